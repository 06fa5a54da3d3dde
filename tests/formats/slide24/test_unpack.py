"""unpack.cu, emulated: the dense weight, bit for bit."""

import pytest
import torch

from semisparse.formats.product import problem_of
from semisparse.formats.slide24.cuda import unpack
from semisparse.formats.slide24.storage.gpu import in_tiles
from tests.cuda_emulator import needs_compiler
from tests.formats.slide24.reference import packed_weight

pytestmark = needs_compiler


@pytest.mark.parametrize(
    ("kind", "patterns"), [("int8", ("2:4", "6:8", "14:16", "32:34")), (None, ("2:4", "4:6", "8:10", "32:34"))]
)
def test_tiles_unpack_to_the_dense_weight(kind, patterns, emulated):
    """The unpacked weight is multiplied with the identity, for which the dense matmul is exact."""
    for pattern in patterns:
        for n, k in ((1, 1), (65, 173), (70, 264)):
            packed = packed_weight(pattern, n, k, kind, torch.bfloat16)
            x = torch.eye(k, dtype=torch.bfloat16)
            tiles = in_tiles(packed)
            problem = problem_of(x, tiles)
            assert unpack.refusal(problem) is None
            assert torch.equal(unpack.prepare(problem)(x, tiles, None), packed.unpack().T), (pattern, n, k)


def test_groups_too_wide_for_shared_memory_are_unpacked_by_torch(emulated):
    packed = in_tiles(packed_weight("4094:4096", 3, 4096, "int8"))
    x = torch.eye(5, 4096, dtype=torch.bfloat16)
    assert torch.equal(unpack.prepare(problem_of(x, packed))(x, packed, None), packed.unpack()[:, :5].T)
