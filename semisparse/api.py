"""The Python entry points, where compression meets formats."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from semisparse import checkpoint
from semisparse.checkpoint import inspect_directory
from semisparse.compress import (
    Journal,
    LayerReport,
    Progress,
    Recipe,
    Trained,
    calibration_batches,
    compress_blocks,
    fingerprint,
    read_yaml,
)
from semisparse.compress.search import Found, search_patterns
from semisparse.errors import InputError, RecipeError, SemisparseError
from semisparse.evaluate import Generation, generate_text, measure_quality, run_tasks
from semisparse.formats import Packed, linear, registry
from semisparse.formats.availability import list_formats
from semisparse.formats.base import get_format
from semisparse.integrations.loading import load, load_dense, load_tokenizer, pick_device
from semisparse.integrations.transformers import mark_compressed
from semisparse.nn import replace_linear, weight_of
from semisparse.patterns import Pattern, parse_pattern
from semisparse.text import token_chunks

__all__ = [
    "CompressionReport",
    "compress",
    "evaluate",
    "generate",
    "inspect_directory",
    "linear",
    "list_formats",
    "load",
    "load_tokenizer",
    "pack",
    "read_recipe",
    "recipes",
]

Text = str | Path | Sequence[str]
Counter = Callable[[int, int], None]
"""Called with (done, total)."""

DEFAULT_SEQLEN = 2048
"""Tokens in a calibration or evaluation sequence, where the model's context is not shorter."""

SAMPLE_ROWS = 256
"""Rows of a weight that formats are compared on by ``format: auto``."""

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
        search: what the search over the layers found, None without one: ``uniform_kl`` and ``kl`` (nats a token, on
            its tokens), ``evaluations`` and ``tokens``.
        tuning: one mapping a tuning of this run: stage, held-out loss before and after, steps, failure, seconds and
            peak_bytes (of GPU memory).
    """

    layers: list[dict[str, Any]]
    bytes_before: int
    bytes_after: int
    seconds: float
    search: dict[str, Any] | None
    tuning: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Give the report as plain JSON values."""
        return asdict(self)


def pack(weight: Tensor, format: str, pattern: str | Pattern, **options: Any) -> Packed:
    """Store a weight in a format, in the layout that the kernels of its device want.

    Args:
        weight: [N, K], float16, bfloat16 or float32, obeying the pattern.
        format: a format's name, or ``auto`` for the lossless one that takes the fewest bytes.
        pattern: as `parse_pattern` reads it.
        options: the format's own.
    Raises:
        InputError: the format is unknown or cannot store this; `PatternError` names the row and block.
    """
    return _pack_for_disk(weight, format, pattern, **options).to(weight.device)


def _pack_for_disk(weight: Tensor, format: str, pattern: str | Pattern, **options: Any) -> Packed:
    pattern = parse_pattern(pattern)
    name = _smallest_format(weight, pattern) if format == "auto" else format
    return get_format(name).pack(weight, pattern, **options)


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
    if found.format != "auto":
        reason = get_format(found.format).accepts(parse_pattern(found.pattern))
        if reason:
            raise RecipeError(f"format {found.format} cannot store pattern {found.pattern}: {reason}")
    rounding = _pack_options(found)
    able = [form.name for form in registry().values() if rounding in form.variants]
    if found.format not in able and (rounding or found.format != "auto"):
        raise RecipeError(
            f"format {found.format} does not store quant={found.quant}; set another one, or format={' or '.join(able)}"
        )
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
        tasks: names of lm-eval tasks, or YAML files of one's own.
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


