"""The command line: one file per verb, over `semisparse.api`.

A verb imports what it runs when it runs, so that `--help` and `--version` import no torch.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from typing import Annotated, Any

import typer

from semisparse import __version__
from semisparse.cli import (
    bench,
    compress,
    demo,
    evaluate,
    export,
    formats,
    frontier,
    generate,
    inspect,
    plan,
    serve,
    warm,
)
from semisparse.cli.output import INTERRUPTED, console, fail, say_interrupted
from semisparse.errors import InputError, SemisparseError

app = typer.Typer(
    name="semisparse",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Compress language models by sparsity, measure what they lose, and run them smaller and faster.",
    epilog="Start with `semisparse demo`; then plan or frontier, compress, eval, generate or serve. Add --debug to any "
    "command for a traceback.",
)


def _print_version(requested: bool) -> None:
    if requested:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Accept options that precede a verb."""


app.command("compress")(compress.compress)
app.command("frontier")(frontier.frontier)
app.command("eval")(evaluate.evaluate)
app.command("generate")(generate.generate)
app.command("serve", context_settings={"ignore_unknown_options": True})(serve.serve)  # they are the server's
app.command("export")(export.export)
app.command("warm")(warm.warm)
app.command("inspect")(inspect.inspect)
app.command("formats")(formats.formats)
app.command("plan")(plan.plan)
app.add_typer(bench.app, name="bench")
app.command("demo")(demo.demo)


def _show_warning(message: Warning | str, *others: Any, **more: Any) -> None:
    """Print a warning as one line on stderr, without the file and line that raised it."""
    console.print(f"warning: {message}", soft_wrap=True, markup=False)


def main() -> None:
    """Run the command line. Errors print one sentence and exit with status 2 (bad input) or 1 (failure)."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    # transformers and huggingface_hub read these when a verb imports them.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.showwarning = _show_warning
    try:
        app()
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            say_interrupted()
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, SemisparseError):
            fail(str(error), 2 if isinstance(error, InputError) else 1)
        if isinstance(error, OSError | MemoryError):
            fail(str(error) or "the memory is full: take a smaller file or model, or a machine with more", 1)
        fail(f"unexpected {type(error).__name__}: {error} (run again with --debug for the traceback)", 1)
