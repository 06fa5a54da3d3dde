"""Files from strangers: what slide24 refuses of them, and where it says the fault is."""

from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats import Packed, linear
from semisparse.formats.base import replace_tensors
from semisparse.formats.slide24 import check
from semisparse.runtime import cpp
from tests.formats.test_slide24 import SLIDE24, random_weight


def corrupted(packed: Packed, tensor: str, row: int, column: int, value) -> Packed:
    changed = packed.tensors[tensor].clone()
    changed[(row, column) if changed.dim() == 2 else row] = value
    return replace_tensors(packed, {**packed.tensors, tensor: changed})


def test_corrupted_content_is_refused_and_located():
    packed = SLIDE24.pack(random_weight("6:8", 4, 100, 0), "6:8", kind="int8")
    # Slots 0 to 3 of group 0: a pair that does not increase, a position its slot cannot have, a window that goes back.
    for byte, what in ((0b1110_0101, "above"), (0b1110_0100 ^ 0b11, "position"), (0b0100_1110, "above")):
        with pytest.raises(FormatError, match=rf"metadata, at row 2, group 0, slot \d: .*{what}"):
            SLIDE24.validate(corrupted(packed, "metadata", 2, 0, byte))
    with pytest.raises(FormatError, match="scale, at row 3: it is not finite"):
        SLIDE24.validate(corrupted(packed, "scale", 3, 0, torch.inf))
    rounded = SLIDE24.pack(random_weight("6:8", 4, 100, 0), "6:8", kind="fp8")
    plain = [SLIDE24.pack(random_weight("6:8", 4, 100, 0).to(dtype), "6:8") for dtype in (torch.half, torch.float32)]
    for sound, value in ((rounded, torch.nan), (plain[0], -torch.inf), (plain[1], torch.inf)):
        with pytest.raises(FormatError, match="values, at row 0, group 0, slot 0: it is not finite"):
            SLIDE24.validate(corrupted(sound, "values", 0, 0, value))
    weight = random_weight("6:8", 4, 99, 0)
    weight[:, 96:98] = 0  # left out, so that slot 1 of the last group stands for column 99, the first that is not there
    with pytest.raises(FormatError, match="values, at row 1, group 12, slot 1: a weight past column K = 99"):
        SLIDE24.validate(corrupted(SLIDE24.pack(weight, "6:8"), "values", 1, 6 * 12 + 1, 3))
    for params in ({"kind": "int9"}, {"kind": 8}, {}):
        with pytest.raises(FormatError):
            SLIDE24.validate(replace(packed, params=params, declaration=""))


def columns_increase(row: Tensor, slots: int) -> bool:
    """Say whether the positions in a row's metadata, [octets] uint8, are those of increasing columns in every group."""
    positions = [octet >> 2 * place & 3 for octet in row.tolist() for place in range(4)]
    groups = [positions[start : start + slots] for start in range(0, len(positions), slots)]
    skipped = [[position - slot % 2 for slot, position in enumerate(group)] for group in groups]
    return all(found == sorted(found) and set(found) <= {0, 1, 2} for found in skipped)


@pytest.mark.skipif(cpp.refusal() is not None, reason=str(cpp.refusal()))
@pytest.mark.parametrize("half", range(2, 9))
def test_the_compiled_check_knows_every_byte_at_every_place(half):
    slots = 2 * half - 2
    packed = SLIDE24.pack(random_weight(f"{slots}:{2 * half}", 1, 4 * half, 0), f"{slots}:{2 * half}")
    for place in range(packed.tensors["metadata"].shape[1]):
        for octet in range(256):
            damaged = corrupted(packed, "metadata", 0, place, octet)
            assert check._sound(damaged) == columns_increase(damaged.tensors["metadata"][0], slots), (place, octet)


@given(half=st.integers(2, 8), data=st.data())
def test_metadata_are_refused_unless_columns_increase(half: int, data):
    """Groups begin inside bytes, and go on in the next."""
    slots = 2 * half - 2
    packed = SLIDE24.pack(random_weight(f"{slots}:{2 * half}", 2, 20 * half, 0), f"{slots}:{2 * half}")
    damaged = packed.tensors["metadata"].clone()
    byte = data.draw(st.integers(0, damaged.shape[1] - 1))
    windows = st.sampled_from([0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110])  # each of them right alone
    damaged[1, byte] = data.draw(st.integers(0, 255) | st.builds(lambda low, high: low | high << 4, windows, windows))
    right = columns_increase(damaged[1], slots)
    for compiled in (check._sound, lambda packed: False):  # what says that all is sound, and what says where it is not
        verdict = nullcontext() if right else pytest.raises(FormatError, match="metadata, at row 1, group")
        with mock.patch.object(check, "_sound", compiled), verdict:
            SLIDE24.validate(corrupted(packed, "metadata", 1, byte, damaged[1, byte]))


def test_metadata_that_validate_accepts_mean_one_weight():
    """Of a 4:6 group's 256 bytes, 15 leave out two of six columns; the others are refused."""
    packed = SLIDE24.pack(random_weight("4:6", 1, 24, 0), "4:6")
    x, accepted = torch.eye(24), 0
    for byte in range(256):
        changed = corrupted(packed, "metadata", 0, 1, byte)
        try:
            SLIDE24.validate(changed)
        except FormatError:
            continue
        accepted += 1
        assert torch.equal(linear(x, changed, kernel="lifted"), linear(x, changed, kernel="dense"))
    assert accepted == 15
