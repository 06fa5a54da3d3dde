"""The real models: compressed on their ``calib`` text, measured on their ``eval`` text, beside dense."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import semisparse
from semisparse.evaluate import Quality, measure_quality
from semisparse.api import load
from semisparse.checkpoint import load_tokenizer, pick_device
from semisparse.text import token_chunks

MODELS = {
    "stories260k": ("tinystories-calib.jsonl", "tinystories-eval.jsonl", 512),
    "babyllama-1m": ("tinystories-calib.jsonl", "tinystories-eval.jsonl", 256),
    "pycode-11m": ("pycode-calib.txt", "pycode-eval.txt", 512),
}
"""Texts, and tokens in a sequence."""


def parser_of(description: str | None, samples: int | None) -> argparse.ArgumentParser:
    """Make a parser of what every measurement of these models takes.

    Args:
        description: the program's docstring.
        samples: how many calibration sequences by default; None for as many as `compress` takes.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path, help="holds models/ and text/")
    parser.add_argument("csv", type=Path, help="rows that it has already are kept")
    parser.add_argument("--samples", type=int, default=samples, help="calibration sequences")
    parser.add_argument("--chunks", type=int, help="sequences of the eval text; all by default")
    parser.add_argument("--device", default="auto")
    return parser


class Subject:
    """A model that is compressed again and again; ``options`` are those of `parser_of`."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        calibration, held_out, self.seqlen = MODELS[name]
        self.options = options
        self.directory = options.shared / "models" / name
        self.calibration = options.shared / "text" / calibration
        self.device = pick_device(options.device)
        self.tokenizer = load_tokenizer(self.directory)
        self.dense = load(self.directory, options.device, torch.float32)
        held_out_text = options.shared / "text" / held_out
        self.chunks = token_chunks(self.tokenizer, held_out_text, self.seqlen)[: options.chunks]

    def compress(
        self, recipe: str, settings: Sequence[str], seed: int
    ) -> tuple[PreTrainedModel, semisparse.CompressionReport]:
        """Compress a fresh copy, and say how that went."""
        model = AutoModelForCausalLM.from_pretrained(self.directory, dtype="auto")
        report = semisparse.compress(
            model,
            self.tokenizer,
            recipe,
            self.calibration,
            settings=settings,
            samples=self.options.samples,
            seqlen=self.seqlen,
            device=self.options.device,
            seed=seed,
        )
        return model, report

    def measure(self, model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Quality:
        """Measure loss, and KL to the dense model, which stays in float32."""
        return measure_quality(model.to(self.device, dtype), self.chunks, self.dense)
