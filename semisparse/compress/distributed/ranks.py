"""The processes ("ranks") that compress a model together, and what one process alone does in their place.

Every rank runs the same program on its share of the calibration batches. Sums over all batches are taken in `PARTS`
parts, which are then added in the order of a binary tree. The order does not depend on the ranks that hold them, so any
number of ranks, one included, gives the same bytes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from semisparse.compress.distributed.exchange import Exchange
from semisparse.errors import InputError

PARTS = 8
"""Parts of the sums over the calibration batches, a power of 2. More ranks than that take more parts, and so end in
other bytes. A process holds the sums of log2(parts) + 1 parts at a time."""

T = TypeVar("T")
Item = TypeVar("Item")

Parts = Mapping[int, range]
"""The number of a part of the sums -> the indices of its batches."""


class Ranks:
    """The ranks of a run; this class is for one process, alone.

    Args:
        parts: of the sums over the calibration batches, a power of 2.
    """

    rank, count, on_this_host = 0, 1, 1

    def __init__(self, parts: int = PARTS) -> None:
        self.parts = parts

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that reads unfinished work, writes and reports."""
        return self.rank == 0

    def first(self, compute: Callable[[], T]) -> T:
        """Return what the first rank computes; the others wait for it."""
        return compute()

    @contextmanager
    def held_by_first(self, manager: AbstractContextManager[T]) -> Iterator[T]:
        """Enter a context on the first rank only; all get its value."""
        with ExitStack() as stack:
            yield self.first(lambda: stack.enter_context(manager))

    def each(self, items: Sequence[Item], costs: Sequence[float], compute: Callable[[Item], T]) -> Iterator[T]:
        """Yield what ``compute`` returns for each item. Items are shared out by cost; every rank gets all results."""
        return map(compute, items)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order; they hold no tensors."""
        return [value]

    def own(self, length: int) -> range:
        """Return which of ``length`` items this rank has: neighbours, in the order of ranks."""
        return _piece(self.rank, self.count, length)

    def join(self, own: list[T]) -> list[T]:
        """Return the items of all ranks, in order, given this rank's."""
        return own

    def share(self, batches: Sequence[T]) -> tuple[list[T], Parts]:
        """Return this rank's batches and, by part of the sums, the indices of the part's batches in that list."""
        own = self._parts_of(self.rank)
        indices = {part: _piece(part, self.parts, len(batches)) for part in own}
        start = min((piece.start for piece in indices.values()), default=0)
        stop = max((piece.stop for piece in indices.values()), default=0)
        parts = {part: range(piece.start - start, piece.stop - start) for part, piece in indices.items()}
        return list(batches[start:stop]), parts

    def share_sums(self, batches: Sequence[Any]) -> Parts:
        """Return the parts of the sums that this rank computes, for ranks that hold all batches."""
        return {part: _piece(part, self.parts, len(batches)) for part in self._parts_of(self.rank)}

    def sum(self, parts: Parts, compute: Callable[[Sequence[int]], T], add: Callable[[T, T], T]) -> T:
        """Return a sum over all batches of all ranks.

        Args:
            parts: of this rank.
            compute: returns the sum over the batches with some indices, which may be none.
            add: returns the sum of two sums; may change the first.
        """
        leaves = (_Node(part, 1, self.rank, compute(indices)) for part, indices in parts.items())
        own = _fold(leaves, lambda left, right: left._replace(value=add(left.value, right.value)))
        return self._root(own, add).value

    def _parts_of(self, rank: int) -> range:
        return _piece(rank, self.count, self.parts)

    def _root(self, own: list[_Node], add: Callable[[Any, Any], Any]) -> _Node:
        """Return the sum of all parts, given the sums that this rank can take alone."""
        (root,) = own
        return root


