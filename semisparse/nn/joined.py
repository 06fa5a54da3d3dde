"""Joined layers: linear layers on one input (query, key, value; gate, up) computed by one matmul.

Each layer keeps its position and name in the model. The first layer that is called with an input computes the matmul
of all. The others return their slices of its cached output, which is discarded once every layer has read its slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisparse.errors import InputError
from semisparse.formats.base import Packed, get_format
from semisparse.nn.output_cache import CachedOutput, CacheKey, cache_key
from semisparse.nn.sparse_linear import SparseLinear
from semisparse.nn.stacking import row_offsets, stack_with_padding, unstack

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of a module's children that have the same input."""

NO_LOADING = "a model with joined layers loads no state dict: load it first, then call join_layers"


class JoinedLinear(SparseLinear):
    """The matmul of several layers on one input. It owns their stacked weight; the layers themselves are discarded.

    Args:
        layers: the layers to join, all with a bias or all without.
        stack: their weights, stacked by `stack_with_padding`.

    Attributes:
        extents: for each layer, its first row of the stack and its number of rows.
    """

    def __init__(self, layers: Sequence[SparseLinear], stack: Packed) -> None:
        specs = [on_disk(layer.packed).spec for layer in layers]
        starts = row_offsets(specs)[:-1]
        super().__init__(stack, _stacked_bias(layers, starts, stack.shape[0]), layers[0].kernel)
        self.extents = [(start, spec.shape[0]) for start, spec in zip(starts, specs, strict=True)]
        self._specs = specs
        self._cached: CachedOutput | None = None
        self._gives_gradients = not any("forward" in vars(layer) for layer in layers)

    def output_of(self, index: int, x: Tensor) -> Tensor:
        """Return one layer's output, from the cached output if that is valid.

        Args:
            index: the layer's position.
            x: [..., K], float16, bfloat16 or float32.
        Returns:
            [..., the layer's N] in x's dtype.
        Raises:
            InputError: x requires a gradient, but the layers were sharded over ranks. transformers' wrapper of each
                layer, which summed the gradient over the ranks, is gone.
        """
        if not self._gives_gradients and torch.is_grad_enabled() and x.requires_grad:
            raise InputError("joined layers that are sharded over ranks give x no gradients: use torch.no_grad")
        cached, key = self._cached, cache_key(x)
        if cached is None or cached.taken[index] or not cached.is_valid(x, key):
            cached = self._compute(x, key)
        cached.taken[index] = True
        if all(cached.taken):
            self._cached = None
        return cached.y.narrow(-1, *self.extents[index])

    def _compute(self, x: Tensor, key: CacheKey | None) -> CachedOutput:
        """Compute the matmul of all layers. The output is kept for the other layers where that is safe."""
        y = self.forward(x)
        if torch.compiler.is_dynamo_compiling():
            from semisparse.nn.traced import record_version

            record_version(y, x)
        output = CachedOutput(x, key or (), y, [False] * len(self.extents))
        self._cached = None if key is None or y.requires_grad else output
        return output

    def weights(self) -> list[Packed]:
        """Return each layer's weight in the layout on disk, with the bytes that it had before joining."""
        return unstack(on_disk(self.packed), self._specs)

    def _set_packed(self, packed: Packed) -> None:
        self._cached = None
        super()._set_packed(packed)

    def _apply(self, *args: Any, **kwargs: Any) -> SparseLinear:
        self._cached = None
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached": None}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save nothing: each `JoinedPart` saves its own weight."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise InputError(NO_LOADING)


