"""The real engine on two GPUs, tensor-parallel, beside transformers: every format on trained models.

vLLM's workers are forked, which is fastest, while this process has not used CUDA; after that they are spawned. Hence
vLLM comes first in each test. A forked process must not compute on several CPU threads once its parent has, or it waits
for OpenMP's threads forever: vLLM's workers do with 1,024 sequences of 128 tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

from tests.serving import Served, one
from tests.vllm.greedy_texts import TEXTS, compare

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.vllm.test_gpu import FEW_GRAPHS, FORMATS, LEAST, quiet, written  # noqa: F401

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

CUT = {**FORMATS, "gqs-dense-w4": Served("gqs-dense-w4", "gqs", one("g16@0%"), {"kind": "w4"})}
"""The formats on one GPU, with groups that halves of the models' columns consist of: groups of 128 are refused."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One CPU thread, which forked workers inherit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


REFUSED = {
    *(("stories260k", served) for served in ("slide24", "gqs-w4s50", "gqs-dense-w4")),
    *product(("demo", "stories260k", "babyllama-1m"), ("bitmask-w4", "slide24-int8", "slide24-fp8")),
}
"""Halves that begin inside a window or a group, or that would round weights again: vLLM's workers end with our
sentence."""


@pytest.mark.parametrize(
    ("name", "served"), [(name, served) for name in TEXTS for served in CUT if (name, served) not in REFUSED]
)
def test_greedy_text_on_two_gpus_is_that_of_transformers(name: str, served: str, tmp_path: Path):
    directory = written(name, CUT[served], tmp_path)
    settings = {"max_num_batched_tokens": 256, "enforce_eager": True, "tensor_parallel_size": 2}
    compare(directory, name, torch.float16, LEAST[served], **settings)


@pytest.mark.parametrize("served", ["bitmask", "gqs-w4s50"])
def test_so_it_is_compiled_and_fused(served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the forked workers fuse is counted in a file: an all-reduce stands between a matmul and its residual."""
    from vllm import envs

    from semisparse.integrations.vllm import fusion

    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    monkeypatch.setattr(inductor_config, "force_disable_caches", True)
    forks = not torch.cuda.is_initialized() and envs.VLLM_WORKER_MULTIPROC_METHOD == "fork"
    run, found = fusion.FusionPass.__call__, tmp_path / "fused"

    def count(self: Any, graph: torch.fx.Graph) -> None:
        run(self, graph)
        kinds = Counter(node.target for node in graph.nodes)
        with found.open("a") as file:
            file.write(f"{kinds[fusion.FUSED]} {sum(kinds[linear] for linear in fusion.LINEARS)}\n")

    monkeypatch.setattr(fusion.FusionPass, "__call__", count)
    directory = written("demo", CUT[served], tmp_path)
    compare(directory, "demo", torch.float16, LEAST[served], compilation_config=FEW_GRAPHS, tensor_parallel_size=2)
    if forks:
        rows = [list(map(int, line.split())) for line in found.read_text().splitlines()]
        fused, alone = (sum(column) for column in zip(*rows, strict=True))
        assert fused
        assert alone  # the row-parallel matmuls
