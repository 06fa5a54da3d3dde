"""The Python entry points, where compression meets formats."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from semisparse import checkpoint
from semisparse.compress import (
    Journal,
    LayerReport,
    Progress,
    Recipe,
    calibration_batches,
    compress_blocks,
    fingerprint,
    read_yaml,
)
from semisparse.errors import CheckpointError, InputError, RecipeError
from semisparse.evaluate import Generation, generate_text, measure_quality, run_tasks
from semisparse.formats import Format, Packed, Problem, get_format, registry
from semisparse.integrations.transformers import mark_compressed
from semisparse.nn import replace_linear, weight_of
from semisparse.patterns import Pattern, parse_pattern
from semisparse.text import token_chunks

Text = str | Path | Sequence[str]
Counter = Callable[[int, int], None]
"""Called with (done, total)."""

TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


@dataclass(frozen=True)
class CompressionReport:
    """What a compression did.

    Args:
        layers: one mapping a compressed layer: name, pattern, format, density, bits_per_weight, error, outcome.
        bytes_before: bytes of these layers' dense weights.
        bytes_after: bytes of their packed tensors.
        seconds: wall time of this run.
    """

    layers: list[dict[str, Any]]
    bytes_before: int
    bytes_after: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Give the report as plain JSON values."""
        return asdict(self)


def pack(weight: Tensor, format: str, pattern: str | Pattern, **options: Any) -> Packed:
    """Store a weight in a format.

    Args:
        weight: [N, K], float16, bfloat16 or float32, obeying the pattern.
        format: a format's name, or ``auto`` for the first that accepts the pattern.
        pattern: as `parse_pattern` reads it.
        options: the format's own.
    Raises:
        InputError: the format is unknown or cannot store this; `PatternError` names the row and block.
    """
    return _format_for(parse_pattern(pattern), format).pack(weight, pattern, **options)


