"""``semisparse generate``: text, and tokens per second."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from semisparse.cli.output import console, print_json


def generate(
    model: Annotated[Path, typer.Argument(help="A model directory, dense or compressed.")],
    prompt: Annotated[str, typer.Option("--prompt", help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="How many tokens to add at most.")] = 64,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Continue a prompt greedily, and say how fast.

    Example: `semisparse generate out --prompt "Once upon a time" --max-new-tokens 100`
    """
    from semisparse import api

    found = api.generate(model, prompt, max_new_tokens)
    if json:
        values = {"text": found.text, "new_tokens": found.new_tokens, "seconds": found.seconds}
        print_json(values | {"tokens_per_second": found.tokens_per_second})
        return
    print(found.text)
    console.print(f"{found.new_tokens} tokens, {found.tokens_per_second:.1f} a second", highlight=False)
