"""Settings for every test: hypothesis runs repeat, and skipped tests are listed at the end."""

import atexit
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings

# Taking the interpreter apart takes seconds. A worker of xdist has sent its results by then; in a single process what
# was frozen is freed, because nanobind's modules report all that is left.
if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)
else:
    atexit.register(gc.unfreeze)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():
    # Triton reads this when it is first imported; its kernels then run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# cuBLAS may add partial sums in 16 bits, and did for 2 and 15 bfloat16 tokens on an H200; the contract says float32.
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

settings.register_profile("ci", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("ci")


def pytest_configure() -> None:
    """Measure rates with one repeat and times on a CPU briefly: no test needs them exact, and they take minutes."""
    from semisparse.bench import timing
    from semisparse.runtime import measure

    measure.REPEATS = 1
    timing.CPU_SECONDS = 0.01
    if os.environ.get("SEMISPARSE_LAUNCHED"):
        from tests import launched

        launched.count_launches()


def pytest_runtest_logfinish() -> None:
    """Leave out what is left from the next full collection of garbage, too.

    Store which kernels a test launched, if asked (`tests.launched`): a run under a sanitizer may be killed.
    """
    if grown[0]:
        gc.freeze()
        grown[0] = False
    if path := os.environ.get("SEMISPARSE_LAUNCHED"):
        from tests import launched

        launched.store(Path(path))


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run tests that share a process first: they are long, and if they came last one process would run them alone.

    The tests of a file share a process if any of them takes a fixture of the file, or the CUDA emulator: two processes
    would make and compile the same things side by side. A worker of xdist only counts the tests that are skipped
    whatever they do: a quarter of all, each of which would take three messages.
    """
    if hasattr(config, "workeroutput"):
        reasons = [_reason_to_skip(item) for item in items]
        config.workeroutput["skipped"] = dict(Counter(reason for reason in reasons if reason))
        items[:] = [item for item, reason in zip(items, reasons, strict=True) if not reason]
    shared = {_file_of(item) for item in items if _shares_work(item)}
    for item in items:
        if _file_of(item) in shared and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_file_of(item)))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
    items[:] = list(_alternating(items))


def _reason_to_skip(item: pytest.Item) -> str | None:
    reasons = (mark.kwargs["reason"] for mark in item.iter_markers("skipif") if True in mark.args)
    return next(reasons, None)


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _shares_work(item: pytest.Item) -> bool:
    fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    return "emulated" in fixtures or any(one.scope == "module" for found in fixtures.values() for one in found)


def _alternating(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Leave out every other order of execution under the CUDA emulator: a test's cases run early, late, early ...

    The first case of a test runs in both. Either order finds its own kind of fault, and finds it in most cases.
    """
    cases: dict[str, dict[str, int]] = {}
    for item in items:
        test, _, case = item.nodeid.partition("[")
        order, _, rest = case.partition("-")
        if order in ("early", "late"):
            numbers = cases.setdefault(test, {})
            number = numbers.setdefault(rest, len(numbers))
            if number and order != ("early", "late")[number % 2]:
                continue
        yield item


def pytest_collection_finish() -> None:
    """Collect garbage seldom, and leave out what was imported and collected: looking through it takes half a second."""
    gc.freeze()
    gc.set_threshold(7000, 20, 20)
    gc.callbacks.append(_note_full_collection)


grown = [False]
"""Whether all garbage was collected since memory was last frozen: tests have imported more by then."""


def _note_full_collection(phase: str, info: dict[str, int]) -> None:
    grown[0] |= phase == "stop" and info["generation"] == 2


class Outcome(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process."""
    from semisparse import cli

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["semisparse", *map(str, arguments)])
        capfd.readouterr()
        status = 0
        try:
            cli.main()
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        return Outcome(status, *capfd.readouterr())

    return call


skipped_by_workers: dict[str, int] = {}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep what a worker counted; all collect the same tests."""
    skipped_by_workers.update(getattr(node, "workeroutput", {}).get("skipped", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the skipped tests, one line per reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(f"Skipped: {reason}" for reason in Counter(skipped_by_workers).elements())
    for report in skipped:
        reasons[report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)] += 1
    if reasons:
        terminalreporter.section("not run here")
        for reason, count in sorted(reasons.items()):
            terminalreporter.write_line(f"{count:5d}  {reason}")
