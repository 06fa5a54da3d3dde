"""``semisparse serve``: vLLM where it is installed and a GPU is there, else transformers' own server."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from semisparse.cli.output import console
from semisparse.errors import InputError, SemisparseError

VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")

_REGISTERED = "import semisparse; from transformers.cli.transformers import main; main()"

CHAT_TEMPLATES = ("chat_template.jinja", "additional_chat_templates")
"""Where a directory holds chat templates, beside tokenizer_config.json."""

TRANSFORMERS = (sys.executable, "-c", _REGISTERED, "serve")
"""The command ``transformers serve`` with the checkpoint format registered."""


def serve(
    model: Annotated[Path, typer.Argument(help="A model directory, dense or compressed.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Options for the server, after the directory.")] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The port that the server listens on.")] = 8000,
) -> None:
    """Serve a model over HTTP: by vLLM where it is installed and a GPU is there, else by transformers' own server.

    Says which, and prints an example request. All other options are passed on to the server.

    Example: `semisparse serve out --max-model-len 4096`
    """
    from semisparse.api import inspect_directory
    from semisparse.api.serving import check_cuts, check_gpu

    if str(model).startswith("-"):
        raise InputError(f"give the model directory first, and options for the server, such as {model}, after it")
    if not (model / "config.json").is_file():
        raise InputError(f"{model} is no model directory: it has no config.json")
    # A server would refuse a corrupted model or a GPU that is too small only after a minute, with a page of traceback.
    description = inspect_directory(model)
    name, command = _server()
    if command is VLLM:
        check_gpu(description, arguments or [])
        check_cuts(model, arguments or [])
    whole = [*command, str(model), "--port", str(port), *(arguments or [])]
    console.print(f"serving {model} by {name}: {shlex.join(whole)}", soft_wrap=True)
    console.print(f"once it is up, try:\n  {_example(model, port)}", soft_wrap=True)
    sys.stderr.flush()
    os.execv(whole[0], whole)


def _server() -> tuple[str, tuple[str, ...]]:
    from importlib.util import find_spec

    import torch

    if find_spec("vllm") is not None and torch.cuda.is_available():
        return "vLLM", VLLM
    from transformers.utils.import_utils import is_serve_available

    if is_serve_available():
        why = "vLLM is not installed" if find_spec("vllm") is None else "torch sees no GPU here"
        return f"transformers' own server ({why})", TRANSFORMERS
    raise SemisparseError(
        "no server can be started: vLLM needs a GPU and `pip install vllm`, transformers' own server needs "
        "`pip install 'transformers[serving]'`"
    )


def _example(model: Path, port: int) -> str:
    """Return a request that the model can answer: servers refuse a chat with one that has no chat template."""
    if _chats(model):
        path, prompt = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
    else:
        path, prompt = "completions", '"prompt": "Hello"'
    body = f'{{"model": "{model}", {prompt}, "max_tokens": 32}}'
    return f"curl http://localhost:{port}/v1/{path} -H 'Content-Type: application/json' -d '{body}'"


def _chats(model: Path) -> bool:
    """Return whether a directory's tokenizer has a chat template."""
    if any((model / name).exists() for name in CHAT_TEMPLATES):
        return True
    config = model / "tokenizer_config.json"
    try:
        return bool(json.loads(config.read_text()).get("chat_template"))
    except (OSError, ValueError, AttributeError):  # the server says what is wrong with it
        return False
