"""Experts of a mixture, one module each, in the place of transformers' fused parameters ``[experts, N, K]``.

Each expert has linear layers of its own (``experts.0.gate_up``, ``experts.0.down``), which are pruned, packed, saved
and loaded like all others. The gated activation between them is the original module's.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from semisparse.errors import InputError
from semisparse.nn.sparse_linear import SparseLinear

FUSED_NAMES = {"gate_up_proj": "gate_up", "up_proj": "up", "down_proj": "down"}
"""Fused parameter of transformers' experts -> linear layer of one expert. Names of fused biases add ``_bias``."""

EXPERT_LAYER = re.compile(rf"(?P<experts>.+)\.\d+\.(?:{'|'.join(FUSED_NAMES.values())})")
"""The name of an expert's linear layer in a model."""

PROBE_TOKENS = 4
"""Random tokens on which a module of fused experts is compared with its replacement."""

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Maximum error relative to the norm of the original module's output, by dtype; 2e-2 for other dtypes."""


class Gating(nn.Module):
    """An expert's activation between its linear layers: [tokens, N of the first] -> [tokens, K of the second].

    Args:
        source: the original module, without its fused parameters.
    """

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_source", source)  # as a submodule, transformers would initialise its parameters

    def forward(self, x: Tensor) -> Tensor:
        """Apply the original module's gate, or its activation if the experts have none."""
        source: Any = self._source
        if not getattr(source, "has_gate", True):
            return source.act_fn(x)
        if hasattr(source, "_apply_gate"):
            return source._apply_gate(x)
        gate, up = x.chunk(2, dim=-1)
        return source.act_fn(gate) * up


class Expert(nn.Module):
    """One expert: ``down(gating(gate_up(x)))``, or ``up`` in the place of ``gate_up`` if it has no gate.

    Args:
        layers: the two linear layers by name, in call order.
        gating: the activation between them.
    """

    def __init__(self, layers: dict[str, nn.Linear], gating: Gating) -> None:
        super().__init__()
        self._first, self._second = layers
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.gating = gating

    @property
    def layer_names(self) -> tuple[str, str]:
        """The names of the two linear layers, in call order."""
        return self._first, self._second

    def forward(self, x: Tensor) -> Tensor:
        """Compute the expert's output [tokens, K] for all x [tokens, K]."""
        hidden = self.gating(self._modules[self._first](x))  # type: ignore[misc]
        return self._modules[self._second](hidden)  # type: ignore[misc]


class SparseExperts(nn.Module):
    """The experts of one layer, each with linear layers of its own.

    Args:
        source: the module with fused parameters, which `is_fused_experts` accepts. It is not changed.

    Attributes:
        num_experts: number of experts that the router chooses from.
        held: the experts that this process computes: all, unless `hold` divided them.
        is_routed: whether the routing is an argument of ``forward``.
        joined: what computes all chosen experts at once, or None (`join_experts`).
    """

    joined: nn.Module | None

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        fused = dict(source.named_parameters(recurse=False))
        transposed = _is_transposed(source)
        gating = Gating(_without_parameters(source))
        names = [name for name in FUSED_NAMES if name in fused]
        for index in range(len(fused[names[0]])):
            layers = {FUSED_NAMES[name]: _linear(fused, name, index, transposed) for name in names}
            self.add_module(str(index), Expert(layers, gating))
        self.num_experts = len(fused[names[0]])
        self.held = range(self.num_experts)
        self.is_routed = _arguments(source) == 3
        self.joined = None

    def forward(self, hidden_states: Tensor, *routing: Tensor) -> Tensor:
        """Compute the weighted sum of the chosen experts' outputs, as transformers' eager experts do.

        Experts that this process does not hold add nothing: the sum over all processes is the output.

        Args:
            hidden_states: [tokens, K].
            routing: the chosen experts [tokens, top-k] int64, and their weights [tokens, top-k]. Without them (Llama-4)
                ``hidden_states`` is [experts * tokens, K], already weighted, zero where an expert was not chosen.
        Returns:
            [tokens, K]; without routing [experts * tokens, K].
        """
        if self.joined is not None:
            chosen, weights = routing
            joined: Tensor = self.joined(hidden_states, self._position(chosen), weights)
            return joined
        output = torch.zeros_like(hidden_states)
        if not routing:
            for index, x in enumerate(hidden_states.chunk(self.num_experts)):
                if index not in self.held:
                    continue
                rows = index * len(x) + x.any(dim=-1).nonzero().flatten()
                output[rows] = self.expert(index)(hidden_states[rows]).to(output.dtype)
            return output
        chosen, weights = routing
        for index in chosen.unique().tolist():
            if index not in self.held:
                continue
            position, token = torch.where(index == chosen.T)
            x = hidden_states.index_select(0, token)  # on a CPU a sixth of the time of hidden_states[token]
            weighted = self.expert(index)(x) * weights[token, position, None]
            output.index_add_(0, token, weighted.to(output.dtype))
        return output

    def expert(self, index: int) -> nn.Module:
        """Return one expert."""
        return self.get_submodule(str(index))

    def hold(self, held: range) -> None:
        """Compute only some of the experts. The others keep their modules, but no data: they are on the meta device."""
        for index in self.held:
            if index not in held:
                self.expert(index).to("meta")
        self.held = held

    def _position(self, chosen: Tensor) -> Tensor:
        """Return the experts' positions among those held, and `len(held)` for the others."""
        if len(self.held) == self.num_experts:
            return chosen
        outside = (chosen < self.held.start) | (chosen >= self.held.stop)
        return (chosen - self.held.start).masked_fill(outside, len(self.held))

    def fuse_into(self, target: nn.Module, dtype: torch.dtype) -> nn.Module:
        """Give a module with fused parameters, on any device, the weights of these experts, and return it.

        Args:
            target: a module like the ``source`` of these experts.
            dtype: dtype of the weights and biases.
        Raises:
            InputError: this process holds some of the experts only.
        """
        if len(self.held) < self.num_experts:
            raise InputError(
                f"experts are divided over processes, this one has {self.held.start} to {self.held.stop - 1} of "
                f"{self.num_experts}: save the model, and load it without parallelism"
            )
        transposed = _is_transposed(target)
        for name, short in FUSED_NAMES.items():
            if name not in target._parameters:
                continue
            layers: list[Any] = [self.get_submodule(f"{index}.{short}") for index in range(self.num_experts)]
            weight = torch.stack([layer.weight.detach().to(dtype) for layer in layers])
            fused = {name: weight.transpose(1, 2).contiguous() if transposed else weight}
            if layers[0].bias is not None:
                fused[f"{name}_bias"] = torch.stack([layer.bias.detach().to(dtype) for layer in layers])
            for key, value in fused.items():
                target.register_parameter(key, nn.Parameter(value, requires_grad=False))
        return target

    def packed_layers(self) -> list[str]:
        """Return the names of the packed layers in this module."""
        return [name for name, module in self.named_modules() if isinstance(module, SparseLinear)]


