"""Seconds and memory of single decoder layers of large shapes: compressed, and as a candidate of `search=profile`.

Usage: python benchmarks/compressing_blocks.py OUT.csv [--works "llama2-7b candidate,llama2-70b compress"]

The model has two decoder layers with random weights, in host memory, and the calibration text is random tokens. The
time is that from the beginning of the first layer to that of the second, without packing, reading and writing. The
first row of a work has compilation. `host_gb` is the peak host memory beside the page cache, the model's included;
`device_gb` is the peak GPU memory that torch allocated.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from compressing import device_gb, held
from rows import read_rows, write_rows
from transformers import AutoModelForCausalLM, PreTrainedModel

from semisparse.api import read_recipe
from semisparse.bench.shapes import architecture
from semisparse.compress import Ranks, compress_decoder_layers
from semisparse.compress.calibration import BATCH_TOKENS
from semisparse.compress.layers import list_decoder_layers
from semisparse.compress.search import PROFILE_TOKENS
from semisparse.compress.search.anew import PrunedAnew
from semisparse.compress.search.profile import REACH
from semisparse.compress.search.score import scoring_batches
from semisparse.compress.search.space import search_space

COLUMNS = ("model", "work", "device", "tokens", "seconds", "host_gb", "device_gb")
CALIBRATION_TOKENS, SEQUENCE = 262_144, 2048
WORKS = "llama2-7b candidate,llama2-7b candidate,llama2-70b compress,llama2-7b compress"


class Second(Exception):
    """The second decoder layer begins."""


class Clock:
    """Times the first decoder layer, and ends the work when the second begins.

    Args:
        device: where the work computes.
    """

    def __init__(self, device: str) -> None:
        self._device, self._started = device, 0.0
        self.seconds = 0.0
        """Of the first decoder layer, once the second has begun."""

    def reset(self) -> None:
        """Forget the last work."""
        self._started = 0.0

    def progress(self, stage: str, done: int, total: int) -> None:
        """Take the time at the beginning of a decoder layer; print each step."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        self._started = self._started or time.perf_counter()
        self.seconds = time.perf_counter() - self._started
        print(f"{self.seconds:8.2f} s  {stage} {done}/{total}", flush=True)
        if "layer 2 of" in stage or (stage.startswith("search: pruning") and done == 1):
            raise Second


def random_layers(arch: str, device: str) -> PreTrainedModel:
    """Return a model of two decoder layers with random weights, in host memory."""
    config = architecture(arch)
    config.num_hidden_layers = 2
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.to("cpu").eval()


def random_batches(model: PreTrainedModel, tokens: int, device: str) -> list[torch.Tensor]:
    """Return random token ids, [batch, 2048] int64 each."""
    rows = BATCH_TOKENS[device] // SEQUENCE
    ids = torch.randint(0, model.config.vocab_size, (tokens // SEQUENCE, SEQUENCE))
    return list(ids.split(rows))


def work_of(model: PreTrainedModel, kind: str, tokens: int, device: str, clock: Clock) -> Callable[[], object]:
    """Return a function that compresses the model, or prunes and scores a candidate."""
    batches = random_batches(model, tokens, device)
    if kind == "compress":
        plan = read_recipe("rheosparse", ["search=none"])
        return lambda: compress_decoder_layers(model, batches, plan, device=device, progress=clock.progress)
    plan = read_recipe("rheosparse", [])
    layers = list_decoder_layers(model, plan, {})
    space = search_space(layers, REACH, lambda pattern: True)
    scored, where = scoring_batches(batches, plan.search_tokens, 0), torch.device(device)
    run = (where, 1, clock.progress, None, Ranks(), None, False)
    anew = PrunedAnew(model, layers, space, batches, scored, plan, *run)
    return lambda: anew.kls_of([(0,) * len(space)])


def peak_memory(work: Callable[[], object], device: str) -> tuple[float, float]:
    """Call a function until the second decoder layer begins; return the peak memory of host and device, in GB."""
    most, done = held("RssAnon"), threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.02):
            most = max(most, held("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        with contextlib.suppress(Second):
            work()
    finally:
        done.set()
        watcher.join()
    return most, device_gb()


def main() -> None:
    """Append a row per work to the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--works", default=WORKS)
    parser.add_argument("--share", type=int, default=1, help="divide the calibration tokens by this")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    rows = read_rows(options.out)
    for words, repeats in itertools.groupby(options.works.split(",")):  # consecutive works have one model
        arch, kind = words.split()
        tokens = (CALIBRATION_TOKENS if kind == "compress" else PROFILE_TOKENS) // options.share
        clock = Clock(device)
        work = work_of(random_layers(arch, device), kind, tokens, device, clock)
        for _ in repeats:
            clock.reset()
            host, gpu = peak_memory(work, device)
            values = (arch, kind, facts, str(tokens), f"{clock.seconds:.2f}", f"{host:.2f}", f"{gpu:.1f}")
            rows.append(dict(zip(COLUMNS, values, strict=True)))
            write_rows(options.out, rows, COLUMNS)
            print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
