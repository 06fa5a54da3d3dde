"""The layouts of vector_nm against readers of their bytes that are written from README.md alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semisparse.errors import FormatError
from semisparse.formats import Packed
from semisparse.formats.vector_nm.storage import gpu
from semisparse.patterns import VectorNM
from tests.cuda_emulator import emulate, emulated, needs_compiler
from tests.formats.cases import build, random
from tests.formats.vector_nm.reference import VECTOR_NM, pack
from tests.formats.worked_example import worked_example

__all__ = ["emulated"]


def read(packed: Packed) -> list[list[float]]:
    """Read the bytes as README.md words it."""
    n, k = packed.shape
    keep, window, length = packed.pattern.keep, packed.pattern.window, packed.pattern.length
    values = packed.tensors["values"].flatten().tolist()
    positions = packed.tensors["positions"].numpy().tobytes()
    slots = -(-k // window) * keep
    weight = [[0.0] * k for _ in range(n)]
    for group in range(-(-n // length)):
        for slot in range(slots):
            column = slot // keep * window + positions[group * slots + slot]
            for i in range(length):
                value = values[(group * slots + slot) * length + i]
                row = group * length + i
                if row < n and column < k:
                    weight[row][column] = value
                else:
                    assert value == 0
    return weight


def expected_positions(weight: torch.Tensor, pattern: VectorNM) -> list[list[int]]:
    """The non-zero vectors of each window, filled up with its lowest others."""
    (n, k), groups = weight.shape, []
    for row in range(0, n, pattern.length):
        kept = weight[row : row + pattern.length].any(0).tolist() + [False] * pattern.window
        groups.append([])
        for start in range(0, k, pattern.window):
            order = sorted(range(pattern.window), key=lambda i, start=start: (not kept[start + i], i))
            groups[-1] += sorted(order[: pattern.keep])
    return groups


windows = st.integers(1, 20) | st.sampled_from([32, 64, 256])
patterns = windows.flatmap(
    lambda window: st.builds(VectorNM, st.integers(1, window), st.just(window), st.integers(1, 9) | st.just(32))
)
dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])


@given(patterns, st.integers(1, 40), st.integers(1, 90), dtypes)
def test_bytes_mean_the_weight(pattern: VectorNM, n: int, k: int, dtype: torch.dtype):
    weight = build(pattern, random, n, k).to(dtype)
    packed = VECTOR_NM.pack(weight, pattern)
    assert read(packed) == weight.tolist()
    assert packed.unpack().tolist() == weight.tolist()
    assert packed.tensors["positions"].tolist() == expected_positions(weight, pattern)
    VECTOR_NM.validate(packed)


def test_the_readmes_example():
    weight = torch.tensor([[1, 0, 2, 0, 0, 3], [0, 0, 4, 0, 0, 0]], dtype=torch.float16)
    packed = VECTOR_NM.pack(weight, "2:4v2")
    assert {name: tensor.numpy().tobytes() for name, tensor in packed.tensors.items()} == worked_example("vector_nm")


@pytest.mark.parametrize(("pattern", "bits"), [("16:32v32", 8.125), ("8:32v4", 4.5), ("4:32v128", 2.0078125)])
def test_bits_per_weight(pattern: str, bits: float):
    assert pack(pattern, 128, 256).bits_per_weight == bits


def test_negative_zeros_are_unpacked_as_zeros():
    assert not VECTOR_NM.pack(torch.full((3, 7), -0.0), "2:4v2").unpack().signbit().any()


@pytest.mark.parametrize(
    ("pattern", "reason"), [("2:4", "v32"), ("4:300v8", "256"), ("2:4v256", "128"), ("50%", "v32")]
)
def test_patterns_that_do_not_fit_are_refused(pattern: str, reason: str):
    with pytest.raises(FormatError, match=reason):
        VECTOR_NM.pack(torch.zeros(8, 8), pattern)


# The GPU layout


def multiplied(packed: Packed) -> torch.Tensor:
    """Return the weight [N, K] that the column order multiplies by, block by block, as README.md words it."""
    (n, k), tensors = packed.shape, packed.tensors
    values, starts = tensors["values"], tensors["block_starts"].tolist()
    length = values.shape[2]
    weight = torch.zeros(len(starts) * 256, k + -k % packed.pattern.window)
    for tile in range(len(starts) - 1):
        for block in range(starts[tile], starts[tile + 1]):
            columns = [tensors["columns"][block].view(2, 16)[i % 2, i // 2].item() & 0xFFFF for i in range(32)]
            for piece in range(8):
                row = tile * 256 + piece * 32
                positions, needed = tensors["metadata"][block].view(8, 2)[piece].tolist()
                for slot in range(16 if needed else 0):
                    stored = tensors["slots"][block].view(16, 8)[slot, piece].item() & 0xFFFF
                    if stored != 0xFFFF:
                        column = columns[slot // 2 * 4 + (positions >> 2 * slot & 3)]
                        weight[row : row + 32, column] += values[row // length, stored, row % length :][:32].float()
    return weight[:n, :k]


@needs_compiler
@pytest.mark.parametrize(("pattern", "n", "k"), [("8:32v32", 300, 100), ("8:32v64", 70, 64), ("2:7v128", 300, 50)])
def test_the_column_order_multiplies_the_weight(emulated, pattern: str, n: int, k: int):
    packed = pack(pattern, n, k)
    ordered = VECTOR_NM.arrange(packed, "cuda")
    assert ordered.params.keys() == {"rows", "layout", "blocks"}
    VECTOR_NM.validate(ordered)
    assert torch.equal(multiplied(ordered), packed.unpack().float())
    back = VECTOR_NM.arrange(ordered, "cpu")
    assert back.spec == packed.spec
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in packed.tensors.items())
    assert back.tensors.keys() == packed.tensors.keys()


@needs_compiler
def test_columns_that_all_groups_keep_or_none(emulated):
    """Quads of two columns that all eight slices keep, and a row tile of zeros: any density has a column order."""
    weight = torch.zeros(520, 64)
    weight[:256, ::2] = 1
    packed = VECTOR_NM.pack(weight.half(), "16:32v32")
    ordered = gpu.with_order(packed)
    VECTOR_NM.validate(ordered)
    assert torch.equal(multiplied(ordered), weight)


@needs_compiler
def test_blocks_are_few(monkeypatch):
    """At 8:32v32 random columns take .94 * K / 32 blocks, of which a 64-row tile multiplies .54 (K = 4,096)."""
    emulate(monkeypatch)
    metadata = VECTOR_NM.arrange(pack("8:32v32", 256, 512), "cuda").tensors["metadata"].view(-1, 8, 2)
    assert len(metadata) <= 1.0 * 16
    assert metadata[..., 1].sum() <= 0.8 * 16 * 8


@needs_compiler
@pytest.mark.parametrize(
    ("pattern", "dtype", "capability"),
    [
        ("12:32v32", torch.float16, (9, 0)),
        ("8:32v16", torch.float16, (9, 0)),
        ("8:32v32", torch.float32, (9, 0)),
        ("8:32v32", torch.float16, (8, 0)),
        ("8:32v32", torch.float16, (10, 0)),
    ],
)
def test_other_weights_and_gpus_have_the_layout_on_disk(monkeypatch, pattern, dtype, capability):
    emulate(monkeypatch, capability=capability)
    packed = pack(pattern, 64, 64, dtype)
    assert VECTOR_NM.arrange(packed, "cuda") is packed


@needs_compiler
@settings(max_examples=15)
@given(keep=st.integers(1, 16), n=st.integers(1, 280), k=st.integers(1, 90), seed=st.integers(0, 99))
def test_every_order_passes_its_check(keep: int, n: int, k: int, seed: int):
    weight = build(VectorNM(keep, 32, 32), lambda scores: torch.rand(scores.shape), n, k)
    with pytest.MonkeyPatch.context() as patch:
        emulate(patch)
        torch.manual_seed(seed)
        VECTOR_NM.validate(gpu.with_order(VECTOR_NM.pack(weight.half(), f"{keep}:32v32")))
