"""``semisparse generate``: text, and how fast it came."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semisparse.cli.output import console, print_json
from semisparse.errors import InputError

if TYPE_CHECKING:
    from semisparse.engine import Engine, Generation


def generate(
    model: Annotated[Path, typer.Argument(help="A model directory, dense or compressed.")],
    prompt: Annotated[str | None, typer.Option("--prompt", help="The text to continue.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="How many tokens to add at most.")] = 64,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    chat: Annotated[
        bool, typer.Option("--chat", help="Hold a conversation: a message per line of standard input.")
    ] = False,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Draw tokens at random; 0 takes the most probable one.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Draw from the K most probable tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Draw from the tokens that make up this probability.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the random numbers.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Text that ends the continuation; may be given several times.")
    ] = None,
    batch: Annotated[
        Path | None, typer.Option("--batch", help="A file with a prompt per line, continued at once.")
    ] = None,
    speculate: Annotated[
        int,
        typer.Option(
            "--speculate", help="Propose N tokens by look-up in the text, verify them at once; 4 to 8 is good."
        ),
    ] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Continue a prompt, a batch of prompts or a conversation, and say how fast.

    Times leave out loading and compiling, which are printed apart.

    Example: `semisparse generate out --prompt "Once upon a time" --max-new-tokens 100`
    """
    from semisparse.engine import Sampling

    if (prompt is not None) + (batch is not None) + chat != 1:
        raise InputError("generate takes --prompt TEXT, --batch FILE or --chat, one of the three")
    if chat and json:
        raise InputError("--chat prints a conversation; --json is for --prompt and --batch")
    sampling = Sampling(temperature, top_k, top_p, seed)
    prompts = _lines(batch) if batch is not None else [prompt or ""]
    engine = _load(model, device, quiet=json)
    options: dict[str, Any] = {"sampling": sampling, "stop": stop or (), "proposals": speculate}
    try:
        if chat:
            _converse(engine, max_new_tokens, options)
            return
        found = _generate(engine, prompts, max_new_tokens, options, streamed=not json and batch is None)
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads on: leave without a word, as other tools do
        raise SystemExit(141) from None
    if json:
        rows = [_as_dict(one) for one in found]
        print_json({"results": rows} if batch is not None else rows[0])
        return
    if batch is not None:
        for one in found:
            print(one.text)
    _show_speed(found)


def _lines(file: Path) -> list[str]:
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the prompts of {file}: {error}") from error
    if not lines:
        raise InputError(f"{file} holds no prompt: write one per line")
    return lines


def _load(model: Path, device: str, quiet: bool) -> Engine:
    import warnings

    from semisparse.engine import Engine

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if quiet:
            engine = Engine(model, device=device)
        else:
            with console.status(f"loading {model}"):
                engine = Engine(model, device=device)
    if engine.note:
        console.print(engine.note, highlight=False)
    return engine


def _generate(
    engine: Engine, prompts: list[str], new: int, options: dict[str, Any], streamed: bool
) -> list[Generation]:
    if not streamed:
        return engine.generate(prompts, new, **options)
    on_terminal = sys.stdout.isatty()

    def show(number: int, text: str) -> None:
        print(text, end="", flush=on_terminal)

    engine.prepare(prompts, new, **options)
    print(engine.echo(prompts[0]), end="", flush=on_terminal)
    try:
        found = engine.generate(prompts, new, **options, on_text=show)
    except KeyboardInterrupt:
        print(flush=True)
        console.print("interrupted")
        raise SystemExit(130) from None
    print(flush=True)
    return found


def _converse(engine: Engine, new: int, options: dict[str, Any]) -> None:
    """Answer the lines of standard input, each with all that was said before."""
    messages: list[dict[str, str]] = []
    on_terminal = sys.stdin.isatty()
    while True:
        try:
            if on_terminal:
                console.print("[bold]you:[/] ", end="")
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            return
        if not line:
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.strip()})
        text = engine.chat_prompt(messages)
        said: list[str] = []

        def show(number: int, text: str, said: list[str] = said) -> None:
            said.append(text)
            print(text, end="", flush=True)

        try:
            found = engine.generate([text], new, **options, on_text=show, special_tokens=False)
        except KeyboardInterrupt:
            print(flush=True)
            console.print("interrupted")
            raise SystemExit(130) from None
        print(flush=True)
        _show_speed(found)
        messages.append({"role": "assistant", "content": "".join(said)})


def _as_dict(found: Generation) -> dict[str, Any]:
    return {
        "text": found.text,
        "new_tokens": found.new_tokens,
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_per_second,
        "load_seconds": found.load_seconds,
        "first_token_seconds": found.first_token_seconds,
        "decode_tokens_per_second": found.decode_tokens_per_second,
        "compile_seconds": found.compile_seconds,
    }


def _show_speed(found: list[Generation]) -> None:
    new, one = sum(each.new_tokens for each in found), found[0]
    decode = sum(each.decode_tokens_per_second or 0 for each in found)
    console.print(
        f"{new} tokens, {new / one.seconds:.1f} per second (first after {one.first_token_seconds * 1e3:.0f} ms, then "
        f"{decode:.1f} per second); loading took {one.load_seconds:.1f} s, compiling and warming up "
        f"{one.compile_seconds:.1f} s",
        highlight=False,
    )
