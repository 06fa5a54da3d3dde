"""The module that replaces ``nn.Linear``: packed tensors as parameters, computed by the kernel its format chooses."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from semisparse.errors import KernelError
from semisparse.formats.base import Codes, Packed, get_format
from semisparse.formats.product import linear, problem_of


class SparseLinear(nn.Module):
    """``y = x @ w.T + bias`` with a packed weight.

    The weight is stored in the layout that the kernels of its device read. ``state_dict`` and ``load_state_dict`` use
    the layout on disk, so that a model on a GPU saves the same bytes as on a CPU.

    Args:
        packed: the weight [N, K]. Its tensors become parameters without gradients, named as in their `TensorSpec`.
        bias: [N] or None.
        kernel: a kernel's name, or ``auto`` for the format's choice (`Format.choose`).
    """

    _hf_quantized_needs_local_tp = True
    """Read by transformers' tensor parallelism: x must be this rank's local tensor, not a DTensor."""

    wrapped_for_gradients = False
    """Whether ``forward`` is wrapped only to sum x's gradient over ranks. Set by the code that shards the layer."""

    _unfilled = False
    """Whether the tensors' memory was allocated and perhaps not written: its indices may lead kernels anywhere."""

    def __init__(self, packed: Packed, bias: Tensor | None = None, kernel: str = "auto") -> None:
        super().__init__()
        self.out_features, self.in_features = packed.shape
        self.kernel = kernel
        self._names: tuple[str, ...] = ()
        self._cached_packed: Packed | None = None
        self.packed = packed
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def arrange(self, device_type: str | None = None) -> None:
        """Convert the weight to the layout that kernels of a device read. It stays on its device.

        Args:
            device_type: ``cuda``, or ``cpu`` for the layout on disk; by default the type of the weight's device.
        """
        packed = self.packed
        arranged = get_format(packed.spec.format).arrange(packed, device_type or packed.device.type)
        if arranged is not packed:
            self._set_packed(arranged)

    def place(self, device: torch.device) -> None:
        """Move the weight, but not the bias, to a device in its present layout: call `arrange` before the layer."""
        packed = self.packed
        self._set_packed(Packed(packed.spec, {name: tensor.to(device) for name, tensor in packed.tensors.items()}))

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the weight by one in the layout on disk, on any device: call `arrange` before the layer."""
        self._set_packed(Packed(self.spec, dict(tensors)))

    def _set_packed(self, packed: Packed) -> None:
        """Replace the parameters by the tensors of ``packed``."""
        for name in self._names:
            delattr(self, name)
        self.spec, self._cached_packed = packed.spec, None
        self._names = tuple(packed.tensors)
        for name, tensor in packed.tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    @property
    def packed(self) -> Packed:
        """The weight in its present layout, on the module's device."""
        if torch.compiler.is_compiling():
            return Packed(self.spec, {name: getattr(self, name) for name in self._names})
        # Cached until a parameter is replaced: every call reads it, and building it takes as long as a launch.
        packed, parameters = self._cached_packed, self._parameters
        if packed is None or not all(map(operator.is_, map(parameters.get, self._names), packed.tensors.values())):
            packed = Packed(self.spec, {name: getattr(self, name) for name in self._names})
            self._cached_packed = packed
        return packed

    @packed.setter
    def packed(self, packed: Packed) -> None:
        """Replace the weight, for instance by a slice of it. ``out_features`` and ``in_features`` do not change."""
        self._set_packed(packed)
        self.arrange()

    @property
    def weight(self) -> Tensor:
        """The dense weight [N, K], unpacked at each access. It is a copy: writing to it does not change the layer."""
        return self.packed.unpack()

    def read_codes(self) -> Codes | None:
        """Return the weight's codes and scales, on its device; None if it is not quantised."""
        form = get_format(self.spec.format)
        return form.codes(form.arrange(self.packed, "cpu"))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``x @ w.T + bias``.

        Args:
            x: [..., K], float16, bfloat16 or float32.
            bias: [N], used instead of the layer's own bias.
        Returns:
            [..., N] in x's dtype.
        Raises:
            KernelError: no kernel can compute this; lists every candidate's reason.
            FormatError: the layer was built on the meta device and moved by `to_empty`, and no weight was loaded.
        """
        if self._unfilled:
            from semisparse.nn.filled import check_filled  # imports torch's compiler

            check_filled(self)
        return linear(x, self.packed, self.bias if bias is None else bias, self.kernel)

    def validate(self) -> None:
        """Check every stored tensor, as `Format.validate` does."""
        get_format(self.spec.format).validate(self.packed)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseLinear:
        """Apply ``.to(device)`` and the like, but keep every dtype: a cast would corrupt packed tensors."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        here = self.packed.device
        if move(torch.empty(0, device=here)).device.type != here.type:
            self.arrange("cpu")
        super()._apply(move, recurse)
        self._unfilled |= here.type == "meta" != self.packed.device.type  # by `to_empty`
        if not self._unfilled:
            self.arrange()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save the layout on disk. If the weight is in another layout, the saved tensors are copies in host memory."""
        packed = self.packed
        stored = get_format(packed.spec.format).arrange(packed, "cpu")
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if stored is not packed:
            for name in self._names:
                del destination[prefix + name]
            destination.update({prefix + name: tensor.cpu() for name, tensor in stored.tensors.items()})

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load the layout on disk, after checking it: kernels do not check indices.

        Raises:
            FormatError: a tensor contradicts the layer's format. The layer keeps its weight.
        """
        self.arrange("cpu")
        try:
            self._validate(state_dict, prefix, assigned=args[0].get("assign_to_params_buffers", False))
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        finally:
            self.arrange()

    def _validate(self, state_dict: Mapping[str, Any], prefix: str, assigned: bool) -> None:
        """Check what a state dict has of the layer's tensors, cast as copying them casts; ``assigned`` are not cast."""
        tensors = {name: state_dict.get(prefix + name) for name in self._names}
        given = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
        present = self.packed.tensors
        fits = all(tensor.shape == present[name].shape for name, tensor in given.items())  # else torch refuses it
        if given and fits and all(tensor.device.type != "meta" for tensor in given.values()):
            rest = {name: tensor for name, tensor in present.items() if name not in given}
            cast = given if assigned else {name: tensor.to(present[name].dtype) for name, tensor in given.items()}
            whole = rest | cast
            device = next(iter(given.values())).device
            get_format(self.spec.format).validate(Packed(self.spec, {n: t.to(device) for n, t in whole.items()}))

    def extra_repr(self) -> str:
        """Return sizes, format, pattern, bits per weight, and the kernel that computes one token."""
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
