"""pack_panels.cu writes the bytes of storage/panels.py."""

import pytest
import torch

from semisparse.formats.ec_csr.cuda import pack_panels
from semisparse.formats.ec_csr.storage import panels
from semisparse.formats.ec_csr.storage.gpu import paired_rows
from tests.cuda_emulator import emulate, needs_compiler
from tests.formats.ec_csr.test_pack_tiles import padded
from tests.formats.ec_csr.weights import random_weight, uneven_weight


def check(weight: torch.Tensor, bits: int, rows: int, paired: bool) -> None:
    weight = padded(weight)
    assert pack_panels.refusal(weight) is None
    params, tensors = pack_panels.pack(weight, bits, rows, paired)
    expected_params, expected = panels.pack(paired_rows(weight, rows) if paired else weight, bits, rows)
    assert {**params, "n": 0} == {**expected_params, "n": 0}  # paired rows are padded
    assert set(tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


def some_weights(dtype: torch.dtype) -> list[torch.Tensor]:
    sparse = torch.zeros(40, 2100, dtype=dtype)
    sparse[::9, 5::700] = 1.5
    sparse[1, 7] = -0.0
    return [random_weight(70, 300, "70%", dtype), uneven_weight(57, 520, dtype), sparse, torch.ones(3, 8, dtype=dtype)]


@needs_compiler
@pytest.mark.parametrize(("bits", "rows", "paired"), [(4, 28, True), (8, 64, False), (4, 32, False)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_emulated(emulated, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bits: int, rows: int, paired: bool):
    emulate(monkeypatch, 1)
    monkeypatch.setattr(pack_panels, "cuda_refusal", lambda device: None)
    for weight in some_weights(dtype):
        check(weight, bits, rows, paired)
    check(torch.zeros(40, 64, dtype=dtype), bits, rows, paired)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize(("bits", "rows", "paired"), [(4, 28, True), (8, 64, False)])
def test_on_a_gpu(bits: int, rows: int, paired: bool):
    for weight in (*some_weights(torch.bfloat16), random_weight(11008, 1000, "70%")):
        check(weight.cuda(), bits, rows, paired)
