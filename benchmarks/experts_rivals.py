"""Other software's layers of experts: transformers around torch's grouped_mm, and humming's kernel for int4 weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from experts_layer import DTYPE, EXPERTS, GPU, HIDDEN, INNER, SHAPES, TOKENS, TOP_K, Call, Step
from torch import Tensor

from semisparse.runtime.elementwise import silu_mul
from semisparse.runtime.experts import Routing


class Grouped:
    """The layer with dense weights, as transformers computes it with torch's grouped_mm.

    Args:
        gate_up: [EXPERTS, 2 * INNER, HIDDEN].
        down: [EXPERTS, HIDDEN, INNER].
    """

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        config = Qwen3MoeConfig(
            num_experts=EXPERTS, num_experts_per_tok=TOP_K, hidden_size=HIDDEN, moe_intermediate_size=INNER
        )
        config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            self._module = Qwen3MoeExperts(config)
        self._module.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
        self._module.down_proj = torch.nn.Parameter(down, requires_grad=False)
        self._weights = gate_up, down

    @torch.no_grad()
    def layer(self, step: Step) -> Tensor:
        """Compute the layer."""
        return self._module(step.x, step.chosen, step.weights)

    def matmuls(self, step: Step) -> Call:
        """Return the two calls of grouped_mm alone, on sorted tokens."""
        experts, order = step.chosen.flatten().sort()
        ends = experts.bincount(minlength=EXPERTS).cumsum(0).int()
        x, hidden = step.x[order // TOP_K], torch.randn(len(order), INNER, device=GPU).to(DTYPE)
        gate_up, down = (weight.transpose(1, 2) for weight in self._weights)

        def both() -> Tensor:
            torch._grouped_mm(x, gate_up, ends)
            return torch._grouped_mm(hidden, down, ends)

        return both


INDEXED = {"gemm_type": "indexed"}
"""humming's GEMM that gathers each token's row, and scatters its result."""


def _tuning(layer: Any, pairs: int) -> dict[str, Any]:
    """Return the tile sizes that humming chooses for so many pairs of a token and an expert."""
    from humming.tune import get_heuristics_config

    return dict(get_heuristics_config(layer.humming_config, shape_m=pairs, gemm_type="indexed"))


class Humming:
    """The layer in int4 with a scale per 128 columns, by the package humming-kernels.

    Its GEMM reads tokens sorted by expert and padded to tiles. Sorting is not in the times: humming leaves it to its
    caller. SiLU and the weighted sum are semisparse's kernels.

    Attributes:
        weights: the dequantised weights [EXPERTS, N, K] of both layers.
    """

    def __init__(self) -> None:
        from humming.kernel.humming import HummingKernel
        from humming.layer import HummingLayer
        from humming.schema import HummingWeightSchema

        self._layers, self.weights = [], []
        for n, k in SHAPES:
            config = {"dtype": "int4", "group_size": 128}
            layer = HummingLayer(n, k, config, num_experts=EXPERTS, torch_dtype=DTYPE).to(GPU)
            weight = torch.randn(EXPERTS, n, k, generator=torch.Generator(GPU).manual_seed(n), device=GPU)
            schema = layer.weight_schema
            tensors = HummingWeightSchema.quant_tensor((weight / k**0.5).to(DTYPE), schema, DTYPE)
            self.weights.append(schema.dequant_tensors(tensors).to(DTYPE))
            layer.load_from_tensors(tensors)
            layer.transform()
            tunings = [(0, 1 << 30, _tuning(layer, tokens * TOP_K)) for tokens in TOKENS]
            HummingKernel.prepare_kernels(layer.humming_config.to_str(), INDEXED, tunings, GPU)  # compiled in parallel
            self._layers.append(layer)

    def prepared(self, step: Step) -> _Prepared:
        """Sort a step's tokens for both layers."""
        return _Prepared(self._layers, step)


class _Prepared:
    """A step whose tokens are sorted."""

    def __init__(self, layers: list[Any], step: Step) -> None:
        from humming.testing.data import generate_moe_tensors

        self._step, self._calls = step, []
        for layer, top_k in zip(layers, (TOP_K, 1), strict=True):
            tuning = _tuning(layer, step.chosen.numel())
            ids = step.chosen.view(-1, top_k).int()
            *_, order, experts, padded = generate_moe_tensors(ids, EXPERTS, "indexed", tuning["block_shape"][0])
            self._calls.append(
                partial(
                    layer,
                    sorted_ids=order,
                    expert_ids=experts,
                    num_tokens_padded=padded,
                    top_k=top_k,
                    compute_config=INDEXED,
                    tuning_config=tuning,
                )
            )
        self._hidden = torch.randn(step.chosen.numel(), INNER, device=GPU).to(DTYPE)

    @torch.no_grad()
    def layer(self) -> Tensor:
        """Compute the layer, without sorting."""
        hidden = silu_mul(self._calls[0](self._step.x), (0, INNER), INNER)
        return Routing(self._step.chosen, EXPERTS).combine(self._calls[1](hidden), self._step.weights)

    @torch.no_grad()
    def matmuls(self) -> Tensor:
        """Compute both matmuls alone."""
        self._calls[0](self._step.x)
        return self._calls[1](self._hidden)
