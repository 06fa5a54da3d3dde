"""A lane that expands a tile reads no byte behind it: there another stage's copy may be under way."""

from pathlib import Path

import pytest
import torch

from semisparse.formats.bitmask.cuda import decode
from semisparse.formats.bitmask.storage.gpu import tiling
from semisparse.runtime.kernel import CudaSource
from tests.cuda_emulator import EmulatedKernel, needs_compiler
from tests.formats.bitmask.weights import BITMASK, random_weight

SOURCE = CudaSource(Path(__file__).parent / "kernels" / "expand_tile.cu")
HEADER = Path(decode.__file__).with_name("tile.cuh")


@needs_compiler
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("keep", "kind"), [(1, "none"), (31, "none"), (32, "none"), (64, "none"), (32, "w8"), (32, "w4")]
)
def test_a_tile_that_fills_shared_memory(keep: int, kind: str, full: bool):
    """Rows are random, or store weights in their lowest columns, so that most columns come after the last weight."""
    weight = random_weight(16, 256, f"{keep}:64")
    if full:
        weight = (torch.arange(256) % 64 < keep).half().expand(16, 256).contiguous()
    packed = BITMASK.arrange(BITMASK.pack(weight, f"{keep}:64", kind=kind), "cuda")
    tiles = tiling(packed.spec)
    defines = {"TILE_HEADER": f'"{HEADER}"', "SCALAR": "__half", "KEEP": keep, "BITS": tiles.bits}
    fragments = torch.empty(16, 4, 8, 4, 2, dtype=torch.float16)  # step, word, g, t, column
    EmulatedKernel(SOURCE.build("expand_tile", defines, tiles.tile_bytes))(
        (1, 1, 1), 32, tiles=packed.tensors["tiles"], fragments=fragments
    )
    # Word 2 c + h has columns 2 c and 2 c + 1 of the step's four of row g + 8 h; lane 4 g + t has block t.
    found = fragments.unflatten(1, (2, 2)).permute(2, 3, 4, 0, 1, 5).reshape(16, 256)
    assert torch.equal(found, packed.unpack())
