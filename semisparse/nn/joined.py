"""Layers on one input as one product: a model's query, key and value, its gate and up projections.

Each keeps its place and its name. The first that is called with an input multiplies for all of them, the others take
their rows of what is remembered, which is forgotten once all have been taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisparse.errors import InputError
from semisparse.formats.base import Packed, get_format
from semisparse.nn.parts import first_rows, stacked_on_grain, unstacked
from semisparse.nn.remembered import Remembered, Setting, setting_of
from semisparse.nn.sparse_linear import SparseLinear

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers of one module that multiply one input."""

REFUSED = "a model whose layers are joined loads no state: load it first, then call join_layers"


class JoinedLinear(SparseLinear):
    """The product of several layers on one input; the weight is held here, and theirs are gone.

    Args:
        layers: of weights that `stacked_on_grain` takes, with biases or without.
        whole: what it gives for them.

    Attributes:
        extents: each layer's first row of the product, and how many are its own.
    """

    def __init__(self, layers: Sequence[SparseLinear], whole: Packed) -> None:
        stored = [_on_disk(layer.packed) for layer in layers]
        starts = first_rows(stored)[:-1]
        super().__init__(whole, _joined_bias(layers, starts, whole.shape[0]), layers[0].kernel)
        self.extents = [(start, weight.shape[0]) for start, weight in zip(starts, stored, strict=True)]
        self._parts = [Packed(weight.spec, {}) for weight in stored]
        self._remembered: Remembered | None = None
        self._passes_gradients = not any("forward" in vars(layer) for layer in layers)

    def rows_of(self, index: int, x: Tensor) -> Tensor:
        """Multiply, or take what was multiplied already, for one of the layers.

        Args:
            index: of the layer.
            x: [..., K], float16, bfloat16 or float32.
        Returns:
            [..., the layer's N] in x's dtype.
        Raises:
            InputError: x wants gradients, which only what wrapped the layers would have gathered from all ranks.
        """
        if not self._passes_gradients and torch.is_grad_enabled() and x.requires_grad:
            raise InputError("joined layers that are spread over ranks give x no gradients: use torch.no_grad")
        found, setting = self._remembered, setting_of(x)
        if found is None or found.taken[index] or not found.holds(x, setting):
            found = self._multiplied(x, setting)
        found.taken[index] = True
        if all(found.taken):
            self._remembered = None
        return found.whole.narrow(-1, *self.extents[index])

    def _multiplied(self, x: Tensor, setting: Setting | None) -> Remembered:
        """Multiply for every layer, and remember it where that is safe."""
        whole = self.forward(x)
        if torch.compiler.is_dynamo_compiling():
            from semisparse.nn.traced import note_version

            note_version(whole, x)
        found = Remembered(x, setting or (), whole, [False] * len(self.extents))
        self._remembered = None if setting is None or whole.requires_grad else found
        return found

    def parts(self) -> list[Packed]:
        """Give each layer's weight, in the layout on disk: the bytes that were joined."""
        return unstacked(_on_disk(self.packed), self._parts)

    def _hold(self, packed: Packed) -> None:
        self._remembered = None
        super()._hold(packed)

    def _apply(self, *args: Any, **kwargs: Any) -> SparseLinear:
        self._remembered = None
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_remembered": None}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save nothing: each layer saves its own part."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise InputError(REFUSED)


