"""unpack_tiles.cu: the whole weight unpacked from mask tiles for cuBLAS, for many tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.ec_csr.cuda.decode_tiles import tiles_refusal
from semisparse.formats.ec_csr.cuda.tile_schedule import tiles_in
from semisparse.formats.ec_csr.storage.tiles import tiles_of
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime import tile_unpack
from semisparse.runtime.blas import multiply_dense
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource
from semisparse.runtime.nvrtc import Defines
from semisparse.runtime.tile_unpack import UnpackSchedule, choose_unpack


def unpack_defines(dtype: torch.dtype, words: int, schedule: UnpackSchedule) -> Defines:
    """Return the macros of unpack_tiles.cu."""
    return {"WORDS": words, **schedule.defines(dtype)}


SOURCE = CudaSource(
    Path(__file__).with_name("unpack_tiles.cu"),
    tuple(
        unpack_defines(dtype, words, UnpackSchedule(stages, 1, 0))
        for dtype, words, stages in ((torch.float16, 34, 2), (torch.bfloat16, 66, 1))
    ),
)


def refusal(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    return tiles_refusal(problem)


def prepare(problem: Problem) -> Product:
    """Compile and load unpack_tiles.cu; return the matmul: the weight is unpacked for cuBLAS. x has w's dtype."""
    unpack = prepare_unpack(problem)
    return lambda x, packed, bias: multiply_dense(x, unpack(packed), bias)


def prepare_unpack(problem: Problem) -> Callable[[Packed], Tensor]:
    """Compile and load the kernel; return a function from mask tiles to [N, K], rows at multiples of 16 bytes."""
    weight, words = tiles_in(problem.spec), int(problem.params["words_limit"])
    schedule = choose_unpack(weight, device_facts(problem.device))
    defines = unpack_defines(problem.dtype, words, schedule)
    kernel = SOURCE.build("semisparse_ec_csr_unpack_tiles", defines, schedule.shared).load(problem.device)
    unpack = tile_unpack.prepare(kernel, schedule, weight, problem.spec.shape)
    return lambda packed: unpack(tiles_of(packed), packed.dtype, packed.device)
