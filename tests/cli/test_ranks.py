"""The command line under torchrun: what it prints, what a rank that dies does to the others, the Slurm script."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks

ROOT = Path(__file__).parents[2]
SETTINGS = ("--samples", "8", "--seqlen", "32", "--set", "search=none", "--set", "pattern=2:4", "--device", "cpu")

DYING = """
import os, signal, sys
from semisparse import cli
from semisparse.compress import pipeline
from semisparse.compress.distributed import watch

watch.INTERVAL /= 10  # a minute's patience takes 6 s

def die(activations, index, *rest):
    if index == 1 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
    propagate(activations, index, *rest)

propagate, pipeline.propagate = pipeline.propagate, die
cli.main()
"""


def torchrun(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run two ranks of a program."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=300, env=environment, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_dies_ends_the_run_with_its_name(signal: str, run, deep: Path, text: Path, tmp_path: Path):
    """One that is stopped keeps its connections open and writes nothing, as a host does that vanishes."""
    (tmp_path / "dying.py").write_text(DYING)
    arguments = ("compress", deep, "--recipe", "rheosparse", "--calib", text, *SETTINGS)
    died = torchrun(tmp_path / "dying.py", *arguments, "--out", tmp_path / "out", SIGNAL=signal)
    assert died.returncode != 0
    assert re.search(
        r"error: rank 1 on \S+ died; the same command with --resume goes on, with any number of ranks", died.stderr
    )
    assert died.stderr.count("error: rank") == died.stderr.count("compressing takes up to") == 1
    assert (tmp_path / "out.partial" / "block-0000.json").exists()
    assert not (tmp_path / "out").exists()
    resumed = run(*arguments, "--out", tmp_path / "out", "--resume")
    whole = run(*arguments, "--out", tmp_path / "whole")
    assert (resumed.status, whole.status) == (0, 0), resumed.err
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
def test_bad_input_is_said_once(tmp_path: Path):
    refused = torchrun("-m", "semisparse.cli", "compress", tmp_path / "no", "--recipe", "nope", "--out", tmp_path / "o")
    assert refused.returncode != 0
    assert refused.stderr.count("error: ") == refused.stderr.count("unknown recipe 'nope'") == 1


@pytest.mark.slow
def test_the_slurm_script_on_stand_ins_for_two_hosts(deep: Path, text: Path, tmp_path: Path):
    [script] = [block.text for block in blocks("several-gpus.md") if block.text.startswith("#!/bin/bash\n#SBATCH")]
    (tmp_path / "compress.slurm").write_text(script)
    folder = Path(sys.executable).parent
    programs = {
        "scontrol": 'test "$1 $2 $3" = "show hostnames here,there" && echo localhost && echo elsewhere',
        "srun": '"$@" & "$@" && wait',
        "torchrun": f'exec {folder}/python -m torch.distributed.run "$@"',
    }
    for name, lines in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "here,there", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1"}
    job |= {"SLURM_JOB_ID": str(os.getpid()), "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    arguments = [deep, "--recipe", "rheosparse", "--calib", text, *SETTINGS, "--out", tmp_path / "out", "--json"]
    done = subprocess.run(
        ["bash", str(tmp_path / "compress.slurm"), *map(str, arguments)],
        capture_output=True, text=True, timeout=300, env=os.environ | job, check=True,
    )  # fmt: skip
    assert done.stdout.count('"layers"') == 1
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.slow
def test_a_run_killed_at_a_random_moment_ends_in_the_same_bytes(deep: Path, text: Path, tmp_path: Path):
    program = [sys.executable, str(ROOT / "benchmarks" / "killed_runs.py"), str(tmp_path / "killed.csv")]
    arguments = [
        str(deep),
        str(text),
        "--recipes",
        "sparsegpt",
        "--scratch",
        str(tmp_path),
        "--times",
        "1",
        "--samples",
        "16",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*program, *arguments], check=True, timeout=900, env=environment)
    assert (tmp_path / "killed.csv").read_text().count(",True") == 1
