"""Layers that gain no speed on a GPU are named after a compression."""

import torch

from semisparse.api.gains import slower_from, speedups_of, without_gain
from semisparse.bench.machines import find_machine, known_gpu
from semisparse.formats import Packed, get_format
from semisparse.patterns import parse_pattern


def packed(form: str, pattern: str, size: int, **options: str) -> Packed:
    weight = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    return get_format(form).pack((weight * parse_pattern(pattern).mask(weight.abs())).bfloat16(), pattern, **options)


def test_small_layers_and_slow_formats_are_named():
    layers = {
        "small": packed("bitmask", "32:64", 64),
        "large": packed("bitmask", "32:64", 4096),
        "low-bit": packed("gqs", "g16@50%", 4096, kind="w4"),
    }
    assert without_gain(speedups_of(layers, find_machine("h200"))) == ["small"]


def test_layers_that_are_slower_with_many_tokens_are_named_with_that_number():
    """By the shipped table 70 % in lists wins at one token and loses from 8 on."""
    speedups = speedups_of({"lists": packed("ec_csr", "70%", 2048, on_gpu="lists")}, find_machine("h200"))
    assert without_gain(speedups) == []
    assert slower_from(speedups) == {8: ["lists"]}


def test_only_a_loss_that_lasts_to_the_most_tokens_counts():
    made = {"a": (2.0, 0.5, 2.0, 2.0, 2.0, 0.9), "b": (0.5,) * 6, "c": (2.0, 1.0, 1.0, 1.0, 1.0, 0.97), "d": None}
    assert slower_from(made) == {2048: ["a"]}


def test_a_gpu_is_known_by_its_device_name():
    assert known_gpu("NVIDIA H200") == find_machine("h200")
    assert known_gpu("Another GPU") is None
