"""pack_tiles.cu writes the bytes of storage/tiles.py."""

import pytest
import torch

from semisparse.formats.ec_csr.cuda import pack_tiles
from semisparse.formats.ec_csr.storage import tiles
from tests.cuda_emulator import emulate, needs_compiler
from tests.formats.ec_csr.weights import EC_CSR, random_weight, uneven_weight


def padded(weight: torch.Tensor) -> torch.Tensor:
    """Return a view of the weight whose rows are padded with zeros to a multiple of 32 columns, as unpack.cu's are."""
    n, k = weight.shape
    memory = weight.new_zeros(n, -(-k // 32) * 32)
    memory[:, :k] = weight
    return memory[:, :k]


def check(weight: torch.Tensor) -> None:
    assert pack_tiles.refusal(weight) is None
    params, tensors = pack_tiles.pack(weight)
    expected_params, expected = tiles.pack(weight)
    assert params == expected_params
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_emulated(emulated, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    emulate(monkeypatch, 1)
    monkeypatch.setattr(pack_tiles, "cuda_refusal", lambda device: None)
    for weight in (random_weight(70, 300, "70%", dtype), uneven_weight(40, 520, dtype), torch.ones(3, 8, dtype=dtype)):
        check(padded(weight))
    weight = random_weight(20, 264, "50%", dtype)
    weight[3, 5] = -0.0
    check(weight)


def test_rows_that_are_not_aligned_or_of_another_dtype_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pack_tiles, "cuda_refusal", lambda device: None)
    weight = torch.zeros(4, 300).half()
    for wrong in (weight.float(), weight, weight[:, 1:297], weight[:, :64]):
        assert pack_tiles.refusal(wrong) is not None
    assert pack_tiles.refusal(padded(weight)) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu_the_bytes_are_the_same_and_come_back():
    for n, k in ((11008, 512), (4100, 1000)):
        weight = random_weight(n, k, "70%")
        check(padded(weight.cuda()))
        packed = EC_CSR.pack(weight, "70%")
        moved = packed.to("cuda")
        EC_CSR.validate(moved)
        assert torch.equal(moved.unpack().cpu(), weight)
        back = moved.to("cpu")
        assert back.spec == packed.spec
        assert all(torch.equal(back.tensors[name], tensor) for name, tensor in packed.tensors.items())
