"""`decode`: its sources in the emulator with every schedule; on a GPU, real launches, overlapping and captured."""

from dataclasses import replace

import pytest
import torch

from semisparse.formats import linear
from semisparse.formats.base import Packed
from semisparse.formats.gqs.cuda import decode, schedule
from semisparse.formats.kernel import Problem
from semisparse.formats.product import problem_of
from semisparse.quant.symmetric import quantise_rows
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulate, needs_compiler
from tests.formats.fusion import check_fused
from tests.formats.gqs.reference import (
    GQS,
    check,
    check_operands_of_any_layout,
    operands,
    packed_weight,
    quantised,
    stored_weight,
)

HALF, BFLOAT = torch.float16, torch.bfloat16
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the decode kernel: no GPU here")


@pytest.fixture
def small_ctas(emulated, monkeypatch):
    """Emulate CTAs of two warps, one per SM: small weights have several, with ragged ranges, and tests share builds."""
    monkeypatch.setattr(schedule, "WARPS", 2)
    monkeypatch.setattr(schedule, "WARPS_PER_SM", 1)


def check_decoded(y: torch.Tensor, x: torch.Tensor, packed: Packed, bias: torch.Tensor) -> None:
    """One or two tokens multiply 4-bit codes; else weights are dequantised in x's dtype, and so is a quantised x."""
    codes = x.shape[0] <= 2 and packed.params["kind"] != "w8"
    multiplied = quantised(x) if packed.params["kind"] == "w4a8" else x
    if codes:
        check(y, multiplied, stored_weight(packed), bias)
    else:
        check(y, multiplied.float().to(x.dtype), packed.unpack(), bias)


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "dtype", "m", "n", "k", "pattern", "sms"),
    mostly_slow(
        [
            # Stream-K: one, a few and all row tiles per CTA. With 99 SMs each CTA has one, and warps share it.
            ("w4", HALF, 1, 120, 1024, "g16@30%", (1, 3, 99)),
            ("w4", BFLOAT, 2, 70, 684, "g16@50%", (1, 2, 99)),
            ("w4a8", HALF, 1, 130, 1024, "g16@80%", (2, 99)),
            ("w4a8", BFLOAT, 2, 40, 172, "g16@50%", (1, 2)),
            # A CTA per row tile.
            ("w4", HALF, 2, 33, 172, "g16@50%", ()),
            ("w4", BFLOAT, 1, 36, 512, "g16@50%", ()),
            ("w4a8", BFLOAT, 2, 40, 1024, "g16@0%", ()),
            ("w4a8", HALF, 2, 20, 300, "g16@50%", ()),
            ("w4", BFLOAT, 13, 23, 684, "g16@50%", ()),
            ("w8", HALF, 9, 16, 1400, "g16@0%", ()),  # the weight ends where a stage does
            ("w8", BFLOAT, 5, 70, 200, "g16@80%", ()),
            ("w8", HALF, 1, 67, 512, "g16@0%", ()),
            ("w4a8", HALF, 3, 40, 512, "g16@50%", ()),
        ],
        0,
        3,
        6,
        8,
        9,
    ),
)
def test_every_schedule(small_ctas, monkeypatch, kind, dtype, m, n, k, pattern, sms):
    packed = packed_weight(n, k, pattern, dtype, kind=kind)
    x, bias = operands(packed, m)
    if sms:
        monkeypatch.setattr(schedule, "TILES_PER_SM", 0)
    for count in sms or (132,):
        emulate(monkeypatch, count)
        check_decoded(decode.prepare(problem_of(x, packed))(x, packed, bias), x, packed, bias)


@needs_compiler
def test_one_prepared_kernel_takes_every_m_and_every_weight_of_its_bucket(small_ctas):
    """M and the number of kept groups are read at each call."""
    first, fuller = packed_weight(36, 512), packed_weight(36, 512, "g16@0%")
    empty = GQS.pack(torch.zeros(36, 512).half(), "g16@50%", kind="w4")
    matmul = decode.prepare(Problem(8, GQS.structure(first.spec), HALF, torch.device("cpu")))
    for packed in (first, fuller, empty):
        for m in (5, 8):
            x, bias = operands(packed, m)
            check(matmul(x, packed, bias), x, packed.unpack(), bias)
            check(matmul(x, packed, None), x, packed.unpack(), None)


@needs_compiler
@pytest.mark.parametrize(("k", "dtype", "m"), [(300, BFLOAT, 9), (512, HALF, 3)])
def test_operands_of_any_layout(small_ctas, k: int, dtype: torch.dtype, m: int):
    """x strided or not aligned to 16 bytes, tensors that begin anywhere, bias of another dtype."""
    check_operands_of_any_layout(decode.prepare, k, dtype, m)


