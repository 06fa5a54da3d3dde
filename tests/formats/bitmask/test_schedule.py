"""Every schedule fits the GPU, and covers the work; what ``auto`` takes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from semisparse.formats.base import Params, WeightSpec
from semisparse.formats.bitmask.cuda import schedule
from semisparse.formats.bitmask.cuda.schedule import (
    DECODE_WARPS_PER_SM,
    GEMM_RATES,
    choose_decode,
    choose_experts,
    fuses_silu,
    gemm_tiles,
)
from semisparse.formats.bitmask.storage.gpu import Tiling, tiling
from semisparse.formats.kernel import ExpertsProblem, Problem, bucket_of
from semisparse.formats.product import structure_of
from semisparse.patterns import parse_pattern
from semisparse.runtime.device import DeviceFacts
from semisparse.runtime.gemm_schedule import SPLIT_K, STREAM_K, Schedule, choose, launch_of
from semisparse.runtime.tile_unpack import choose_unpack
from tests.cuda_emulator import emulate
from tests.formats.bitmask.weights import BITMASK, random_weight


def gpu(sms: int, shared: int, capability: tuple[int, int]) -> DeviceFacts:
    return DeviceFacts("", "cuda", "", sms, 0, 0, "", capability, shared << 10, (shared - 1) << 10)


H200 = gpu(132, 228, (9, 0))
GPUS = (H200, gpu(108, 164, (8, 0)), gpu(128, 100, (8, 9)), gpu(1, 228, (9, 0)))
tilings = st.builds(Tiling, st.integers(1, 20_000), st.integers(1, 500), st.integers(1, 64), st.sampled_from([0, 8, 4]))


def tile_bytes(weight: Tiling) -> int:
    if weight.bits == 4:
        return 128 + 2048
    return 640 + -(-weight.keep // 4) * 256 if weight.bits else 512 + -(-weight.keep // 2) * 256


@given(st.integers(1, 64), tilings, st.sampled_from(GPUS))
def test_every_decode_schedule_fits_and_covers_the_weight(m: int, weight: Tiling, device: DeviceFacts):
    found = choose_decode(m, weight, device)
    warps = found.warps_n * found.warps_k
    rings = found.stages * (warps * tile_bytes(weight) + found.warps_k * m * 512)
    assert rings + 2 * warps * found.tile_m * 16 * 4 <= found.shared <= device.shared_per_cta
    resident = -(-found.ctas // device.sms)
    assert resident * (found.shared + 1024) <= device.shared_per_sm
    assert resident * warps <= DECODE_WARPS_PER_SM[found.tile_m]
    assert m <= found.tile_m
    assert 1 <= found.warps_k <= weight.column_tiles
    assert warps <= 16
    assert found.warps_n == 1 or found.warps_k <= 15, "named barriers 1 to 15"
    assert 1 <= found.ctas <= -(-weight.row_tiles // found.warps_n)


@example(8, 128, 48, 2048, 32, "none", "silu_mul", (1, 8, 2), H200)  # read past its shared memory
@given(
    pairs=st.integers(1, 512),
    experts=st.integers(1, 256),
    rows=st.integers(1, 100),
    k=st.integers(1, 9000),
    keep=st.integers(1, 64),
    kind=st.sampled_from(["none", "w8", "w4"]),
    epilogue=st.sampled_from(["none", "silu_mul"]),
    shape=st.sampled_from([None, (1, 8, 2), (2, 8, 2), (4, 2, 2)]),
    device=st.sampled_from(GPUS),
)
def test_every_schedule_of_experts_has_room_for_what_the_kernel_stores(
    pairs, experts, rows, k, keep, kind, epilogue, shape, device
):
    """With SiLU fused, x lies in shared memory whole. A CTA of one row tile does not fuse it: it has a ring of x."""
    spec = WeightSpec(
        "bitmask",
        1,
        parse_pattern(f"{keep}:64"),
        (32 * experts * rows, k),
        torch.float16,
        Params({"kind": kind, "layout": "tiles"}),
    )
    problem = ExpertsProblem(pairs, experts, spec, torch.float16, torch.device("cpu"), epilogue)
    weight = replace(tiling(spec), row_tiles=2 * rows)
    with pytest.MonkeyPatch.context() as patch:
        if shape is not None:
            patch.setattr(schedule, "EXPERT_SHAPES_GATED", dict.fromkeys((1, 8), (shape,)))
        found = choose_experts(problem, weight, device)
    fused = epilogue == "silu_mul" and k % 8 == 0 and found.warps_n % 2 == 0
    x_tiles = weight.column_tiles if fused else found.warps_k * found.stages
    taken = found.stages * found.warps * tile_bytes(weight) + x_tiles * found.tile_m * 512
    assert taken + 2 * found.warps * found.tile_m * 16 * 4 <= found.shared <= device.shared_per_cta
    assert fused == fuses_silu(problem, found.warps_n)
    assert 1 <= found.ctas <= -(-weight.row_tiles // found.warps_n)


@given(st.integers(1, 65_535), tilings)
def test_every_gemm_schedule_fits_and_gives_each_range_work(m: int, weight: Tiling):
    tiles = gemm_tiles(weight)
    check_gemm(choose(bucket_of(m), tiles, H200, GEMM_RATES[weight.bits]), m, weight)


def check_gemm(found: Schedule, m: int, tiling: Tiling) -> None:
    weight = gemm_tiles(tiling)
    rings = found.x_stages * 4 * found.tile_m * 128 + found.stages * found.warpgroups * 4 * tile_bytes(tiling)
    per_warp = 8 if found.split_in_cluster else 0
    assert rings + 16 * (found.stages + 4 * found.x_stages) + per_warp * found.warps == found.shared(weight)
    assert found.split_in_cluster == (found.split_k == 2)
    assert not found.split_in_cluster or rings >= 2 * -(-found.tile_m // 16) * 8 * found.warps * 16 * 4, "partials"
    permute_x = 1024  # bytes that a CTA of permute_x.cu takes
    assert found.ctas_per_sm * (found.shared(weight) + 1024) + permute_x <= H200.shared_per_sm
    shapes = SPLIT_K if found.split_k else STREAM_K
    assert (found.warpgroups, found.cluster, found.ctas_per_sm) in shapes[found.tile_m]
    ranges = found.ranges(m, weight, H200.sms)
    assert 1 <= ranges <= found.tiles(m, weight) * weight.column_tiles
    if found.split_k:
        assert found.split_k <= weight.column_tiles
    if found.split_k != 1:
        assert ranges * found.cluster <= H200.sms * found.ctas_per_sm, "CTAs wait for one another: all are resident"
    spare = 0 if found.tile_m >= 128 and found.warpgroups == 3 else 4096
    registers = (65536 - spare) // found.ctas_per_sm // (128 * (found.warpgroups + 1)) // 8 * 8
    assert registers * (found.warpgroups + 1) - 32 >= (72 + found.tile_m // 2) * found.warpgroups
    launch = launch_of(found, m, weight, H200.sms)
    assert launch.ctas == ranges * found.cluster
    assert launch.tokens % found.tile_m == 0
    assert launch.tokens >= m
    assert launch.permute_ctas >= 1
    sizes = [512 * weight.column_tiles * launch.tokens, 4 * launch.counters]
    assert all(launch.offsets[i] + size <= launch.offsets[i + 1] for i, size in enumerate(sizes))
    in_memory = found.split_k != 1 and not found.split_in_cluster
    assert launch.counters == in_memory * launch.ctas * found.warps
    partials = launch.counters * 16 * found.tile_m * 4
    assert launch.offsets[2] + partials <= launch.workspace


@given(tilings, st.sampled_from(GPUS))
def test_every_unpack_schedule_fits(weight: Tiling, device: DeviceFacts):
    found = choose_unpack(weight, device)
    assert found.shared <= device.shared_per_cta
    assert 1 <= found.ctas <= weight.row_tiles * weight.column_tiles


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((9, 0), ["decode", "decode", "gemm", "gemm", "unpack"]),
        ((8, 0), ["decode", "decode", "decode", "unpack", "unpack"]),
    ],
)
def test_auto_takes_tiles_by_the_number_of_tokens(capability, expected, monkeypatch: pytest.MonkeyPatch):
    emulate(monkeypatch, capability=capability)
    monkeypatch.setattr("semisparse.runtime.kernel.unavailable", lambda: None)
    packed = BITMASK.arrange(BITMASK.pack(random_weight(16, 64, "32:64"), "32:64"), "cuda")
    assert chosen(packed.spec, torch.float16, (1, 16, 24, 128, 8192)) == expected
    assert chosen(packed.spec, torch.float32, (1, 8192)) == ["reference", "reference"]


@pytest.mark.parametrize(
    ("pattern", "dtype", "expected"),
    [
        ("70%", torch.float16, ["decode_rows", "decode_rows", "unpack", "unpack"]),
        ("6:10", torch.bfloat16, ["decode_rows", "decode_rows", "unpack", "unpack"]),
        ("4:8", torch.float32, ["unpack"] * 4),
    ],
)
def test_auto_decodes_rows_and_unpacks_them_for_many_tokens(
    pattern: str, dtype, expected: list[str], monkeypatch: pytest.MonkeyPatch
):
    emulate(monkeypatch)
    monkeypatch.setattr("semisparse.runtime.kernel.unavailable", lambda: None)
    packed = BITMASK.pack(random_weight(16, 64, pattern, dtype), pattern)
    assert chosen(packed.spec, dtype, (1, 16, 128, 8192)) == expected


@pytest.mark.parametrize("kind", ["w8", "w4"])
def test_auto_takes_codes_by_the_number_of_tokens(kind: str, monkeypatch: pytest.MonkeyPatch):
    emulate(monkeypatch)
    monkeypatch.setattr("semisparse.runtime.kernel.unavailable", lambda: None)
    small = BITMASK.arrange(BITMASK.pack(random_weight(16, 64, "32:64"), "32:64", kind=kind), "cuda").spec
    assert chosen(small, torch.float16, (1, 16, 24, 128, 8192)) == ["decode", "decode", "gemm", "gemm", "unpack"]


def chosen(spec, dtype: torch.dtype, tokens: tuple[int, ...]) -> list[str]:
    """Return the kernels that `auto` takes on a GPU with these facts, which are given for the CPU."""
    problems = [Problem(m, structure_of(spec), dtype, torch.device("cpu")) for m in tokens]
    able = [[k for k in BITMASK.all_kernels if k.device != "cpu" and k.supports(p) is None] for p in problems]
    return [sorted(ks, key=lambda k: not k.pays(p))[0].name for p, ks in zip(problems, able, strict=True)]
