"""Validate a weight in the layout on disk, which may come from an untrusted file.

A group of `window` columns has `window - 2` slots, each with one value and a position of 2 bits (README.md, "Layout").
Slots 2p and 2p + 1 of a group hold two of its columns 2p to 2p + 3. So the column of slot s is ``s + shift``, where
``shift = position - s % 2`` must be 0 to 2. The columns of a group increase exactly if its shifts do not decrease.
Tensors: values [N, slots], metadata [N, slots / 4] uint8 (four positions per byte), scale [N] if quantised.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.errors import FormatError
from semisparse.formats.base import Packed
from semisparse.formats.slide24.storage.disk import aligned_groups, as_bits, shifts_of, window_of
from semisparse.runtime import cpp

FIRST_NON_FINITE = {
    torch.float8_e4m3fn: 0x7F,  # NaN; the type has no infinity
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F800000,
}
"""Smallest bit pattern, its sign bit cleared, that is infinity or NaN."""


class _Weight(ctypes.Structure):
    """The struct `Weight` of check.cpp, which describes the fields."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "metadata", "begins")),
        *((name, ctypes.c_int64) for name in ("rows", "slots", "window", "columns", "width", "infinity")),
    )


def check_content(packed: Packed) -> None:
    """Check that the columns of every group's slots increase, that values at columns >= K are 0, and all are finite.

    On a CPU check.cpp first tests the whole weight, because loading waits for it. The slower torch checks then run only
    to locate an error, or where check.cpp cannot be compiled.

    Raises:
        FormatError: a check fails. The message names the tensor, the row, the group and the slot.
    """
    if "scale" in packed.tensors:
        scale = packed.tensors["scale"]
        at = _first(~scale.isfinite())
        if at:
            raise FormatError(f"tensor scale, at row {at[0]}: expected a finite value, got {scale[at].item()}")
    if packed.device.type == "cpu" and cpp.refusal() is None and _passes_check_cpp(packed):
        return
    _check_positions(packed)
    _check_past_k(packed)
    _check_finite(packed)


def _passes_check_cpp(packed: Packed) -> bool:
    """Return whether check.cpp accepts positions and values."""
    values, metadata = packed.tensors["values"].contiguous(), packed.tensors["metadata"].contiguous()
    (rows, row_slots), k, window = values.shape, packed.shape[1], window_of(packed.pattern)
    # A byte of metadata has four slots. Bit 0: a group begins at its first slot; bit 1: a group begins at its third.
    group_slot = 4 * torch.arange(row_slots // 4, device=values.device) % (window - 2)
    begins = ((group_slot == 0) + 2 * (group_slot == window - 4)).to(torch.uint8)
    first_non_finite = FIRST_NON_FINITE.get(values.dtype, 0)
    sizes = (rows, row_slots, window, k, values.element_size(), first_non_finite)
    weight = _Weight(values.data_ptr(), metadata.data_ptr(), begins.data_ptr(), *sizes)
    return bool(_library().slide24_sound(weight, cpp.threads_for(values.numel())))


@cache
def _library() -> ctypes.CDLL:
    library = cpp.load(Path(__file__).with_name("check.cpp"))
    library.slide24_sound.argtypes = (ctypes.POINTER(_Weight), ctypes.c_int)
    library.slide24_sound.restype = ctypes.c_bool
    return library


def _check_positions(packed: Packed) -> None:
    """Check each slot's position, then that its column is greater than that of the previous slot of the same group."""
    metadata = packed.tensors["metadata"]
    group_slots = window_of(packed.pattern) - 2
    shifts = [_positions_at(metadata, i) - i % 2 for i in range(4)]  # uint8: -1 becomes 255
    for i in range(4):
        if shifts[i].max() <= 2:  # on a CPU 40 times as fast as the comparison of each
            continue
        row, byte = _first(shifts[i] > 2)
        least, position = i % 2, int(_positions_at(metadata, i)[row, byte])
        place = _place(row, 4 * byte + i, group_slots)
        raise FormatError(f"tensor metadata, {place}: expected a position from {least} to {least + 2}, got {position}")
    shifts.append(F.pad(shifts[0][:, 1:], (0, 1)))  # of the next byte's first slot
    first_slots = 4 * torch.arange(metadata.shape[1], device=metadata.device)
    for i in range(4):
        same_group = (first_slots + i + 1) % group_slots != 0
        at = _first((shifts[i] > shifts[i + 1]) & same_group)
        if at:
            slot = 4 * at[1] + i + 1
            column = slot + 2 * (slot // group_slots) + int(shifts[i + 1][at])
            previous = slot - 1 + 2 * (slot // group_slots) + int(shifts[i][at])
            raise FormatError(
                f"tensor metadata, {_place(at[0], slot, group_slots)}: expected a column above {previous}, that of the "
                f"slot before, got {column}"
            )


def _positions_at(metadata: Tensor, i: int) -> Tensor:
    """Return the i-th of the four positions of every byte of metadata, [N, slots / 4] uint8."""
    shift_counts = metadata.new_full(metadata.shape[1:], 2 * i)  # ten times as fast as a Python number on a CPU
    return (metadata >> shift_counts) & 3


def _check_past_k(packed: Packed) -> None:
    """Check that values at columns >= K are 0.

    Reads from the last group on that begins at or before column K, and whose first slot is the first of a byte of
    metadata.
    """
    k, window = packed.shape[1], window_of(packed.pattern)
    first_group = k // window // aligned_groups(window) * aligned_groups(window)
    first_slot = first_group * (window - 2)
    values = packed.tensors["values"][:, first_slot:]
    shifts = shifts_of(packed.tensors["metadata"][:, first_slot // 4 :], window)
    slots = torch.arange(first_slot, first_slot + values.shape[1], device=values.device).view(shifts.shape[1:])
    columns = (slots + 2 * (slots // (window - 2)) + shifts).flatten(1)  # a group has two columns more than slots
    at = _first((columns >= k) & (values.float() != 0))
    if at:
        raise FormatError(
            f"tensor values, {_place(at[0], first_slot + at[1], window - 2)}: expected 0 at column {int(columns[at])}, "
            f"which is not below K = {k}, got {values[at].float().item():g}"
        )


def _check_finite(packed: Packed) -> None:
    """Check that the values are finite."""
    values = packed.tensors["values"]
    if values.dtype not in FIRST_NON_FINITE:
        return
    bits = as_bits(values)
    magnitudes = bits & torch.iinfo(bits.dtype).max
    if magnitudes.max() >= FIRST_NON_FINITE[values.dtype]:
        row, slot = _first(magnitudes >= FIRST_NON_FINITE[values.dtype])
        place, value = _place(row, slot, window_of(packed.pattern) - 2), values[row, slot].float().item()
        raise FormatError(f"tensor values, {place}: expected a finite value, got {value}")


def _first(bad: Tensor) -> tuple[int, ...]:
    """Return the index of the first True of ``bad``; () if there is none."""
    if not bad.count_nonzero():  # five times as fast as `any` on a CPU
        return ()
    return tuple(bad.nonzero()[0].tolist())


def _place(row: int, slot: int, group_slots: int) -> str:
    """Describe slot ``slot`` of a row, whose groups have ``group_slots`` slots each."""
    return f"at row {row}, group {slot // group_slots}, slot {slot % group_slots}"
