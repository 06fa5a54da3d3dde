"""A decoder without transformers' code: modules that hold the weights, under the names that they have in the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import torch
from safetensors import safe_open
from torch import Tensor, nn

from semisparse.checkpoint import ModelDirectory
from semisparse.engine.attention import HeadNorms
from semisparse.engine.blueprint import Blueprint, Rotary
from semisparse.engine.structure import Layer, Structure
from semisparse.errors import CheckpointError, SemisparseError
from semisparse.nn import SparseLinear, join_layers

READERS = 4
"""Threads that copy weights to the device: 3.76 GB took 0.8 s from the page cache to an H200
(results/h200/start.csv)."""


class BareNorm(nn.Module):
    """An RMSNorm's weight [C] and epsilon. The engine's kernels compute it."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta"), requires_grad=False)
        self.epsilon = epsilon


class BareDecoder(nn.Module):
    """A Llama-like decoder's weights. It has no forward pass: `Decoder` runs it.

    Args:
        blueprint: what it consists of. Its tensors are on the meta device until `load_bare` fills them.

    Attributes:
        structure: the parts, as `recognise` returns them of transformers' model; valid once the decoder is loaded.
        generation_config: the tokens that end a text, as ``eos_token_id``.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self.blueprint = blueprint
        self.generation_config = SimpleNamespace(eos_token_id=list(blueprint.ends))
        self.dtype = getattr(torch, blueprint.dtype)
        embedding = torch.empty(blueprint.embedding, device="meta", dtype=self.dtype)
        # Drawing random values on the meta device, as nn.Embedding does, imports torch's compiler.
        self._put("model.embed_tokens", nn.Embedding.from_pretrained(embedding))
        for name, (n, k, bias) in blueprint.linears.items():
            self._put(name, nn.Linear(k, n, bias, device="meta", dtype=self.dtype))
        for name, (size, epsilon) in blueprint.norms.items():
            self._put(name, BareNorm(size, epsilon))

    def _put(self, name: str, module: nn.Module) -> None:
        """Put a module under a dotted name, and make the modules on the way."""
        parent: nn.Module = self
        *path, last = name.split(".")
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, module)

    @property
    def device(self) -> torch.device:
        """The weights' device."""
        return self.get_parameter("model.norm.weight").device

    @property
    def structure(self) -> Structure:
        """The decoder, taken apart."""
        blueprint = self.blueprint
        frequencies = torch.tensor(blueprint.frequencies, dtype=torch.float32, device=self.device)
        return Structure(
            embedding=self.get_submodule("model.embed_tokens"),
            layers=[self._layer(f"model.layers.{index}") for index in range(blueprint.layers)],
            norm=self.get_parameter("model.norm.weight"),
            head=self.get_submodule("lm_head"),
            heads=blueprint.heads,
            epsilon=blueprint.norms["model.norm"][1],
            rotary=Rotary(frequencies, blueprint.scaling),
            context=blueprint.context,
        )

    def _layer(self, at: str) -> Layer:
        attention, mlp = self.get_submodule(f"{at}.self_attn"), self.get_submodule(f"{at}.mlp")
        norms = None
        if f"{at}.self_attn.q_norm" in self.blueprint.norms:
            q, k = (attention.get_parameter(f"{name}.weight") for name in ("q_norm", "k_norm"))
            norms = HeadNorms(q, k, self.blueprint.norms[f"{at}.self_attn.q_norm"][1])
        return Layer(
            q=attention.get_submodule("q_proj"),
            k=attention.get_submodule("k_proj"),
            v=attention.get_submodule("v_proj"),
            o=attention.get_submodule("o_proj"),
            gate=mlp.get_submodule("gate_proj"),
            up=mlp.get_submodule("up_proj"),
            down=mlp.get_submodule("down_proj"),
            input_norm=self.get_parameter(f"{at}.input_layernorm.weight"),
            mlp_norm=self.get_parameter(f"{at}.post_attention_layernorm.weight"),
            head_norms=norms,
            parents=(attention, mlp),
        )


