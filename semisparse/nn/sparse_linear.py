"""The module that replaces ``nn.Linear``: packed tensors as parameters, a product chosen by what can run."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from semisparse.errors import KernelError
from semisparse.formats.base import Packed, get_format
from semisparse.formats.product import linear, problem_of


class SparseLinear(nn.Module):
    """``y = x @ w.T + bias`` with a packed weight.

    On a device the weight lies in the layout that its kernels want; ``state_dict`` gives and takes the layout on disk,
    so that a model on a GPU saves what one on a CPU would.

    Args:
        packed: the weight [N, K]; its tensors become parameters without gradients, under their specs' names.
        bias: [N] or None.
        kernel: a kernel's name, or ``auto`` for the first that can run.
    """

    _hf_quantized_needs_local_tp = True
    """transformers' tensor parallelism is to hand over this rank's part of x, not a distributed tensor."""

    wrapped_for_gradients = False
    """Whether ``forward`` is wrapped for no more than the gradients of x; who sets it has looked at the wrapper."""

    def __init__(self, packed: Packed, bias: Tensor | None = None, kernel: str = "auto") -> None:
        super().__init__()
        self.out_features, self.in_features = packed.shape
        self.kernel = kernel
        self._names: tuple[str, ...] = ()
        self._put_together: Packed | None = None
        self.packed = packed
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def arrange(self, device_type: str | None = None) -> None:
        """Bring the weight into the layout that kernels on a device want.

        Args:
            device_type: ``cuda``, ``cpu`` (the layout on disk); by default that of the device where the weight is.
        """
        packed = self.packed
        arranged = get_format(packed.spec.format).arrange(packed, device_type or packed.device.type)
        if arranged is not packed:
            self._hold(arranged)

    def _hold(self, packed: Packed) -> None:
        for name in self._names:
            delattr(self, name)
        self.spec, self._put_together = packed.spec, None
        self._names = tuple(packed.tensors)
        for name, tensor in packed.tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    @property
    def packed(self) -> Packed:
        """The weight as it is stored now, on the module's device."""
        if torch.compiler.is_compiling():
            return Packed(self.spec, {name: getattr(self, name) for name in self._names})
        # Every call asks for it, and making it anew takes as long as a launch.
        held, found = self._parameters, self._put_together
        if found is None or not all(map(operator.is_, map(held.get, self._names), found.tensors.values())):
            tensors = {name: getattr(self, name) for name in self._names}
            found = self._put_together = Packed(self.spec, tensors)
        return found

    @packed.setter
    def packed(self, packed: Packed) -> None:
        """Put another weight in, such as a part of this one; ``out_features`` and ``in_features`` stay the layer's."""
        self._hold(packed)
        self.arrange()

    @property
    def weight(self) -> Tensor:
        """The dense weight [N, K], unpacked at each access: a copy for those who look (GPT-2's initialisation does)."""
        return self.packed.unpack()

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply.

        Args:
            x: [..., K], float16, bfloat16 or float32.
            bias: [N], in the place of a bias of its own.
        Returns:
            [..., N] in x's dtype.
        Raises:
            KernelError: no kernel can compute this; gives every candidate's reason.
        """
        return linear(x, self.packed, self.bias if bias is None else bias, self.kernel)

    def validate(self) -> None:
        """Check every stored tensor against the format, as `Format.validate` does."""
        get_format(self.spec.format).validate(self.packed)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseLinear:
        """Follow ``.to(device)``; keep every dtype, because a cast would break the packed layout or lose weights."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        here = self.packed.device
        if move(torch.empty(0, device=here)).device.type != here.type:
            self.arrange("cpu")
        super()._apply(move, recurse)
        self.arrange()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Put the layout on disk into a state dict; where that is not the one in use, it is a copy in host memory."""
        packed = self.packed
        stored = get_format(packed.spec.format).arrange(packed, "cpu")
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if stored is not packed:
            for name in self._names:
                del destination[prefix + name]
            destination.update({prefix + name: tensor.cpu() for name, tensor in stored.tensors.items()})

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Take the layout on disk from a state dict."""
        self.arrange("cpu")
        super()._load_from_state_dict(*args, **kwargs)
        self.arrange()

    def extra_repr(self) -> str:
        """Show what is stored and which kernel one token would take."""
        packed = self.packed
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"format={packed.spec.format}, pattern={packed.pattern}, bits_per_weight={packed.bits_per_weight:.2f}, "
            f"kernel={self._kernel_of_one_token(packed)}"
        )

    def _kernel_of_one_token(self, packed: Packed) -> str:
        if packed.device.type == "meta":
            return f"{self.kernel} (not loaded yet)"
        x = torch.empty(1, self.in_features, dtype=packed.dtype, device=packed.device)
        try:
            return get_format(packed.spec.format).choose(problem_of(x, packed), self.kernel).name
        except KernelError as error:
            return f"none ({error})"
