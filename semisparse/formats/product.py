"""The matmul of every format, ``y = x @ w.T + bias`` with a packed weight, and its torch operator for traced graphs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from semisparse.errors import InputError
from semisparse.formats.base import Format, Kernel, Packed, WeightSpec, get_format, reference_kernel, require_tensors
from semisparse.formats.kernel import (
    MAX_FUSED_TOKENS,
    FusedProduct,
    PermutingProduct,
    Problem,
    Product,
    bucket_of,
)
from semisparse.formats.tuned import measured_times
from semisparse.runtime import cpp
from semisparse.runtime.device import device_facts
from semisparse.runtime.expand_gemm import Permutation, PermutedX

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes of x. A bias may have another of these than x, and is cast."""


def linear(x: Tensor, packed: Packed, bias: Tensor | None = None, kernel: str = "auto") -> Tensor:
    """Compute ``y = x @ w.T + bias`` with a packed weight.

    torch.compile and torch.export see one opaque operator, whatever the format. Gradients reach x and the bias; the
    packed weight is constant.

    Args:
        x: [..., K], float16, bfloat16 or float32, on the packed tensors' device.
        packed: a weight [N, K]. It is trusted: call `Format.validate` first if it comes from a file.
        bias: [N] or None, float16, bfloat16 or float32, on the same device.
        kernel: a kernel's name, or ``auto`` for the choice of `Format.choose`.
    Returns:
        [..., N] in x's dtype, accumulated in float32; under ``torch.autocast`` in autocast's dtype.
    Raises:
        InputError: an operand has the wrong type, size or dtype or is on another device than the weight, or no kernel
            has that name.
        KernelError: no kernel can compute this; lists every candidate's reason.
    """
    _check_operands(x, packed, bias)
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        return _autocast(x, packed, bias, kernel)
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        return _dual(x, packed, bias, kernel)
    return _linear(x, packed, bias, kernel)


