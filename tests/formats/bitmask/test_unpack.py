"""unpack.cu against the packer, and the matmul on its result."""

from dataclasses import replace

import pytest
import torch

from semisparse.formats.bitmask.cuda import unpack
from semisparse.formats.bitmask.storage.gpu import tiling
from semisparse.formats.product import problem_of
from semisparse.runtime.device import device_facts
from semisparse.runtime.tile_unpack import choose_unpack
from tests.cuda_emulator import emulate, needs_compiler
from tests.formats.bitmask.weights import BITMASK, check, check_on_gpu, in_tiles, needs_gpu, operands, random_weight


@needs_compiler
@pytest.mark.parametrize(("n", "k", "keep", "stages"), [(250, 701, 31, 2), (150, 701, 64, 1)])
def test_emulated_bit_for_bit(emulated, monkeypatch: pytest.MonkeyPatch, n: int, k: int, keep: int, stages: int):
    """Twelve warps have 48 and 30 tiles, so all refill their stages; one stage is for GPUs with less memory."""
    emulate(monkeypatch, sms=1)
    facts = replace(device_facts("cpu"), shared_per_cta=(227 if stages == 2 else 99) << 10)
    monkeypatch.setattr(unpack, "device_facts", lambda device: facts)
    packed = in_tiles(n, k, f"{keep}:64")
    schedule = choose_unpack(tiling(packed.spec), facts)
    assert (schedule.stages, schedule.ctas) == (stages, 3)
    x, _ = operands(packed, 2)
    w = unpack.prepare_unpack(problem_of(x, packed))(packed)
    assert w.stride(0) % 8 == 0
    assert torch.equal(w, packed.unpack())
    check(unpack.prepare, packed, 70)


@pytest.mark.parametrize(("pattern", "dtype"), [("70%", torch.bfloat16), ("32:64", torch.float32)])
def test_rows_are_unpacked_by_torch(pattern: str, dtype: torch.dtype):
    packed = BITMASK.pack(random_weight(33, 200, pattern, dtype), pattern)
    x, _ = operands(packed, 5)
    assert unpack.refusal(problem_of(x, packed)) is None
    check(unpack.prepare, packed, 5)


@needs_gpu
@pytest.mark.parametrize(("n", "k", "keep"), [(64, 512, 32), (33, 701, 31), (1, 1, 64), (257, 4100, 5)])
def test_on_a_gpu_bit_for_bit(n: int, k: int, keep: int, nan_filled_memory):
    packed = in_tiles(n, k, f"{keep}:64")
    there = packed.to("cuda")
    x, _ = operands(there, 1)
    assert torch.equal(unpack.prepare_unpack(problem_of(x, there))(there).cpu(), packed.unpack())
    check_on_gpu("unpack", packed, 300)


@needs_gpu
@pytest.mark.parametrize(("pattern", "dtype"), [("70%", torch.bfloat16), ("32:64", torch.float32)])
def test_rows_on_a_gpu(pattern: str, dtype: torch.dtype, nan_filled_memory):
    check_on_gpu("unpack", BITMASK.pack(random_weight(33, 200, pattern, dtype), pattern), 5)
