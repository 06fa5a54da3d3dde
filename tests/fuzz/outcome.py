"""Use a mutated directory in a process of its own, and class the outcome; the last classes are faults."""

from __future__ import annotations

import random
import shutil
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from semisparse.api import compress, inspect_directory, load
from semisparse.errors import SemisparseError
from tests.fuzz.mutate import mutated, mutations_of
from tests.fuzz.sources import FOREIGN
from tests.limited import limited

TOKENS = torch.arange(24)[None]

SOUND = ("refused", "equal logits", "other logits", "logits not finite")
"""The classes that are no fault. The others: an untyped exception, a signal, the time limit."""


@dataclass(frozen=True)
class Outcome:
    """A case's class, the names of its mutations, and what was printed of an exception."""

    kind: str
    mutations: list[str]
    detail: str


def baseline(directory: Path) -> torch.Tensor:
    """Return the logits of the directory as it was written."""
    return _logits(directory)


def run_case(directory: Path, expected: torch.Tensor, seed: int, number: int, scratch: Path) -> Outcome:
    """Mutate a directory and use it in a process with limits on memory and time.

    Args:
        directory: a directory of `write_directory`.
        expected: its logits.
        seed, number: the case.
        scratch: does not exist; the mutated directory, which is removed.
    """
    rng = random.Random(f"{seed}:{number}")
    try:
        changed, names = mutated(directory, rng, mutations_of(directory.name))
        with suppress(OSError, ValueError, IndexError):  # of a file that an earlier mutation had replaced
            changed.write(scratch)
        use = _keep if directory.name in FOREIGN else _inspect
        ended = limited(_use, use if rng.random() < 0.3 else None, scratch, expected)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if ended.signal:
        name = "time limit" if ended.signal == signal.SIGKILL else signal.Signals(ended.signal).name
        return Outcome(name, names, f"after {ended.seconds:.1f} s")
    kind, detail = ended.value or ("no outcome", "")
    return Outcome(kind, names, detail)


def _inspect(directory: Path) -> None:
    inspect_directory(directory)
    inspect_directory(directory, verify=True)


def _keep(directory: Path) -> None:
    """Pack the layers of a directory that another tool wrote with the numbers that they have."""
    compress(directory, recipe="keep")


def _use(first: Callable[[Path], None] | None, directory: Path, expected: torch.Tensor) -> tuple[str, str]:
    """Call ``first``, then load a directory and compute logits; return class and detail."""
    try:
        if first is not None:
            first(directory)
        logits = _logits(directory)
    except SemisparseError as error:
        return "refused", f"{type(error).__name__}: {error}"[:1000]
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)[:-6:-1]
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
        return f"untyped {type(error).__name__}", f"{str(error)[:200]} in {where}"
    if not logits.isfinite().all():
        return "logits not finite", ""
    return ("equal logits" if torch.equal(logits, expected) else "other logits"), ""


def _logits(directory: Path) -> torch.Tensor:
    model = load(directory, device="cpu")
    with torch.inference_mode():
        return torch.cat([model(TOKENS[:, :count]).logits[0, -1:] for count in (1, 24)])