def load(path: str | Path, device: str = "auto", dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a model directory, dense or compressed, after checking that it is whole.

    Args:
        path: the directory.
        device: ``auto`` (CUDA if there is one), ``cpu`` or ``cuda``.
        dtype: of what is not packed; by default the checkpoint's, and float32 on a CPU, where half precision is slow.
    Raises:
        CheckpointError: the directory is missing, incomplete or corrupted.
    """
    place = pick_device(device)
    if dtype is None and place.type == "cpu":
        dtype = torch.float32
    return _load(checkpoint.open_directory(path).path, dtype or "auto").to(place)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load a model directory's tokenizer.

    Raises:
        CheckpointError: there is none, or it is unreadable.
    """
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # tokenizers raises bare Exceptions on malformed files
        raise CheckpointError(f"cannot load the tokenizer of {path}: {error}") from error


def pick_device(device: str) -> torch.device:
    """Resolve ``auto``, ``cpu`` or ``cuda``.

    Raises:
        InputError: the name is unknown, or there is no CUDA device.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"unknown device {device!r}; it is auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda was asked for, but torch sees no CUDA device here")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def recipes() -> dict[str, Mapping[str, Any]]:
    """Give the built-in recipes, which the formats declare, by name."""
    return {name: settings for form in registry().values() for name, settings in form.recipes.items()}


def read_recipe(recipe: str | Path | Recipe, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe by name or from a YAML file, and vary it.

    Args:
        recipe: a built-in recipe's name or a YAML file.
        settings: ``key=value`` each.
    Raises:
        RecipeError: unknown name, key or value; lists the known ones.
    """
    if isinstance(recipe, Recipe):
        found = recipe
    elif str(recipe) in recipes():
        found = Recipe.read(recipes()[str(recipe)])
    elif Path(recipe).suffix in (".yaml", ".yml") or Path(recipe).is_file():
        found = read_yaml(recipe)
    else:
        raise RecipeError(f"unknown recipe {str(recipe)!r}; known: {', '.join(sorted(recipes()))}, or a YAML file")
    found = found.with_settings(settings)
    _format_for(parse_pattern(found.pattern), found.format)
    return found


@torch.inference_mode()
def evaluate(
    model: str | Path,
    baseline: str | Path | None = None,
    text: Text | None = None,
    *,
    seqlen: int | None = None,
    tasks: Sequence[str] = (),
    progress: Counter | None = None,
) -> dict[str, Any]:
    """Measure a model directory on a text and on lm-eval tasks.

    Args:
        model: a dense or compressed model directory.
        baseline: the dense model, for the KL divergence.
        text: a file or documents, as `token_chunks` cuts them.
        seqlen: tokens in a chunk; by default the model's context, 2048 at most.
        tasks: names of lm-eval tasks.
        progress: called with (chunks done, all chunks).
    Returns:
        ``nll`` (nats a token), ``perplexity``, ``tokens`` and ``kl`` (None without a baseline) if there is a text;
        ``tasks`` if there are any.
    Raises:
        InputError: there is nothing to measure, or an input cannot be used.
    """
    if text is None and not tasks:
        raise InputError("nothing to measure: give --text FILE, --tasks NAMES or both")
    loaded, tokenizer = load(model), load_tokenizer(model)
    found: dict[str, Any] = {}
    if text is not None:
        chunks = token_chunks(tokenizer, text, _seqlen(loaded, seqlen))
        dense = None if baseline is None else load(baseline)
        if dense is not None and dense.config.vocab_size != loaded.config.vocab_size:
            raise InputError(
                f"the baseline has {dense.config.vocab_size} tokens, the model {loaded.config.vocab_size}: "
                "they must share a vocabulary"
            )
        quality = measure_quality(loaded, chunks, dense, progress=progress)
        found |= asdict(quality) | {"perplexity": quality.perplexity}
    if tasks:
        found["tasks"] = run_tasks(loaded, tokenizer, tasks)
    return found


def generate(model: str | Path, prompt: str, max_new_tokens: int) -> Generation:
    """Continue a prompt greedily with a dense or compressed model directory.

    Raises:
        InputError: the directory or the prompt cannot be used.
    """
    return generate_text(load(model), load_tokenizer(model), prompt, max_new_tokens)


def generate(model: str | Path, prompt: str, max_new_tokens: int) -> Generation:
    """Continue a prompt greedily with a dense or compressed model directory.

    Raises:
        InputError: the directory or the prompt cannot be used.
    """
    return generate_text(load(model), load_tokenizer(model), prompt, max_new_tokens)


def compress(
    model: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    recipe: str | Path | Recipe = "rheosparse",
    calibration: Text | None = None,
    out: str | Path | None = None,
    *,
    settings: Sequence[str] = (),
    samples: int = 128,
    seqlen: int | None = None,
    device: str = "auto",
    seed: int = 0,
    resume: bool = False,
    progress: Progress | None = None,
) -> CompressionReport:
    """Run a recipe on a model.

    Args:
        model: a model directory, or a model, whose layers are replaced in place.
        tokenizer: the model's; read from the directory if None.
        recipe: a built-in recipe's name, a YAML file or a `Recipe`.
        calibration: a text file or documents.
        out: the directory to write; it is whole or absent. Unfinished work lies in ``<out>.partial``.
        settings: changes to the recipe, ``key=value`` each.
        samples: calibration sequences.
        seqlen: tokens in one; by default the model's context, 2048 at most.
        device: where the arithmetic runs, a block at a time: ``auto``, ``cpu`` or ``cuda``.
        seed: of everything drawn at random.
        resume: go on with unfinished work; start anew if there is none.
        progress: told of every step.
    Raises:
        InputError: the model, the recipe, the text or ``out`` cannot be used.
        SemisparseError: writing failed.
    """
    start = time.perf_counter()
    plan = read_recipe(recipe, settings)
    place = pick_device(device)
    source = None if isinstance(model, PreTrainedModel) else Path(model)
    if source is not None:
        dense, tokenizer = _load_dense(source), tokenizer or load_tokenizer(source)
    else:
        dense = model
    batches = _calibration(dense, tokenizer, calibration, samples, seqlen, seed)
    run = partial(compress_blocks, dense, batches, plan, device=place, progress=progress)
    if out is None:
        block = _pack_layers(dense, plan, run())
        return _report(block, time.perf_counter() - start)

    out = Path(out).absolute()
    identity = fingerprint(dense, batches, plan, seed)
    block = _finished(out, identity) if resume else None
    if block is None:
        checkpoint.refuse_existing(out)
        with _job(out, resume) as job:
            block = _pack_layers(dense, plan, run(journal=Journal(job, identity))) | {"fingerprint": identity}
            mark_compressed(dense, block)
            _write(dense, tokenizer, source, out)
            shutil.rmtree(job)
    return _report(block, time.perf_counter() - start)


def _load(path: Path, dtype: torch.dtype | str) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_safetensors=True).eval()
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"cannot load {path}: {error}") from error


