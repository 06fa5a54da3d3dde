"""The command line: one file a verb, over `semisparse.api`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from transformers.utils import logging as transformers_logging

from semisparse.cli import bench, compress, demo, evaluate, formats, generate, inspect, plan
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
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
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
