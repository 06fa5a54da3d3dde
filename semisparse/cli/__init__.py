"""The command line: one file per verb, over `semisparse.api`.

Verbs import what they run when they run: `--help` and `--version` import no torch.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from semisparse.cli import bench, compress, demo, evaluate, formats, generate, inspect, plan, serve, warm
from semisparse.cli.output import fail
from semisparse.errors import InputError, SemisparseError
from semisparse.version import __version__

app = typer.Typer(
    name="semisparse",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Make sparse language models pay: compress a model, measure what it lost, run it smaller and faster.",
    epilog="Start with `semisparse demo`. Add --debug to any command for a traceback.",
)


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Take what comes before a verb."""


app.command("compress")(compress.compress)
app.command("eval")(evaluate.evaluate)
app.command("generate")(generate.generate)
app.command("serve")(serve.serve)
app.command("warm")(warm.warm)
app.command("inspect")(inspect.inspect)
app.command("formats")(formats.formats)
app.command("plan")(plan.plan)
app.add_typer(bench.app, name="bench")
app.command("demo")(demo.demo)


def main() -> None:
    """Run the command line; one sentence and status 2 for bad input, 1 for a failure."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    # Read when a verb imports transformers.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except SemisparseError as error:
        if debug:
            raise
        fail(str(error), 2 if isinstance(error, InputError) else 1)
    except Exception as error:
        if debug:
            raise
        fail(f"unexpected {type(error).__name__}: {error} (run again with --debug for the traceback)", 1)
