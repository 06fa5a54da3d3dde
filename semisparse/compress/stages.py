"""Which linear layers of a block share an input, and which add to the residual stream: found by tracing a forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from semisparse.compress.blocks import Call, first_tensor
from semisparse.errors import InputError


@dataclass(frozen=True)
class Point:
    """A place where a tensor passes while a block runs: a submodule's input or output (name "": the block itself)."""

    module: str
    side: str


@dataclass(frozen=True)
class Stage:
    """Linear layers that share their input; they are pruned from the same statistics.

    Args:
        linears: names inside the block, in call order.
        streams: for each of them that adds its output to the residual stream, where that stream passes before.
        every_token: whether the layers see each token of the block once (experts of a mixture do not).
    """

    linears: tuple[str, ...]
    streams: Mapping[str, Point]
    every_token: bool


@dataclass
class _Trace:
    points: list[tuple[Point, Tensor]] = field(default_factory=list)

    def watch(self, block: nn.Module) -> list[Any]:
        handles = []
        for name, module in block.named_modules():
            handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._after(name)))
        return handles

    def _before(self, name: str):
        def hook(_module, args, kwargs):
            found = input_tensor(args, kwargs)
            if found is not None:
                self.points.append((Point(name, "input"), found))

        return hook

    def _after(self, name: str):
        def hook(_module, _args, output):
            if output is not None:
                self.points.append((Point(name, "output"), first_tensor(output)))

        return hook


def input_tensor(args, kwargs):
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    return None


@torch.no_grad()
def find_stages(block: nn.Module, linears: Sequence[str], call: Call, hidden: Tensor) -> list[Stage]:
    trace = _Trace()
    handles = trace.watch(block)
    try:
        call(block, hidden)
    finally:
        for handle in handles:
            handle.remove()
    points = [(point, tensor.reshape(-1, tensor.shape[-1])) for point, tensor in trace.points]
    called = [(i, p.module, t) for i, (p, t) in enumerate(points) if p.side == "input" and p.module in linears]
    names = [n for _, n, _ in called]
    for name in linears:
        if names.count(name) != 1:
            raise InputError(f"{name} called {names.count(name)}")
    groups: list[list[tuple[int, str, Tensor]]] = []
    for entry in called:
        for group in groups:
            if group[0][2].shape == entry[2].shape and torch.equal(group[0][2], entry[2]):
                group.append(entry)
                break
        else:
            groups.append([entry])
    stages = []
    for group in groups:
        streams = {}
        for i, name, _ in group:
            found = _stream(points, group[0][0], name)
            if found:
                streams[name] = found
        tokens = hidden.shape[:-1].numel()
        stages.append(Stage(tuple(n for _, n, _ in group), streams, len(group[0][2]) == tokens))
    return stages


def _stream(points, first, name):
    out = next(i for i, (p, _) in enumerate(points) if p == Point(name, "output"))
    y = points[out][1]
    afters = [t for _, t in points[out + 1 :] if t.shape == y.shape]
    for point, before in points[:first]:
        if before.shape != y.shape:
            continue
        for after in afters:
            error = (after - before - y).abs()
            if (error <= 4 * torch.finfo(y.dtype).eps * (after.abs() + before.abs() + y.abs())).all():
                return point
    return None
