"""Fused products on a GPU: every format that has them, at sizes where SMs have several row tiles."""

import os
from dataclasses import replace

import pytest
import torch

from semisparse.formats import get_format
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from tests.formats.fusion import check_fused

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="fused kernels: no GPU here")

WEIGHTS = (
    ("dense", "0%", {}),
    ("bitmask", "32:64", {}),
    ("gqs", "g16@50%", {"kind": "w4"}),
    ("gqs", "g32@0%", {"kind": "w4"}),
    ("gqs", "g128@0%", {"kind": "w4"}),
    ("gqs", "g64@0%", {"kind": "w2"}),
    ("vector_nm", "16:32v32", {}),
    ("ec_csr", "70%", {}),
)

SHAPES = ((4096, 4096), (2048, 11008), (22016, 4096))
if os.environ.get("SEMISPARSE_DRAWS"):  # under compute-sanitizer, where a launch takes a hundred times as long
    SHAPES = ((256, 2048), (4480, 264))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("form", "pattern", "options"), WEIGHTS)
def test_on_a_gpu(form: str, pattern: str, options: dict[str, str], dtype: torch.dtype):
    checked = 0
    for n, k in SHAPES:
        # On the GPU, because packing takes seconds on a CPU.
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n)).to("cuda")
        weight = (weight * k**-0.5 * parse_pattern(pattern).mask(weight.abs())).to(dtype)
        packed = get_format(form).pack(weight, pattern, **options).to("cuda")
        problem = problem_of(torch.empty(1, k, dtype=dtype, device="cuda"), packed)
        for m in (1, 2):
            for prologue, epilogue in (("rms_norm", "none"), ("none", "add"), ("rms_norm", "silu_mul")):
                asked = replace(problem, m=m, prologue=prologue, epilogue=epilogue)
                for kernel in get_format(form).kernels:
                    if kernel.refusal(asked) is None and kernel.fuse(asked) is not None:
                        check_fused(kernel, packed, packed.unpack(), m, prologue, epilogue)
                        checked += 1
    assert checked >= 6  # one shape, each fusion with 1 and 2 tokens
