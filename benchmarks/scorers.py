"""Seconds and GPU memory of scoring candidates: by a copy of the whole model, and one decoder layer at a time.

Usage: python benchmarks/scorers.py OUT.csv [--arch llama2-7b] [--blocks 8] [--candidates 64] [--tokens 2048]

The model has random weights, its bank weights of two densities, by magnitude. Each candidate differs from the parent in
one linear layer, as where a joint search measures what each choice loses. Both must give the same scores.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from compressing import device_gb
from rows import read_rows, write_rows
from transformers import AutoModelForCausalLM

from semisparse.api import read_recipe
from semisparse.bench.shapes import architecture
from semisparse.compress import LayerReport, Ranks
from semisparse.compress.layers import list_decoder_layers
from semisparse.compress.search.bank import Bank
from semisparse.compress.search.masked import to_masked
from semisparse.compress.search.score import Scorer
from semisparse.compress.search.space import search_space
from semisparse.compress.search.streaming import StreamingScorer
from semisparse.nn import weight_of

COLUMNS = ("model", "blocks", "tokens", "device", "scorer", "candidates", "start_seconds", "seconds", "device_gb")
LEVELS = (0, 3)


def main() -> None:
    """Append a row per scorer to the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", default="llama2-7b")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = architecture(options.arch)
    config.num_hidden_layers = options.blocks
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to("cpu").eval()
    space = search_space(list_decoder_layers(model, read_recipe("rheosparse", []), {}), 1, lambda _: True)
    bank: Bank = {}
    for linear in space:
        weight = weight_of(model.get_submodule(linear.name)).detach().to(device)
        report = LayerReport(linear.name, "", 0.5, None, "magnitude", 0.0)
        masks = {level: linear.patterns[level].mask(weight.abs().float()) for level in LEVELS}
        bank[linear.name] = {level: to_masked(weight * mask, report) for level, mask in masks.items()}
    batches = [torch.randint(0, config.vocab_size, (1, options.tokens))]
    uniform, rng = (0,) * len(space), random.Random(0)
    changed = [rng.randrange(len(space)) for _ in range(options.candidates)]
    wanted = [((*uniform[:index], LEVELS[1], *uniform[index + 1 :]), [0]) for index in changed]
    rows, kls = read_rows(options.out), []
    for kind in (Scorer, StreamingScorer):
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        scorer = kind(model, space, bank, batches, device, Ranks())
        scorer.set_parent(uniform, scorer.score(uniform, [0]))
        ready = time.perf_counter()
        kls.append([score.kl for (score,) in scorer.score_all(wanted, keep_states=False)])
        seconds = time.perf_counter() - ready
        facts = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        run = (options.arch, options.blocks, options.tokens, facts, kind.__name__, options.candidates)
        values = (*run, f"{ready - started:.2f}", f"{seconds:.2f}", f"{device_gb():.1f}")
        rows.append(dict(zip(COLUMNS, map(str, values), strict=True)))
        write_rows(options.out, rows, COLUMNS)
        print(rows[-1], flush=True)
        del scorer
    assert kls[0] == kls[1], max(abs(a - b) for a, b in zip(*kls, strict=True))


if __name__ == "__main__":
    main()
