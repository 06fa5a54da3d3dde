"""The kernel ``gemm``: lift.cu and gemm.cu, emulated, against float64."""

import pytest
import torch
from torch import Tensor

from semisparse.formats import Packed
from semisparse.formats.product import problem_of
from semisparse.formats.slide24.cuda import gemm, schedule
from semisparse.formats.slide24.cuda.schedule import CtaTile
from semisparse.formats.slide24.storage.gpu import in_tiles
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulate, needs_compiler
from tests.formats.slide24.reference import SLIDE24, exact_linear, packed_weight

pytestmark = needs_compiler

# Tokens, warpgroups and CTAs per cluster: small, so that few shapes meet every case.
ALONE, PAIR, TRIPLE, WIDE = (CtaTile(*tile, 0.2, 1.5) for tile in ((64, 2, 1), (64, 2, 2), (64, 3, 2), (128, 2, 1)))


def schedule_as(monkeypatch: pytest.MonkeyPatch, tile: CtaTile, splits: int, sms: int) -> None:
    """Let every GEMM have this tile, so many splits and three stages, on a GPU of so many SMs."""
    emulate(monkeypatch, sms)
    monkeypatch.setattr(CtaTile, "stages", lambda tile, itemsize, shared_per_cta: 3)
    monkeypatch.setattr(schedule, "choose", lambda *shape: schedule.Schedule(tile, splits))


def check(y: Tensor, x: Tensor, packed: Packed, bias: Tensor | None) -> None:
    """Sums of int8 are exact, those of other types float32's; three roundings in the epilogue, one to y's dtype."""
    product, magnitude = exact_linear(x, packed)
    exact = product if bias is None else product + bias.to(x.dtype).double()
    summed = 0 if packed.params.get("kind") == "int8" else packed.shape[1] * 2**-24
    allowed = (summed + 2**-22) * (magnitude + 1) + torch.finfo(x.dtype).eps / 2 * exact.abs()
    assert y.dtype == x.dtype
    assert ((y.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize(
    ("pattern", "kind", "dtype", "n", "k", "tile", "splits", "sms", "tokens"),
    mostly_slow(
        [
            # 4 K tiles. 6 tiles of y, of which the last is split; then 2 tiles of y in more splits than one wave holds.
            ("6:8", "int8", torch.bfloat16, 130, 300, ALONE, 3, 5, (130, 191)),
            ("6:8", "int8", torch.bfloat16, 130, 300, ALONE, 3, 5, (1,)),
            # The last of three tiles of y is split; rows do not fill the cluster.
            ("4:6", "fp8", torch.float16, 200, 300, PAIR, 2, 4, (130,)),
            # Both CTAs of the cluster have the same rows, because there are no more; one K tile.
            ("2:4", None, torch.bfloat16, 33, 64, TRIPLE, 1, 4, (7, 8)),
            # Rows of y are stored in whole units of 16 bytes.
            ("8:10", None, torch.float16, 136, 100, WIDE, 2, 2, (129,)),
        ],
        1,
        2,
    ),
    ids=["int8-split", "int8-few-tokens", "fp8-cluster", "bfloat16-three-warpgroups", "float16-wide"],
)
def test_gemm(pattern, kind, dtype, n, k, tile, splits, sms, tokens, emulated, monkeypatch):
    schedule_as(monkeypatch, tile, splits, sms)
    packed = in_tiles(packed_weight(pattern, n, k, kind, dtype))
    biases = (None, torch.linspace(-1, 1, 2 * n)[::2])  # strided, and of another dtype
    xs = [torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype) for m in tokens]
    assert len({problem_of(x, packed) for x in xs}) == 1
    matmul = gemm.prepare(problem_of(xs[0], packed))
    for x, bias in zip(xs, biases, strict=False):
        check(matmul(x, packed, bias), x, packed, bias)


def test_the_schedule_that_is_chosen_computes(emulated, monkeypatch):
    monkeypatch.setattr(CtaTile, "stages", lambda tile, itemsize, shared_per_cta: 3)
    packed = in_tiles(packed_weight("6:8", 130, 260, "int8"))
    x = torch.randn(3, 260, generator=torch.Generator().manual_seed(3)).bfloat16()
    problem = problem_of(x, packed)
    assert gemm.refusal(problem) is None
    check(gemm.prepare(problem)(x, packed, None), x, packed, None)


def test_what_the_kernel_refuses(monkeypatch):
    packed = packed_weight("6:8", 5, 40, "int8")
    x = torch.zeros(2, 40, dtype=torch.bfloat16)
    assert "needs wgmma" in gemm.refusal(problem_of(x, in_tiles(packed)))
    emulate(monkeypatch)
    plain = in_tiles(packed_weight("6:8", 5, 40))
    long = in_tiles(packed_weight("2:4", 1, 240_000, "int8"))
    for x_dtype, weight, reason in (
        (torch.float32, in_tiles(packed), "x is float16 or bfloat16"),
        (torch.bfloat16, packed, "supports layout 'tiles' only; this weight has layout 'rows'"),
        (torch.float16, plain, "x is torch.float16, the weight torch.bfloat16"),
        (torch.bfloat16, packed_weight("6:8", 5, 40, dtype=torch.float32), "2:4 kernels take"),
        (torch.bfloat16, long, "a lifted token has 240000 bytes, shared memory 231424"),
    ):
        assert reason in gemm.refusal(problem_of(torch.zeros(2, weight.shape[1], dtype=x_dtype), weight))
    assert SLIDE24.kernels[0].refusal(problem_of(x, packed)).startswith("runs on cuda")
