"""What a decoder is built from, recorded once its logits have been compared with those of transformers' own code.

A later start builds the decoder from it and does not import transformers, which takes 2 to 3 seconds. The record is of
one config.json, tokenizer, device and dtype, and of one version of the engine, torch and transformers.
"""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from semisparse.engine.attention import Heads
from semisparse.engine.structure import Structure, rotary_table
from semisparse.runtime.cache import cached, lookup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FOLDER = "blueprints"
"""The folder of the cache directory."""

PACKAGES = ("transformers", "tokenizers")
"""The packages whose code the engine is compared with, beside torch."""

FILES = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model"),
)
"""The files of a model directory, most of them optional, on which a blueprint depends. Without a tokenizer.json, whose
tokenizer may come from still other files, nothing is recorded."""


@dataclass(frozen=True)
class Blueprint:
    """What a decoder consists of, beside its weights.

    Args:
        layers: number of decoder layers.
        linears: N, K and whether there is a bias, of each linear layer by module name, packed or dense.
        norms: size and epsilon of each norm by module name.
        embedding: tokens of the vocabulary, and values of each.
        tied: whether the head's weight is the embedding's.
        heads: attention's shape.
        context: maximum positions.
        frequencies: of the rotary embedding, radians per position.
        scaling: factor of its cosines and sines.
        ends: tokens that end a text.
        dtype: of activations and of tensors that are not packed.
        tokenizer: the tokenizer, as `tokenizers.Tokenizer.to_str` writes it.
    """

    layers: int
    linears: dict[str, tuple[int, int, bool]]
    norms: dict[str, tuple[int, float]]
    embedding: tuple[int, int]
    tied: bool
    heads: Heads
    context: int
    frequencies: tuple[float, ...]
    scaling: float
    ends: tuple[int, ...]
    dtype: str
    tokenizer: str

    def to_json(self) -> bytes:
        """Return the blueprint as JSON. Floating-point numbers are read back exactly."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_json(content: bytes) -> Blueprint:
        """Return what `to_json` wrote."""
        values = json.loads(content)
        values["heads"] = Heads(**values["heads"])
        for name in ("embedding", "frequencies", "ends"):
            values[name] = tuple(values[name])
        for name in ("linears", "norms"):
            values[name] = {key: tuple(value) for key, value in values[name].items()}
        return Blueprint(**values)


class Rotary(nn.Module):
    """The rotary embedding of most models: a fixed frequency per pair of values.

    Args:
        frequencies: [head dim / 2] float32, radians per position.
        scaling: factor of cosines and sines.
    """

    def __init__(self, frequencies: Tensor, scaling: float) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies, persistent=False)
        self._scaling = scaling

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of positions [1, length], each [1, length, head dim] in x's dtype."""
        angles = positions[..., None].float() * self.get_buffer("frequencies")
        doubled = torch.cat((angles, angles), dim=-1)
        return (doubled.cos() * self._scaling).to(x.dtype), (doubled.sin() * self._scaling).to(x.dtype)


def recorded(path: Path, device: torch.device, dtype: torch.dtype | None) -> Blueprint | None:
    """Return the blueprint that `record` stored, or None.

    Args:
        path: the model directory.
        device: where the model is to run.
        dtype: dtype that the engine was given, or None.
    """
    try:
        content = lookup(FOLDER, _key(path, device, dtype))
    except OSError:
        return None
    return None if content is None else Blueprint.from_json(content)


def record(path: Path, dtype: torch.dtype | None, blueprint: Blueprint, device: torch.device) -> None:
    """Store the blueprint of a decoder whose logits were compared with those of transformers' own code."""
    cached(FOLDER, _key(path, device, dtype), blueprint.to_json)


def _key(path: Path, device: torch.device, dtype: torch.dtype | None) -> bytes:
    """Return all that the comparison's result depends on, except the weights."""
    files = [hashlib.sha256((path / name).read_bytes()).hexdigest() if (path / name).exists() else "" for name in FILES]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return json.dumps([files, name, str(dtype), torch.__version__, *map(version, PACKAGES), _sources()]).encode()


