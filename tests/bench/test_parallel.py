"""`bench parallel` over two processes on a CPU."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import distributed

from semisparse.bench import shapes
from semisparse.bench.model import Workload
from semisparse.bench.parallel import measure_parallel
from semisparse.bench.roofline import candidates
from tests.forked import on_ranks
from tests.models import TINY


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    distributed.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    shapes.ARCHITECTURES["tiny"] = TINY
    measured = [None, *candidates(["bitmask"], ["32:64"])[1:2]]
    rows = measure_parallel("tiny", torch.bfloat16, torch.device("cpu"), measured, Workload(2, 8, 3))
    (folder / f"{rank}.json").write_text(json.dumps([asdict(row) for row in rows]))


def test_each_rank_holds_its_half_and_rows_have_the_number_of_ranks(tmp_path: Path):
    on_ranks(_rank, (tmp_path,), 2)
    for rank in range(2):
        dense, packed = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (dense["weights"], packed["weights"]) == ("dense", "bitmask 32:64")
        assert dense["machine"].startswith("2 x ")
        layers = 2 * (4 * 256 * 256 + 3 * 256 * 512)
        others = 2 * 256 * 256 + 5 * 256  # embedding, head and norms; newer transformers shard the embedding, too
        assert layers + others <= dense["weight_gb"] * 1e9 <= layers + 2 * others
        assert (dense["weight_gb"] - packed["weight_gb"]) * 1e9 == pytest.approx((16 - 9) / 8 * layers / 2, rel=0.001)
        assert packed["decode_tokens_per_second"] > 0


def test_a_single_process_is_refused_with_the_command(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    outcome = run("bench", "parallel")
    assert outcome.status == 2
    assert "torchrun --nproc-per-node 2 -m semisparse.cli bench parallel" in outcome.err
