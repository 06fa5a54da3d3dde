"""`unpack`, emulated: tiles of whole panels, and so small that most segments reach none; `unpack_tiles`."""

from dataclasses import replace

import pytest
import torch

from semisparse.formats.ec_csr.cuda import schedule, unpack, unpack_tiles
from semisparse.formats.ec_csr.cuda.tile_schedule import tiles_in
from semisparse.formats.ec_csr.storage.gpu import to_tiles
from semisparse.formats.product import problem_of
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulate, gpu, needs_compiler
from tests.formats.ec_csr.weights import EC_CSR, check, operands, random_weight, uneven_weight

pytestmark = needs_compiler


@pytest.mark.parametrize(
    ("n", "k", "pattern", "sms", "bits", "dtype"),
    mostly_slow(
        [
            (40, 300, "70%", 132, 4, torch.float16),
            (110, 430, "50%", 2, 8, torch.float32),
            (1, 33, "0%", 132, 4, torch.float16),
        ],
        1,
    ),
)
def test_the_weight_is_unpacked(emulated, monkeypatch, n, k, pattern, sms, bits, dtype):
    emulate(monkeypatch, sms)
    for weight in (random_weight(n, k, pattern, dtype), uneven_weight(n, k, dtype)):
        packed = EC_CSR.arrange(EC_CSR.pack(weight, "0%", delta_bits=bits), "cuda")
        problem = problem_of(torch.empty(1, k, dtype=dtype), packed)
        for tile_bytes in (64 << 10, 4096):
            monkeypatch.setattr(schedule, "UNPACK_TILE_BYTES", tile_bytes)
            unpacked = unpack.prepare_unpack(problem)(packed)
            assert torch.equal(unpacked, weight)
            assert unpacked.stride() == (-(-k // 32) * 32, 1)


def test_products(emulated):
    packed = EC_CSR.arrange(EC_CSR.pack(random_weight(40, 300, "70%"), "70%", delta_bits=4), "cuda")
    x, bias = operands(packed, 20)
    check(unpack.prepare(problem_of(x, packed))(x, packed, bias), x, packed, bias)


@pytest.mark.parametrize(
    ("n", "k", "pattern", "shared", "stages"),
    [(250, 701, "70%", 227, 2), (150, 701, "0%", 99, 1)],
)
def test_mask_tiles_are_unpacked(emulated, monkeypatch, n, k, pattern, shared, stages):
    """Twelve warps have 48 and 30 tiles, so all refill their stages; one stage is for GPUs with less memory."""
    emulate(monkeypatch, 1)
    monkeypatch.setattr(unpack_tiles, "device_facts", lambda device: replace(gpu(1), shared_per_cta=shared << 10))
    for weight in (random_weight(n, k, pattern, torch.bfloat16), uneven_weight(n, k, torch.bfloat16)):
        packed = to_tiles(EC_CSR.pack(weight, "0%"))
        problem = problem_of(torch.empty(1, k, dtype=torch.bfloat16), packed)
        schedule = unpack_tiles.choose_unpack(tiles_in(packed.spec), unpack_tiles.device_facts("cpu"))
        assert (schedule.stages, schedule.ctas) in ((stages, 3), (2, 3))
        unpacked = unpack_tiles.prepare_unpack(problem)(packed)
        assert torch.equal(unpacked, weight)
        assert unpacked.stride() == (-(-k // 8) * 8, 1)
        x, bias = operands(packed, 20)
        check(unpack_tiles.prepare(problem_of(x, packed))(x, packed, bias), x, packed, bias)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize(("n", "k", "pattern"), [(64, 512, "70%"), (33, 701, "0%"), (1, 1, "0%"), (3000, 8200, "90%")])
def test_mask_tiles_on_a_gpu(n, k, pattern, nan_filled_memory):
    for weight in (random_weight(n, k, pattern), uneven_weight(n, k)):
        packed = to_tiles(EC_CSR.pack(weight, "0%").to("cuda"))
        x, bias = operands(packed, 300)
        assert torch.equal(unpack_tiles.prepare_unpack(problem_of(x, packed))(packed).cpu(), weight)
        check(unpack_tiles.prepare(problem_of(x, packed))(x, packed, bias), x, packed, bias)
