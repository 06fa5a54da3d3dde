"""Layers that gain no speed on a GPU are named after a compression."""

import pytest
import torch

from semisparse.api.gains import without_gain
from semisparse.bench.machines import find_machine
from semisparse.formats import Packed, get_format
from semisparse.patterns import parse_pattern
from tests.models import SHARED


def packed(form: str, pattern: str, size: int, **options: str) -> Packed:
    weight = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    return get_format(form).pack((weight * parse_pattern(pattern).mask(weight.abs())).bfloat16(), pattern, **options)


def test_small_layers_and_slow_formats_are_named():
    layers = {
        "small": packed("bitmask", "32:64", 64),
        "large": packed("bitmask", "32:64", 4096),
        "low-bit": packed("gqs", "g16@50%", 4096, kind="w4"),
    }
    assert without_gain(layers, find_machine("h200")) == ["small"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="real models are in ../shared: it is absent")
def test_compress_reports_them_for_the_gpu_of_a_target(run, tmp_path):
    done = run(
        "compress", SHARED / "models/stories260k", "--target", "decode=1x", "--target", "bits=9", "--gpu", "h200",
        "--calib", SHARED / "text/tinystories-calib.jsonl", "--samples", 4, "--seqlen", 64, "--set", "tune=none",
        "--set", "search_effort=1", "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    assert done.status == 0, done.err
    assert "H200" in done.json["no_gain"]["machine"]
    assert "model.layers.0.self_attn.q_proj" in done.json["no_gain"]["layers"]