def compress(
    model: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    recipe: str | Path | Recipe = "rheosparse",
    calibration: Text | None = None,
    out: str | Path | None = None,
    *,
    settings: Sequence[str] = (),
    samples: int | None = None,
    seqlen: int | None = None,
    device: str = "auto",
    seed: int = 0,
    resume: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> CompressionReport:
    """Run a recipe on a model.

    Args:
        model: a model directory, or a model, whose layers are replaced in place.
        tokenizer: the model's; read from the directory if None.
        recipe: a built-in recipe's name, a YAML file or a `Recipe`.
        calibration: a text file or documents.
        out: the directory to write; it is whole or absent. Unfinished work lies in ``<out>.partial``.
        settings: changes to the recipe, ``key=value`` each.
        samples: calibration sequences; by default as many as hold 262,144 tokens.
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
    if isinstance(model, PreTrainedModel):
        dense, source = model, None
    else:
        source = Path(model)
        dense, tokenizer = load_dense(source), tokenizer or load_tokenizer(source)
    batches = []
    if calibration is not None:
        if tokenizer is None:
            raise InputError("calibration text needs the model's tokenizer")
        length = _seqlen(dense, seqlen)
        batches = calibration_batches(tokenizer, calibration, samples=samples, seqlen=length, seed=seed)
    tuning: list[dict[str, Any]] = []
    run = partial(_run_recipe, dense, batches, plan, tuning, seed=seed, device=place, progress=progress)
    if out is None:
        block = run(journal=None)
        mark_compressed(dense, block)
        return _report(block, time.perf_counter() - start, tuning)

    out = Path(out).absolute()
    identity = fingerprint(dense, batches, plan, seed=seed, device=place)
    finished = _finished(out, identity) if resume else None
    if finished is not None:
        return _report(finished, time.perf_counter() - start, tuning)
    checkpoint.refuse_existing(out)
    with _job(out, resume) as job:
        block = run(journal=Journal(job, identity)) | {"origin": identity}
        mark_compressed(dense, block)
        _write(dense, tokenizer, source, out, job)
        shutil.rmtree(job)
    return _report(block, time.perf_counter() - start, tuning)


def _seqlen(model: PreTrainedModel, seqlen: int | None) -> int:
    context = getattr(model.config, "max_position_embeddings", None)
    if seqlen is None:
        return min(context or DEFAULT_SEQLEN, DEFAULT_SEQLEN)
    if context is not None and seqlen > context:
        raise InputError(f"seqlen is {seqlen}, the model's context is {context}")
    return seqlen


def _smallest_format(weight: Tensor, pattern: Pattern) -> str:
    sample = weight[:SAMPLE_ROWS]
    sizes = {
        form.name: sum(t.numel() * t.element_size() for t in form.pack_weight(sample, pattern)[1].values())
        for form in registry().values()
        if form.lossless and form.accepts(pattern) is None
    }
    if not sizes:
        raise InputError(f"no lossless format stores pattern {pattern}; name one with format=NAME")
    return min(sizes, key=lambda name: sizes[name])


def _pack_options(plan: Recipe) -> dict[str, str]:
    return {} if plan.quant == "none" else {"kind": plan.quant}


def _run_recipe(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    plan: Recipe,
    tuning: list[dict[str, Any]],
    *,
    seed: int,
    device: torch.device,
    progress: Progress,
    journal: Journal | None,
) -> dict[str, Any]:
    """Replace the layers by compressed ones, note each tuning, and give the config block that describes them."""

    def trained(stage: str, found: Trained) -> None:
        tuning.append({"stage": stage, **asdict(found)})

    run: dict[str, Any] = {"device": device, "progress": progress, "journal": journal}
    found = None
    if plan.search != "none":
        found = search_patterns(model, batches, plan, seed=seed, accepts=partial(_can_store, plan), **run)
    patterns = found.patterns if found else None
    reports = compress_blocks(model, batches, plan, seed=seed, patterns=patterns, trained=trained, **run)
    return _pack_layers(model, plan, reports, found)


def _can_store(plan: Recipe, pattern: Pattern) -> bool:
    return plan.format == "auto" or get_format(plan.format).accepts(pattern) is None


def _pack_layers(
    model: PreTrainedModel, plan: Recipe, reports: Sequence[LayerReport], found: Found | None
) -> dict[str, Any]:
    """Replace every compressed layer by a packed one, and give the config block that describes them."""
    layers = {}
    for report in reports:
        weight = weight_of(model.get_submodule(report.name))
        options = _pack_options(plan) | ({"scales": report.scales.to(weight.device)} if report.scales else {})
        packed = _pack_for_disk(weight, plan.format, report.pattern, **options)
        replace_linear(model, report.name, packed)
        measured = {"density": report.density, "error": report.error, "outcome": report.outcome}
        layers[report.name] = checkpoint.describe(packed) | measured
    settings = {"quant_method": checkpoint.METHOD, "version": checkpoint.VERSION, "recipe": plan.to_dict()}
    return settings | {"layers": layers, "search": found.measured() if found else None}


def _report(block: Mapping[str, Any], seconds: float, tuning: list[dict[str, Any]]) -> CompressionReport:
    rows, before, after = [], 0, 0
    for name, packed in checkpoint.read_block(block).items():
        entry = block["layers"][name]
        shown = {key: entry[key] for key in ("pattern", "format", "density", "error", "outcome")}
        rows.append({"name": name, **shown, "bits_per_weight": packed.bits_per_weight})
        before += packed.shape[0] * packed.shape[1] * packed.dtype.itemsize
        after += packed.nbytes
    return CompressionReport(rows, before, after, seconds, block.get("search"), tuning)


def _finished(out: Path, identity: Mapping[str, str]) -> dict[str, Any] | None:
    """Give the config block of an ``out`` that this very run has written already, before it was killed."""
    if not (out / "config.json").is_file():
        return None
    block = checkpoint.open_directory(out).config.get("quantization_config", {})
    if block.get("origin") != identity:
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


def _write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, source: Path | None, out: Path, job: Path
) -> None:
    """Write the checkpoint, prepared among the unfinished work: a kill leaves nothing that looks like a model."""
    with checkpoint.whole_directory(out, workplace=job) as scratch:
        model.save_pretrained(scratch)
        if source is not None:
            for name in TOKENIZER_FILES:
                if (source / name).is_file():
                    shutil.copyfile(source / name, scratch / name)
        elif tokenizer is not None:
            tokenizer.save_pretrained(scratch)
