"""transformers' tensor parallelism over gloo: every format computes as on one rank, and saves what it loaded."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import distributed
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

from semisparse.errors import CheckpointError, InputError
from semisparse.integrations.transformers import sparse_layers
from semisparse.nn import join_layers
from tests.forked import on_ranks
from tests.serving import SIZES, Served, every_format, one, write

pytestmark = pytest.mark.xdist_group("tensor parallel")  # one process makes the folders, which takes a minute

WIDE = {**SIZES, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
LLAMA = LlamaConfig(**WIDE, attention_bias=True)
RAGGED = LlamaConfig(**{**WIDE, "intermediate_size": 344})
ALIKE = [served for served in every_format() if served.config.to_dict() == LlamaConfig(**SIZES).to_dict()]
CHOSEN = {served.name if served.pattern.__name__ == "searched" else served.format: served for served in ALIKE}
SERVED = {served.name: replace(served, config=LLAMA) for served in CHOSEN.values()}
SERVED["ragged"] = Served("ragged", "bitmask", one("32:64"), config=RAGGED)
IDS = torch.arange(2 * 9).view(2, 9) * 13
WORLDS = {2: SERVED, 4: {"searched": SERVED["searched"]}}
"""Models by number of ranks: one of each format at two; tests/nn/test_slicing.py cuts every variant."""
USUAL = [(2, name) for name in SERVED if name.startswith(("ec_csr", "gqs", "searched", "ragged"))]
"""The runs that are not slow: with lists, groups, layers of different patterns, and rows that do not fill windows."""
RUNS = pytest.mark.parametrize(
    ("served", "ranks"),
    [
        pytest.param(s, ranks, id=f"{s.name}-{ranks}", marks=[] if (ranks, s.name) in USUAL else [pytest.mark.slow])
        for ranks, chosen in WORLDS.items()
        for s in chosen.values()
    ],
)

ATTENTION = "model.layers.0.self_attn.q_proj_k_proj_v_proj"


def _rank(rank: int, ranks: int, folder: Path, directories: list[Path]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    distributed.init_process_group(
        "gloo", f"file://{folder}/rendezvous-{ranks}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    for directory in directories:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, distributed_config=DistributedConfig(tp_plan="auto")
        )
        with torch.no_grad():
            found = {"logits": model(IDS).logits}
        found["shapes"] = {n: layer.packed.shape for n, layer in sparse_layers(model).items()}
        found["generated"] = model.generate(IDS[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
        found["joined"] = join_layers(model)
        with torch.no_grad():
            found["joined logits"] = model(IDS).logits
        if ATTENTION in found["joined"]:
            with pytest.raises(InputError, match="no gradients"):
                model.model.layers[0].self_attn.q_proj(torch.zeros(1, 512, requires_grad=True))
            with pytest.raises(CheckpointError, match="save before joining"):
                model.save_pretrained(folder / f"joined-{ranks}-{rank}")
        as_stored = AutoModelForCausalLM.from_pretrained(
            directory, distributed_config=DistributedConfig(tp_plan="auto")
        )
        as_stored.save_pretrained(folder / f"{directory.name}-{ranks}")
        torch.save(found, folder / f"{directory.name}-{ranks}-{rank}.pt")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Return a function that returns the folder with a run: its model alone and on its ranks, beside those like it."""

    def folder_of(name: str, ranks: int) -> Path:
        return runs(ranks, (ranks, name) in USUAL)

    @cache
    def runs(ranks: int, usual: bool) -> Path:
        folder = tmp_path_factory.mktemp("parallel")
        chosen = [served for name, served in WORLDS[ranks].items() if ((ranks, name) in USUAL) == usual]
        directories = [write(served, folder / served.folder) for served in chosen]
        on_ranks(_rank, (ranks, folder, directories), ranks)
        return folder

    return folder_of


@RUNS
def test_the_ranks_compute_what_one_process_does(served: Served, ranks: int, folder_of: Callable[[str, int], Path]):
    folder = folder_of(served.name, ranks)
    alone = AutoModelForCausalLM.from_pretrained(folder / served.folder, dtype=torch.float32)
    found = [torch.load(folder / f"{served.folder}-{ranks}-{rank}.pt") for rank in range(ranks)]
    with torch.no_grad():
        expected = alone(IDS).logits
    # Float32 sums in another order; where activations are rounded to 8 bits, each rank has a scale of its own.
    tolerance = (0.1 if served.rounds else 1e-4) * float(expected.abs().max())
    for rank in found:
        torch.testing.assert_close(rank["logits"], expected, rtol=0, atol=tolerance)
        assert torch.equal(rank["logits"], found[0]["logits"])
        assert torch.equal(rank["generated"], found[0]["generated"])
        torch.testing.assert_close(
            rank["joined logits"], rank["logits"], rtol=0, atol=1e-5 * float(expected.abs().max())
        )
        assert bool(rank["joined"]) == bool(join_layers(copy.deepcopy(alone)))
    shapes = {name: layer.packed.shape for name, layer in sparse_layers(alone).items()}
    for name, (n, k) in found[0]["shapes"].items():
        whole = shapes[name]
        rows = name.endswith(("o_proj", "down_proj"))
        assert (n, k) == ((whole[0], whole[1] // ranks) if rows else (whole[0] // ranks, whole[1]))


@RUNS
def test_saving_gathers_the_bytes_that_were_loaded(served: Served, ranks: int, folder_of: Callable[[str, int], Path]):
    folder = folder_of(served.name, ranks)
    loaded, saved = folder / served.folder, folder / f"{served.folder}-{ranks}"
    assert (saved / "model.safetensors").read_bytes() == (loaded / "model.safetensors").read_bytes()
    assert (saved / "config.json").read_bytes() == (loaded / "config.json").read_bytes()


def test_layers_that_do_not_divide_are_refused(tmp_path: Path):
    import semisparse.integrations.tensor_parallel as parallel

    model = AutoModelForCausalLM.from_pretrained(write(SERVED["ragged"], tmp_path / "model"))
    layers = sparse_layers(model)

    class Mesh:
        ndim = 1
        get_local_rank = staticmethod(lambda: 0)
        size = staticmethod(lambda: 3)

    model._device_mesh, model._tp_size = Mesh(), 3
    with pytest.raises(InputError, match=r"has 512 rows, which do not divide over 3 ranks"):
        parallel.shard_layers(model, layers)
    model.tp_plan["model.layers.*.self_attn.q_proj"] = "packed_colwise"
    with pytest.raises(InputError, match="is to be distributed as 'packed_colwise'"):
        parallel.shard_layers(model, layers)
