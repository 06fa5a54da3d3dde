"""Settings for every test: hypothesis runs repeat, and skipped tests are listed at the end."""

import atexit
import gc
import json
import os
import sys
from collections.abc import Callable
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
    """Store which kernels a test launched, if asked (`tests.launched`): a run under a sanitizer may be killed."""
    if path := os.environ.get("SEMISPARSE_LAUNCHED"):
        from tests import launched

        launched.store(Path(path))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that share a process first: they are long, and if they came last one process would run them alone."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
    items[:] = _alternating(items)


def _alternating(items: list[pytest.Item]) -> list[pytest.Item]:
    """Leave out every other order of execution under the CUDA emulator: a test's cases run early, late, early ...

    The first case of a test runs in both. Either order finds its own kind of fault, and finds it in most cases. The
    second of the two comes last of all: side by side, two processes would compile the same kernels.
    """
    cases: dict[str, dict[str, int]] = {}
    chosen, second = [], []
    for item in items:
        test, _, case = item.nodeid.partition("[")
        order, _, rest = case.partition("-")
        if order in ("early", "late"):
            numbers = cases.setdefault(test, {})
            repeated = rest in numbers
            number = numbers.setdefault(rest, len(numbers))
            if number and order != ("early", "late")[number % 2]:
                continue
            if repeated and not number:
                second.append(item)
                continue
        chosen.append(item)
    return chosen + second


def pytest_collection_finish() -> None:
    """Collect garbage seldom, and leave out what was imported and collected: looking through it takes half a second."""
    gc.freeze()
    gc.set_threshold(7000, 20, 20)


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the skipped tests, one line per reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons: dict[str, int] = {}
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason] = reasons.get(reason, 0) + 1
    if reasons:
        terminalreporter.section("not run here")
        for reason, count in sorted(reasons.items()):
            terminalreporter.write_line(f"{count:5d}  {reason}")
