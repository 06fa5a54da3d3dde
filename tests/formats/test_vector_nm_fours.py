"""The plan of a weight for 2:4 tensor cores, its product, x by columns: the kernels' own sources on a CPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semisparse.errors import FormatError
from semisparse.formats import get_format
from semisparse.formats.base import replace_tensors
from semisparse.formats.product import problem_of
from semisparse.formats.vector_nm import fours, plan, tiled
from semisparse.patterns import parse_pattern
from tests.formats import emulated
from tests.formats.cases import build, random
from tests.formats.test_contract import check_product, random_operands

VECTOR_NM = get_format("vector_nm")

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="no g++ to compile the emulation")


@pytest.fixture(autouse=True, scope="module")
def emulated_kernels():
    with pytest.MonkeyPatch.context() as patch:
        emulated.stand_in(patch, fours, plan, tiled)
        yield
    plan._fit_kernel.cache_clear()
    tiled._transpose_kernel.cache_clear()
    tiled._prepare_kernel.cache_clear()
    fours._kernel.cache_clear()


def packed_weight(pattern: str, n: int, k: int, dtype: torch.dtype = torch.float16):
    return VECTOR_NM.pack(build(parse_pattern(pattern), random, n, k).to(dtype), pattern)


@pytest.mark.parametrize(
    ("pattern", "n", "k", "m", "dtype"),
    [
        ("16:32v32", 270, 100, 130, torch.float16),
        ("4:32v32", 60, 900, 3, torch.bfloat16),
        ("8:32v64", 70, 64, 40, torch.float16),
        ("5:12v128", 130, 51, 9, torch.bfloat16),
    ],
)
def test_products(pattern: str, n: int, k: int, m: int, dtype: torch.dtype):
    """One block of threads walks over all tiles: the ring of stages goes round between them."""
    packed = packed_weight(pattern, n, k, dtype)
    planned = plan.planned(packed)
    x, bias = random_operands(packed, m, dtype, "cpu")
    results = []
    for emulated.adverse[0], added in ((False, None), (False, bias), (True, bias)):
        results.append(fours.prepare(problem_of(x, planned))(x, planned, added))
        check_product(results[-1], x, packed, added)
    assert torch.equal(results[1], results[2])


def multiplied(packed) -> torch.Tensor:
    """Give the weight [N, K] that fours.cu multiplies by: what it would read for each block, position by position."""
    (n, _), tensors = packed.shape, packed.tensors
    values, starts = tensors["values"], tensors["starts"].tolist()
    width = packed.shape[1] + -packed.shape[1] % packed.pattern.window
    weight = torch.zeros(len(starts) * 256, width)
    for tile in range(len(starts) - 1):
        for block in range(starts[tile], starts[tile + 1]):
            columns = [tensors["columns"][block].view(2, 16)[i % 2, i // 2] & 0xFFFF for i in range(32)]
            for part in range(8):
                row = tile * 256 + part * 32
                positions, needed = tensors["records"][block].view(8, 2)[part].tolist()
                for slot in range(16 if needed else 0):
                    stored = tensors["slots"][block].view(16, 8)[slot, part].item() & 0xFFFF
                    if stored == plan.NONE:
                        continue
                    column = columns[slot // 2 * 4 + (positions >> 2 * slot & 3)]
                    length = values.shape[2]
                    weight[row : row + 32, column] += values[row // length, stored, row % length :][:32].float()
    return weight[:n, : packed.shape[1]]


@pytest.mark.parametrize(
    ("pattern", "n", "k"),
    [("16:32v32", 300, 100), ("4:32v32", 256, 172), ("8:32v64", 70, 64), ("5:12v128", 300, 50), ("1:7v64", 97, 33)],
)
def test_a_plan_multiplies_the_weight(pattern: str, n: int, k: int):
    packed = packed_weight(pattern, n, k)
    planned = plan.planned(packed)
    VECTOR_NM.validate(planned)
    assert torch.equal(multiplied(planned), packed.unpack().float())
    for emulated.adverse[0] in (True, False):
        again = plan.planned(packed)
        assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in planned.tensors.items())


@settings(max_examples=10, deadline=None)
@given(keep=st.integers(1, 16), n=st.integers(1, 280), k=st.integers(1, 90), seed=st.integers(0, 99))
def test_any_plan_passes_its_check(keep: int, n: int, k: int, seed: int):
    torch.manual_seed(seed)
    VECTOR_NM.validate(plan.planned(packed_weight(f"{keep}:32v32", n, k)))


@pytest.mark.parametrize(("pattern", "blocks", "needed"), [("16:32v32", 1.2, 1.2), ("8:32v32", 1.0, 0.8)])
def test_fours_are_few(pattern: str, blocks: float, needed: float):
    """Beside K / 32 blocks that every set needs: the search finds 1.13 and 1.13, .94 and .75 for random columns."""
    records = plan.planned(packed_weight(pattern, 256, 512)).tensors["records"].view(-1, 8, 2)
    assert len(records) <= blocks * 16
    assert records[..., 1].sum() <= needed * 16 * 8


def test_whole_rows_of_zeros_and_of_weights():
    """Columns that all groups keep, or none: fours of two, and tiles with no block at all."""
    weight = torch.zeros(520, 64)
    weight[:256, ::2] = 1
    packed = VECTOR_NM.pack(weight.half(), "16:32v32")
    planned = plan.planned(packed)
    VECTOR_NM.validate(planned)
    assert torch.equal(multiplied(planned), weight)


def test_what_a_file_must_not_say_is_refused():
    planned = plan.planned(packed_weight("8:32v32", 70, 100))
    for name, index, wrong, message in (
        ("starts", 0, 1, "do not rise"),
        ("columns", 0, 1000, "past the last column"),
        ("slots", 0, 999, "not one of 3 groups' 32"),
        ("slots", 0, plan.NONE, "not multiplied exactly once"),
        ("records", 0, 0, "the first is not the lower"),
        ("records", 1, 0, "the sets that need a block"),
    ):
        tensor = planned.tensors[name].clone()
        tensor.view(-1)[index] = torch.tensor(wrong).to(tensor.dtype)
        with pytest.raises(FormatError, match=message):
            VECTOR_NM.validate(replace_tensors(planned, {**planned.tensors, name: tensor}))
    moved = planned.tensors["columns"].clone()
    moved[0, :2] = moved[0, :2].flip(0)
    with pytest.raises(FormatError, match="another column than its own"):
        VECTOR_NM.validate(replace_tensors(planned, {**planned.tensors, "columns": moved}))


def test_a_plan_goes_before_a_weight_is_stored():
    packed = packed_weight("16:32v32", 70, 100)
    back = VECTOR_NM.arrange(plan.planned(packed), "cpu")
    assert back.declaration == packed.declaration
    assert back.tensors.keys() == packed.tensors.keys()
    assert VECTOR_NM.arrange(packed, "cuda") is packed  # it is not on a GPU


@pytest.mark.parametrize(("m", "k"), [(1, 8), (70, 200), (129, 64), (5, 72)])
def test_x_by_columns(m: int, k: int):
    x = torch.randn(m, k).half()
    packed = packed_weight("16:32v32", 1, k)
    for emulated.adverse[0] in (False, True):
        found = tiled.prepare_by_column(problem_of(x, packed), m + -m % 128)(x)
        assert torch.equal(found[:k, :m], x.T)
        assert not found[k:].any()
        assert not found[:, m:].any()
