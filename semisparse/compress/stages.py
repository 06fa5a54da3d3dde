"""Which linear layers of a block share an input, and which add to the residual stream: found by tracing a forward."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from semisparse.compress.blocks import Call
from semisparse.errors import InputError

SAMPLE = 64
"""Tokens whose features are compared to tell tensors apart."""


class Point(NamedTuple):
    """A place where a tensor passes while a block runs: the input or the output of a submodule ("" is the block)."""

    module: str
    side: str


@dataclass(frozen=True)
class Stage:
    """Linear layers that share their input.

    Args:
        linears: their names in the block, in the order of their calls.
        streams: for each of them that adds its output to the residual stream, where that stream passes before.
        every_token: whether they see each token of the block (the experts of a mixture do not).
    """

    linears: tuple[str, ...]
    streams: Mapping[str, Point]
    every_token: bool

    @property
    def entry(self) -> Point:
        """Where the shared input passes."""
        return Point(self.linears[0], "input")


class _Seen(NamedTuple):
    point: Point
    sample: Tensor
    tokens: int


class _StageReached(Exception):
    """Ends a block's forward once a stage's input is known."""


@torch.no_grad()
def find_stages(block: nn.Module, linears: Mapping[str, str], call: Call, hidden: Tensor) -> list[Stage]:
    """Group a block's linear layers by equal input, in the order of their calls.

    Args:
        block: in float32, so that sums can be told apart from rounding.
        linears: the layers' names in the block, and their names in the model.
        call: what the model passes to the block, in float32.
        hidden: [batch, tokens, features] float32.

    Raises:
        InputError: a layer is not called exactly once.
    """
    trace: list[_Seen] = []

    def see(point: Point, tensor: Tensor) -> None:
        trace.append(_Seen(point, tensor[:SAMPLE].clone(), len(tensor)))

    with _watching(block, [name for name, _ in block.named_modules()], see):
        call(block, hidden)
    times = Counter(seen.point for seen in trace)
    for name, full_name in linears.items():
        count = times[Point(name, "input")]
        if count != 1:
            raise InputError(
                f"layer {full_name} is called {count} times when its block runs, once is expected; "
                "list it under 'ignore' to leave it dense"
            )
    trace = [seen for seen in trace if times[seen.point] == 1]
    tokens = hidden.shape[:-1].numel()
    return [_stage(trace, group, tokens) for group in _by_input(trace, linears)]


def read_stage(block: nn.Module, stage: Stage, call: Call, hidden: Tensor) -> dict[Point, Tensor]:
    """Run a block as far as a stage, and give what passes at the stage's entry and streams.

    Returns:
        [tokens, features] for each point; nothing at the entry if no token of this batch reaches it.
    """
    found: dict[Point, Tensor] = {}

    def see(point: Point, tensor: Tensor) -> None:
        found[point] = tensor
        if point == stage.entry:
            raise _StageReached

    modules = {stage.entry.module, *(point.module for point in stage.streams.values())}
    with _watching(block, modules, see), contextlib.suppress(_StageReached):
        call(block, hidden)
    return found


def _by_input(trace: Sequence[_Seen], linears: Collection[str]) -> list[list[int]]:
    """Group the positions of the linear layers' inputs in a trace."""
    groups: list[list[int]] = []
    for index, seen in enumerate(trace):
        if seen.point.side != "input" or seen.point.module not in linears:
            continue
        for group in groups:
            first = trace[group[0]]
            if first.tokens == seen.tokens and torch.equal(first.sample, seen.sample):
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


def _stage(trace: Sequence[_Seen], group: Sequence[int], tokens: int) -> Stage:
    entry = group[0]
    names = tuple(trace[index].point.module for index in group)
    streams = {name: point for name in names if (point := _stream_before(trace, entry, name))}
    return Stage(names, streams, trace[entry].tokens == tokens)


def _stream_before(trace: Sequence[_Seen], entry: int, name: str) -> Point | None:
    """Find the stream that a layer adds to: a tensor seen before its stage that, with its output, makes a later one."""
    end = next(index for index, seen in enumerate(trace) if seen.point == Point(name, "output"))
    for before in trace[:entry]:
        if any(_is_sum(after.sample, before.sample, trace[end].sample) for after in trace[end + 1 :]):
            return before.point
    return None


def _is_sum(total: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether ``total = left + right``, but for the rounding of that sum and of this check (2 eps; 4 to be safe)."""
    if not total.shape == left.shape == right.shape:
        return False
    bound = 4 * torch.finfo(total.dtype).eps * (total.abs() + left.abs() + right.abs())
    return bool(((total - left - right).abs() <= bound).all())


@contextlib.contextmanager
def _watching(block: nn.Module, modules: Iterable[str], see: Callable[[Point, Tensor], None]) -> Iterator[None]:
    """Call `see` with each tensor ([tokens, features]) that enters or leaves the named submodules."""

    def pass_on(point: Point, values: Iterable[Any]) -> None:
        found = next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)
        if found is not None:
            see(point, found.reshape(-1, found.shape[-1]))

    def watch(name: str) -> Iterator[Any]:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            pass_on(Point(name, "input"), (*args, *kwargs.values()))

        def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            pass_on(Point(name, "output"), output if isinstance(output, tuple | list) else (output,))

        module = block.get_submodule(name)
        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after)

    handles = [handle for name in modules for handle in watch(name)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
