"""Trace a decoder layer's forward: which linear layers share an input, and which add to the residual stream."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from semisparse.compress.decoder import LayerCall
from semisparse.errors import InputError

SAMPLED_TOKENS = 64
"""Two activations count as equal if they are equal on this many tokens, the first ones."""


class HookPoint(NamedTuple):
    """The ``input`` or ``output`` (`side`) of a submodule of a decoder layer; ``""`` is the decoder layer itself."""

    module: str
    side: str


@dataclass(frozen=True)
class SharedInput:
    """An activation that one or more linear layers of a decoder layer read.

    Args:
        linears: names of these linear layers in the decoder layer, in call order.
        residuals: by name, for each of them whose output is added to the residual stream: a hook point at which the
            stream before the addition can be read.
        all_tokens: whether they read every token of a batch.
    """

    linears: tuple[str, ...]
    residuals: Mapping[str, HookPoint]
    all_tokens: bool

    @property
    def point(self) -> HookPoint:
        """Where the activation can be read."""
        return HookPoint(self.linears[0], "input")


@dataclass(frozen=True)
class RoutedLayers:
    """Linear layers with one role: those of one name, such as ``down``, in each of several experts.

    Each reads the tokens that are routed to its expert.

    Args:
        linears: their names in the decoder layer, such as ``mlp.experts.0.down``, in the model's order.
    """

    linears: tuple[str, ...]


Inputs = Sequence[SharedInput | RoutedLayers]
"""What the linear layers of a decoder layer read, in call order."""


class _Sample(NamedTuple):
    """The activation at a hook point: features of its first tokens, [tokens, features], and its number of tokens."""

    point: HookPoint
    features: Tensor
    tokens: int


class Reached(Exception):
    """Ends a decoder layer's forward pass once the wanted activation has been observed."""


@torch.no_grad()
def find_inputs(
    layer: nn.Module, linears: Mapping[str, str], call: LayerCall, hidden: Tensor
) -> list[SharedInput | RoutedLayers]:
    """Group a decoder layer's linear layers by input, those of routed experts by role (`RoutedLayers`), in call order.

    Args:
        layer: in float32, since the tolerance of `_is_sum` follows the dtype's eps: some 3 % in bfloat16, which would
            hide the difference between two states of the residual stream.
        linears: the linear layers' names in the decoder layer, each with its name in the model.
        call: arguments of the decoder layer, in float32.
        hidden: [batch, tokens, features] float32.

    Raises:
        InputError: a linear layer that is in no `RoutedLayers` is not called exactly once.
    """
    trace: list[_Sample] = []

    def observe(point: HookPoint, activation: Tensor) -> None:
        trace.append(_Sample(point, activation[:SAMPLED_TOKENS].clone(), len(activation)))

    with hooked(layer, [name for name, _ in layer.named_modules()], observe):
        call(layer, hidden)
    tokens = hidden.shape[:-1].numel()
    times = Counter(sample.point for sample in trace)
    first = {sample.point: index for index, sample in reversed(list(enumerate(trace)))}
    routed = _routed(trace, times, linears, tokens)
    starts: list[tuple[int, SharedInput | RoutedLayers]] = [
        (min(first.get(HookPoint(name, "input"), len(trace)) for name in role.linears), role) for role in routed
    ]
    shared = [name for name in linears if not any(name in role.linears for role in routed)]
    for name in shared:
        count = times[HookPoint(name, "input")]
        if count != 1:
            raise InputError(
                f"layer {linears[name]} is called {count} times per forward of its decoder layer, once is expected; "
                "list it under 'ignore' to leave it dense"
            )
    # What experts read and write is neither an input of these layers nor the residual stream.
    whole = [s for s in trace if times[s.point] == 1 and (s.tokens == tokens or s.point.module in shared)]
    for group in _group_by_input(whole, shared):
        starts.append((first[whole[group[0]].point], _shared_input(whole, group, tokens)))
    return [inputs for _, inputs in sorted(starts, key=lambda start: start[0])]


def expert_of(name: str) -> str | None:
    """Return the innermost numbered module that holds a linear layer, such as ``mlp.experts.3``; None without one."""
    parts = name.split(".")
    numbered = [index for index, part in enumerate(parts[:-1]) if part.isdecimal()]
    return ".".join(parts[: numbered[-1] + 1]) if numbered else None