class JoinedPart(nn.Module):
    """One layer of a `JoinedLinear`. It replaces the `SparseLinear` that was joined, under the same name.

    Args:
        whole: the joined layer, which another module owns.
        index: this layer's position in it.
    """

    _whole: JoinedLinear

    def __init__(self, whole: JoinedLinear, index: int) -> None:
        super().__init__()
        object.__setattr__(self, "_whole", whole)  # not as a submodule: the model must list its parameters once
        self._index = index
        self.in_features, self.out_features = whole.in_features, whole.extents[index][1]

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``x @ w.T + bias``: x [..., K] in float16, bfloat16 or float32, to [..., N] in x's dtype."""
        return self._whole.output_of(self._index, x)

    @property
    def packed(self) -> Packed:
        """The weight: a copy, in the layout on disk."""
        return self._whole.weights()[self._index]

    @property
    def weight(self) -> Tensor:
        """The dense weight [N, K], unpacked at each access."""
        return self.packed.unpack()

    @property
    def bias(self) -> Tensor | None:
        """The bias [N] or None."""
        bias, (start, _) = self._whole.bias, self._whole.extents[self._index]
        return None if bias is None else bias.detach()[start : start + self.out_features]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save the weight and bias as the layer did before joining."""
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias.clone()
        destination.update({prefix + name: tensor for name, tensor in self.packed.tensors.items()})

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise InputError(NO_LOADING)

    def extra_repr(self) -> str:
        """Return sizes and the rows of the joined weight that are this layer's."""
        whole, (start, _) = self._whole, self._whole.extents[self._index]
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={whole.bias is not None}, "
            f"rows {start} to {start + self.out_features} of a joined matmul of {whole.out_features}"
        )


def join_layers(model: nn.Module) -> list[str]:
    """Join query, key and value, and gate and up projections, into one matmul each, wherever their weights stack.

    The experts of a mixture are joined, too (`join_experts`).

    Layers stay apart if they differ in format, pattern, params or kernel, if they have hooks, or if only some have a
    bias. The model's state dict stays the same, but a joined model cannot load one.

    Use `torch.no_grad`. Under `torch.inference_mode` without `torch.compile`, and where gradients are required, the
    output cannot be cached: each layer then computes the joined matmul again.

    Args:
        model: contains `SparseLinear` modules, on the device where it will run.
    Returns:
        The names of the new `JoinedLinear` and `JoinedExperts` modules.
    """
    # Only modules that contain layers are listed, so that each layer is freed as soon as its weight has been stacked.
    parents = [(path, module) for path, module in model.named_modules() if not isinstance(module, SparseLinear)]
    joined = []
    for path, parent in parents:
        for names, layers in _joinable(parent):
            stack = stack_with_padding([on_disk(layer.packed) for layer in layers])
            if stack is None:
                continue
            module = JoinedLinear(layers, stack).train(parent.training)
            for index, name in enumerate(names):
                setattr(parent, name, JoinedPart(module, index).train(parent.training))
            joined_name = "_".join(names)
            parent.add_module(joined_name, module)
            joined.append(f"{path}.{joined_name}" if path else joined_name)
    from semisparse.nn.joined_experts import join_experts  # it needs the classes above

    return joined + join_experts(model)


def _joinable(parent: nn.Module) -> Iterator[tuple[Sequence[str], list[SparseLinear]]]:
    """Yield the names and layers of each group of `SIBLINGS` in a module that may be joined."""
    for names in SIBLINGS:
        layers = [layer for layer in map(parent._modules.get, names) if type(layer) is SparseLinear]
        if len(layers) < len(names) or len(set(map(id, layers))) < len(names) or any(map(is_intercepted, layers)):
            continue
        kinds = {(layer.kernel, layer.packed.device, layer.bias is None) for layer in layers}
        if len(kinds) == 1 and "meta" not in {layer.packed.device.type for layer in layers}:
            yield names, layers


def is_intercepted(layer: SparseLinear) -> bool:
    """Return whether other code intercepts the layer's calls, by a hook or by replacing ``forward``."""
    attributes: Mapping[str, Any] = vars(layer)
    return ("forward" in attributes and not layer.wrapped_for_gradients) or any(
        attributes[name] for name in attributes if name.endswith("_hooks")
    )


def on_disk(packed: Packed) -> Packed:
    """Return a weight in the layout on disk, where it is."""
    return get_format(packed.spec.format).arrange(packed, "cpu")


def _stacked_bias(layers: Sequence[SparseLinear], starts: Sequence[int], rows: int) -> Tensor | None:
    """Return the stack's bias: each layer's bias from its first row on, zeros in padding rows. None without biases.

    Args:
        layers: all with a bias or all without. Of a sharded bias, the local shard is taken.
        starts: the first row of each layer.
        rows: the rows of the stack.
    """
    biases = [_local(layer.bias) for layer in layers if layer.bias is not None]
    if not biases:
        return None
    ends = [*starts[1:], rows]
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    return torch.cat([F.pad(bias, (0, length - len(bias))) for bias, length in zip(biases, lengths, strict=True)])


def _local(bias: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor  # takes a second to import

    return (bias.to_local() if isinstance(bias, DTensor) else bias).detach()
