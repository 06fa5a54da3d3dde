"""The product every user calls: ``y = x @ w.T + bias`` with a packed weight, and the one operator it traces to."""

from __future__ import annotations

import json
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from semisparse.errors import InputError
from semisparse.formats.base import Packed, get_format, replace_tensors
from semisparse.formats.kernel import Problem, Product
from semisparse.patterns import parse_pattern


def linear(x: Tensor, packed: Packed, bias: Tensor | None = None, kernel: str = "auto") -> Tensor:
    """Compute ``y = x @ w.T + bias`` with a packed weight.

    torch.compile and torch.export see one opaque operator, whatever the format. Gradients reach x and the bias; the
    packed weight is constant.

    Args:
        x: [..., K], float16, bfloat16 or float32, on the packed tensors' device.
        packed: a weight [N, K]; trusted: call `validate` first if it comes from a file.
        bias: [N] or None.
        kernel: a kernel's name, or ``auto`` for the first that can and pays.
    Returns:
        [..., N] in x's dtype, accumulated in float32.
    Raises:
        InputError: x or bias has the wrong size.
        KernelError: no kernel can compute this; gives every candidate's reason.
    """
    n, k = packed.shape
    if x.shape[-1] != k:
        raise InputError(f"x has {x.shape[-1]} features, the weight takes K = {k}")
    if bias is not None and bias.shape != packed.shape[:1]:
        raise InputError(f"bias is {list(bias.shape)}, expected [{n}]")
    flat = x.dim() == 2
    rows = x if flat else x.reshape(-1, k)
    if torch.compiler.is_compiling() or _needs_gradient(x, bias):
        tensors = [packed.tensors[name] for name in sorted(packed.tensors)]
        y = torch.ops.semisparse.linear(rows, tensors, bias, packed.declaration, kernel)
    else:
        y = _product(rows, packed, bias, kernel)
    return y if flat else y.reshape(*x.shape[:-1], n)


def _needs_gradient(x: Tensor, bias: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))


def problem_of(x: Tensor, packed: Packed) -> Problem:
    """Describe the product of ``x`` ([M, K]) with a packed weight."""
    n, k = packed.shape
    return Problem(x.shape[0], n, k, packed.pattern, packed.params, packed.dtype, x.dtype, x.device)


def _product(x: Tensor, packed: Packed, bias: Tensor | None, kernel: str) -> Tensor:
    return _prepared(packed.declaration, kernel, x.shape[0], x.dtype, x.device)(x, packed, bias)


@lru_cache(maxsize=4096)
def _prepared(declaration: str, kernel: str, m: int, dtype: torch.dtype, device: torch.device) -> Product:
    """Choose and prepare once for each problem, which the key holds whole: no tensor's address outlives its call."""
    packed, _ = _undeclare(declaration)
    n, k = packed.shape
    problem = Problem(m, n, k, packed.pattern, packed.params, packed.dtype, dtype, device)
    return get_format(packed.format).choose(problem, kernel).prepare(problem)


@cache
def _undeclare(declaration: str) -> tuple[Packed, tuple[str, ...]]:
    """Give a packed weight whose tensors are still to be put in, and their names in order."""
    told = json.loads(declaration)
    packed = Packed(
        told["format"],
        told["version"],
        parse_pattern(told["pattern"]),
        tuple(told["shape"]),
        getattr(torch, told["dtype"]),
        told["params"],
        {},
        declaration,
    )
    return packed, tuple(told["tensors"])


# A plain Library, not torch.library.custom_op: 6.3 against 10.7 us a call.
_library = torch.library.Library("semisparse", "DEF")
_library.define("linear(Tensor x, Tensor[] tensors, Tensor? bias, str declaration, str kernel) -> Tensor")


def _operator(x: Tensor, tensors: list[Tensor], bias: Tensor | None, declaration: str, kernel: str) -> Tensor:
    declared, names = _undeclare(declaration)
    packed = replace_tensors(declared, dict(zip(names, tensors, strict=True)))
    return _product(x, packed, bias, kernel)


def _operator_fake(x: Tensor, tensors: list[Tensor], bias: Tensor | None, declaration: str, kernel: str) -> Tensor:
    return x.new_empty(x.shape[0], _undeclare(declaration)[0].shape[0])


_library.impl("linear", _operator, "CompositeExplicitAutograd")
torch.library.register_fake("semisparse::linear", _operator_fake, lib=_library)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, tensors, _, ctx.declaration, _ = inputs
    ctx.save_for_backward(*tensors)


def _operator_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Give x its gradient through the unpacked weight, and the bias its own."""
    declared, names = _undeclare(ctx.declaration)
    packed = replace_tensors(declared, dict(zip(names, ctx.saved_tensors, strict=True)))
    needs_x, _, needs_bias, _, _ = ctx.needs_input_grad
    to_x = grad @ packed.unpack().to(grad.dtype) if needs_x else None
    return to_x, [None] * len(names), grad.sum(0) if needs_bias else None, None, None


torch.library.register_autograd(
    "semisparse::linear", _operator_backward, setup_context=_keep_for_backward, lib=_library
)
