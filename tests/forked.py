"""Several processes at once, for the tests of what they share."""

import multiprocessing
from collections.abc import Callable

PROCESSES, SECONDS = 3, 60


def run_at_once(target: Callable[[], None]) -> None:
    """Run a function in some processes at the same time, and expect that each ends well.

    They are forked: nothing has to be imported again, so they start together.
    """
    workers = [multiprocessing.get_context("fork").Process(target=target, daemon=True) for _ in range(PROCESSES)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(SECONDS)
    assert [worker.exitcode for worker in workers] == [0] * PROCESSES
