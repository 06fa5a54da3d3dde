"""transformers' tensor and expert parallelism over gloo, for packed experts: as on one rank, and saved as loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

from semisparse.errors import InputError
from semisparse.integrations.transformers import sparse_layers
from semisparse.nn import SparseExperts, dequantise_layers, split_experts
from tests.forked import on_ranks
from tests.models import byte_tokenizer
from tests.serving import SIZES, Served, one, write_compressed

pytestmark = pytest.mark.xdist_group("expert parallel")  # one process makes the folders

ROUTED = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
CONFIGS = {
    "mixtral": MixtralConfig(**{**ROUTED, "architectures": ["MixtralForCausalLM"]}),
    "qwen3-moe": Qwen3MoeConfig(
        **{**SIZES, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
        | {"architectures": ["Qwen3MoeForCausalLM"]}
    ),
    "gpt-oss": GptOssConfig(**{**ROUTED, "head_dim": 64, "architectures": ["GptOssForCausalLM"]}),
}
"""Plain; many experts; biases and an activation of its own."""

FORMATS = {"mixtral": ("bitmask", "32:64"), "qwen3-moe": ("gqs", "g16@50%"), "gpt-oss": ("bitmask", "2:4")}
PLANS: dict[str, dict[str, Any]] = {"tp": {"tp_plan": "auto"}, "ep": {"tp_plan": "auto", "ep_size": 2}}
IDS = torch.arange(2 * 9).view(2, 9) * 13
USUAL = {("mixtral", "tp"), ("qwen3-moe", "ep"), ("gpt-oss", "ep")}
RUNS = pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=[] if (name, plan) in USUAL else [pytest.mark.slow])
        for name in CONFIGS
        for plan in PLANS
    ],
)


def write(name: str, out: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16).eval()
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    assert split_experts(model)
    form, pattern = FORMATS[name]
    return write_compressed(model, byte_tokenizer(), Served(name, form, one(pattern), dense=("gate", "router")), out)


def experts_of(model: Any) -> SparseExperts:
    return next(module for module in model.modules() if isinstance(module, SparseExperts))


def _rank(rank: int, folder: Path, usual: bool) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    distributed.init_process_group(
        "gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    for name in CONFIGS:
        for plan, settings in PLANS.items():
            if ((name, plan) in USUAL) != usual:
                continue
            config = DistributedConfig(**settings)
            model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32, distributed_config=config)
            with torch.no_grad():
                found = {"logits": model(IDS).logits}
            found["generated"] = model.generate(IDS[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
            found["held"] = list(experts_of(model).held)
            found["bytes"] = sum(
                layer.packed.nbytes
                for key, layer in sparse_layers(model).items()
                if ".experts." in key and layer.packed.device.type != "meta"
            )
            with pytest.raises(InputError, match="divided over processes"):
                dequantise_layers(model, torch.float32)
            stored = AutoModelForCausalLM.from_pretrained(
                folder / name, distributed_config=DistributedConfig(**settings)
            )
            stored.save_pretrained(folder / f"{name}-{plan}")
            torch.save(found, folder / f"{name}-{plan}-{rank}.pt")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return a function that returns the folder with a run: every model alone, and the runs like it on two ranks."""

    def folder_of(name: str, plan: str) -> Path:
        return runs((name, plan) in USUAL)

    @cache
    def runs(usual: bool) -> Path:
        folder = tmp_path_factory.mktemp("parallel")
        for name in CONFIGS:
            write(name, folder / name)
        on_ranks(_rank, (folder, usual), 2)
        return folder

    return folder_of


@RUNS
def test_the_ranks_compute_what_one_process_does(name: str, plan: str, folder_of: Callable[[str, str], Path]) -> None:
    folder = folder_of(name, plan)
    alone = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    ranks = [torch.load(folder / f"{name}-{plan}-{rank}.pt") for rank in range(2)]
    with torch.no_grad():
        expected = alone(IDS).logits
    whole = sum(layer.packed.nbytes for key, layer in sparse_layers(alone).items() if ".experts." in key)
    count = experts_of(alone).num_experts
    for rank, found in enumerate(ranks):
        torch.testing.assert_close(found["logits"], expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
        assert torch.equal(found["logits"], ranks[0]["logits"])
        assert torch.equal(found["generated"], ranks[0]["generated"])
        assert found["held"] == list(range(rank * count // 2, (rank + 1) * count // 2))
        assert found["bytes"] == whole / 2


@RUNS
def test_saving_gathers_the_bytes_that_were_loaded(name: str, plan: str, folder_of: Callable[[str, str], Path]) -> None:
    folder = folder_of(name, plan)
    loaded, saved = folder / name, folder / f"{name}-{plan}"
    assert (saved / "model.safetensors").read_bytes() == (loaded / "model.safetensors").read_bytes()
    assert (saved / "config.json").read_bytes() == (loaded / "config.json").read_bytes()


class Mesh:
    """Three ranks, of which this is the first."""

    ndim = 1
    get_local_rank = staticmethod(lambda: 0)
    size = staticmethod(lambda: 3)


def test_what_is_refused(tmp_path: Path) -> None:
    import semisparse.integrations.tensor_parallel as tensor_parallel

    model = AutoModelForCausalLM.from_pretrained(write("mixtral", tmp_path / "model"))
    layers = sparse_layers(model)
    model._device_mesh, model._tp_size = Mesh(), 3
    with pytest.raises(InputError, match="has 4 experts, which do not divide over 3 ranks"):
        tensor_parallel.shard_layers(model, layers)
    name = next(n for n, module in model.named_modules() if isinstance(module, SparseExperts))
    model.tp_plan[tensor_parallel._plan_key(name)] = "colwise"
    with pytest.raises(InputError, match=r"experts': 'colwise'}; packed experts support 'moe_tp_experts' alone"):
        tensor_parallel.shard_layers(model, layers)
    model.tp_plan.update({tensor_parallel._plan_key(name): "moe_tp_experts", "model.layers.*.mlp.gate": "ep_router"})
    with pytest.raises(InputError, match=r"'model.layers.\*.mlp.gate': 'ep_router'}; packed experts support"):
        tensor_parallel.shard_layers(model, layers)
    model.config.distributed_config = DistributedConfig(tp_size=1, fsdp_size=2, ep_size=2)
    with pytest.raises(InputError, match="got ep_size=2 and tp_size=1: set tp_size to ep_size"):
        tensor_parallel.shard_layers(model, layers)
