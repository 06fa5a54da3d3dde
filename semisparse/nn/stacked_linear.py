"""A fused layer: several packed weights on one input, such as a model's query, key and value."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from semisparse.errors import KernelError
from semisparse.formats.base import Packed, get_format, reference_kernel
from semisparse.formats.kernel import Problem, bucket_of, in_parallel
from semisparse.formats.product import prepare_product
from semisparse.nn.dense_copy import CopiedLinear
from semisparse.nn.fused_linear import can_fuse
from semisparse.nn.sparse_linear import SparseLinear
from semisparse.nn.stacking import stack_neighbours


class StackedLinear(nn.Module):
    """``y = x @ w.T + bias``, where w is several packed weights stacked along N.

    Neighbouring weights are computed by one matmul where `stack_neighbours` can stack them.

    Args:
        weights: [N_i, K] each, of any formats and patterns.
    """

    def __init__(self, weights: Sequence[Packed]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SparseLinear(weight) for weight in stack_neighbours(weights))
        self.sizes = [layer.out_features for layer in self.layers]

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._weights()[0].device

    def prepare(self, tokens: int, dtype: torch.dtype, fusions: Sequence[tuple[str, str]] = ()) -> None:
        """Compile and load, in parallel, the kernels of the matmuls of 1 to ``tokens`` tokens.

        Args:
            tokens: maximum number of rows of x.
            dtype: dtype of x.
            fusions: prologues and epilogues of `fused_linear` whose kernels are compiled too, where there are any.
        Raises:
            KernelError: no kernel can compute a matmul, or on a GPU only the reference kernel, which copies from the
                host and so cannot be captured in a CUDA graph.
        """
        buckets = sorted({bucket_of(m) for m in range(1, tokens + 1)})
        weights = self._weights()
        if self.device.type == "cuda":
            for weight in weights:
                _check_captured(weight, buckets, dtype)
        in_parallel(
            [partial(prepare_product, weight, m, dtype) for weight in weights for m in buckets]
            + [partial(can_fuse, weight, dtype, fusion) for weight in weights for fusion in fusions]
        )

    def keep_dense(self, tokens: int, dtype: torch.dtype) -> None:
        """Keep dense copies of the weights that have any use for one.

        Args:
            tokens: maximum number of rows of x.
            dtype: dtype of x.
        """
        for index, weight in enumerate(self._weights()):
            if CopiedLinear.pays(weight, tokens, dtype):
                self.layers[index] = CopiedLinear(weight, dtype)

    def _weights(self) -> list[Packed]:
        return [layer.packed for layer in self.layers if isinstance(layer, SparseLinear)]

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``x @ w.T + bias``.

        Args:
            x: [..., K], float16, bfloat16 or float32.
            bias: [sum of N_i] or None.
        Returns:
            [..., sum of N_i] in x's dtype.
        Raises:
            KernelError: no kernel can compute a matmul; lists every candidate's reason.
        """
        biases = [None] * len(self.sizes) if bias is None else bias.split(self.sizes)
        outputs = [layer(x, part) for layer, part in zip(self.layers, biases, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def _check_captured(weight: Packed, buckets: Sequence[int], dtype: torch.dtype) -> None:
    """Refuse a weight that only the reference kernel can multiply, for some number of tokens."""
    form = get_format(weight.spec.format)
    for m in buckets:
        problem = Problem(m, form.structure(weight.spec), dtype, weight.device)
        if form.choose(problem) is reference_kernel:
            own = [kernel for kernel in form.kernels if kernel.device in (None, problem.device.type)]
            reasons = "; ".join(f"{kernel.name}: {kernel.refusal(problem)}" for kernel in own)
            raise KernelError(
                f"format {form.name} has no kernel for {str(dtype).removeprefix('torch.')} and {m} tokens here "
                f"({reasons}), and its reference kernel cannot be captured in a CUDA graph: use another dtype or format"
            )