def _load_dense(path: Path) -> PreTrainedModel:
    directory = checkpoint.open_directory(path)
    if "quantization_config" in directory.config:
        raise InputError(f"{path} is compressed already; compress the dense model")
    return _load(path, "auto")


def _seqlen(model: PreTrainedModel, seqlen: int | None) -> int:
    context = getattr(model.config, "max_position_embeddings", None)
    if seqlen is None:
        return min(context or DEFAULT_SEQLEN, DEFAULT_SEQLEN)
    if context is not None and seqlen > context:
        raise InputError(f"seqlen is {seqlen}, the model's context is {context}")
    return seqlen


def _format_for(pattern: Pattern, name: str) -> Format:
    """Find a format by name; ``auto`` has to wait for the weight, so it only checks that some format would do."""


def _pack_layers(model: PreTrainedModel, plan: Recipe, reports: Sequence[LayerReport]) -> dict[str, Any]:
    """Replace every compressed layer by a packed one, and give the config block that describes them."""
    layers = {}
    for report in reports:
        weight = weight_of(model.get_submodule(report.name))
        packed = pack(weight, plan.format, report.pattern)
        replace_linear(model, report.name, packed)
        measured = {"density": report.density, "error": report.error, "outcome": report.outcome}
        layers[report.name] = checkpoint.describe(packed) | measured
    block = {
        "quant_method": checkpoint.METHOD,
        "version": checkpoint.VERSION,
        "layers": layers,
        "recipe": plan.to_dict(),
    }
    return block


def _report(block: Mapping[str, Any], seconds: float) -> CompressionReport:
    rows, before, after = [], 0, 0
    for name, packed in checkpoint.read_block(block).items():
        entry = block["layers"][name]
        shown = {key: entry[key] for key in ("pattern", "format", "density", "error", "outcome")}
        rows.append({"name": name, **shown, "bits_per_weight": packed.bits_per_weight})
        before += packed.shape[0] * packed.shape[1] * packed.dtype.itemsize
        after += packed.nbytes
    return CompressionReport(rows, before, after, seconds)


def _finished(out: Path, identity: str) -> dict[str, Any] | None:
    """Give the config block of an ``out`` that this very run has written already, before it was killed."""
    if not (out / "config.json").is_file():
        return None
    block = checkpoint.open_directory(out).config.get("quantization_config", {})
    if block.get("fingerprint") != identity:
        return None
    shutil.rmtree(_job_path(out), ignore_errors=True)
    return block


def _job_path(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


@contextmanager
def _job(out: Path, resume: bool) -> Iterator[Path]:
    """Hold the directory of unfinished work, alone.

    Raises:
        InputError: another run holds it, or there is unfinished work and ``resume`` is off.
    """
    job = _job_path(out)
    unfinished = job.is_dir() and not resume
    try:
        job.mkdir(parents=True, exist_ok=True)
        with FileLock(job / "lock", timeout=0):
            if unfinished:
                raise InputError(f"{job} holds an unfinished run; go on with --resume, or delete it")
            yield job
    except Timeout as error:
        raise InputError(f"another run is writing to {out}; wait for it or choose another --out") from error
    except OSError as error:
        raise SemisparseError(f"cannot write {job}: {error}") from error


def _write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, source: Path | None, out: Path) -> None:
    with checkpoint.whole_directory(out) as scratch:
        model.save_pretrained(scratch)
        if source is not None:
            for name in TOKENIZER_FILES:
                if (source / name).is_file():
                    shutil.copyfile(source / name, scratch / name)
        elif tokenizer is not None:
            tokenizer.save_pretrained(scratch)
