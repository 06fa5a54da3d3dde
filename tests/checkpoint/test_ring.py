"""A ring gives out its memory in order and never the same bytes twice at once."""

import random
from threading import Timer

import pytest

from semisparse.checkpoint.ring import Part, Ring

SIZE = 64


@pytest.mark.parametrize("seed", range(20))
def test_parts_in_use_never_overlap(seed: int):
    draw, ring = random.Random(seed), Ring(SIZE)
    held: list[Part] = []
    written: dict[Part, int] = {}
    for step in range(400):
        nbytes = draw.randint(1, SIZE)
        while held and (ring._place(nbytes) is None or draw.random() < 0.3):
            ring.release(held.pop(draw.randrange(len(held)) if draw.random() < 0.5 else 0))
        part = ring.acquire(nbytes)
        assert part is not None
        assert len(part.memory) == nbytes
        part.memory[:] = bytes([step % 256]) * nbytes
        held.append(part)
        written[part] = step % 256
        assert all(set(part.memory) == {written[part]} for part in held)


def test_waiting_ends_when_memory_is_released_or_the_ring_is_closed():
    ring = Ring(SIZE)
    whole = ring.acquire(SIZE)
    assert whole is not None
    Timer(0.05, ring.release, (whole,)).start()
    assert ring.acquire(SIZE) is not None
    Timer(0.05, ring.close).start()
    assert ring.acquire(1) is None
