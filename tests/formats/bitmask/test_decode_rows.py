"""decode_rows.cu, in both layouts on disk."""

import pytest
import torch

from semisparse.formats.bitmask.cuda import decode_rows
from tests.cuda_emulator import needs_compiler
from tests.formats.bitmask.weights import BITMASK, check, check_on_gpu, needs_gpu, random_weight


@needs_compiler
@pytest.mark.parametrize(
    ("pattern", "dtype", "m", "aligned"), [("64:64", torch.float16, 1, True), ("70%", torch.bfloat16, 13, False)]
)
def test_emulated(emulated, pattern: str, dtype: torch.dtype, m: int, aligned: bool):
    check(decode_rows.prepare, BITMASK.pack(random_weight(20, 302, pattern, dtype), pattern), m, aligned)


@needs_gpu
@pytest.mark.parametrize(("pattern", "dtype", "m"), [("0%", torch.float16, 1), ("70%", torch.bfloat16, 13)])
def test_on_a_gpu(pattern: str, dtype: torch.dtype, m: int, nan_filled_memory):
    check_on_gpu("decode_rows", BITMASK.pack(random_weight(70, 302, pattern, dtype), pattern), m)