class JoinedPart(nn.Module):
    """A layer whose product is part of a `JoinedLinear`, in the place of the `SparseLinear` that it was.

    Args:
        whole: the product, which another module holds.
        index: the layer's, in it.
    """

    _whole: JoinedLinear

    def __init__(self, whole: JoinedLinear, index: int) -> None:
        super().__init__()
        object.__setattr__(self, "_whole", whole)  # no submodule: its parameters stand once in the model
        self._index = index
        self.in_features, self.out_features = whole.in_features, whole.extents[index][1]

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: [..., K], float16, bfloat16 or float32, to [..., N] in x's dtype."""
        return self._whole.rows_of(self._index, x)

    @property
    def packed(self) -> Packed:
        """The weight, a copy in the layout on disk."""
        return self._whole.parts()[self._index]

    @property
    def weight(self) -> Tensor:
        """The dense weight [N, K], unpacked at each access."""
        return self.packed.unpack()

    @property
    def bias(self) -> Tensor | None:
        """The bias [N], if any."""
        bias, (start, _) = self._whole.bias, self._whole.extents[self._index]
        return None if bias is None else bias.detach()[start : start + self.out_features]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Put what the layer was made of into a state dict."""
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias.clone()
        destination.update({prefix + name: tensor for name, tensor in self.packed.tensors.items()})

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise InputError(REFUSED)

    def extra_repr(self) -> str:
        """Show which rows of which product the layer is."""
        whole, (start, _) = self._whole, self._whole.extents[self._index]
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={whole.bias is not None}, "
            f"rows {start} to {start + self.out_features} of one product of {whole.out_features}"
        )


def join_layers(model: nn.Module) -> list[str]:
    """Compute query, key and value, and gate and up projections, in one product each, wherever their weights stack.

    Layers of unequal formats, patterns or params stay as they are, as do those with hooks, and those of which some have
    a bias. A state dict stays what it was, and nothing can be loaded any more. Where nobody can know whether an input
    was written since (`torch.inference_mode` without `torch.compile`), or gradients are wanted, every layer computes
    the whole product: use `torch.no_grad`.

    Args:
        model: holds `SparseLinear`, on the device where it will run.
    Returns:
        The names of the new modules that hold the joined weights.
    """
    # No layer is in the list, so that each is freed once its weight has been joined.
    parents = [(path, module) for path, module in model.named_modules() if not isinstance(module, SparseLinear)]
    joined = []
    for path, parent in parents:
        for names, layers in _groups_of(parent):
            whole = stacked_on_grain([_on_disk(layer.packed) for layer in layers])
            if whole is None:
                continue
            module = JoinedLinear(layers, whole).train(parent.training)
            for index, name in enumerate(names):
                setattr(parent, name, JoinedPart(module, index).train(parent.training))
            own = "_".join(names)
            parent.add_module(own, module)
            joined.append(f"{path}.{own}" if path else own)
    return joined


def _groups_of(parent: nn.Module) -> Iterator[tuple[Sequence[str], list[SparseLinear]]]:
    """Give the layers of a module that multiply one input and may be one product, with their names."""
    for names in SIBLINGS:
        layers = [layer for layer in map(parent._modules.get, names) if type(layer) is SparseLinear]
        if len(layers) < len(names) or len(set(map(id, layers))) < len(names) or any(map(_is_watched, layers)):
            continue
        kinds = {(layer.kernel, layer.packed.device, layer.bias is None) for layer in layers}
        if len(kinds) == 1 and "meta" not in {layer.packed.device.type for layer in layers}:
            yield names, layers


def _is_watched(layer: SparseLinear) -> bool:
    """Whether somebody else has put a hand on how the layer is called, such as hooks do."""
    hooks: Mapping[str, Any] = vars(layer)
    return ("forward" in hooks and not layer.wrapped_for_gradients) or any(
        hooks[name] for name in hooks if name.endswith("_hooks")
    )


def _on_disk(packed: Packed) -> Packed:
    return get_format(packed.spec.format).arrange(packed, "cpu")


def _joined_bias(layers: Sequence[SparseLinear], starts: Sequence[int], rows: int) -> Tensor | None:
    """Put biases one behind the other, each from its weight's first row on; of one spread over ranks, the part here."""
    biases = [_local(layer.bias) for layer in layers if layer.bias is not None]
    if not biases:
        return None
    ends = [*starts[1:], rows]
    room = [end - start for start, end in zip(starts, ends, strict=True)]
    return torch.cat([F.pad(bias, (0, r - len(bias))) for bias, r in zip(biases, room, strict=True)])


def _local(bias: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor  # imported with the first joined bias: it costs a second

    return (bias.to_local() if isinstance(bias, DTensor) else bias).detach()
