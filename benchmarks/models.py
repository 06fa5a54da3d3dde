"""The trained models of the quality benchmarks, with their calibration and evaluation texts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import semisparse
from semisparse.api import load
from semisparse.checkpoint import load_tokenizer, pick_device
from semisparse.evaluate import Quality, measure_quality
from semisparse.text import token_chunks

MODELS = {
    "stories260k": ("tinystories-calib.jsonl", "tinystories-eval.jsonl", 512),
    "babyllama-1m": ("tinystories-calib.jsonl", "tinystories-eval.jsonl", 256),
    "pycode-11m": ("pycode-calib.txt", "pycode-eval.txt", 512),
    "mixture": ("pycode-calib.txt", "pycode-eval.txt", 256),
    "mixture-dense": ("pycode-calib.txt", "pycode-eval.txt", 256),
}
"""Model -> calibration text, evaluation text, tokens per sequence."""


def parser_of(description: str | None, samples: int | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all quality benchmarks have.

    Args:
        description: the program's docstring.
        samples: the default number of calibration sequences; None for the default of `compress`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path, help="a directory with models/ and text/")
    parser.add_argument("csv", type=Path, help="the output; rows that it already has are kept")
    parser.add_argument("--samples", type=int, default=samples, help="calibration sequences")
    parser.add_argument("--chunks", type=int, help="evaluation sequences; all by default")
    parser.add_argument("--device", default="auto")
    return parser


class Subject:
    """A model that is compressed in several ways, with its texts.

    Args:
        name: a name in `MODELS`.
        options: the parsed arguments of `parser_of`.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        calibration, held_out, self.seqlen = MODELS[name]
        self.options = options
        self.directory = options.shared / "models" / name
        self.calibration = options.shared / "text" / calibration
        self.device = pick_device(options.device)
        self.tokenizer = load_tokenizer(self.directory)
        self.dense = load(self.directory, options.device, torch.float32)
        self.dtype = AutoConfig.from_pretrained(self.directory).dtype
        held_out_text = options.shared / "text" / held_out
        self.chunks = token_chunks(self.tokenizer, held_out_text, self.seqlen)[: options.chunks]

    def compress(
        self, recipe: str, settings: Sequence[str], seed: int, target: Mapping[str, Any] | None = None
    ) -> tuple[PreTrainedModel, semisparse.CompressionReport]:
        """Compress a new copy of the model; return it and the report."""
        model = AutoModelForCausalLM.from_pretrained(self.directory, dtype="auto")
        report = semisparse.compress(
            model,
            self.tokenizer,
            recipe,
            self.calibration,
            settings=settings,
            target=target,
            samples=self.options.samples,
            seqlen=self.seqlen,
            device=self.options.device,
            seed=seed,
        )
        return model, report

    @cached_property
    def dense_nll(self) -> float:
        """The dense model's loss in float32."""
        return measure_quality(self.dense, self.chunks).nll

    def measure(self, model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Quality:
        """Measure a model's loss, and its KL divergence to the dense model in float32."""
        return measure_quality(model.to(self.device, dtype), self.chunks, self.dense)
