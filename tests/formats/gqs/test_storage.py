"""The layout: its bytes, every kind and size, scales from elsewhere, bits per weight, cutting and stacking."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semisparse.api import read_recipe
from semisparse.errors import FormatError, RecipeError
from semisparse.formats import Packed
from semisparse.patterns import parse_pattern
from semisparse.quant.group import KINDS, GroupScales, scales_of
from tests.formats.gqs.reference import GQS, packed_weight
from tests.formats.worked_example import worked_example

SIZES = (4, 8, 16, 32, 64, 128)


def read_by_hand(packed: Packed) -> torch.Tensor:
    """Read the bytes as README.md says, bit by bit."""
    (n, k), size = packed.shape, int(re.match(r"g(\d+)", str(packed.pattern))[1])
    bits, tensors = KINDS[packed.params["kind"]], packed.tensors
    weight = torch.zeros(n, k, dtype=torch.float64)
    unit = min(8, size)
    group = 0
    for tile, masks in enumerate(tensors["masks"].tolist()):
        for column_tile, mask in enumerate(masks):
            assert tensors["starts"][tile * len(masks) + column_tile] == group
            for bit in range(64):
                if not mask >> bit & 1:
                    continue
                row, first = 16 * tile + bit // 4, (4 * column_tile + bit % 4) * size
                codes = int.from_bytes(bytes(tensors["codes"][group].tolist()), "little")
                zero = int(tensors["zero"][group]) * 2.0 ** (bits - 8)
                for column in range(min(size, k - first)):
                    inside = column % unit
                    position = column // unit * unit + inside // 2 + (unit // 2 if inside % 2 else 0)
                    code = codes >> bits * position & 2**bits - 1
                    weight[row, first + column] = (code - zero) * float(tensors["scale"][group])
                group += 1
    assert tensors["starts"][-1] == group == packed.params["kept"]
    return weight.to(packed.dtype)


@given(
    kind=st.sampled_from(sorted(KINDS)),
    n=st.integers(1, 37),
    k=st.integers(1, 300),
    size=st.sampled_from(SIZES),
    percent=st.sampled_from([0, 30, 50, 90]),
)
def test_the_bytes_are_those_of_the_readme(kind: str, n: int, k: int, size: int, percent: float):
    if kind == "w3" and size == 4:
        return
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k)).half()
    weight *= parse_pattern(f"g{size}@{percent}%").mask(weight.abs())
    packed = GQS.pack(weight, f"g{size}@{percent}%", kind=kind)
    GQS.validate(packed)
    assert torch.equal(packed.unpack(), read_by_hand(packed))
    assert torch.equal(packed.unpack(), scales_of(weight, KINDS[kind], size, torch.float16).rounded(weight))


def test_the_worked_example():
    expected = worked_example("gqs")
    weight = torch.zeros(2, 12)
    weight[0, 4:8] = torch.tensor([-1.0, 2.0, 0.0, 0.6])
    weight[1, 8:12] = torch.tensor([0.5, 1.0, 1.5, 7.5])
    packed = GQS.pack(weight.half(), "g4@50%")
    for name, tensor in packed.tensors.items():
        assert expected[name] == tensor.contiguous().view(torch.uint8).numpy().tobytes(), name


@pytest.mark.parametrize(("percent", "bits"), [(0, 5.594), (20, 4.494), (50, 2.844)])
def test_bits_per_weight(percent: float, bits: float):
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    weight *= parse_pattern(f"g16@{percent}%").mask(weight.abs())
    assert GQS.pack(weight.half(), f"g16@{percent}%").bits_per_weight == pytest.approx(bits, abs=0.003)


@pytest.mark.parametrize(("kind", "dtype"), [("w4", torch.bfloat16), ("w8", torch.float16), ("w2", torch.float32)])
def test_tuned_scales_are_stored_and_their_codes_found_again(kind: str, dtype: torch.dtype):
    """Compression ends in quantised weights and their scales: packing must not quantise them anew."""
    weight = torch.randn(20, 70, generator=torch.Generator().manual_seed(0))
    weight *= parse_pattern("g16@50%").mask(weight.abs())
    tuned = scales_of(weight, KINDS[kind], 16, dtype)
    tuned = replace(tuned, scale=tuned.scale * 0.9, zero=(tuned.zero + 3).clamp(0, 255))
    rounded = tuned.rounded(weight)
    assert torch.equal(GQS.pack(rounded, "g16@50%", kind=kind, scales=tuned).unpack() + 0.0, rounded + 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 8}, "expected"),
        ({"size": 8}, "expected"),
        ({"scale": torch.ones(3, 1)}, "expected"),
        ({"scale": torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])}, "row 1, group 1 is 0.0"),
        ({"scale": torch.tensor([[1.0, 1.0], [1.0, 1.0], [float("nan"), 1.0]])}, "row 2, group 0 is nan"),
    ],
)
def test_scales_of_another_weight_are_refused(change: dict, message: str):
    scales = replace(GroupScales(4, 16, torch.ones(3, 2), torch.zeros(3, 2)), **change)
    with pytest.raises(FormatError, match=message):
        GQS.pack(torch.ones(3, 30), "g16@0%", scales=scales)


@pytest.mark.parametrize(
    ("pattern", "kind", "message"),
    [("g5@50%", "w4", "groups along K"), ("2:4", "w4", "groups along K"), ("g16@50%", "w5", "no kind 'w5'"),
     ("g4@50%", "w3", "do not fill bytes")],
)  # fmt: skip
def test_what_cannot_be_stored_is_refused(pattern: str, kind: str, message: str):
    with pytest.raises(FormatError, match=message):
        GQS.pack(torch.zeros(4, 40), pattern, kind=kind)


def test_a_recipe_needs_a_kind_that_the_format_stores():
    for setting in ("quant=none", "quant=int8", "format=auto"):
        with pytest.raises(RecipeError, match="does not store quant="):
            read_recipe("gqsa", ["tune=bqpo", setting])


def test_kernels_are_prepared_without_the_number_of_kept_groups():
    a, b = packed_weight(20, 70), packed_weight(20, 70, "g16@50%/row")
    assert GQS.structure(a.spec).params == {"kind": "w4", "rows": 20, "full": 0}
    assert GQS.structure(GQS.structure(a.spec)) == GQS.structure(a.spec)
    assert GQS.structure(replace(b.spec, pattern=a.pattern)) == GQS.structure(a.spec)


@pytest.mark.parametrize("kind", ["w4", "w3"])
def test_parts_are_cut_and_joined_without_quantising_again(kind: str):
    """Quantising a weight twice would lose GQSA's rounding, so stored groups are moved unchanged."""
    whole = packed_weight(50, 176, kind=kind)
    pattern = whole.pattern
    for dim, edge in ((0, 21), (1, 80)):
        cuts = ((0, edge), (edge, whole.shape[dim]))
        parts = [GQS.regroup([whole], dim, start, stop, pattern) for start, stop in cuts]
        for part, expected in zip(parts, whole.unpack().tensor_split([edge], dim), strict=True):
            GQS.validate(part)
            assert torch.equal(part.unpack(), expected)
        again = GQS.regroup(parts, dim, 0, whole.shape[dim], pattern)
        assert again.spec == whole.spec
        assert all(torch.equal(again.tensors[name], tensor) for name, tensor in whole.tensors.items())
    with pytest.raises(FormatError, match="cannot be cut or joined at columns"):
        GQS.regroup([whole], 1, 0, 40, pattern)


