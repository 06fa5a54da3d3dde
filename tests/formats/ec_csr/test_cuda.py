"""Row panels and the paper's kernel on a GPU: `auto` takes the expected kernel, and moving back restores the bytes."""

import pytest
import torch

from semisparse.formats.ec_csr.storage.gpu import panel_rows_for
from semisparse.formats.product import linear, problem_of
from semisparse.runtime.device import device_facts
from tests.formats.ec_csr.weights import EC_CSR, check, operands, random_weight, uneven_weight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.mark.parametrize(
    ("m", "n", "k", "bits", "dtype", "kernel"),
    [
        (1, 11008, 512, 4, torch.float16, "decode"),
        (2, 11008, 512, 8, torch.float32, "decode"),
        (7, 4096, 1000, 8, torch.bfloat16, "decode"),
        (9, 4096, 512, 4, torch.float16, "decode_mma"),
        (40, 11008, 512, 4, torch.bfloat16, "unpack"),
    ],
)
def test_products_of_lists(m: int, n: int, k: int, bits: int, dtype: torch.dtype, kernel: str):
    for weight, pattern in ((random_weight(n, k, "70%", dtype), "70%"), (uneven_weight(n, k, dtype), "0%")):
        packed = EC_CSR.pack(weight, pattern, delta_bits=bits, on_gpu="lists").to("cuda")
        assert packed.params["panel_rows"] == panel_rows_for(n, device_facts("cuda").sms)
        x, bias = operands(packed, m)
        assert EC_CSR.choose(problem_of(x, packed)).name == kernel
        y = linear(x, packed, bias)
        check(y, x, packed, bias)
        assert torch.equal(y, linear(x, packed, bias)), "two calls differ"


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="mask tiles are for Hopper"
)
@pytest.mark.parametrize("gpu", ["both", "tiles"])
@pytest.mark.parametrize("m", [1, 2, 7, 16, 40, 300])
def test_products_of_mask_tiles(m: int, gpu: str):
    packed = EC_CSR.pack(random_weight(11008, 1000, "70%"), "70%", on_gpu=gpu).to("cuda")
    EC_CSR.validate(packed)
    x, bias = operands(packed, m)
    lists = gpu == "both" and m <= 2
    assert EC_CSR.choose(problem_of(x, packed)).name == ("decode" if lists else "decode_tiles" if m <= 8 else "gemm")
    y = linear(x, packed, bias)
    check(y, x, packed, bias)
    assert torch.equal(y, linear(x, packed, bias)), "two calls differ"


def test_the_papers_kernel():
    packed = EC_CSR.pack(random_weight(300, 1000, "50%"), "50%", layout="paper", multiple=32).to("cuda")
    x, bias = operands(packed, 3)
    assert EC_CSR.choose(problem_of(x, packed)).name == "paper"
    check(linear(x, packed, bias), x, packed, bias)


def test_a_gpu_packs_the_same_bytes():
    weight = random_weight(300, 1000, "50%")
    for options in ({}, {"layout": "paper", "multiple": 32}):
        here, there = EC_CSR.pack(weight, "50%", **options), EC_CSR.pack(weight.cuda(), "50%", **options)
        assert here.spec == there.spec
        assert all(torch.equal(tensor, there.tensors[name].cpu()) for name, tensor in here.tensors.items())


def test_the_bytes_on_disk_come_back():
    packed = EC_CSR.pack(random_weight(11008, 512, "70%"), "70%")
    moved = packed.to("cuda")
    EC_CSR.validate(moved)
    back = moved.to("cpu")
    assert back.spec == packed.spec
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in packed.tensors.items())
