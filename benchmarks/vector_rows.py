"""KL of vectors of 32 rows if rows that agree share a vector: one CSV row per run, and a table.

    python benchmarks/vector_rows.py DATA results/vector_rows.csv --samples 60 --chunks 60

DATA is a directory with ``models/`` and ``text/``. Rows that the CSV already has are not measured again. The ways:

- *as they come*: vectors are consecutive rows.
- *gate and up*: rows of gate and up change places, and columns of down with them. The dense model stays the same, and a
  packed model needs nothing more.
- *every layer*: rows of every linear layer change places, as if its output were permuted back. No format stores this.
- *rotated*: the residual stream in the basis of its principal components, norms folded into the linear layers. The
  dense model computes the same, but its head is no longer tied to its embedding.
- *rotated, every layer*: both.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from models import MODELS, Subject, parser_of
from rows import add_row, missing, read_rows
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from semisparse.compress import Recipe
from semisparse.compress.pipeline import compress_decoder_layers
from semisparse.compress.prune import PrunedLayer, Statistics
from semisparse.patterns import Pattern, parse_pattern
from semisparse.patterns.base import blocks_along, top_per_row
from semisparse.text import token_chunks

KEEP, WINDOW, LENGTH = 16, 32, 32
WAYS = ("as they come", "gate and up", "every layer", "rotated", "rotated, every layer")
ROUNDS = 30
COLUMNS = ("model", "way", "length", "nll", "kl", "tokens", "samples", "cpu_seconds")

layer_module: Any = importlib.import_module("semisparse.compress.prune.layer")


def main() -> None:
    """Measure the runs that the CSV lacks, then print the table."""
    parser = parser_of(__doc__, samples=60)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ways", default="|".join(WAYS), help="separated by |")
    parser.add_argument("--length", type=int, default=LENGTH)
    options = parser.parse_args()
    rows = read_rows(options.csv)
    models, ways = options.models.split(","), options.ways.split("|")
    absent = missing(rows, model=models, way=ways, length=[str(options.length)])
    for name, keys in groupby(absent, key=itemgetter(0)):
        subject = Subject(name, options)
        for _, way, _ in keys:
            add_row(options.csv, rows, measure(subject, name, way, options))
    print(table(rows))


def measure(subject: Subject, name: str, way: str, options: argparse.Namespace) -> dict[str, str]:
    """Compress and evaluate the model in one of the ways."""
    started = time.process_time()
    model = AutoModelForCausalLM.from_pretrained(subject.directory, dtype=torch.float32)
    chunks = token_chunks(subject.tokenizer, subject.calibration, subject.seqlen)
    picked = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(0))[: options.samples]
    batches = [torch.as_tensor(chunks[index])[None] for index in picked]
    if way.startswith("rotated"):
        rotate(model, batches)
    if way == "gate and up":
        permute_mlp(model, batches, options.length)
    recipe = Recipe(pattern=f"{KEEP}:{WINDOW}v{options.length}", format="vector_nm")
    with rows_permuted() if way.endswith("every layer") else contextlib.nullcontext():
        compress_decoder_layers(model, batches, recipe)
    seconds = time.process_time() - started
    quality = subject.measure(model)
    values = (name, way, options.length, quality.nll, quality.kl, quality.tokens, options.samples, f"{seconds:.0f}")
    return dict(zip(COLUMNS, map(str, values), strict=True))


def group_rows(scores: Tensor, length: int) -> Tensor:
    """Return an order of rows in which those that agree on the columns to keep are neighbours.

    Groups keep the vectors with the largest sum of scores; rows go to the group that keeps most of theirs, as many to
    each; and so on, while the sum of what is kept grows. Best of three starts.

    Args:
        scores: saliency, [N, K].
        length: rows per group.
    """
    n = len(scores)
    padded = torch.cat((scores, scores.new_zeros(-n % length, scores.shape[1])))
    groups = len(padded) // length
    first = [torch.arange(len(padded)) // length]
    first.append(torch.randperm(len(padded), generator=torch.Generator().manual_seed(0)) % groups)
    masks = _mask(padded)
    main = torch.linalg.svd(masks - masks.mean(0), full_matrices=False)[0][:, 0]
    first.append(torch.empty_like(first[0]).scatter_(0, main.argsort(), first[0]))
    best = max((_improved(padded, start, groups, length) for start in first), key=lambda found: found[0])
    return best[1][:n].argsort(stable=True)


def _improved(scores: Tensor, group: Tensor, groups: int, length: int) -> tuple[float, Tensor]:
    best = (_kept(scores, group, groups), group)
    for _ in range(ROUNDS):
        group = _assigned(scores @ _group_masks(scores, group, groups).T, length)
        kept = _kept(scores, group, groups)
        if kept <= best[0]:
            break
        best = (kept, group)
    return best


def _mask(scores: Tensor) -> Tensor:
    """Mark the columns that each row keeps, [rows, K] float."""
    blocks = blocks_along(scores, WINDOW, dim=1)
    return top_per_row(blocks, KEEP).flatten(1)[:, : scores.shape[1]].to(scores)


def _group_masks(scores: Tensor, group: Tensor, groups: int) -> Tensor:
    return _mask(scores.new_zeros(groups, scores.shape[1]).index_add_(0, group, scores))


def _kept(scores: Tensor, group: Tensor, groups: int) -> float:
    return float((scores * _group_masks(scores, group, groups)[group]).sum())


def _assigned(benefit: Tensor, length: int) -> Tensor:
    """Assign rows to groups of equal size by the largest benefit [rows, groups]: prices, then one row after another."""
    groups = benefit.shape[1]
    prices, step = benefit.new_zeros(groups), 0.3 * benefit.std()
    for iteration in range(200):
        chosen = (benefit - prices).argmax(1)
        excess = torch.bincount(chosen, minlength=groups) / length - 1
        if not excess.any():
            return chosen
        prices = prices + step * excess.clamp(-1, 1) / (1 + iteration / 20)
    benefit = benefit - prices
    room = torch.full((groups,), length)
    best = benefit.topk(min(2, groups), 1).values
    for row in (best[:, 0] - best[:, -1]).argsort(descending=True).tolist():
        chosen[row] = benefit[row].masked_fill(room == 0, -torch.inf).argmax()
        room[chosen[row]] -= 1
    return chosen


@contextlib.contextmanager
def rows_permuted() -> Iterator[None]:
    """Prune every layer in an order of its rows, and put the rows back."""
    plain = layer_module.prune_levels

    def permuted(
        weight: Tensor, patterns: Sequence[Pattern], statistics: Statistics, recipe: Recipe
    ) -> Iterator[PrunedLayer]:
        order = group_rows(_saliency(weight.float(), statistics, recipe), parse_pattern(recipe.pattern).length)
        cross = None if statistics.cross is None else statistics.cross[order]
        for pruned in plain(weight[order], patterns, replace(statistics, cross=cross), recipe):
            yield replace(pruned, weight=pruned.weight[order.argsort()])

    layer_module.prune_levels = permuted
    try:
        yield
    finally:
        layer_module.prune_levels = plain


def _saliency(weight: Tensor, statistics: Statistics, recipe: Recipe) -> Tensor:
    """Return what pruning each weight alone would cost, [N, K]."""
    problem = layer_module._normalise(weight, parse_pattern(recipe.pattern), statistics, recipe)
    losses = problem.goal.square() / problem.factor.upper.square().sum(0)
    return losses[:, problem.order.argsort()]


def hessians(model: PreTrainedModel, batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the sum of x x^T of each linear layer's inputs, by module name."""
    sums: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def add(_: nn.Module, args: tuple[Tensor]) -> None:
            x = args[0].flatten(0, -2)
            sums[name] = sums.get(name, 0) + x.T @ x

        return add

    handles = [
        module.register_forward_pre_hook(hook(name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "layers" in name
    ]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in handles:
        handle.remove()
    return sums


@torch.no_grad()
def permute_mlp(model: PreTrainedModel, batches: Sequence[Tensor], length: int) -> None:
    """Permute the rows of gate and up and the columns of down in each decoder layer; the model computes the same."""
    sums, recipe = hessians(model, batches), Recipe(pattern=f"{KEEP}:{WINDOW}v{length}")
    for index, layer in enumerate(model.model.layers):
        scores = []
        for name in ("gate_proj", "up_proj"):
            statistics = Statistics(sums[f"model.layers.{index}.mlp.{name}"])
            scores.append(_saliency(getattr(layer.mlp, name).weight, statistics, recipe))
        order = group_rows(torch.cat(scores, 1), length)
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
            linear.weight.copy_(linear.weight[order])
        layer.mlp.down_proj.weight.copy_(layer.mlp.down_proj.weight[:, order])


@torch.no_grad()
def rotate(model: PreTrainedModel, batches: Sequence[Tensor]) -> None:
    """Rotate the residual stream to the principal components of the layers' inputs; the model computes the same.

    Components are dealt to the windows in turn, so that each window has strong and weak ones.
    """
    decoder = model.model
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    reading = []
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, linears in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            reading.append((norm, linears))
    reading.append((decoder.norm, (model.lm_head,)))
    for norm, linears in reading:
        for linear in linears:
            linear.weight.mul_(norm.weight)
        norm.weight.fill_(1)
    sums = hessians(model, batches)
    inputs = [total for name, total in sums.items() if name.endswith(("q_proj", "gate_proj"))]
    covariance = sum((total / total.trace() for total in inputs), torch.zeros_like(inputs[0]))
    components = torch.linalg.eigh(covariance.double())[1].flip(1).float()
    windows = max(1, len(components) // WINDOW)
    components = components[:, torch.arange(len(components)).view(-1, windows).T.flatten()]
    decoder.embed_tokens.weight.copy_(decoder.embed_tokens.weight @ components)
    for _, linears in reading:
        for linear in linears:
            linear.weight.copy_(linear.weight @ components)
    for layer in decoder.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.copy_(components.T @ linear.weight)


def table(rows: list[dict[str, str]]) -> str:
    """Return the KL of every model and way as a Markdown table."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    kl = {(row["model"], row["way"]): f"{float(row['kl']):.3f}" for row in rows if row["length"] == str(LENGTH)}
    lines = [f"| | {' | '.join(models)} |", "|---" * (1 + len(models)) + "|"]
    for way in WAYS:
        lines.append(f"| {way} | {' | '.join(kl.get((model, way), '') for model in models)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
