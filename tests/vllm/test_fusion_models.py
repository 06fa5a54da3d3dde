"""The pass over graphs of vLLM's own models on a CPU: what it fuses of each, and that the graph computes the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.models import byte_tokenizer
from tests.serving import SIZES, Served, one, write_compressed
from tests.vllm import ranks

pytest.importorskip("vllm", reason="vLLM is not installed: make test-serving sets it up")

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.usefixtures("group")]

HEAD = {"head_dim": 64}

ALL = {"normed": 2, "gated": 1, "added": 2, "early": 1}
"""Every matmul of a decoder layer: query, key, value and gate, up after a norm; the two others before a residual. Then
Inductor's kernels are launched early."""

MODELS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any], dict[str, int]]] = {
    "llama": (LlamaConfig, {}, {**ALL, "rms_norm": 1}),
    "biases": (Qwen2Config, {}, {**ALL, "rms_norm": 1}),
    "norms-of-q-and-k": (Qwen3Config, HEAD, {**ALL, "rms_norm": 3}),
    "one-layer-for-q-k-v": (Phi3Config, {"pad_token_id": 0}, {**ALL, "rms_norm": 1}),
    "scaled-residuals": (
        GraniteConfig,
        {"residual_multiplier": 0.5},
        {"normed": 2, "gated": 1, "linear": 2, "rms_norm": 1},
    ),
    "float32-norm-weights": (GemmaConfig, HEAD, {"linear": 4, "rms_norm": 1, "fused_add_rms_norm": 2}),
    "four-norms": (
        Gemma2Config,
        {**HEAD, "query_pre_attn_scalar": 64},
        {"linear": 4, "rms_norm": 3, "fused_add_rms_norm": 2},
    ),
}
"""The config's class, its arguments, and the operators of the graph of one decoder layer after the pass."""


class OwnAttention(torch.nn.Module):
    """In place of vLLM's attention, which needs a KV cache: a sum of query, key and value."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.heads, self.keys = attention.num_heads, attention.num_kv_heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *others: Any, **further: Any) -> Tensor:
        both = (k + v).view(len(q), self.keys, -1).repeat_interleave(self.heads // self.keys, 1)
        return q + both.reshape(q.shape)


def written(name: str, folder: Path) -> Path:
    """A model of one decoder layer with random weights, norms and biases."""
    kind, arguments, _ = MODELS[name]
    architecture = kind.__name__.replace("Config", "ForCausalLM")
    config = kind(**{**SIZES, "architectures": [architecture], **arguments})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for own, parameter in model.named_parameters():
        if own.endswith("bias") or "norm" in own:
            torch.nn.init.normal_(parameter, mean=float(parameter.mean()), std=0.3)
    served = Served(name, "bitmask", one("32:64"), config=config)
    return write_compressed(model, byte_tokenizer(), served, folder / "model")


def operators_after(graph: fx.Graph) -> Counter[str]:
    """Count the packed matmuls and norms of a graph after the pass."""
    from semisparse.integrations.vllm import fusion

    found: Counter[str] = Counter()
    for node in graph.nodes:
        if node.target is fusion.FUSED:
            *_, norm, _, _, gated = node.args
            found["added" if norm is None else "normed"] += 1
            if gated:
                found["gated"] += 1
        elif "semisparse" in str(node.target) or "rms_norm" in str(node.target):
            found[str(node.target).split(".")[-2]] += 1
    return found


def compiled_with_the_pass(forward: Any, vllm_config: Any, found: Counter[str]) -> Any:
    """Compile a function as vLLM does, for one and two tokens, and count the operators of its graph in ``found``."""
    from vllm.compilation.passes.inductor_pass import InductorPass
    from vllm.compilation.passes.ir.inplace_functionalization import VllmIRInplaceFunctionalizationPass

    from semisparse.integrations.vllm import fusion

    class Spy(InductorPass):
        def __call__(self, graph: fx.Graph) -> None:
            fusion.FusionPass()(graph)
            graph.lint()
            found.update(operators_after(graph))
            if inductor_config.triton.enable_pdl:
                found["early"] += 1

        def uuid(self) -> object:
            return object()  # nothing compiled is cached

    before = "pre_grad_custom_pass"
    options = {
        before: VllmIRInplaceFunctionalizationPass(vllm_config),
        "post_grad_custom_post_pass": Spy(),
        "fx_graph_cache": False,
        fusion.PDL: False,
        "_cache_config_ignore_prefix": [*inductor_config._cache_config_ignore_prefix, before],
    }
    torch._dynamo.reset()
    return torch.compile(forward, dynamic=True, options=options)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same_with_what_the_pass_fuses(name: str, tmp_path: Path, monkeypatch):
    from vllm.compilation.passes.inductor_pass import pass_context
    from vllm.config import set_current_vllm_config
    from vllm.config.utils import Range
    from vllm.model_executor.layers.attention import Attention

    from semisparse.integrations.vllm import fusion

    monkeypatch.setattr(fusion, "can_fuse", lambda packed, dtype, fusion: True)
    loaded, vllm_config = ranks.load_with_config(written(name, tmp_path), "bfloat16", custom_ops=["none"])
    for module in list(loaded.modules()):
        for own, child in list(module.named_children()):
            if isinstance(child, Attention):
                setattr(module, own, OwnAttention(child))
    tokens, positions, found = torch.tensor([5, 77]), torch.arange(2), Counter()

    def forward(tokens: Tensor, positions: Tensor) -> Tensor:
        return loaded.model.forward(tokens, positions, None, None)

    compiled = compiled_with_the_pass(forward, vllm_config, found)
    with set_current_vllm_config(vllm_config):
        wanted = forward(tokens, positions)
        with pass_context(Range(1, 2)):
            y = compiled(tokens, positions)
    assert found == MODELS[name][2]
    assert (y - wanted).float().norm() <= 2**-6 * wanted.float().norm()