def fits(blueprint: Blueprint, directory: ModelDirectory) -> bool:
    """Return whether a directory stores exactly the tensors of a blueprint's decoder, named as its modules are."""
    packed = {f"{layer}.{name}" for layer, weight in directory.layers.items() for name in weight.tensors}
    dense = _dense_shapes(blueprint, directory)
    headers = directory.headers
    return (
        all(blueprint.linears.get(layer, (0, 0))[:2] == weight.shape for layer, weight in directory.layers.items())
        and set(headers) == packed | set(dense)
        and all(headers[name].shape == shape for name, shape in dense.items())
        and all(dtype is not None and dtype.is_floating_point for dtype in (headers[name].dtype for name in dense))
    )


def _dense_shapes(blueprint: Blueprint, directory: ModelDirectory) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that is not packed, by its name in the files."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": blueprint.embedding}
    shapes |= {f"{name}.weight": (size,) for name, (size, _) in blueprint.norms.items()}
    for name, (n, k, bias) in blueprint.linears.items():
        if name not in directory.layers and not (name == "lm_head" and blueprint.tied):
            shapes[f"{name}.weight"] = n, k
        if bias:
            shapes[f"{name}.bias"] = (n,)
    return shapes


@torch.no_grad()
def load_bare(directory: ModelDirectory, blueprint: Blueprint, device: torch.device) -> BareDecoder:
    """Load a decoder to a device; on a GPU layers that share an input are joined.

    Args:
        directory: one that `fits`.
        blueprint: what the decoder consists of.
        device: where it is to run.
    Raises:
        CheckpointError: a packed tensor contradicts its format; names the layer.
    """
    model = BareDecoder(blueprint)
    tensors: dict[str, Tensor] = {}
    owners = {
        f"{layer}.{name}": layer
        for layer, weight in directory.layers.items()
        for name in (*weight.tensors, "bias")
        if f"{layer}.{name}" in directory.headers
    }
    missing = Counter(owners.values())
    # Layers are checked while others are read: all checks take 1.0 s of a 7B's ec_csr start
    # (results/h200/start-parts.csv).
    for name, tensor in _read(directory, device, model.dtype):
        tensors[name] = tensor
        if name in owners:
            layer = owners[name]
            missing[layer] -= 1
            if not missing[layer]:
                model.set_submodule(layer, _filled(layer, directory, tensors))
    for name, tensor in tensors.items():
        path, _, parameter = name.rpartition(".")
        model.get_submodule(path).register_parameter(parameter, nn.Parameter(tensor, requires_grad=False))
    if blueprint.tied:
        model.get_submodule("lm_head").register_parameter("weight", model.get_parameter("model.embed_tokens.weight"))
    if device.type == "cuda":
        join_layers(model)
    return model.to(device).eval()  # arranges every layer that was not joined


def _filled(name: str, directory: ModelDirectory, tensors: dict[str, Tensor]) -> SparseLinear:
    """Return a layer with the tensors that were read of it, checked. They are taken out of ``tensors``."""
    declared = directory.layers[name]
    layer = SparseLinear(declared, tensors.pop(f"{name}.bias", None))
    layer.fill({tensor: tensors.pop(f"{name}.{tensor}") for tensor in declared.tensors})
    try:
        layer.validate()
    except SemisparseError as error:
        raise CheckpointError(f"layer {name}: {error}") from error
    return layer


def _read(directory: ModelDirectory, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield each stored tensor, on the device. Tensors that are not packed are cast to a dtype."""
    packed = {f"{layer}.{name}" for layer, weight in directory.layers.items() for name in weight.tensors}
    with ExitStack() as stack:
        files = {header.file for header in directory.headers.values()}
        opened = {file: stack.enter_context(safe_open(file, "pt")) for file in files}

        def load(name: str) -> Tensor:
            tensor: Tensor = opened[directory.headers[name].file].get_tensor(name).to(device)
            return tensor if name in packed else tensor.to(dtype)

        with ThreadPoolExecutor(READERS) as pool:
            yield from zip(directory.headers, pool.map(load, directory.headers), strict=True)