class SeveralRanks(Ranks):
    """The processes of torch.distributed's default group. All must call the same methods in the same order.

    Args:
        device: where this process computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        super().__init__(max(PARTS, 1 << (self.count - 1).bit_length()))
        self._exchange = Exchange(device)
        self.on_this_host = self.gather(socket.gethostname()).count(socket.gethostname())

    def first(self, compute: Callable[[], T]) -> T:
        return self._exchange.broadcast(compute() if self.is_first else None, 0)

    def each(self, items: Sequence[Item], costs: Sequence[float], compute: Callable[[Item], T]) -> Iterator[T]:
        owners = share_out(costs, self.count)
        own = {index: compute(items[index]) for index, owner in enumerate(owners) if owner == self.rank}
        for index, owner in enumerate(owners):
            yield self._exchange.broadcast(own.pop(index, None), owner)

    def gather(self, value: T) -> list[T]:
        return self._exchange.gather(value)

    def join(self, own: list[T]) -> list[T]:
        return [item for rank in range(self.count) for item in self._exchange.broadcast(own, rank)]

    def _root(self, own: list[_Node], add: Callable[[Any, Any], Any]) -> _Node:
        held = {node.start: node for node in own}

        def merge(left: _Node, right: _Node) -> _Node:
            value = None
            if left.rank == right.rank == self.rank:
                value = add(left.value, right.value)
            elif left.rank == self.rank:
                value = add(left.value, self._exchange.receive(right.rank))
            elif right.rank == self.rank:
                self._exchange.send(right.value, left.rank)
            return left._replace(value=value)

        every = [
            held.get(node.start, node) if rank == self.rank else node
            for rank in range(self.count)
            for node in _fold((_Node(part, 1, rank, None) for part in self._parts_of(rank)), lambda left, _: left)
        ]
        (root,) = _fold(every, merge)
        return root._replace(value=self._exchange.broadcast(root.value, root.rank))


class _Node(NamedTuple):
    """The sum of ``size`` parts from part ``start`` on, and the rank that holds it."""

    start: int
    size: int
    rank: int
    value: Any


def all_ranks(device: torch.device) -> Ranks:
    """Return the ranks of this run: those of torch.distributed if it is initialised, else this process alone."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return SeveralRanks(device) if several else Ranks()


def require_same(ranks: Ranks, facts: Mapping[str, str]) -> None:
    """Raise, on every rank, unless all have the same facts.

    Raises:
        InputError: names a rank that differs from the first one, and in what.
    """
    first, *others = ranks.gather((socket.gethostname(), dict(facts)))
    for rank, (host, found) in enumerate(others, 1):
        different = [
            f"{key} ({found.get(key)}; rank 0 on {first[0]} has {first[1].get(key)})"
            for key in first[1].keys() | found.keys()
            if found.get(key) != first[1].get(key)
        ]
        if different:
            raise InputError(
                f"rank {rank} on {host} differs in {', '.join(sorted(different))}; "
                "start the same command with the same versions and devices everywhere"
            )


def local_rank() -> int:
    """Return the number of this process among those on its host; 0 if it runs alone."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def share_out(costs: Sequence[float], count: int) -> list[int]:
    """Return the rank of each item: the costliest first, each to the rank with the least work so far."""
    loads, owners = [0.0] * count, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


def _piece(index: int, pieces: int, length: int) -> range:
    """Return piece ``index`` of ``range(length)``, cut into pieces of nearly equal length; the first is not empty."""
    return range(-(-index * length // pieces), -(-(index + 1) * length // pieces))


def _fold(nodes: Iterable[_Node], merge: Callable[[_Node, _Node], _Node]) -> list[_Node]:
    """Add neighbours in the order of a binary tree over all parts, as soon as both are there; return what is left."""
    stack: list[_Node] = []
    for node in nodes:
        while stack and stack[-1].size == node.size and node.start % (2 * node.size) == node.size:
            left = stack.pop()
            node = merge(left, node)._replace(start=left.start, size=2 * left.size)
        stack.append(node)
    return stack