def _autocast(x: Tensor, packed: Packed, bias: Tensor | None, kernel: str) -> Tensor:
    """Compute the matmul under ``torch.autocast``, with a result in its dtype, as ``nn.Linear`` has.

    x is cast only to the dtype that the weight has, too: no kernel takes x and a weight of two 16-bit dtypes.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        return linear(x.to(dtype) if packed.spec.dtype == dtype else x, packed, bias, kernel).to(dtype)


def _linear(x: Tensor, packed: Packed, bias: Tensor | None, kernel: str) -> Tensor:
    n, k = packed.spec.shape
    flat = x.dim() == 2
    rows = x if flat else x.reshape(-1, k)
    if torch.compiler.is_compiling() or _needs_gradient(x, bias) or _is_transformed():
        tensors = [packed.tensors[name] for name in sorted(packed.tensors)]
        y = torch.ops.semisparse.linear(rows, tensors, bias, packed.spec.json, kernel)
    else:
        y = _product(rows, packed, bias, kernel)
    return y if flat else y.reshape(*x.shape[:-1], n)


def _dual(x: Tensor, packed: Packed, bias: Tensor | None, kernel: str) -> Tensor:
    """Compute the matmul and its tangent, for forward-mode differentiation; the tangent takes the unpacked weight.

    The operator ``semisparse::linear`` has no forward-mode rule: without this, its tangent would be zeros.
    """
    x, x_tangent = forward_ad.unpack_dual(x)
    bias, bias_tangent = (None, None) if bias is None else forward_ad.unpack_dual(bias)
    y = _linear(x, packed, bias, kernel)
    if x_tangent is None and bias_tangent is None:
        return y
    tangent = torch.zeros_like(y) if x_tangent is None else x_tangent @ packed.unpack().to(x.dtype).T
    return forward_ad.make_dual(y, tangent if bias_tangent is None else tangent + bias_tangent.to(y.dtype))


def _check_operands(x: Tensor, packed: Packed, bias: Tensor | None) -> None:
    if not (isinstance(x, Tensor) and isinstance(packed, Packed) and (bias is None or isinstance(bias, Tensor))):
        types = ", ".join(type(operand).__name__ for operand in (x, packed, bias))
        raise InputError(f"the operands are {types}; expected a Tensor, a Packed weight, and a Tensor or None")
    if x.layout != torch.strided:
        raise InputError(f"x is {x.layout}, expected a strided tensor")
    n, k = packed.spec.shape
    if x.dim() == 0 or x.shape[-1] != k:
        raise InputError(f"x is {list(x.shape)}, expected [..., {k}] features: the weight takes K = {k}")
    if bias is not None and tuple(bias.shape) != (n,):
        raise InputError(f"bias is {list(bias.shape)}, expected [{n}]")
    if not torch.compiler.is_compiling():
        require_tensors(packed)
    if x.device != packed.device:
        raise InputError(f"x is on {x.device}, the weight on {packed.device}: move one to the other's device")
    if bias is not None and bias.dtype not in DTYPES:
        raise InputError(f"bias is {bias.dtype}, expected float16, bfloat16 or float32")
    if bias is not None and bias.device != x.device:
        raise InputError(f"the bias is on {bias.device}, the weight on {x.device}: move one to the other's device")


def _require_memory(x: Tensor, packed: Packed, bias: Tensor | None) -> None:
    """Refuse tensors whose storage was freed, as FSDP and offloading do between uses: C++ would read address 0.

    On a GPU the launch refuses them.
    """
    if x.device.type != "cpu":
        return
    for tensor in (x, *packed.tensors.values(), *(() if bias is None else (bias,))):
        if not tensor.data_ptr() and tensor.numel() and not tensor._is_zerotensor():
            raise InputError(
                f"the memory of x, the weight or the bias ({tensor.dtype} {list(tensor.shape)}) was freed: gather or "
                "load it before the matmul"
            )


def _is_transformed() -> bool:
    """Return whether ``torch.vmap`` or another transform of torch.func runs. Its tensors have no data pointers."""
    return torch._C._functorch.maybe_current_level() is not None


def _needs_gradient(x: Tensor, bias: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))


def problem_of(x: Tensor, packed: Packed) -> Problem:
    """Return the problem of ``x`` ([M, K]) and a packed weight, for every M of the bucket."""
    return Problem(bucket_of(x.shape[0]), structure_of(packed.spec), x.dtype, x.device)


@lru_cache(maxsize=1 << 16)
def structure_of(spec: WeightSpec) -> WeightSpec:
    """Return `Format.structure`, on which kernels depend; cached, because every call needs it."""
    return get_format(spec.format).structure(spec)


def _product(x: Tensor, packed: Packed, bias: Tensor | None, kernel: str) -> Tensor:
    m = x.shape[0]
    if m == 0:
        return x.new_empty(0, packed.spec.shape[0])
    _require_memory(x, packed, bias)
    return _prepared(structure_of(packed.spec), kernel, bucket_of(m), x.dtype, x.device, False)(x, packed, bias)


@lru_cache(maxsize=4096)
def _prepared(
    spec: WeightSpec, kernel: str, m: int, dtype: torch.dtype, device: torch.device, constant: bool
) -> Product:
    """Choose and prepare a kernel; cached by the weight's structure, the bucket of M, x's dtype and the device.

    Raises:
        InputError: x is not float16, bfloat16 or float32, or no kernel has that name.
        KernelError: no kernel can compute it.
    """
    if dtype not in DTYPES:
        raise InputError(f"x is {dtype}, expected float16, bfloat16 or float32")
    problem, form = Problem(m, spec, dtype, device, constant=constant), get_format(spec.format)
    chosen = form.choose(problem, kernel)
    if kernel == "auto":
        _warn_if_slow(form, chosen, problem)
    return chosen.prepare(problem)


def _warn_if_slow(form: Format, chosen: Kernel, problem: Problem) -> None:
    """Warn if the reference kernel runs, or one that is slower than those that no compiler was found for."""
    candidates = [kernel for kernel in form.kernels if kernel.device in (None, problem.device.type)]
    if chosen is reference_kernel:
        _say_slow(form.name, chosen.name, "no other can run", _reasons(candidates, problem))
    elif chosen.device == "cpu" and (missing := cpp.refusal()):
        faster = takewhile(lambda kernel: kernel.name != chosen.name, candidates)
        lacking = [kernel for kernel in faster if kernel.refusal(problem) == missing]
        if lacking:
            _say_slow(form.name, chosen.name, "no C++ can be compiled", _reasons(lacking, problem))


def _reasons(kernels: Iterable[Kernel], problem: Problem) -> str:
    return "; ".join(f"{kernel.name}: {kernel.refusal(problem)}" for kernel in kernels)


@cache
def _say_slow(form: str, kernel: str, because: str, reasons: str) -> None:
    """Warn, once per format, kernel and reasons, that a slow kernel runs."""
    warnings.warn(f"format {form} runs its slow {kernel} kernel, because {because} ({reasons})", stacklevel=2)


def fused_product(
    packed: Packed, m: int, dtype: torch.dtype, prologue: str = "none", epilogue: str = "none"
) -> FusedProduct | None:
    """Return the matmul with its prologue and epilogue in one kernel; None if no kernel fuses them.

    More than `MAX_FUSED_TOKENS` rows are not fused.

    Args:
        packed: a weight that no kernel on the stream writes (`Problem.is_fused`).
        m: number of rows of x.
        dtype: dtype of x.
        prologue: as in `Problem`.
        epilogue: as in `Problem`.
    """
    if m > MAX_FUSED_TOKENS:
        return None
    return _fused(structure_of(packed.spec), bucket_of(m), dtype, packed.device, prologue, epilogue)


@lru_cache(maxsize=4096)
def _fused(
    spec: WeightSpec, m: int, dtype: torch.dtype, device: torch.device, prologue: str, epilogue: str
) -> FusedProduct | None:
    problem = Problem(m, spec, dtype, device, prologue, epilogue)
    products = (kernel.fuse(problem) for kernel in get_format(spec.format).kernels if kernel.refusal(problem) is None)
    return next((product for product in products if product is not None), None)


def permutation_of(packed: Packed, m: int, dtype: torch.dtype) -> Permutation | None:
    """Return the order in which `permuted_linear` takes x, or None if the kernel for ``m`` rows takes it as it is.

    Args:
        packed: the weight, on its device.
        m: number of rows of x.
        dtype: dtype of x.
    Raises:
        KernelError: no kernel can compute the matmul.
    """
    product = _prepared(structure_of(packed.spec), "auto", bucket_of(m), dtype, packed.device, True)
    return product.permutation if isinstance(product, PermutingProduct) else None


def permuted_linear(x: PermutedX, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """Compute ``y = x @ w.T + bias`` as `linear` does, of an x in the order of `permutation_of`; no gradients."""
    product = _prepared(structure_of(packed.spec), "auto", bucket_of(x.m), x.dtype, packed.device, True)
    if not isinstance(product, PermutingProduct) or product.permutation != x.permutation:
        raise RuntimeError(f"x is in another order than the kernel for {packed.spec.format} takes")
    return product(x, packed, bias)


def constant_linear(x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """Compute ``y = x @ w.T + bias`` as `linear` does, without gradients, with a weight that nothing writes meanwhile.

    A GEMM may then read the weight while the kernels before it on the stream still run.

    Args:
        x: [M, K], on the weight's device.
        packed: the weight, aligned to 16 bytes (`Problem.is_fused`).
        bias: as in `linear`.
    Raises:
        KernelError: no kernel can compute the matmul.
    """
    product = _prepared(structure_of(packed.spec), "auto", bucket_of(len(x)), x.dtype, packed.device, True)
    if isinstance(product, PermutingProduct):
        return product(product.permuted(x), packed, bias)
    return product(x, packed, bias)


def prepare_product(packed: Packed, m: int, dtype: torch.dtype, constant: bool = False) -> None:
    """Compile and load the kernels of a matmul before it is needed.

    Args:
        packed: a weight, on the device where the matmul will run.
        m: number of rows of x.
        dtype: dtype of x.
        constant: whether it will be `constant_linear` or `permuted_linear`.
    Raises:
        InputError: x is not float16, bfloat16 or float32.
        KernelError: no kernel can compute it.
    """
    _prepared(structure_of(packed.spec), "auto", bucket_of(m), dtype, packed.device, constant)


@lru_cache(maxsize=4096)
def _measured_speedup(spec: WeightSpec, m: int, dtype: torch.dtype, device: torch.device) -> float | None:
    problem, form = Problem(m, spec, dtype, device), get_format(spec.format)
    measured = measured_times(problem, form.tuned_by, device_facts(device).name).get(form.choose(problem).name)
    return None if measured is None else measured.dense_us / measured.us


def measured_speedup(packed: Packed, m: int, dtype: torch.dtype) -> float | None:
    """Return how many times as fast as dense a matmul is, by the tuned tables; None if they do not have it.

    Args:
        packed: the weight, on its device.
        m: number of rows of x.
        dtype: dtype of x.
    Raises:
        KernelError: no kernel can compute it.
    """
    return _measured_speedup(structure_of(packed.spec), bucket_of(m), dtype, packed.device)


@cache
def _declared(spec: str) -> tuple[WeightSpec, tuple[str, ...]]:
    """Return the spec that a traced graph holds as JSON, and the names of its tensors, sorted."""
    read = WeightSpec.from_json(spec)
    return read, tuple(sorted(tensor.name for tensor in get_format(read.format).specs(read)))


def packed_of(spec: str, tensors: Sequence[Tensor]) -> Packed:
    """Return the weight that a traced graph holds: its spec as JSON, and its tensors in the order of their names."""
    read, names = _declared(spec)
    return Packed(read, dict(zip(names, tensors, strict=True)))


# A plain Library, not torch.library.custom_op: 6.3 us per call instead of 10.7.
_library = torch.library.Library("semisparse", "DEF")
_library.define("linear(Tensor x, Tensor[] tensors, Tensor? bias, str spec, str kernel) -> Tensor")


def _operator(x: Tensor, tensors: list[Tensor], bias: Tensor | None, spec: str, kernel: str) -> Tensor:
    return _product(x, packed_of(spec, tensors), bias, kernel)


def _operator_fake(x: Tensor, tensors: list[Tensor], bias: Tensor | None, spec: str, kernel: str) -> Tensor:
    return x.new_empty(x.shape[0], _declared(spec)[0].shape[0])


_library.impl("linear", _operator, "CompositeExplicitAutograd")
torch.library.register_fake("semisparse::linear", _operator_fake, lib=_library)


def _operator_batched(
    info: Any, dims: tuple[Any, ...], x: Tensor, tensors: list[Tensor], bias: Tensor | None, spec: str, kernel: str
) -> tuple[Tensor, int]:
    """Compute a batch of matmuls under `torch.vmap`. x and the bias may be batched; the weight is the same for all.

    Raises:
        InputError: the packed tensors are batched.
    """
    in_x, in_tensors, in_bias, _, _ = dims
    if any(dim is not None for dim in in_tensors):
        raise InputError("torch.vmap over a packed weight is not supported: map over x or the bias")
    x = x.movedim(in_x, 0) if in_x is not None else x.expand(info.batch_size, *x.shape)
    plain = None if bias is None or in_bias is not None else bias
    y = torch.ops.semisparse.linear(x.flatten(0, 1), tensors, plain, spec, kernel).unflatten(0, x.shape[:2])
    if bias is not None and in_bias is not None:
        y = (y.float() + bias.movedim(in_bias, 0)[:, None].float()).to(y.dtype)
    return y, 0


torch.library.register_vmap("semisparse::linear", _operator_batched, lib=_library)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, tensors, _, ctx.spec, _ = inputs
    ctx.save_for_backward(*tensors)


def _operator_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of x, from the unpacked weight, and of the bias."""
    needs_x, _, needs_bias, _, _ = ctx.needs_input_grad
    saved = ctx.saved_tensors  # read once: torch.utils.checkpoint recomputes them, and refuses a second read
    to_x = grad @ packed_of(ctx.spec, saved).unpack().to(grad.dtype) if needs_x else None
    return to_x, [None] * len(saved), grad.sum(0) if needs_bias else None, None, None


torch.library.register_autograd(
    "semisparse::linear", _operator_backward, setup_context=_keep_for_backward, lib=_library
)
