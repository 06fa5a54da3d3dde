"""``semisparse generate``: continue a prompt, and report the speed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semisparse.cli.arguments import Device, Json, comma_separated
from semisparse.cli.output import INTERRUPTED, console, print_json, say_interrupted
from semisparse.errors import InputError

if TYPE_CHECKING:
    from semisparse.engine import Engine, Generation


def generate(
    model: Annotated[Path, typer.Argument(help="A model directory, dense or compressed.")],
    prompt: Annotated[str | None, typer.Option("--prompt", help="The text to continue.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Maximum number of new tokens.")] = 64,
    device: Device = "auto",
    chat: Annotated[
        bool, typer.Option("--chat", help="Hold a conversation: one message per line of standard input.")
    ] = False,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Sample tokens at this temperature; 0 takes the most probable token.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Sample from the K most probable tokens; 0 for all.")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Sample from the fewest tokens with this probability in all.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="The random seed.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Text that ends the continuation. May be given several times.")
    ] = None,
    batch: Annotated[
        Path | None,
        typer.Option("--batch", help="A file with one prompt per line; empty lines are skipped. All run as one batch."),
    ] = None,
    speculate: Annotated[
        int,
        typer.Option(
            "--speculate", help="Propose N tokens by prompt look-up and verify them in one step; 4 to 8 is good."
        ),
    ] = 0,
    draft: Annotated[
        Path | None,
        typer.Option(
            "--draft", help="A smaller model with the same tokenizer that proposes the tokens of --speculate."
        ),
    ] = None,
    keep_dense: Annotated[
        str | None,
        typer.Option(
            "--keep-dense",
            help="Module names (globs, comma-separated; all for every layer) that get a dense copy for long prompts.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt, a batch of prompts or a conversation, and report the speed.

    Loading and compiling are timed separately.

    Example: `semisparse generate out --prompt "Once upon a time" --max-new-tokens 100`
    """
    from semisparse.api.start import importing

    if (prompt is not None) + (batch is not None) + chat != 1:
        raise InputError("generate takes --prompt TEXT, --batch FILE or --chat, one of the three")
    if chat and as_json:
        raise InputError("--chat prints a conversation; --json is for --prompt and --batch")
    if draft is not None and not speculate:
        raise InputError("--draft proposes the tokens of --speculate N; give both")
    if "" in (stop or ()):
        raise InputError("a --stop text is empty; leave it out, or give the text that ends the continuation")
    with importing(model, device, waits=False):
        from semisparse.engine import Sampling

    sampling = Sampling(temperature, top_k, top_p, seed)
    prompts = _read_prompts(batch) if batch is not None else [prompt or ""]
    engine = _load(model, device, draft, _patterns(keep_dense), quiet=as_json)
    if not as_json:
        _show_slower(engine, len(prompts) * (speculate + 1))
    options: dict[str, Any] = {"sampling": sampling, "stop": stop or (), "proposals": speculate}
    try:
        if chat:
            _chat(engine, max_new_tokens, options)
            return
        generations = _generate(engine, prompts, max_new_tokens, options, streamed=not as_json and batch is None)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the pipe has gone: exit silently, as other tools do
        raise SystemExit(141) from None
    if as_json:
        rows = [_as_dict(generation) for generation in generations]
        print_json({"results": rows} if batch is not None else rows[0])
        return
    if batch is not None:
        for generation in generations:
            print(generation.text)
    _show_speed(generations)


def _read_prompts(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8-sig")  # without a byte-order mark
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the prompts of {file}: {error}") from error
    lines = [line for line in text.split("\n") if line.strip()]  # splitlines() also cuts at U+2028
    if not lines:
        raise InputError(f"{file} holds no prompt: write one per line")
    return lines


def _patterns(text: str | None) -> list[str]:
    """Return the glob patterns of --keep-dense."""
    patterns = ["*" if part == "all" else part for part in comma_separated(text) or []]
    if text is not None and not patterns:
        raise InputError("--keep-dense names no layer; give patterns such as *.down_proj, or all")
    return patterns


def _load(model: Path, device: str, draft: Path | None, keep_dense: list[str], quiet: bool) -> Engine:
    import warnings

    from semisparse.engine import Engine

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* runs through transformers' own code")  # printed below
        if quiet:
            engine = Engine(model, device=device, draft=draft, keep_dense=keep_dense, bare=True)
        else:
            with console.status(f"loading {model}"):
                engine = Engine(model, device=device, draft=draft, keep_dense=keep_dense, bare=True)
    if engine.dense_bytes:
        console.print(f"dense copies take {engine.dense_bytes / 1e9:.2f} GB")
    if engine.note:
        console.print(engine.note)
    return engine


def _show_slower(engine: Engine, tokens: int) -> None:
    """Name the layers that are slower than dense in decode steps of so many tokens, if tables say so."""
    slower = engine.slower_than_dense(tokens)
    if slower:
        advice = "" if engine.note else ": --keep-dense all computes them from dense copies"
        console.print(
            f"with {tokens} tokens per step {len(slower)} packed layers are slower than dense on this GPU, "
            f"{slower[0]} first{advice}",
        )


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
        generations = engine.generate(prompts, new, **options, on_text=show)
    except KeyboardInterrupt:
        print(flush=True)
        say_interrupted()
        raise SystemExit(INTERRUPTED) from None
    print(flush=True)
    return generations


def _chat(engine: Engine, new: int, options: dict[str, Any]) -> None:
    """Answer each line of standard input, with the conversation so far as context."""
    messages: list[dict[str, str]] = []
    if sys.stdin is None:
        raise InputError("--chat reads messages from standard input, which is closed")
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
        pieces: list[str] = []

        def show(number: int, text: str, pieces: list[str] = pieces) -> None:
            pieces.append(text)
            print(text, end="", flush=True)

        try:
            generations = engine.generate([text], new, **options, on_text=show, special_tokens=False)
        except KeyboardInterrupt:
            print(flush=True)
            say_interrupted()
            raise SystemExit(INTERRUPTED) from None
        print(flush=True)
        _show_speed(generations)
        messages.append({"role": "assistant", "content": "".join(pieces)})


def _as_dict(generation: Generation) -> dict[str, Any]:
    return {
        "text": generation.text,
        "new_tokens": generation.new_tokens,
        "seconds": generation.seconds,
        "tokens_per_second": generation.tokens_per_second,
        "load_seconds": generation.load_seconds,
        "first_token_seconds": generation.first_token_seconds,
        "decode_tokens_per_second": generation.decode_tokens_per_second,
        "compile_seconds": generation.compile_seconds,
    }


def _show_speed(generations: list[Generation]) -> None:
    first = generations[0]  # all generations of a batch have the same times
    new = sum(generation.new_tokens for generation in generations)
    decode = sum(generation.decode_tokens_per_second or 0 for generation in generations)
    console.print(
        f"{new} tokens, {new / first.seconds:.1f} per second (first after {first.first_token_seconds * 1e3:.0f} ms, "
        f"then {decode:.1f} per second); loading took {first.load_seconds:.1f} s, compiling and warming up "
        f"{first.compile_seconds:.1f} s",
    )