def test_weights_of_one_kind_stack_along_n():
    upper, lower = packed_weight(32, 100), packed_weight(17, 100)
    params = GQS.stack([upper, lower], 49)
    assert params == {"kind": "w4", "rows": 49, "kept": upper.params["kept"] + lower.params["kept"]}
    assert GQS.stack([upper, packed_weight(17, 100, kind="w8")], 49) is None


@pytest.mark.parametrize("span", [(-1, 1), (-1, 0.5), (-0.01, 1), (0, 1), (-1, 0), (-0.999, 0.99)])
@pytest.mark.parametrize("kind", ["w8", "w4", "w3", "w2"])
def test_no_code_of_a_wide_group_is_infinity(kind: str, span: tuple[float, float]):
    """With the scale rounded to float16, the codes at the ends of such a group were 65520 and more."""
    weight = torch.zeros(1, 16)
    weight[0, :3] = 65504 * torch.tensor([*span, 0.3])
    weight = weight.half()
    step = 65504 * (max(span) - min(span)) / (2 ** KINDS[kind] - 1)
    given = scales_of(weight, KINDS[kind], 16, torch.float16)
    wider = replace(given, scale=given.scale * 1.01)
    for scales in (None, wider):
        values = GQS.pack(weight, "g16@0%", kind=kind, scales=scales).unpack()
        assert values.isfinite().all()
        assert (values.double() - weight.double()).abs().max() <= 1.2 * step
