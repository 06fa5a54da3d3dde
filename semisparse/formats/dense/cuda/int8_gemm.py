"""int8 weights: x is quantised per token, then one Triton GEMM with both scales and the bias in its epilogue."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.dense.cuda import quantise
from semisparse.formats.kernel import Problem, Product


def refusal(problem: Problem) -> str | None:
    """Refuse other kinds, and a machine without Triton."""
    if problem.params.get("kind") != "int8":
        return "multiplies kind int8"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'semisparse[cuda]'"
    return None


def prepare(problem: Problem) -> Product:
    """Import Triton and choose the tile sizes by M."""
    from semisparse.formats.dense.cuda.int8_gemm_triton import choose_config, int8_gemm

    config, quantise_x = choose_config(problem.m), quantise.prepare(problem, torch.int8)

    def linear(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        rounded, scale = quantise_x(x)
        return int8_gemm(rounded, scale, packed.tensors["values"], packed.tensors["scale"], bias, x.dtype, config)

    return linear
