"""Commands that use torch import it as `api.start.importing` has it: without the garbage collector, reading ahead."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from semisparse.api import start
from semisparse.cli import app

COMMANDS = {
    "compress": ("DIR --recipe rheosparse --out OUT", ("DIR", "cpu")),
    "eval": ("DIR --text TEXT", ("DIR", "auto")),
    "generate": ("DIR --prompt x --device cpu", ("DIR", "cpu")),
    "inspect": ("DIR", (None, "cpu")),
    "plan": ("--shape 64,64 --gpu h200", (None, "cpu")),
    "warm": ("DIR --device cpu", ("DIR", "cpu")),
}
"""Arguments of each verb, and the model and the device that it prepares while it imports."""


@pytest.mark.parametrize("verb", COMMANDS)
def test_imports_are_prepared(verb: str, monkeypatch: pytest.MonkeyPatch):
    arguments, expected = COMMANDS[verb]
    begun = []

    @contextmanager
    def importing(model: Path | None = None, device: str = "cpu", waits: bool = True) -> Iterator[None]:
        begun.append((model and str(model), device))
        raise SystemExit(7)
        yield

    monkeypatch.setattr(start, "importing", importing)
    assert CliRunner().invoke(app, [verb, *arguments.split()]).exit_code == 7
    assert begun == [expected]
