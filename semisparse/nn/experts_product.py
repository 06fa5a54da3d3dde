"""The matmuls of a mixture's experts, whose weights are stacked along N: one launch for all chosen experts."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed, WeightSpec, get_format
from semisparse.formats.kernel import ExpertsProblem, ExpertsProduct, Routing, bucket_of
from semisparse.formats.product import structure_of

__all__ = ["Routing", "experts_product", "reference_product"]


def experts_product(
    packed: Packed, experts: int, pairs: int, dtype: torch.dtype, epilogue: str = "none"
) -> ExpertsProduct | None:
    """Return the matmuls of all experts for any number of pairs of the bucket; None if no kernel can compute them.

    Args:
        packed: the experts' weights, stacked along N.
        experts: number of experts.
        pairs: number of pairs of a token and an expert.
        dtype: dtype of x and y.
        epilogue: ``none`` or ``silu_mul``, as in `Problem`.
    """
    return _prepared(structure_of(packed.spec), experts, bucket_of(pairs), dtype, packed.device, epilogue)


@lru_cache(maxsize=4096)
def _prepared(
    spec: WeightSpec, experts: int, pairs: int, dtype: torch.dtype, device: torch.device, epilogue: str
) -> ExpertsProduct | None:
    problem = ExpertsProblem(pairs, experts, spec, dtype, device, epilogue)
    prepare = get_format(spec.format).experts
    return None if prepare is None else prepare(problem)


def reference_product(x: Tensor, packed: Packed, bias: Tensor | None, routing: Routing) -> Tensor:
    """Compute the matmuls on any device with the unpacked weight, expert by expert; x gets gradients.

    The host reads which experts were chosen, so this cannot be captured in a CUDA graph.

    Args:
        x: [tokens, K] or [pairs, K].
        packed: the experts' weights, stacked along N.
        bias: [experts * N] or None.
        routing: which experts each token chose.
    Returns:
        [pairs, N]; zeros for a pair whose expert does not exist.
    """
    weights = packed.unpack().unflatten(0, (routing.experts, -1))
    biases = None if bias is None else bias.unflatten(0, (routing.experts, -1))
    chosen, per_row = routing.chosen.flatten(), routing.pairs // x.shape[0]
    y = x.new_zeros(routing.pairs, weights.shape[1])
    for expert in chosen.unique().tolist():
        if 0 <= expert < routing.experts:
            own = (chosen == expert).nonzero().flatten()
            part = F.linear(x[own // per_row], weights[expert].to(x.dtype), None if biases is None else biases[expert])
            y = y.index_put((own,), part)
    return y