def is_fused_experts(module: nn.Module) -> bool:
    """Return whether a module has the fused parameters of transformers' experts, and no others."""
    names = {name for name, _ in module.named_parameters()}
    weights = {name for name in FUSED_NAMES if name in names}
    if len(weights) != 2 or "down_proj" not in weights or getattr(module, "has_post_expert_norm", False):
        return False
    if any(True for _ in module.buffers()) or any(module.get_parameter(name).dim() != 3 for name in weights):
        return False
    return names <= weights | {f"{name}_bias" for name in weights} and _arguments(module) in (1, 3)


def expert_shapes(module: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Return (experts, N, K) of the linear layers of fused experts, by name, from the shapes of their parameters alone.

    Args:
        module: one that `is_fused_experts` accepts, on any device.
    """
    transposed, shapes = _is_transposed(module), {}
    for fused, name in FUSED_NAMES.items():
        if fused in module._parameters:
            count, first, second = module.get_parameter(fused).shape
            shapes[name] = (count, second, first) if transposed else (count, first, second)
    return shapes


def split_experts(model: nn.Module, keep: Callable[[str], bool] = lambda name: False) -> list[str]:
    """Replace every module of fused experts by `SparseExperts` with the same weights, if they compute the same.

    Args:
        model: changed in place.
        keep: whether to leave a module, given its name, as it is.
    Returns:
        The names of the replaced modules.
    """
    replaced = []
    for name, module in list(model.named_modules()):
        if is_fused_experts(module) and not keep(name):
            experts = SparseExperts(module).train(module.training)
            if _computes_the_same(module, experts):
                model.set_submodule(name, experts)
                replaced.append(name)
    return replaced


def prepare_experts(model: nn.Module, layers: Iterable[str]) -> None:
    """Replace the modules of fused experts that hold some of the named layers, before these are loaded.

    Args:
        model: on the meta device.
        layers: module names of packed layers.
    """
    modules = {match["experts"] for name in layers if (match := EXPERT_LAYER.fullmatch(name))}
    for name in modules:
        module = _submodule(model, name)
        if module is not None and is_fused_experts(module):
            model.set_submodule(name, SparseExperts(module))


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _linear(fused: dict[str, nn.Parameter], name: str, index: int, transposed: bool) -> nn.Linear:
    """Return one expert's linear layer. Its weight shares memory with the fused one, unless that is transposed."""
    weight, bias = fused[name].data[index], fused.get(f"{name}_bias")
    weight = weight.T.contiguous() if transposed else weight
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.data[index], requires_grad=False)
    return linear


def _is_transposed(module: Any) -> bool:
    """Return whether weights are stored as [experts, K, N]; without ``is_transposed``, inferred from gated shapes."""
    if hasattr(module, "is_transposed"):
        return bool(module.is_transposed)
    return module.gate_up_proj.shape[2] == 2 * module.down_proj.shape[1]


def _without_parameters(module: nn.Module) -> nn.Module:
    bare = copy.copy(module)
    bare._parameters = {}
    return bare


def _arguments(module: nn.Module) -> int:
    """Return how many positional arguments a module's own forward takes; 0 if any are of another kind (``*args``)."""
    parameters = list(inspect.signature(inspect.unwrap(type(module).forward)).parameters.values())[1:]
    positional = all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    return len(parameters) if positional else 0


@torch.no_grad()
def _computes_the_same(module: nn.Module, experts: SparseExperts) -> bool:
    """Compare with the original module's own eager forward on a few random tokens."""
    weight = next(module.parameters())
    first: Any = next(experts.expert(0).children())
    count, routed = experts.num_experts, _arguments(module) == 3
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBE_TOKENS * (1 if routed else count), first.in_features, generator=generator)
    arguments = [x.to(weight.device, weight.dtype)]
    if routed:
        scores = torch.rand(PROBE_TOKENS, count, generator=generator)
        weights, chosen = scores.topk(min(2, count))
        arguments += [chosen.to(weight.device), weights.to(weight.device, weight.dtype)]
    try:
        expected = inspect.unwrap(type(module).forward)(module, *arguments).float()
    except Exception:  # it takes other arguments, so it computes something else
        return False
    y = experts(*arguments).float()
    bound = TOLERANCES.get(weight.dtype, 2e-2)
    return y.shape == expected.shape and bool((y - expected).norm() <= bound * expected.norm())
