"""Joined experts: the matmuls of all experts that a step's tokens chose, by one launch for each of their two layers.

Each expert keeps its position, and its tensors their names. Its layers become parts of a stack of all experts' weights,
which is what the kernels read.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisparse.formats.base import get_format
from semisparse.nn.experts_product import Routing, experts_product, reference_product
from semisparse.nn.joined import JoinedLinear, JoinedPart, is_intercepted, on_disk
from semisparse.nn.sparse_experts import Expert, Gating, SparseExperts
from semisparse.nn.sparse_linear import SparseLinear
from semisparse.nn.stacking import stack_with_padding

PROBE_TOKENS = 4
"""Tokens on which an expert's own activation is compared with ``silu(gate) * up``."""


class JoinedExperts(nn.Module):
    """All experts of a layer as two stacks. The `SparseExperts` that owns it calls it.

    Args:
        first: the experts' first layers, stacked along N.
        second: their second layers.
        gating: the activation between them.
        count: number of experts.
    """

    def __init__(self, first: JoinedLinear, second: JoinedLinear, gating: Gating, count: int) -> None:
        super().__init__()
        self.first, self.second, self.gating = first, second, gating
        self._count = count
        gated = first.out_features == 2 * count * second.in_features and _is_silu_mul(gating, first, second)
        self._epilogue = "silu_mul" if gated else "none"

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Compute the weighted sum of the chosen experts' outputs, without waiting for the device.

        On a CPU, where x needs gradients or where the model is traced, the weights are unpacked at each call.

        Args:
            x: [tokens, K].
            chosen: [tokens, top-k] integers; an expert that does not exist computes nothing.
            weights: [tokens, top-k].
        Returns:
            [tokens, K] in x's dtype.
        """
        routing = Routing(chosen, self._count)
        if routing.pairs == 0:
            return torch.zeros_like(x)
        traced = torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad)
        products = [
            None if traced else experts_product(layer.packed, self._count, routing.pairs, x.dtype, epilogue)
            for layer, epilogue in ((self.first, self._epilogue), (self.second, "none"))
        ]
        if products[0] is None or products[1] is None:
            hidden = self.gating(reference_product(x, self.first.packed, self.first.bias, routing))
            y = reference_product(hidden, self.second.packed, self.second.bias, routing)
            return (y.unflatten(0, chosen.shape) * weights[..., None]).sum(1).to(x.dtype)
        hidden = products[0](x, self.first.packed, self.first.bias, routing)
        hidden = self.gating(hidden).contiguous() if self._epilogue == "none" else hidden
        return routing.combine(products[1](hidden, self.second.packed, self.second.bias, routing), weights)


def join_experts(model: nn.Module) -> list[str]:
    """Join the experts of each layer into two stacks, wherever a kernel can compute those that a step's tokens chose.

    Experts stay apart if they differ in format, pattern, params or kernel, or if no kernel on their device takes them.
    So do experts with hooks, and experts that do not get the routing as an argument.

    Args:
        model: contains `SparseExperts`, on the device where it will run.
    Returns:
        The names of the new `JoinedExperts` modules.
    """
    names = []
    for path, experts in list(model.named_modules()):
        if isinstance(experts, SparseExperts) and experts.joined is None and experts.is_routed and _join(experts):
            names.append(f"{path}.joined" if path else "joined")
    return names


def _join(experts: SparseExperts) -> bool:
    """Join one layer's experts, and return whether they can be."""
    members = [expert for index in experts.held if isinstance(expert := experts.expert(index), Expert)]
    first, second = (_stacked(members, name) for name in members[0].layer_names)
    if first is None or second is None:
        return False
    for name, whole in zip(members[0].layer_names, (first, second), strict=True):
        for index, expert in enumerate(members):
            setattr(expert, name, JoinedPart(whole, index).train(expert.training))
    experts.joined = JoinedExperts(first, second, members[0].gating, len(members)).train(experts.training)
    return True


def _stacked(members: list[Expert], name: str) -> JoinedLinear | None:
    """Stack one layer of all experts, or return None if no kernel would take the stack."""
    layers = [layer for expert in members if type(layer := expert.get_submodule(name)) is SparseLinear]
    if len(layers) < len(members):
        return None
    kinds = {(layer.kernel, layer.packed.device, layer.bias is None) for layer in layers}
    if len(kinds) > 1 or layers[0].kernel != "auto" or any(map(is_intercepted, layers)):
        return None
    device = layers[0].packed.device
    if device.type == "meta" or layers[0].out_features % _grain(layers[0]):
        return None
    stack = stack_with_padding([on_disk(layer.packed) for layer in layers])
    if stack is None:
        return None
    arranged = get_format(stack.spec.format).arrange(stack, device.type)
    if experts_product(arranged, len(layers), 1, stack.dtype) is None:
        return None
    return JoinedLinear(layers, arranged)


def _grain(layer: SparseLinear) -> int:
    """Return the rows at whose multiples experts begin without padding."""
    packed = on_disk(layer.packed)
    grain = get_format(packed.spec.format).grain
    return 1 if grain is None else grain(packed.spec)[0]


@torch.no_grad()
def _is_silu_mul(gating: Gating, first: JoinedLinear, second: JoinedLinear) -> bool:
    """Return whether the activation is ``silu(gate) * up``, gate the first half of the columns."""
    device, columns = first.packed.device, 2 * second.in_features
    x = torch.linspace(-8, 8, PROBE_TOKENS * columns, device=device).view(PROBE_TOKENS, columns)
    x = x[:, torch.randperm(columns, generator=torch.Generator().manual_seed(0)).to(device)]
    gate, up = x.chunk(2, dim=-1)
    return torch.allclose(gating(x), F.silu(gate) * up, atol=1e-5)
