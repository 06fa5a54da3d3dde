"""Compressing a model: run a recipe, pack the layers, write the checkpoint."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from semisparse import checkpoint
from semisparse.api.chosen import Chosen, compress_chosen
from semisparse.api.duration import duration, seconds_on_gpu
from semisparse.api.gains import machine_here
from semisparse.api.job import finished_block, job_directory, write_model
from semisparse.api.loading import load_uncompressed
from semisparse.api.needs import free_memory, needs_of
from semisparse.api.recipe import can_store, read_recipe
from semisparse.api.report import CompressionReport, bits_per_weight, report_of
from semisparse.api.rivals import Rivals
from semisparse.api.sequences import Text, sequence_length
from semisparse.api.suitable import require_suitable
from semisparse.api.takeover import kept_layers, leave_unrounded_dense, rounded_modules
from semisparse.api.targets import (
    WORKLOADS,
    check_targets,
    limits_of,
    machine_of,
    options_for,
    reached,
    written,
)
from semisparse.checkpoint.files import require_directory
from semisparse.compress import (
    NEEDS_CALIBRATION,
    Journal,
    Progress,
    Ranks,
    Recipe,
    SharedJournal,
    all_ranks,
    calibration_batches,
    calibration_tokens,
    dense_layers,
    fingerprint,
    open_journal,
    split_decoder_experts,
    warn_if_fewer,
    weights_digest,
)
from semisparse.compress.distributed.ranks import local_rank, require_same
from semisparse.compress.journal import PARTS, recorded_parts
from semisparse.compress.layers import list_decoder_layers
from semisparse.compress.search import SearchResult, search_patterns
from semisparse.compress.search.allocate import Unreachable
from semisparse.compress.search.joint import JointResult, search_choices
from semisparse.compress.staying_dense import warn_if_unmatched
from semisparse.errors import InputError
from semisparse.integrations.importers import Rounded
from semisparse.integrations.transformers import mark_compressed
from semisparse.runtime.modes import torch_defaults

THREADS = "number of CPU threads"


@torch_defaults()
def compress(
    model: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    recipe: str | Path | Recipe = "rheosparse",
    calibration: Text | None = None,
    out: str | Path | None = None,
    *,
    settings: Sequence[str] = (),
    target: Mapping[str, Any] | None = None,
    gpu: str | None = None,
    samples: int | None = None,
    seqlen: int | None = None,
    device: str | torch.device = "auto",
    seed: int = 0,
    resume: bool = False,
    offload: str | Path | None = None,
    progress: Progress = lambda stage, done, total: None,
    inform: Callable[[str], None] = lambda line: None,
) -> CompressionReport:
    """Run a recipe on a model.

    Where torch.distributed is initialised, every rank calls this with the same arguments. They share the work; only the
    first one writes ``out``, each writes its hidden states to ``offload``. All call ``progress`` and ``inform``; stages
    that only the first runs (measuring dense low bits, tuning) are reported by the first alone. All return the report.

    Args:
        model: a model directory, or a model in memory, whose layers are replaced in place.
        tokenizer: the model's tokenizer; by default read from the directory.
        recipe: a built-in recipe's name, a YAML file or a `Recipe`.
        calibration: a text file or documents.
        out: the directory to write, atomically. Unfinished work is kept in ``<out>.partial``.
        settings: changes to the recipe, ``key=value`` each.
        target: what the recipe ``auto`` has to reach, such as ``{"bits": 3.0, "decode": 2.5}``; keys of
            `compress.recipe.TARGETS`.
        gpu: the machine that speed-ups are predicted for, as in the command ``semisparse plan``; by default this
            machine's GPU, else its CPU. It needs a target.
        samples: number of calibration sequences; by default `calibration_tokens` tokens are used, at most 262,144.
        seqlen: tokens per sequence; by default the model's context, 2048 at most.
        device: where one decoder layer at a time is compressed: ``auto``, ``cpu`` or ``cuda``.
        seed: the random seed.
        resume: continue unfinished work, if there is any.
        offload: a directory on a disk for the hidden states of the calibration tokens; by default they are in memory,
            on the device.
        progress: called with (stage, steps done, all steps).
        inform: called with a sentence that says what memory and disk the run will take, and on a GPU that gpus.yaml has
            about how long, for recipes that `seconds_on_gpu` knows.
    Returns:
        The report, per layer and in total.
    Raises:
        InputError: the model, the recipe, the text or ``out`` is invalid, there is too little memory, or ranks differ.
        SemisparseError: writing failed.
    """
    start = time.perf_counter()
    plan = read_recipe(recipe, [*settings, *([f"gpu={gpu}"] if gpu else [])], target)
    where = checkpoint.pick_device(device)
    machine = machine_of(plan) or machine_here(where)  # before any work: refuses an unknown machine
    ranks, offload = all_ranks(where), None if offload is None else Path(offload)
    _check_request(model, calibration, out, plan, offload, resume, ranks)
    stored: dict[str, Rounded] = {}
    if isinstance(model, PreTrainedModel):
        dense, source = model, None
    else:
        source = Path(model)
        (dense, stored), tokenizer = load_uncompressed(source), tokenizer or checkpoint.load_tokenizer(source)
        require_suitable(dense)
    batches = _calibration_batches(dense, tokenizer, calibration, samples, seqlen, seed, where)
    split_decoder_experts(dense, plan)
    warn_if_unmatched(dense, plan)
    rounded = rounded_modules(dense, stored)
    plan = leave_unrounded_dense(plan, dense, rounded, stored)
    inputs = fingerprint(batches, plan, seed=seed, device=where)
    require_same(ranks, inputs | _machine_facts(where))
    layers = list_decoder_layers(dense, plan, {})
    facts = (dense, layers, plan, batches, where, ranks, offload)
    needs, free = needs_of(*facts), free_memory(where, offload)
    streams = ranks.first(lambda: plan.searches_bank and not needs.fits(free))
    if streams:
        needs = needs_of(*facts, streams=True)
    span = seconds_on_gpu(layers, plan, batches, machine_here(where), ranks, streams)
    inform(f"{needs}{duration(span)}")
    needs.check(free)
    tuning: list[dict[str, Any]] = []
    run = partial(
        _run_recipe,
        dense,
        batches,
        plan,
        tuning,
        rounded=rounded,
        seed=seed,
        device=where,
        progress=progress,
        mapped=source is not None,
        ranks=ranks,
        offload=offload,
        streams=streams,
    )
    if out is None:
        block = mark_compressed(dense, run(journal=None))
        return report_of(block, time.perf_counter() - start, tuning, machine)

    out = Path(out).absolute()
    identity = {"model weights": _shared_digest(dense, ranks)} | inputs
    finished = ranks.first(lambda: finished_block(out, identity)) if resume else None
    if finished is not None:
        return report_of(finished, time.perf_counter() - start, tuning, machine)
    checkpoint.refuse_existing(out)
    with ranks.held_by_first(job_directory(out, resume)) as job:
        ranks.parts = ranks.first(lambda: recorded_parts(job)) or ranks.parts
        # On a CPU the number of threads changes the order of floating-point sums, and so the stored bytes.
        threads = {THREADS: str(torch.get_num_threads())} if where.type == "cpu" else {}
        journal = open_journal(job, identity | threads | {PARTS: str(ranks.parts)}, ranks)
        block = run(journal=journal) | {"origin": identity}

        def finish() -> CompressionReport:
            marked = mark_compressed(dense, block)
            write_model(dense, tokenizer, source, out, job)
            shutil.rmtree(job)
            return report_of(marked, time.perf_counter() - start, tuning, machine)

        return ranks.first(finish)


def _check_request(
    model: str | Path | PreTrainedModel,
    calibration: Text | None,
    out: str | Path | None,
    plan: Recipe,
    offload: Path | None,
    resume: bool,
    ranks: Ranks,
) -> None:
    """Refuse what cannot be compressed, before the model is loaded.

    Raises:
        InputError: says what is missing or in the way.
    """
    if isinstance(model, str | Path):
        require_directory(Path(model))
    else:
        require_suitable(model)
    if calibration is None and plan.needs_calibration:
        raise InputError(NEEDS_CALIBRATION)
    if out is None and ranks.count > 1:
        raise InputError("with several ranks, out is required: only the first rank has the compressed model")
    if out is not None and not resume:
        checkpoint.refuse_existing(Path(out).absolute())
    if offload is not None and not offload.is_dir():
        raise InputError(f"--offload {offload} is no directory; make it, or name one on a disk with room")


def _calibration_batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    text: Text | None,
    samples: int | None,
    seqlen: int | None,
    seed: int,
    device: torch.device,
) -> list[Tensor]:
    """Return token ids, each [batch, tokens] int64; none without a text."""
    if text is None:
        return []
    if tokenizer is None:
        raise InputError("calibration text needs the model's tokenizer")
    tokens, length = calibration_tokens(model), sequence_length(model, seqlen)
    drawn: dict[str, Any] = {"samples": samples, "seqlen": length, "seed": seed, "device": device.type}
    batches = calibration_batches(tokenizer, text, tokens=tokens, **drawn)
    warn_if_fewer(batches, samples)
    return batches


def _machine_facts(device: torch.device) -> dict[str, str]:
    """Return what must be the same on every rank besides the settings of the run."""
    if device.type == "cuda":
        return {"GPU": torch.cuda.get_device_name(device)}
    return {"CPU instructions": torch.backends.cpu.get_cpu_capability(), THREADS: str(torch.get_num_threads())}


def _shared_digest(model: PreTrainedModel, ranks: Ranks) -> str:
    """Return the digest of the weights, which one rank of each host computes.

    Raises:
        InputError: the hosts have different weights.
    """
    own = weights_digest(model) if local_rank() == 0 else None
    digests = ranks.gather(own)
    different = [rank for rank, digest in enumerate(digests) if digest not in (None, digests[0])]
    if different:
        raise InputError(f"the model of rank {different[0]} has other weights than that of rank 0; copy it again")
    return str(digests[0])


def _run_recipe(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    plan: Recipe,
    tuning: list[dict[str, Any]],
    *,
    rounded: Mapping[str, Rounded],
    seed: int,
    device: torch.device,
    progress: Progress,
    mapped: bool,
    ranks: Ranks,
    offload: Path | None,
    streams: bool,
    journal: Journal | None,
) -> dict[str, Any]:
    """Replace the layers by packed ones, and append a report per tuning stage to ``tuning``.

    Returns:
        The config block; on other ranks than the first it lacks the layers and ``rival``.
    """
    shared: dict[str, Any] = {"device": device, "progress": progress, "ranks": ranks, "offload": offload}
    run = shared | {"journal": SharedJournal(journal, ranks) if journal else None, "streams": streams}
    # A joint search compares dense low bits itself, so no rivals are measured; nor are they if `format` excludes them.
    has_rivals = batches and plan.search != "joint" and ranks.is_first
    rivals = Rivals(model, plan, batches, device, progress) if has_rivals else None
    result: SearchResult | JointResult | None = None
    if plan.search == "joint":
        result = _search_choices(model, batches, plan, seed=seed, **run)
    elif plan.search != "none":
        result = search_patterns(model, batches, plan, seed=seed, can_store=partial(can_store, plan), **run)
    kept = kept_layers(model, rounded, plan)
    chosen = Chosen.of(result, kept)
    layers = list_decoder_layers(model, plan, {})
    dense = dense_layers(model, plan, {layer.full_name(name) for layer in layers for name in layer.patterns})
    packed, compared = compress_chosen(
        model, batches, plan, chosen, tuning, kept=kept, seed=seed, mapped=mapped, journal=journal, **shared
    )
    settings = {"quant_method": checkpoint.METHOD, "version": checkpoint.VERSION, "recipe": plan.to_dict()}
    search = result.metrics() | compared if result else None
    block = settings | {
        "layers": packed.entries,
        "dense": [asdict(layer) for layer in dense],
        "search": search,
    }
    rival = rivals.better_than(model, bits_per_weight(block)) if rivals else None
    return block | ({"rival": rival} if rival else {})


def _search_choices(model: PreTrainedModel, batches: Sequence[Tensor], plan: Recipe, **run: Any) -> JointResult:
    """Choose pattern, bits and format of every layer such that the recipe's targets hold."""
    targets = dict(plan.targets)
    check_targets(targets, model.dtype)
    workloads = [key for key in targets if key in WORKLOADS]
    machine = machine_of(plan)
    many_tokens = machine is not None and machine.device == "cuda" and "prompt" in workloads
    options = options_for(model, plan, workloads, machine, rounds=many_tokens)
    dtype = model.dtype
    try:
        return search_choices(model, batches, plan, options, limits_of(targets, dtype), **run)
    except Unreachable as error:
        best = reached(targets, {**error.least, "bits": error.least.get("bits", 1.0)}, dtype)
        alone = " for each alone" if len(targets) > 1 else ""
        raise InputError(f"{error} ({written(targets)}); the best possible{alone} is {written(best)}") from error
