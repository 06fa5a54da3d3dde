"""unpack.cu on the emulator: the dense weight, bit for bit."""

import pytest
import torch

from semisparse.formats.product import problem_of
from semisparse.formats.vector_nm.cuda import unpack
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulated, needs_compiler
from tests.formats.vector_nm.reference import check_kernel, pack

__all__ = ["emulated"]


@needs_compiler
@pytest.mark.parametrize(
    ("pattern", "n", "k", "dtype"),
    mostly_slow(
        [
            ("16:32v32", 70, 172, torch.float16),
            ("5:7v1", 33, 100, torch.float32),
            ("40:200v100", 150, 333, torch.bfloat16),
        ],
        1,
    ),
)
def test_unpack(emulated, pattern: str, n: int, k: int, dtype: torch.dtype):
    packed = pack(pattern, n, k, dtype)
    problem = problem_of(torch.empty(1, k, dtype=dtype), packed)
    assert torch.equal(unpack.prepare_unpack(problem)(packed), packed.unpack())
    check_kernel(unpack.prepare, packed, 3)
