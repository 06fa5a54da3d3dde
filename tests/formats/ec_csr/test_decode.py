"""`decode`, emulated: lists of all widths, panels of all heights, stages in shared memory and in registers."""

import re
from dataclasses import replace

import pytest
import torch

from semisparse.formats.ec_csr.cuda import decode, schedule
from semisparse.formats.product import problem_of
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulate, gpu, needs_compiler
from tests.formats.ec_csr.weights import EC_CSR, check, operands, random_weight, uneven_weight
from tests.formats.fusion import check_fused

pytestmark = needs_compiler

DECODE = next(kernel for kernel in EC_CSR.kernels if kernel.name == "decode")


@pytest.mark.parametrize(
    ("m", "n", "k", "sms", "bits", "dtype", "panel_rows", "ctas"),
    mostly_slow(
        [
            (1, 65, 1000, 132, 4, torch.float16, 32, 2),
            (2, 84, 500, 1, 8, torch.bfloat16, 28, 3),
            (1, 33, 33000, 132, 8, torch.float32, 32, 2),
            (13, 100, 300, 2, 4, torch.float16, 52, 2),
        ],
        1,
    ),
)
def test_products(emulated, monkeypatch, m, n, k, sms, bits, dtype, panel_rows, ctas):
    """One product for all of a bucket, x and bias contiguous or not, the bias of another dtype."""
    emulate(monkeypatch, sms)
    packed = EC_CSR.arrange(EC_CSR.pack(random_weight(n, k, "70%", dtype), "70%", delta_bits=bits), "cuda")
    x, bias = operands(packed, m)
    problem = problem_of(x, packed)
    assert packed.params["panel_rows"] == panel_rows
    assert schedule.decode_schedule(problem, gpu(sms)).ctas == ctas
    product = decode.prepare(problem)
    check(product(x, packed, bias), x, packed, bias)
    fewer = m // 2 + 1
    strided, wide_bias = torch.stack((x, x), -1)[:fewer, :, 0], torch.stack((bias, bias), -1)[:, 0].double()
    check(product(strided, packed, wide_bias), x[:fewer], packed, bias)
    check(product(x[:fewer], packed, None), x[:fewer], packed, torch.zeros(n))


@pytest.mark.parametrize(
    ("m", "n", "k", "sms", "bits", "dtype", "prologue", "epilogue", "paired"),
    mostly_slow(
        [
            (1, 90, 1000, 2, 4, torch.bfloat16, "rms_norm", "silu_mul", 1),
            (1, 61, 8200, 132, 8, torch.float16, "rms_norm", "none", 0),  # three units of x per thread
            (1, 131, 1000, 1, 4, torch.bfloat16, "none", "add", 1),
            (2, 90, 1008, 2, 8, torch.float16, "rms_norm", "silu_mul", 1),
            (2, 131, 5000, 1, 4, torch.bfloat16, "rms_norm", "none", 1),
            (2, 61, 1004, 132, 4, torch.float32, "none", "add", 0),
        ],
        0,
        3,
    ),
)
def test_fused(emulated, monkeypatch, m, n, k, sms, bits, dtype, prologue, epilogue, paired):
    emulate(monkeypatch, sms)
    packed = EC_CSR.arrange(EC_CSR.pack(random_weight(n, k, "70%", dtype), "70%", delta_bits=bits), "cuda")
    assert packed.params["paired"] == paired
    check_fused(DECODE, packed, packed.unpack(), m, prologue, epilogue, bias=m % 2 == 1)


def test_what_is_not_fused(monkeypatch: pytest.MonkeyPatch):
    emulate(monkeypatch)
    packed = EC_CSR.arrange(EC_CSR.pack(random_weight(64, 1000, "70%"), "70%"), "cuda")
    problem = problem_of(torch.zeros(1, 1000).half(), packed)
    assert decode.fuse(replace(problem, epilogue="silu_mul")) is None  # panels are not paired
    odd = EC_CSR.arrange(EC_CSR.pack(random_weight(64, 1002, "70%"), "70%"), "cuda")
    assert decode.fuse(replace(problem_of(torch.zeros(1, 1002).half(), odd), epilogue="add")) is None


def test_lanes_in_rows_far_apart(emulated):
    packed = EC_CSR.arrange(EC_CSR.pack(uneven_weight(65, 1000), "0%", delta_bits=4), "cuda")
    x, bias = operands(packed, 1)
    check(decode.prepare(problem_of(x, packed))(x, packed, bias), x, packed, bias)


def test_too_little_shared_memory_is_refused(monkeypatch: pytest.MonkeyPatch):
    emulate(monkeypatch)
    packed = EC_CSR.arrange(EC_CSR.pack(uneven_weight(33, 33000), "0%", delta_bits=8), "cuda")
    reason = decode.refusal(problem_of(torch.zeros(1, 33000).half(), packed))
    assert re.fullmatch(r"one token needs \d+ bytes of shared memory, the GPU has 232448", reason)


def test_a_weight_that_is_not_arranged(emulated):
    """A weight that was not arranged may have any span, so shared memory is sized for a whole panel."""
    packed = EC_CSR.pack(uneven_weight(65, 1100), "0%", delta_bits=4)
    x, bias = operands(packed, 1)
    check(decode.prepare(problem_of(x, packed))(x, packed, bias), x, packed, bias)


def test_all_shared_memory_is_dynamic():
    """Static shared memory would not count in the attribute that permits more than 48 KB per CTA."""
    for variant in decode.SOURCE.variants[:2]:
        for resources in decode.SOURCE.build("semisparse_ec_csr_decode", variant).compile("sm_90a").resources.values():
            assert resources.shared == 0


def test_the_bucket_alone_is_compiled(monkeypatch: pytest.MonkeyPatch):
    """Every M of a bucket has one schedule; only the grid differs."""
    emulate(monkeypatch)
    packed = EC_CSR.arrange(EC_CSR.pack(random_weight(40, 300, "70%"), "70%"), "cuda")
    problems = {problem_of(torch.zeros(m, 300).half(), packed) for m in (9, 12, 16)}
    assert len(problems) == 1
    assert schedule.decode_schedule(problems.pop(), gpu()).tokens == 8
