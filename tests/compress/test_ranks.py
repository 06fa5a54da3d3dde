"""How work is shared over ranks, in which order sums are taken, and what ends a run."""

import io
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from semisparse.compress.distributed import watch
from semisparse.compress.distributed.exchange import _bytes_of, _dump, _Unpickler
from semisparse.compress.distributed.ranks import Ranks, SeveralRanks, share_out
from semisparse.compress.distributed.watch import Watch, _Seen


class Threads:
    """An exchange of values between threads that stand for ranks."""

    def __init__(self, rank: int, count: int, queues: dict[tuple[int, int], queue.Queue[Any]]) -> None:
        self._rank, self._count, self._queues = rank, count, queues

    def send(self, value: Any, to: int) -> None:
        self._queues[self._rank, to].put(value)

    def receive(self, source: int) -> Any:
        return self._queues[source, self._rank].get(timeout=20)

    def broadcast(self, value: Any, source: int) -> Any:
        if self._rank != source:
            return self.receive(source)
        for other in set(range(self._count)) - {source}:
            self.send(value, other)
        return value


def on_threads(count: int, parts: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """Return what ``work`` returns on each of several ranks."""
    if count == 1:
        return [work(Ranks(parts))]
    queues: dict[tuple[int, int], queue.Queue[Any]] = defaultdict(queue.Queue)
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        ranks = SeveralRanks.__new__(SeveralRanks)
        ranks.rank, ranks.count, ranks.parts = rank, count, parts
        ranks._exchange = Threads(rank, count, queues)  # type: ignore[assignment]
        results[rank] = work(ranks)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def written_sum(batches: list[str], ranks: Ranks) -> str:
    """Return a sum as a formula, with every pair of parentheses that it was taken in."""
    own, parts = ranks.share(batches)

    def compute(indices: Any) -> str:
        return "+".join(own[index] for index in indices)

    return ranks.sum(parts, compute, lambda left, right: f"({left} {right})")


@pytest.mark.parametrize("batches", ["abcdefghijklmnop", "abcdefgh", "abcde", "a"])
def test_the_order_of_a_sum_does_not_depend_on_the_ranks(batches: str):
    work = partial(written_sum, list(batches))
    (expected,) = on_threads(1, 8, work)
    if len(batches) == 16:
        assert expected == "(((a+b c+d) (e+f g+h)) ((i+j k+l) (m+n o+p)))"
    assert sorted(expected.replace("+", " ").replace("(", " ").replace(")", " ").split()) == list(batches)
    for count in range(2, 12):
        assert on_threads(count, 8, work) == [expected] * count
    assert on_threads(11, 16, work) == on_threads(3, 16, work)[:1] * 11


@pytest.mark.parametrize("count", [1, 2, 3, 8, 11])
def test_every_batch_is_on_one_rank_and_the_first_rank_has_some(count: int):
    batches = list(range(13))
    found = on_threads(count, 8 if count <= 8 else 16, lambda ranks: ranks.share(batches))
    assert [batch for own, _ in found for batch in own] == batches
    assert found[0][0]
    for own, parts in found:
        assert [index for indices in parts.values() for index in indices] == list(range(len(own)))
    few = on_threads(count, 8 if count <= 8 else 16, lambda ranks: ranks.share(batches[:1]))
    assert [own for own, _ in few] == [[0]] + [[]] * (count - 1)


def test_work_is_shared_out_by_cost():
    assert share_out([1, 5, 1, 4, 2], 2) == [0, 0, 0, 1, 1]
    assert share_out([1, 1, 1], 4) == [0, 1, 2]
    computed: list[tuple[int, str]] = []

    def work(ranks: Ranks) -> list[str]:
        def compute(item: str) -> str:
            computed.append((ranks.rank, item))
            return item.upper()

        return list(ranks.each(list("abcde"), [1, 5, 1, 4, 2], compute))

    assert on_threads(2, 8, work) == [list("ABCDE")] * 2
    assert sorted(computed) == [(0, "a"), (0, "b"), (0, "c"), (1, "d"), (1, "e")]


def test_values_are_sent_bit_by_bit():
    tensors = [
        torch.tensor([[float("nan"), -0.0], [1e-45, 2.0]]),
        torch.randn(3, 4).bfloat16().T,
        torch.randn(5).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.tensor(7),
    ]
    content, sent = _dump({"some": tensors, "more": (1, "a", None)})
    unpickler = _Unpickler(io.BytesIO(content), torch.device("cpu"))
    value = unpickler.load()
    for source, target in zip(sent, filter(torch.Tensor.numel, unpickler.tensors), strict=True):
        _bytes_of(target).copy_(_bytes_of(source))
    assert value["more"] == (1, "a", None)
    for found, tensor in zip(value["some"], tensors, strict=True):
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(_bytes_of(found), _bytes_of(tensor.contiguous()))


COUNTS = 1000


class Ended(Exception):
    """A watch has ended its process."""


@pytest.fixture
def watch_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watch]:
    """Return the watch of one of three ranks, without its thread."""

    def exit_(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(watch, "INTERVAL", 0)
    monkeypatch.setattr(watch.os, "_exit", exit_)

    def make(rank: int, said: list[str], alarmed: int | None = None) -> Watch:
        one = Watch.__new__(Watch)
        one._rank, one._speak, one._stop = rank, said.append, threading.Event()
        one._hosts = ["node0", "node1", "node2"]
        one._keys = [one._key(other) for other in range(3)]
        one._alarm = "this run was ended from outside"
        one._counts, one._alarmed_at = COUNTS, None if alarmed is None else COUNTS - alarmed
        return one

    return make


def judged(one: Watch, seen: list[tuple[str, int]]) -> int | None:
    """Return the status with which a watch ends its process, given the word of each rank and its age; else None."""
    try:
        one._judge([_Seen(*word) for word in seen])
    except Ended as ended:
        return ended.args[0]
    return None


GO_ON = "died; the same command with --resume goes on, with any number of ranks"


@pytest.mark.parametrize(
    ("rank", "ages", "alarmed", "status", "sentences"),
    [
        (0, (0, 121, 0), None, 1, [f"rank 1 on node1 {GO_ON}"]),
        (0, (0, 11, 0), 2, 1, [f"rank 1 on node1 {GO_ON}"]),
        (1, (11, 0, 0), 2, 1, [f"rank 0 on node0 {GO_ON}"]),
        (2, (11, 11, 0), 2, 1, [f"rank 0 on node0 and rank 1 on node1 {GO_ON}"]),
        (2, (0, 11, 0), 2, 1, []),  # rank 0 says it
        (0, (0, 11, 0), None, None, []),  # that is not long unless something has ended
        (0, (0, 9, 0), 2, None, []),
        (0, (0, 0, 0), 19, None, []),
        (0, (0, 0, 0), 21, 143, ["this run was ended from outside; the same command with --resume goes on"]),
        (1, (0, 0, 0), 21, 143, []),
    ],
)
def test_a_rank_that_dies_is_named_by_the_first_one_that_lives(
    watch_of, rank: int, ages: tuple[int, ...], alarmed: int | None, status: int | None, sentences: list[str]
):
    said: list[str] = []
    assert judged(watch_of(rank, said, alarmed), [("7", age) for age in ages]) == status
    assert said == sentences


def test_a_rank_that_fails_is_quoted_and_one_that_is_done_is_not_missed(watch_of):
    said: list[str] = []
    failed = ("failed 2 no such file", 6)
    assert judged(watch_of(0, said), [("7", 0), failed, failed]) == 2
    assert said == ["rank 1 on node1: no such file"]
    assert judged(watch_of(0, said), [("7", 0), (failed[0], 4), ("7", 0)]) is None, "it may fail alike"
    assert judged(watch_of(1, said), [failed, ("7", 0), ("7", 0)]) == 2, "rank 0 has said it"
    assert judged(watch_of(2, said), [("done", 900), ("done", 900), ("7", 0)]) is None
    assert len(said) == 1


def test_a_store_that_has_gone_ends_the_run(watch_of):
    class Gone:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Broken pipe")

    said: list[str] = []
    one = watch_of(2, said)
    one._store = Gone()
    with pytest.raises(Ended):
        one._run()
    assert said == ["the ranks' store has gone, with the host that torchrun made it on: Broken pipe"]
