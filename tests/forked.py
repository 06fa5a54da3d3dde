"""Processes for tests of shared resources, of killed processes and of ranks."""

import multiprocessing
from collections.abc import Callable
from typing import Any

from torch.multiprocessing import start_processes

PROCESSES, SECONDS = 3, 60
IMPORTED = ["semisparse.cli", "tests.models", "tests.serving", "transformers.models.llama.modeling_llama"]
"""What processes that are not forked from this one find imported: a new interpreter needs 6 s of a core for it."""

multiprocessing.set_forkserver_preload(IMPORTED)


def run_at_once(target: Callable[[], None]) -> None:
    """Run a function in some processes at the same time, and expect that each ends well.

    They are forked from this one: nothing has to be imported again, so they start together.
    """
    workers = [multiprocessing.get_context("fork").Process(target=target, daemon=True) for _ in range(PROCESSES)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(SECONDS)
    assert [worker.exitcode for worker in workers] == [0] * PROCESSES


def exit_code(target: Callable[..., None], *arguments: Any) -> int | None:
    """Run a function of a module in a process that has computed nothing yet, to its end or 300 seconds.

    What it prints goes where this process prints.

    Returns:
        its exit status; minus the signal that ended it; None if it still runs.
    """
    worker = multiprocessing.get_context("forkserver").Process(target=target, args=arguments, daemon=True)
    worker.start()
    worker.join(300)
    return worker.exitcode


def on_ranks(work: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Run ``work(rank, *arguments)`` in as many processes, and expect that each ends well."""
    start_processes(work, arguments, nprocs=ranks, start_method="forkserver")
