"""What the kernels on tiles have in common: which problems they take, and their operands."""

from __future__ import annotations

import torch

from semisparse.formats.bitmask.storage.layouts import layout_of
from semisparse.formats.kernel import Problem
from semisparse.runtime.kernel import cuda_refusal

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
"""C++ type of x, w and y by dtype, for the macro SCALAR."""


def refusal(problem: Problem) -> str | None:
    """Say why no kernel on tiles can compute ``problem`` here, or None if one can."""
    if layout_of(problem.params) != "tiles":
        return "reads the layout tiles, this weight is stored in rows"
    if problem.dtype != problem.spec.dtype:
        return f"x and w must have one dtype, got {problem.dtype} and {problem.spec.dtype}"
    return cuda_refusal(problem.device)
