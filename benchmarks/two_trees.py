"""Time the kernels of an older version of the package beside today's, in turns: one CSV row per matmul.

    mkdir /tmp/0584701^ && git archive 0584701^ semisparse | tar x -C /tmp/0584701^
    python benchmarks/two_trees.py results/h200/sweeps/two-trees.csv /tmp/0584701^:bitmask,bitmask-w4 --rounds 5

Needs a GPU. Each version runs in a process of its own, packs and compiles there, and times the kernel that it chooses
(CUDA graphs over weights that outgrow the cache) when its parent process says so; only one process uses the
GPU at a time. Each round times every matmul once in both versions, and every other round begins with today's. The CSV
is written after each round, with the median time of each version and the median of after / before within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Any

from rows import write_rows

WEIGHTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "bitmask": ("bitmask", "32:64", {}),
    "bitmask-w4": ("bitmask", "32:64", {"kind": "w4"}),
    "gqs-w4s50": ("gqs", "g16@50%", {"kind": "w4"}),
    "gqs-w4": ("gqs", "g128@0%", {"kind": "w4"}),
    "gqs-w2": ("gqs", "g64@0%", {"kind": "w2"}),
    "ec_csr": ("ec_csr", "70%", {}),
    "vector_nm": ("vector_nm", "16:32v32", {}),
    "slide24": ("slide24", "6:8", {}),
}
"""Format, pattern and pack options."""

SHAPES = "4096,4096,11008,4096,4096,11008,28672,8192"
COLUMNS = ("before", "weights", "n", "k", "m", "kernel_before", "kernel_after", "us_before", "us_after", "ratio")
COLUMNS += ("lowest_ratio", "highest_ratio", "rounds", "error", "machine", "dtype")

Case = tuple[str, int, int, int]
"""Name in `WEIGHTS`, N, K and M."""


class Worker:
    """A process that times the kernels of one version.

    Args:
        tree: the folder that holds the version's ``semisparse``.
        cases: the matmuls that it prepares.
        dtype: of x and the weights.
    """

    def __init__(self, tree: Path, cases: list[Case], dtype: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(cases), dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(tree)},
            text=True,
        )

    def ask(self, case: Case | None) -> Any:
        """Time a case; wait until all are prepared if it is None."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if case:
            print(json.dumps(case), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self.process.wait()}: see its error above")
        return json.loads(line)