@needs_compiler
@pytest.mark.parametrize(("k", "dtype"), [(100, HALF), (256, BFLOAT)])
def test_tokens_are_quantised_as_elsewhere(small_ctas, k: int, dtype: torch.dtype):
    """Weights of one 15 per row show the codes of x: halves to even, a scale per token, zeros as they are."""
    packed = GQS.pack(15 * torch.eye(k).to(dtype), "g16@0%", kind="w4a8")
    halves = torch.arange(k) % 64 - 31.5
    halves[3] = 127
    for tokens in (torch.stack((halves, halves * 3)), torch.stack((torch.zeros(k), 1e-3 * halves))):
        x = tokens.to(dtype)
        codes, scale = quantise_rows(x, torch.int8)
        y = decode.prepare(problem_of(x, packed))(x, packed, None)
        assert torch.equal(y, (codes.float() * scale[:, None] * 15).to(dtype))


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "m", "n", "k", "pattern", "prologue", "epilogue", "sms"),
    mostly_slow(
        [
            (HALF, 1, 224, 1024, "g16@50%", "rms_norm", "silu_mul", 2),
            (BFLOAT, 2, 96, 684, "g16@30%", "rms_norm", "silu_mul", 99),
            (BFLOAT, 1, 120, 2816, "g16@50%", "rms_norm", "none", 3),
            (BFLOAT, 1, 70, 1024, "g16@50%", "none", "add", 2),
            (HALF, 2, 36, 684, "g16@50%", "none", "add", 132),
            (HALF, 1, 64, 512, "g16@100%", "rms_norm", "silu_mul", 2),
        ],
        0,
        2,
        5,
    ),
)
def test_fused(small_ctas, monkeypatch, dtype, m, n, k, pattern, prologue, epilogue, sms):
    if sms != 132:
        monkeypatch.setattr(schedule, "TILES_PER_SM", 0)
    emulate(monkeypatch, sms)
    if pattern == "g16@100%":
        packed = GQS.pack(torch.zeros(n, k).to(dtype), "g16@50%", kind="w4")
    else:
        packed = packed_weight(n, k, pattern, dtype)
    weight = stored_weight(packed) if m <= 2 else packed.unpack()
    check_fused(GQS.kernels[2], packed, weight, m, prologue, epilogue, bias=n % 16 == 0)


def test_what_is_not_fused(monkeypatch):
    emulate(monkeypatch)
    problem = problem_of(torch.zeros(1, 512).half(), packed_weight(32, 512))
    eight_bits = problem_of(torch.zeros(1, 512).half(), packed_weight(32, 512, kind="w4a8"))
    assert decode.fuse(replace(problem, m=8, prologue="rms_norm")) is None
    assert decode.fuse(replace(eight_bits, epilogue="add")) is None


@pytest.mark.parametrize(
    ("m", "dtype", "pattern", "kind", "reason"),
    [
        (17, HALF, "g16@50%", "w4", "takes 1 to 16 tokens, got 24"),
        (1, torch.float32, "g16@50%", "w4", "both float16 or both bfloat16"),
        (1, HALF, "g8@50%", "w4", "takes groups of 16, this weight has groups of 8"),
        (1, HALF, "g16@50%", "w3", "takes codes of 4 or 8 bits, this weight is w3"),
    ],
)
def test_what_the_kernel_refuses(monkeypatch, m, dtype, pattern, kind, reason):
    emulate(monkeypatch)
    packed = packed_weight(20, 64, pattern, HALF, kind=kind)
    assert reason in decode.refusal(problem_of(torch.empty(m, 64, dtype=dtype), packed))


@needs_gpu
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize(("kind", "k"), [("w4", 172), ("w4", 1024), ("w8", 520), ("w4a8", 172), ("w4a8", 1024)])
def test_more_row_tiles_than_ctas_on_a_gpu(kind: str, k: int, dtype: torch.dtype):
    packed = packed_weight(9000, k, "g16@50%", dtype, kind=kind).to("cuda")
    for m in (1, 2, 3, 8, 16):
        x, bias = operands(packed, m, device="cuda")
        y = linear(x, packed, bias, kernel="decode")
        check_decoded(y, x, packed, bias)
        assert torch.equal(y, linear(x, packed, bias, kernel="decode"))
        assert torch.equal(y, linear(x * 1, packed, bias, kernel="decode"))  # after a kernel that it overlaps
        unaligned = torch.cat((x[0, :1], x.flatten()))[1:].view(x.shape)
        assert torch.equal(y, linear(unaligned, packed, bias, kernel="decode"))


@needs_gpu
def test_graphs_of_one_stream_replay_at_once():
    """A launch leaves nothing in memory that another graph could find."""
    packed = packed_weight(9000, 1024).to("cuda")
    tokens, graphs = torch.randn(2, 1, 1024, device="cuda").half(), []
    expected = [linear(x, packed, kernel="decode") for x in tokens]
    for x in tokens:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [linear(x, packed, kernel="decode") for _ in range(30)]
        graphs.append((graph, results, torch.cuda.Stream()))
    torch.cuda.synchronize()
    for _ in range(10):
        for graph, _, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for y, (_, results, _) in zip(expected, graphs, strict=True):
        assert all(torch.equal(y, other) for other in results)
