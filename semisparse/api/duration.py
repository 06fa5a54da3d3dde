"""How long a compression takes on a GPU, from the operations of its matmuls, before it begins."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from semisparse.bench.machines import Machine
from semisparse.compress import Ranks, Recipe
from semisparse.compress.propagate import DecoderLayer
from semisparse.compress.prune.sparsegpt import UPDATE_COLUMNS
from semisparse.compress.search import PROFILE_TOKENS
from semisparse.compress.search.profile import REACH, most_candidates
from semisparse.compress.search.space import search_space
from semisparse.compress.trace import expert_of
from semisparse.patterns import NM, Pattern

PASSES = 2.4
"""Forwards of a decoder layer's linear layers: once whole, and in parts until each of their inputs. 2.36 in Llama."""

ATTENTION = 4
"""Forwards of attention per model that runs: until the inputs of its output layer, of the MLP and of the MLP's last
layer, and once whole."""

PRODUCTS = 15
"""Matmuls [N, K] x [K, K] while a linear layer is pruned: 11 of conjugate gradients, 4 of goals and errors."""

THREE_PASS = 0.8 / 3
"""Float32 matmuls in three bfloat16 products, of the rate of one large bfloat16 product. An H200 reaches 210 of 770."""

FACTOR = 0.43
"""The rate of an inverse factor, K^3 operations, of that of float32 matmuls: 58.6 ms for K = 11,008 on an H200."""

COLUMN_SECONDS = 4.2e-6
"""Pruning one column of a linear layer, of any number of rows."""

REST = 1.3
"""What norms, rotary embeddings, activations and splitting into halves add, as a factor."""

LAYER_BANDWIDTH = 2e9
"""Bytes per second at which a decoder layer is read, copied to the GPU, traced and taken by the thread that packs."""


def seconds_on_gpu(
    layers: Sequence[DecoderLayer], plan: Recipe, batches: Sequence[Tensor], machine: Machine | None, ranks: Ranks
) -> float | None:
    """Return about how many seconds a compression takes, beside reading the model, writing and checking the result.

    None where it is not known: on a CPU and on GPUs that gpus.yaml lacks, for recipes that tune, round in groups or
    choose by ``search=joint``, ``evolution`` and ``rheosparse``, for patterns that no kernel prunes, and with experts.

    Args:
        layers: the decoder layers.
        plan: the recipe.
        batches: calibration token ids, each [batch, tokens] int64.
        machine: the GPU that compresses.
        ranks: the processes.
    """
    linears = [(layer, name) for layer in layers for name in layer.patterns]
    known = machine is not None and machine.device == "cuda" and batches and plan.tune == "none"
    if machine is None or not known or plan.searches_bank or any(expert_of(name) for _, name in linears):
        return None
    if plan.prune != "sparsegpt" or plan.code_bits or plan.saliency != "loss" or plan.refine == "swaps":
        return None
    if not all(_is_pruned_by_a_kernel(layer.patterns[name]) for layer, name in linears):
        return None
    tokens, length = sum(batch.numel() for batch in batches), max(batch.shape[1] for batch in batches)
    seconds = sum(_layer_seconds(layer, plan, tokens, length, machine, ranks.count) for layer in layers)
    if plan.search == "profile":
        some = min(tokens, PROFILE_TOKENS)
        once = sum(_layer_seconds(layer, plan, some, length, machine, ranks.count) for layer in layers)
        candidates = most_candidates(search_space(layers, REACH, lambda _: True))
        seconds = candidates * once + (seconds if some < tokens else 0)
    return seconds


def duration(seconds: float | None) -> str:
    """Return the end of a sentence on what a compression takes; empty if its time is not known."""
    if seconds is None:
        return ""
    minutes = seconds / 60
    return f"; the GPU works for some {f'{minutes:.0f} minutes' if minutes >= 1.5 else f'{seconds:.0f} s'}"


def _is_pruned_by_a_kernel(pattern: Pattern) -> bool:
    return isinstance(pattern, NM) and pattern.window.bit_count() == 1 and pattern.window <= UPDATE_COLUMNS


def _layer_seconds(layer: DecoderLayer, plan: Recipe, tokens: int, length: int, machine: Machine, count: int) -> float:
    """Return the seconds of one decoder layer on each of ``count`` GPUs."""
    shapes = {name: layer.weight(name).shape for name in layer.patterns}
    models = 2 if plan.target == "residual" else 1
    weights = sum(n * k for n, k in shapes.values())
    inputs = {(name.rpartition(".")[0], k): k for name, (_, k) in shapes.items()}  # read by one module's layers
    features = min(k for _, k in shapes.values())
    sums = models * sum(k * k for k in inputs.values())
    sums += sum(n * k for n, k in shapes.values() if n == features and k > features) if models == 2 else 0  # r x^T
    pruning = PRODUCTS * sum(n * k * k for n, k in shapes.values())
    three_pass = 2 * (tokens * (models * PASSES * weights + sums) + pruning) / count
    # Each token attends to half of its sequence on average, by two products.
    attention = models * ATTENTION * 4 * tokens * length / 2 * features / count
    factors = 2 * sum(k**3 for _, k in shapes.values()) / count
    float32 = machine.peaks["fp32"]
    busy = three_pass / (THREE_PASS * machine.peaks["tensor fp16"]) + attention / float32 + factors / (FACTOR * float32)
    busy += COLUMN_SECONDS * sum(k for _, k in shapes.values()) / count
    return REST * busy + sum(weight.nbytes for weight in layer.module.parameters()) / LAYER_BANDWIDTH
