"""Recognising Llama-like decoders by what their modules compute, not by their classes.

A model is accepted if its decoder layers have the parts of a Llama layer, as those of Llama, Mistral, Qwen2 and Qwen3
do. Their norms and activations must compute what a Llama layer's do. `decoder.check_against` then compares the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from semisparse.engine.attention import HeadNorms, Heads, RotaryTable

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class UnknownStructureError(Exception):
    """The model is no Llama-like decoder; the message says what differs."""


@dataclass(frozen=True)
class Layer:
    """A decoder layer's modules and weights.

    Args:
        q: linear layer of the queries; likewise ``k``, ``v``, and ``o`` for the output.
        gate: linear layer of the gated MLP; likewise ``up`` and ``down``.
        input_norm: weight [C] of the norm before attention; ``mlp_norm``: of the norm before the MLP.
        head_norms: norms of queries and keys, if the model has them.
        parents: the modules that hold attention's and the MLP's linear layers.
    """

    q: nn.Module
    k: nn.Module
    v: nn.Module
    o: nn.Module
    gate: nn.Module
    up: nn.Module
    down: nn.Module
    input_norm: Tensor
    mlp_norm: Tensor
    head_norms: HeadNorms | None
    parents: tuple[nn.Module, nn.Module]


@dataclass(frozen=True)
class Structure:
    """A Llama-like decoder, taken apart.

    Args:
        embedding: the token embedding.
        layers: the decoder layers.
        norm: weight [C] of the last norm.
        head: the language-model head.
        heads: attention's shape.
        epsilon: epsilon of all RMSNorms except the head norms.
        rotary: the model's module that computes cosines and sines.
        context: maximum positions.
    """

    embedding: nn.Module
    layers: list[Layer]
    norm: Tensor
    head: nn.Module
    heads: Heads
    epsilon: float
    rotary: nn.Module
    context: int


LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
"""The child modules of a decoder layer that the engine can run: exactly these."""
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj"}


def recognise(model: PreTrainedModel) -> Structure:
    """Return the parts of a Llama-like decoder.

    Raises:
        UnknownStructureError: it is no Llama-like decoder.
    """
    base = getattr(model, "model", None)
    layers = getattr(base, "layers", None)
    if base is None or not isinstance(layers, nn.ModuleList) or not len(layers):
        raise UnknownStructureError("it has no list model.layers")
    if {name for name, _ in base.named_children()} != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        raise UnknownStructureError(f"beside its layers it has {', '.join(name for name, _ in base.named_children())}")
    config: Any = model.config
    if getattr(config, "sliding_window", None) is not None and _slides(config):
        raise UnknownStructureError("some layers attend to a sliding window")
    if getattr(config, "final_logit_softcapping", None) or getattr(config, "attn_logit_softcapping", None):
        raise UnknownStructureError("its logits are soft-capped")
    epsilon = _epsilon_of(base.norm)
    attention: Any = getattr(layers[0], "self_attn", None)
    if not hasattr(attention, "head_dim") or not hasattr(attention, "scaling"):  # DeepSeek-V2's has no head_dim
        raise UnknownStructureError("its first layer has no self_attn with a head_dim and a scaling")
    dim = int(attention.head_dim)
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, dim, float(attention.scaling))
    structure = Structure(
        base.embed_tokens,
        [_layer_of(layer, epsilon) for layer in layers],
        base.norm.weight,
        model.get_output_embeddings(),
        heads,
        epsilon,
        base.rotary_emb,
        int(config.max_position_embeddings),
    )
    _check_norm(base.norm, epsilon)
    return structure


def _slides(config: Any) -> bool:
    types = getattr(config, "layer_types", None)
    return types is None or any(kind != "full_attention" for kind in types)


def _layer_of(layer: nn.Module, epsilon: float) -> Layer:
    children = dict(layer.named_children())
    if set(children) != LAYER_PARTS:
        raise UnknownStructureError(f"a layer consists of {', '.join(children)}")
    attention: Any = children["self_attn"]
    mlp: Any = children["mlp"]
    joined = "q_proj_k_proj_v_proj", "gate_proj_up_proj"
    own = {name for name, _ in attention.named_children()} - {joined[0]}
    if own not in (ATTENTION_PARTS, ATTENTION_PARTS | {"q_norm", "k_norm"}):
        raise UnknownStructureError(f"attention consists of {', '.join(sorted(own))}")
    parts = {name for name, _ in mlp.named_children()} - {joined[1], "act_fn"}
    if parts != MLP_PARTS:
        raise UnknownStructureError(f"the MLP consists of {', '.join(sorted(parts))}")
    probe = torch.linspace(-8, 8, 64, dtype=torch.float32)
    if not torch.allclose(mlp.act_fn(probe), nn.functional.silu(probe), atol=1e-6):
        raise UnknownStructureError("the MLP's activation is not SiLU")
    norms = None
    if "q_norm" in own:
        _check_norm(attention.q_norm, epsilon)
        norms = HeadNorms(attention.q_norm.weight, attention.k_norm.weight, _epsilon_of(attention.q_norm))
    for norm in (children["input_layernorm"], children["post_attention_layernorm"]):
        _check_norm(norm, epsilon)
    return Layer(
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
        children["input_layernorm"].get_parameter("weight"),
        children["post_attention_layernorm"].get_parameter("weight"),
        norms,
        (attention, mlp),
    )


def _epsilon_of(norm: nn.Module) -> float:
    for name in ("variance_epsilon", "eps"):
        if hasattr(norm, name):
            return float(getattr(norm, name))
    raise UnknownStructureError(f"{type(norm).__name__} has no epsilon")


@torch.no_grad()
def _check_norm(norm: nn.Module, epsilon: float) -> None:
    """Refuse a norm that computes anything other than ``x / sqrt(mean(x * x) + epsilon) * weight``."""
    weight = norm.get_parameter("weight")
    x = torch.linspace(-3, 5, weight.numel(), device=weight.device, dtype=torch.float32).to(weight.dtype)[None]
    wide = x.float()
    expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * weight.float()
    if not torch.allclose(norm(x).float(), expected, rtol=2e-2, atol=1e-3):
        raise UnknownStructureError(f"{type(norm).__name__} is no RMSNorm with a plain weight")


def rotary_table(
    rotary: nn.Module, head_dim: int, length: int, device: torch.device, dtype: torch.dtype
) -> RotaryTable:
    """Return the cosines and sines of positions 0 to ``length`` - 1, as a model's own module computes them."""
    positions = torch.arange(length, device=device)[None]
    cosines, sines = rotary(torch.empty(1, dtype=dtype, device=device), positions)
    half = head_dim // 2
    if cosines.shape[-1] != head_dim or not torch.equal(cosines[..., :half], cosines[..., half:]):
        raise UnknownStructureError("its rotary embedding does not rotate the pairs (i, i + head dim / 2)")
    return RotaryTable(cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous())