def main() -> None:
    """Start the workers and let them measure in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("before", nargs="+", help=f"FOLDER:WEIGHTS, comma-separated, of {', '.join(WEIGHTS)}")
    parser.add_argument("--shapes", default=SHAPES, help="N,K pairs, comma-separated")
    parser.add_argument("--tokens", default="1,8,64,256", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    options = parser.parse_args()
    sizes = [int(size) for size in options.shapes.split(",")]
    shapes = list(zip(sizes[::2], sizes[1::2], strict=True))
    tokens = [int(m) for m in options.tokens.split(",")]
    start, cases = time.perf_counter(), {}
    for text in options.before:
        folder, _, names = text.rpartition(":")
        cases[Path(folder)] = [(name, n, k, m) for name in names.split(",") for n, k in shapes for m in tokens]
    every = list(dict.fromkeys(case for some in cases.values() for case in some))
    after = Worker(Path(__file__).parents[1], every, options.dtype)
    workers = {tree: Worker(tree, some, options.dtype) for tree, some in cases.items()}
    machine, *_ = [worker.ask(None) for worker in (after, *workers.values())]
    print(f"prepared after {time.perf_counter() - start:.0f} s", flush=True)
    times: dict[tuple[Path, Case], list[tuple[Any, Any]]] = {}
    for number in range(options.rounds):
        for tree, some in cases.items():
            for case in some:
                turns = [workers[tree], after]
                answers = [worker.ask(case) for worker in (turns if number % 2 == 0 else turns[::-1])]
                before, now = answers if number % 2 == 0 else answers[::-1]
                times.setdefault((tree, case), []).append((before, now))
        write_rows(options.csv, [row(*key, some, (machine, options.dtype)) for key, some in times.items()], COLUMNS)
        print(f"round {number + 1} ended after {time.perf_counter() - start:.0f} s", flush=True)


def row(tree: Path, case: Case, rounds: list[tuple[Any, Any]], ran: tuple[str, str]) -> dict[str, str]:
    """Return the CSV row of a matmul, on a machine and in a dtype."""
    name, n, k, m = case
    before, after = rounds[0]
    line = {"before": tree.name, "weights": name, "n": n, "k": k, "m": m, "rounds": len(rounds)}
    line |= dict(zip(("machine", "dtype"), ran, strict=True))
    line |= {"kernel_before": before["kernel"], "kernel_after": after["kernel"], "error": f"{after['error']:.1e}"}
    ratios = [now["us"] / then["us"] for then, now in rounds]
    line |= {"us_before": f"{median(then['us'] for then, _ in rounds):.2f}"}
    line |= {"us_after": f"{median(now['us'] for _, now in rounds):.2f}", "ratio": f"{median(ratios):.3f}"}
    line |= {"lowest_ratio": f"{min(ratios):.3f}", "highest_ratio": f"{max(ratios):.3f}"}
    return {column: str(line[column]) for column in COLUMNS}


def work(cases: list[Case], dtype_name: str, answers: IO[str]) -> None:
    """Prepare the cases with the version on PYTHONPATH, then time one per line of standard input."""
    from concurrent.futures import ThreadPoolExecutor

    import torch
    from torch.nn import functional as F

    from semisparse.bench import timing
    from semisparse.bench.kernels import TOLERANCE
    from semisparse.bench.roofline import random_weight
    from semisparse.formats import Packed, get_format
    from semisparse.formats.product import prepare_product, problem_of
    from semisparse.patterns import parse_pattern
    from semisparse.runtime.device import device_facts

    gpu, dtype = torch.device("cuda"), getattr(torch, dtype_name)
    timing.GPU_SECONDS = 0.02
    copies: dict[tuple[str, int, int], list[Packed]] = {}
    for name, n, k in dict.fromkeys((name, n, k) for name, n, k, _ in cases):
        form, text, settings = WEIGHTS[name]
        pattern = parse_pattern(text)
        weight = random_weight(pattern, n, k, dtype, gpu)
        packed = get_format(form).pack(weight, pattern, **settings).to(gpu)
        copies[name, n, k] = timing.rotating_copies(packed, device_facts(gpu).cache_bytes)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda case: prepare_product(copies[case[:3]][0], case[3], dtype), cases))

    checked: dict[Case, float] = {}

    def measure(case: Case) -> dict[str, Any]:
        name, _, k, m = case
        weights = copies[case[:3]]
        x = torch.randn(m, k, device=gpu, generator=torch.Generator(gpu).manual_seed(m)).to(dtype)
        problem = problem_of(x, weights[0])
        kernel = get_format(WEIGHTS[name][0]).choose(problem)
        matmul = kernel.prepare(problem)
        if case not in checked:
            expected = F.linear(x.float(), weights[0].unpack().float())
            error = ((matmul(x, weights[0], None).float() - expected).norm() / expected.norm()).item()
            if not error <= 1.05 * TOLERANCE[dtype]:
                raise SystemExit(f"{case} is wrong: relative error {error:.3g}")
            checked[case] = error
        us = timing.time_calls([partial(matmul, x, one, None) for one in weights], gpu).us
        return {"us": us, "kernel": kernel.name, "error": checked[case]}

    print(json.dumps(device_facts(gpu).name), file=answers, flush=True)
    for line in sys.stdin:
        name, n, k, m = json.loads(line)
        print(json.dumps(measure((name, n, k, m))), file=answers, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is no answer
        work([(name, n, k, m) for name, n, k, m in json.loads(sys.argv[2])], sys.argv[3], answers)
    else:
        main()
