"""The shapes of a model's linear layers: from an architecture's name, a model directory, or plain N,K."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from semisparse.engine import is_encoder, read_config
from semisparse.errors import InputError
from semisparse.nn import expert_shapes, is_fused_experts, is_linear, weight_of

ARCHITECTURES: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted((Path(__file__).parent / "suites").glob("*.yaml"))
}
"""Name -> the fields of the model's published config.json that the shapes of its layers depend on. A file
``suites/<name>.yaml`` adds an architecture."""

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Layer -> the fused layer that inference engines such as vLLM compute it in."""


@dataclass(frozen=True)
class LayerShape:
    """A shape of weights, and the layers of a model that have it.

    Args:
        names: the last components of their names, as in ``q_proj, o_proj``; empty if only ``N,K`` was given.
        n: output features.
        k: input features.
        count: the number of such layers in the model, those of all experts included.
        experts: number of experts that the router chooses from; 1 for other layers.
        chosen: experts per token.
    """

    names: str
    n: int
    k: int
    count: int
    experts: int = 1
    chosen: int = 1

    @property
    def title(self) -> str:
        """The names, and the number of experts if the layers belong to experts."""
        return f"{self.names} ({self.chosen} of {self.experts} experts)" if self.experts > 1 else self.names

    @property
    def label(self) -> str:
        """The name with the shape, such as ``q_proj, o_proj 4096,4096``."""
        return f"{self.title} {self.n},{self.k}".strip()

    def used(self, m: int) -> float:
        """Return how many of the `count` layers m tokens use, if the router chooses all experts equally often."""
        return self.count * (1 - (1 - self.chosen / self.experts) ** m)

    def tokens(self, m: int) -> int:
        """Return the mean number of tokens of each layer that is used."""
        return max(1, round(m * self.count * self.chosen / self.experts / self.used(m)))


MAX_FEATURES = 1 << 20
"""Maximum N and K: a sample of each weight's rows is packed to learn its bytes, 1 GB in float32 at this K."""


def layer_shapes(text: str) -> list[LayerShape]:
    """Return the distinct shapes of a model's linear layers, without the LM head.

    Args:
        text: ``N,K``, a model directory, or a name in `ARCHITECTURES`. ``:fused`` after the name fuses q, k, v into
            one layer, and gate, up into another.
    Raises:
        InputError: ``text`` is none of these, config.json cannot be read, or N or K is above `MAX_FEATURES`.
    """
    shapes = list(_shapes_of(text))
    for shape in shapes:
        if max(shape.n, shape.k) > MAX_FEATURES:
            raise InputError(f"N, K = {shape.n}, {shape.k}: expected at most {MAX_FEATURES}, more than any model has")
    return shapes


def _shapes_of(text: str) -> list[LayerShape]:
    plain = re.fullmatch(r"(\d{1,18}),(\d{1,18})", text)
    if plain:
        return [LayerShape("", int(plain[1]), int(plain[2]), 1)]
    name, _, fused = text.partition(":")
    if name in ARCHITECTURES and fused in ("", "fused"):
        return _shapes_of_fields(json.dumps(ARCHITECTURES[name]), fused=bool(fused))
    return _grouped(*_linears(_config_of(Path(text))), fused=False)


@cache
def _shapes_of_fields(fields: str, fused: bool) -> list[LayerShape]:
    """Return the shapes of an architecture by its fields, JSON. Its model takes 50 ms to build; `auto` asks often."""
    return _grouped(*_linears(AutoConfig.for_model(**json.loads(fields))), fused=fused)


def architecture(name: str) -> PretrainedConfig:
    """Return the config of an architecture in `ARCHITECTURES`.

    Raises:
        InputError: the name is unknown; lists the known ones.
    """
    if name not in ARCHITECTURES:
        raise InputError(f"unknown architecture {name!r}; known: {', '.join(ARCHITECTURES)}")
    return AutoConfig.for_model(**ARCHITECTURES[name])


def _config_of(directory: Path) -> PretrainedConfig:
    try:
        has_config = (directory / "config.json").is_file()
    except OSError:  # the name is too long for a file's
        has_config = False
    if not has_config:
        known = ", ".join(ARCHITECTURES)
        raise InputError(
            f"got {str(directory)[:99]}; expected N,K, a directory with a config.json, or one of these names, also "
            f"followed by :fused: {known}"
        )
    return read_config(directory)


@dataclass(frozen=True)
class _Linear:
    """A linear layer of a model, or those of all experts of a layer."""

    name: str
    n: int
    k: int
    experts: int = 1


def _linears(config: PretrainedConfig) -> tuple[list[_Linear], int]:
    """Return the linear layers of the text decoder, without the LM head, and the experts per token.

    The model is built on the meta device.

    Raises:
        InputError: the model is no decoder; or it has experts, and the config does not say how many a token takes.
    """
    kinds = [
        kind for kind in (AutoModelForCausalLM, AutoModelForImageTextToText) if type(config) in kind._model_mapping
    ]
    attention = hasattr(config.get_text_config(), "num_attention_heads")  # a state-space model has none
    if not kinds or config.is_encoder_decoder or is_encoder(config) or not attention:
        raise InputError(
            f"{config.model_type} is not supported; plan takes decoder-only transformers, and the text decoder of "
            "multimodal models"
        )
    try:
        with torch.device("meta"):
            model = kinds[0].from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers raises many types
        raise InputError(f"no {config.model_type} can be built: {type(error).__name__}: {error}") from error
    head = model.get_output_embeddings()
    linears = []
    for name, module in model.get_decoder().named_modules():
        if is_fused_experts(module):
            linears += [_Linear(f"{name}.{part}", n, k, count) for part, (count, n, k) in expert_shapes(module).items()]
        elif is_linear(module) and module is not head:
            linears.append(_Linear(name, *weight_of(module).shape))
    experts_per_token = getattr(config.get_text_config(), "num_experts_per_tok", None)
    if experts_per_token is None and any(layer.experts > 1 for layer in linears):
        raise InputError(f"config.json of {type(model).__name__} does not say num_experts_per_tok: plan needs it")
    return linears, experts_per_token or 1


def _grouped(linears: list[_Linear], chosen: int, fused: bool) -> list[LayerShape]:
    """Group layers by shape, after fusing them if ``fused``."""
    if fused:
        joined: dict[str, _Linear] = {}
        for layer in linears:
            parent, _, last = layer.name.rpartition(".")
            name = f"{parent}.{FUSED.get(last, last)}"
            rows = joined[name].n if name in joined else 0
            joined[name] = _Linear(name, rows + layer.n, layer.k, layer.experts)
        linears = list(joined.values())
    groups: dict[tuple[int, int, int], list[str]] = {}
    for layer in linears:
        groups.setdefault((layer.n, layer.k, layer.experts), []).append(layer.name.rpartition(".")[2])
    return [
        LayerShape(", ".join(dict.fromkeys(names)), n, k, len(names) * experts, experts, min(chosen, experts))
        for (n, k, experts), names in groups.items()
    ]
