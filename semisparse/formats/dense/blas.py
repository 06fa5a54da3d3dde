"""The unquantised weight, multiplied by torch: cuBLAS on a GPU, oneDNN or the like on a CPU."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed
from semisparse.formats.kernel import Problem, Product


def refusal(problem: Problem) -> str | None:
    """Refuse rounded weights and mixed dtypes."""
    if problem.params:
        return f"supports unquantised weights only; this weight is {problem.params['kind']}"
    if problem.spec.dtype != problem.dtype:
        return f"x is {problem.dtype}, the weight {problem.spec.dtype}"
    return None


def prepare(problem: Problem) -> Product:
    """Return torch's own linear. If torch's flags allow it, cuBLAS adds the partial sums of split-K in 16 bits."""
    return _linear


def _linear(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    # Contiguous: else the result's bits depend on x's strides.
    return F.linear(x.contiguous(), packed.tensors["values"], None if bias is None else bias.to(x.dtype))