def _routed(
    trace: Sequence[_Sample], times: Mapping[HookPoint, int], linears: Iterable[str], tokens: int
) -> list[RoutedLayers]:
    """Return the linear layers of routed experts, by role.

    Experts are routed if each layer of a role is called at most once, and at least one is not called with all tokens.
    """
    roles: dict[str, list[str]] = {}
    for name in linears:
        expert = expert_of(name)
        if expert:
            role = f"{expert.rpartition('.')[0]}.*{name.removeprefix(expert)}"
            roles.setdefault(role, []).append(name)
    seen = {sample.point.module: sample.tokens for sample in trace if sample.point.side == "input"}

    def is_routed(names: Sequence[str]) -> bool:
        once = all(times[HookPoint(name, "input")] <= 1 for name in names)
        return once and any(seen.get(name) != tokens for name in names)

    return [RoutedLayers(tuple(names)) for names in roles.values() if is_routed(names)]


def capture(layer: nn.Module, shared: SharedInput, call: LayerCall, hidden: Tensor) -> dict[HookPoint, Tensor]:
    """Run a decoder layer until a shared input is known; return it, and the streams at the points in `residuals`.

    Returns:
        [tokens, features] by hook point. The shared input is missing if no token of this batch reaches it.
    """
    activations: dict[HookPoint, Tensor] = {}

    def observe(point: HookPoint, activation: Tensor) -> None:
        activations[point] = activation
        if point == shared.point:
            raise Reached

    modules = {shared.point.module, *(point.module for point in shared.residuals.values())}
    with hooked(layer, modules, observe), contextlib.suppress(Reached):
        call(layer, hidden)
    return activations


def capture_all(
    layer: nn.Module, inputs: Inputs, call: LayerCall, hidden: Tensor
) -> tuple[dict[HookPoint, Tensor], Tensor]:
    """Run a decoder layer; return what `capture` would return for each of its shared inputs, and its output."""
    shared = [each for each in inputs if isinstance(each, SharedInput)]
    points = {point for each in shared for point in (each.point, *each.residuals.values())}
    activations: dict[HookPoint, Tensor] = {}

    def observe(point: HookPoint, activation: Tensor) -> None:
        if point in points:
            activations[point] = activation.clone()  # what follows may change it in place

    with hooked(layer, {point.module for point in points}, observe):
        output = call(layer, hidden)
    return activations, output


def _group_by_input(trace: Sequence[_Sample], linears: Collection[str]) -> list[list[int]]:
    """Return the linear layers' inputs, as indices into the trace; equal inputs form one list."""
    groups: list[list[int]] = []
    for index, sample in enumerate(trace):
        if sample.point.side != "input" or sample.point.module not in linears:
            continue
        for group in groups:
            first = trace[group[0]]
            if first.tokens == sample.tokens and torch.equal(first.features, sample.features):
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


def _shared_input(trace: Sequence[_Sample], group: Sequence[int], tokens: int) -> SharedInput:
    first = group[0]
    names = tuple(trace[index].point.module for index in group)
    residuals = {name: point for name in names if (point := _residual_before(trace, first, name))}
    return SharedInput(names, residuals, trace[first].tokens == tokens)


def _residual_before(trace: Sequence[_Sample], first: int, name: str) -> HookPoint | None:
    """Find the residual stream that a linear layer adds to.

    It is an activation before index ``first`` of the trace which, plus the linear layer's output, equals a later one.
    """
    end = next(index for index, sample in enumerate(trace) if sample.point == HookPoint(name, "output"))
    for before in trace[:first]:
        if any(_is_sum(after.features, before.features, trace[end].features) for after in trace[end + 1 :]):
            return before.point
    return None


def _is_sum(total: Tensor, left: Tensor, right: Tensor) -> bool:
    """Return whether ``total = left + right`` within 4 eps of the sum of their magnitudes.

    Rounding, in the layer's addition and in this check, takes less than 2 eps.
    """
    if not total.shape == left.shape == right.shape:
        return False
    bound = 4 * torch.finfo(total.dtype).eps * (total.abs() + left.abs() + right.abs())
    return bool(((total - left - right).abs() <= bound).all())


@contextlib.contextmanager
def hooked(layer: nn.Module, modules: Iterable[str], observe: Callable[[HookPoint, Tensor], None]) -> Iterator[None]:
    """While entered, call ``observe`` before and after each call of the named submodules.

    It is passed the hook point and the input (before) or the output (after), [tokens, features]: the first
    floating-point tensor among the arguments or the results.
    """

    def pass_on(point: HookPoint, values: Iterable[Any]) -> None:
        first = next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)
        if first is not None:
            observe(point, first.reshape(-1, first.shape[-1]))

    def hooks(name: str) -> Iterator[Any]:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            pass_on(HookPoint(name, "input"), (*args, *kwargs.values()))

        def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            pass_on(HookPoint(name, "output"), output if isinstance(output, tuple | list) else (output,))

        module = layer.get_submodule(name)
        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after)

    handles = [handle for name in modules for handle in hooks(name)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
