"""`gemm` and `gemm_wgmma` on a GPU: every kind, several sizes of groups, 1 to 600 tokens."""

import pytest
import torch

from semisparse.formats import linear
from tests.formats.gqs.reference import check_product, operands, packed_weight

HALF, BFLOAT = torch.float16, torch.bfloat16
GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="the gemm kernel: no GPU here")
needs_hopper = pytest.mark.skipif(
    not GPU or torch.cuda.get_device_capability()[0] != 9, reason="the gemm_wgmma kernel: no Hopper GPU here"
)


@pytest.mark.parametrize("m", [1, 7, 16, 17, 40, 64, 100, 200, 600])
@pytest.mark.parametrize(
    ("kind", "dtype", "pattern", "n", "k"),
    [
        ("w4", HALF, "g16@50%", 9000, 1024),
        ("w4", BFLOAT, "g128@0%", 700, 4100),
        ("w8", BFLOAT, "g64@50%", 1000, 5000),
        ("w8", HALF, "g16@50%", 4096, 4096),
        ("w3", HALF, "g8@30%", 333, 2600),
        ("w3", BFLOAT, "g32@30%", 2048, 3000),
        ("w3", BFLOAT, "g128@30%", 2048, 3000),
        ("w2", HALF, "g64@0%", 2048, 11008),
        ("w4a8", BFLOAT, "g16@50%", 513, 777),
    ],
)
@pytest.mark.parametrize(
    "kernel", [pytest.param("gemm", marks=needs_gpu), pytest.param("gemm_wgmma", marks=needs_hopper)]
)
def test_products(kernel: str, kind: str, dtype: torch.dtype, pattern: str, n: int, k: int, m: int, nan_filled_memory):
    packed = packed_weight(n, k, pattern, dtype, kind=kind).to("cuda")
    x, bias = operands(packed, m, device="cuda")
    y = linear(x, packed, bias, kernel)
    check_product(y, x, packed, bias)
    assert torch.equal(y, linear(x * 1, packed, bias, kernel))  # after a kernel that it overlaps
    assert all(torch.equal(y, linear(x, packed, bias, kernel)) for _ in range(5))
    unaligned = torch.cat((x[0, :1], x.flatten()))[1:].view(x.shape)
    assert torch.equal(y, linear(unaligned, packed, bias, kernel))


@pytest.mark.parametrize("dtype", [BFLOAT, HALF])
@pytest.mark.parametrize(
    ("kind", "pattern"), [("w4", "g16@50%"), ("w4", "g128@0%"), ("w3", "g32@30%"), ("w2", "g64@0%")]
)
@pytest.mark.parametrize(
    ("kernel", "m"),
    [
        pytest.param("decode", 16, marks=needs_gpu),
        pytest.param("gemm", 40, marks=needs_gpu),
        pytest.param("gemm_wgmma", 16, marks=needs_hopper),
        pytest.param("gemm_wgmma", 64, marks=needs_hopper),
    ],
)
def test_weights_are_those_of_unpack(kernel: str, m: int, kind: str, pattern: str, dtype: torch.dtype):
    """Tokens of a single 1 show the columns, bit for bit: subnormal bfloat16 numbers of codes are not flushed."""
    if kernel == "decode" and pattern != "g16@50%":
        pytest.skip("decode takes groups of 16")
    packed = packed_weight(272, 640, pattern, dtype, kind=kind).to("cuda")
    weight, ones = packed.unpack(), torch.eye(640, dtype=dtype, device="cuda")
    for x in ones.split(m):
        assert torch.equal(linear(x, packed, None, kernel), x @ weight.T)
