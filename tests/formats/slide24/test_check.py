"""Untrusted files: what slide24 refuses of them, and where it says the fault is."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats import Packed, linear
from semisparse.formats.base import Params
from semisparse.formats.slide24.storage import check
from semisparse.runtime import cpp
from tests.formats.slide24.reference import SLIDE24, lifted_linear, packed_weight, random_weight

needs_compiler = pytest.mark.skipif(cpp.refusal() is not None, reason=str(cpp.refusal()))
located_by_torch = mock.patch.object(check, "_passes_check_cpp", return_value=False)


def corrupted(packed: Packed, tensor: str, row: int, column: int, value) -> Packed:
    changed = packed.tensors[tensor].clone()
    changed[(row, column) if changed.dim() == 2 else row] = value
    return Packed(packed.spec, {**packed.tensors, tensor: changed})


def refuses(packed: Packed, message: str) -> None:
    """Both checks refuse it: the one of all positions and the one that locates a fault."""
    for compiled in (nullcontext(), located_by_torch):
        with compiled, pytest.raises(FormatError, match=message):
            SLIDE24.validate(packed)


def test_corrupted_content_is_refused_and_located():
    packed = packed_weight("6:8", 4, 100, "int8")
    # Slots 0 to 3 of group 0: a pair that does not increase, a position its slot cannot have, a window that goes back.
    for byte, what in ((0b1110_0101, "above"), (0b1110_0100 ^ 0b11, "position"), (0b0100_1110, "above")):
        refuses(corrupted(packed, "metadata", 2, 0, byte), rf"metadata, at row 2, group 0, slot \d: .*{what}")
    refuses(corrupted(packed, "scale", 3, 0, torch.inf), "scale, at row 3: expected a finite value, got inf")
    for kind, dtype, value in (
        ("fp8", torch.bfloat16, torch.nan), (None, torch.half, -torch.inf), (None, torch.float32, torch.inf)
    ):  # fmt: skip
        sound = packed_weight("6:8", 4, 100, kind, dtype)
        message = f"values, at row 0, group 0, slot 0: expected a finite value, got {value}"
        refuses(corrupted(sound, "values", 0, 0, value), message)


@pytest.mark.parametrize(("kind", "value"), [(None, 3), ("int8", -128), ("fp8", 0.5)])
def test_a_weight_past_the_last_column_is_refused(kind, value):
    weight = random_weight("6:8", 4, 99)
    weight[:, 96:98] = 0  # left out, so that slot 1 of the last group stands for column 99, the first that is not there
    packed = SLIDE24.pack(weight, "6:8", **({} if kind is None else {"kind": kind}))
    message = f"values, at row 1, group 12, slot 1: expected 0 at column 99, which is not below K = 99, got {value}"
    refuses(corrupted(packed, "values", 1, 6 * 12 + 1, value), message)
    if kind != "int8":
        SLIDE24.validate(corrupted(packed, "values", 1, 6 * 12 + 1, -0.0))


@pytest.mark.parametrize("params", [{"kind": "int9"}, {"kind": 8}, {}])
def test_another_kind_is_refused(params):
    packed = packed_weight("6:8", 4, 100, "int8")
    with pytest.raises(FormatError):
        SLIDE24.validate(packed.in_layout(Params(params), packed.tensors))


def columns_increase(row: Tensor, slots: int) -> bool:
    """Say whether the positions in a row's metadata, [octets] uint8, are those of increasing columns in every group."""
    positions = [octet >> 2 * i & 3 for octet in row.tolist() for i in range(4)]
    groups = [positions[start : start + slots] for start in range(0, len(positions), slots)]
    shifts = [[position - slot % 2 for slot, position in enumerate(group)] for group in groups]
    return all(of_group == sorted(of_group) and set(of_group) <= {0, 1, 2} for of_group in shifts)


@needs_compiler
@pytest.mark.parametrize("half", [2, 3, 4, 9])
def test_the_compiled_check_knows_every_byte_everywhere_in_a_group(half):
    slots = 2 * half - 2
    packed = packed_weight(f"{slots}:{2 * half}", 1, 4 * half)
    for at in range(packed.tensors["metadata"].shape[1]):
        for octet in range(256):
            damaged = corrupted(packed, "metadata", 0, at, octet)
            valid = columns_increase(damaged.tensors["metadata"][0], slots)
            assert check._passes_check_cpp(damaged) == valid, (at, octet)


@given(half=st.integers(2, 8), data=st.data())
def test_metadata_are_refused_unless_columns_increase(half: int, data):
    """Groups begin inside bytes, and go on in the next."""
    slots = 2 * half - 2
    packed = packed_weight(f"{slots}:{2 * half}", 2, 20 * half)
    damaged = packed.tensors["metadata"].clone()
    byte = data.draw(st.integers(0, damaged.shape[1] - 1))
    windows = st.sampled_from([0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110])  # each of them right alone
    damaged[1, byte] = data.draw(st.integers(0, 255) | st.builds(lambda low, high: low | high << 4, windows, windows))
    right = columns_increase(damaged[1], slots)
    for compiled in (nullcontext(), located_by_torch):
        verdict = nullcontext() if right else pytest.raises(FormatError, match="metadata, at row 1, group")
        with compiled, verdict:
            SLIDE24.validate(corrupted(packed, "metadata", 1, byte, damaged[1, byte]))


def test_metadata_that_validate_accepts_mean_one_weight():
    """15 of the 256 metadata bytes of a 4:6 group leave out two of six columns; the others are refused."""
    packed = packed_weight("4:6", 1, 24, dtype=torch.float32)
    x, accepted = torch.eye(24), 0
    for byte in range(256):
        changed = corrupted(packed, "metadata", 0, 1, byte)
        try:
            SLIDE24.validate(changed)
        except FormatError:
            continue
        accepted += 1
        assert torch.equal(linear(x, changed, kernel="cpu"), lifted_linear(x, changed))
    assert accepted == 15