@cache
def _sources() -> str:
    """Return a digest of the engine's source."""
    files = sorted(file for file in Path(__file__).parent.rglob("*") if file.suffix in (".py", ".cu", ".cuh"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def blueprint_of(model: PreTrainedModel, structure: Structure, tokenizer: str, ends: set[int]) -> Blueprint | None:
    """Return a decoder's blueprint, or None if a bare decoder would not compute the same.

    Args:
        model: transformers' model.
        structure: as `recognise` returns it.
        tokenizer: as in `Blueprint`.
        ends: tokens that end a text.
    """
    names = {id(module): name for name, module in model.named_modules()}
    head, embedding = structure.head, structure.embedding
    rotary: Any = structure.rotary
    frequencies = getattr(rotary, "inv_freq", None)
    if names.get(id(head)) != "lm_head" or type(embedding) is not nn.Embedding or not isinstance(frequencies, Tensor):
        return None
    scaling = float(getattr(rotary, "attention_scaling", 1.0))
    # A call may change transformers' module, so its copy is called.
    if not _same_tables(structure, copy.deepcopy(structure.rotary), Rotary(frequencies.float(), scaling)):
        return None
    linears, norms = _parts(structure)
    weight = embedding.get_parameter("weight")
    return Blueprint(
        layers=len(structure.layers),
        linears=linears,
        norms=norms,
        embedding=(weight.shape[0], weight.shape[1]),
        tied=isinstance(head, nn.Linear) and head.weight.data_ptr() == weight.data_ptr(),
        heads=structure.heads,
        context=structure.context,
        frequencies=tuple(frequencies.float().tolist()),
        scaling=scaling,
        ends=tuple(sorted(ends)),
        dtype=str(structure.norm.dtype).removeprefix("torch."),
        tokenizer=tokenizer,
    )


def _same_tables(structure: Structure, *modules: nn.Module) -> bool:
    """Return whether two rotary embeddings give the same bits at all positions of the context."""
    device, dtype = structure.norm.device, structure.norm.dtype
    first, second = (rotary_table(module, structure.heads.dim, structure.context, device, dtype) for module in modules)
    return torch.equal(first.cosines, second.cosines) and torch.equal(first.sines, second.sines)


def _parts(structure: Structure) -> tuple[dict[str, tuple[int, int, bool]], dict[str, tuple[int, float]]]:
    """Return `Blueprint.linears` and `Blueprint.norms`."""
    linears: dict[str, tuple[int, int, bool]] = {}
    norms: dict[str, tuple[int, float]] = {}
    for index, layer in enumerate(structure.layers):
        at = f"model.layers.{index}"
        attention = {"q_proj": layer.q, "k_proj": layer.k, "v_proj": layer.v, "o_proj": layer.o}
        mlp = {"gate_proj": layer.gate, "up_proj": layer.up, "down_proj": layer.down}
        linears |= {f"{at}.self_attn.{name}": _linear(module) for name, module in attention.items()}
        linears |= {f"{at}.mlp.{name}": _linear(module) for name, module in mlp.items()}
        norms[f"{at}.input_layernorm"] = len(layer.input_norm), structure.epsilon
        norms[f"{at}.post_attention_layernorm"] = len(layer.mlp_norm), structure.epsilon
        if layer.head_norms is not None:
            norms[f"{at}.self_attn.q_norm"] = len(layer.head_norms.q), layer.head_norms.epsilon
            norms[f"{at}.self_attn.k_norm"] = len(layer.head_norms.k), layer.head_norms.epsilon
    norms["model.norm"] = len(structure.norm), structure.epsilon
    linears["lm_head"] = _linear(structure.head)
    return linears, norms


def _linear(module: Any) -> tuple[int, int, bool]:
    return int(module.out_features), int(module.in_features), module.bias is not None
