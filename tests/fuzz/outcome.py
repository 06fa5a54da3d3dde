"""Use a mutated directory in a process of its own, and class the outcome; some classes are faults."""

from __future__ import annotations

import ast
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

SOUND = ("refused", "refused by transformers", "equal logits", "other logits", "logits not finite")
"""The classes that are no fault. The others: an untyped exception, one behind a typed one, a signal, the time limit."""

LIBRARIES = ("semisparse", "transformers", "tokenizers")
"""An exception is theirs in whose code it came up, although torch or json raised it."""

PROGRAMMING = (TypeError, AttributeError, NameError, LookupError, AssertionError, ArithmeticError, RuntimeError)
"""What wrong code raises. Loading wraps whatever transformers raises, and transformers calls semisparse."""


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
        return refused(error)
    except BaseException as error:
        return f"untyped {type(error).__name__}", f"{str(error)[:200]} in {_frames(error)}"
    if not logits.isfinite().all():
        return "logits not finite", ""
    return ("equal logits" if torch.equal(logits, expected) else "other logits"), ""


def refused(error: SemisparseError) -> tuple[str, str]:
    """Return class and detail of a typed error: whose exception it wraps, and whether that is a fault of semisparse."""
    detail = f"{type(error).__name__}: {error}"[:1000]
    cause: BaseException | None = error
    while isinstance(cause, SemisparseError):
        error, cause = cause, cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    if cause is None or not _caught_by_any_handler(error):
        return "refused", detail
    if _owner(cause) == "semisparse" and isinstance(cause, PROGRAMMING):
        return f"hidden {type(cause).__name__}", f"{detail} in {_frames(cause)}"
    return "refused by transformers", detail


def _caught_by_any_handler(error: BaseException) -> bool:
    """Return whether an ``except Exception`` raised an error, so that its cause may be anything."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    tree = ast.parse(Path(frame.filename).read_text(encoding="utf-8"))
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    around = [node for node in handlers if node.lineno <= (frame.lineno or 0) <= (node.end_lineno or 0)]
    return any(isinstance(node.type, ast.Name) and node.type.id == "Exception" for node in around)


def _owner(error: BaseException) -> str | None:
    """Return which of `LIBRARIES` has the innermost frame, or None if none has one."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for library in LIBRARIES:
            if library in Path(frame.filename).parent.parts[-6:]:
                return library
    return None


def _frames(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[:-8:-1]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)


def _logits(directory: Path) -> torch.Tensor:
    model = load(directory, device="cpu")
    with torch.inference_mode():
        return torch.cat([model(TOKENS[:, :count]).logits[0, -1:] for count in (1, 24)])
