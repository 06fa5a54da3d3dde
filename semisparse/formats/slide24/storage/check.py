"""The check of a weight in the layout on disk: slots stand for increasing columns of their group, all is finite."""

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

INFINITY = {
    torch.float8_e4m3fn: 0x7F,  # has none, but NaN
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F800000,
}
"""Bits of the least magnitude that is not finite."""


class _Weight(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "metadata", "begins")),
        *((name, ctypes.c_int64) for name in ("rows", "slots", "window", "columns", "width", "infinity")),
    )


def check_content(packed: Packed) -> None:
    """Check that the slots of every group stand for increasing columns, none past K with a weight, and all is finite.

    On a CPU, where loading waits for it, check.cpp first says whether there is any fault to locate.

    Raises:
        FormatError: names the tensor, the row, the group and the slot.
    """
    if "scale" in packed.tensors:
        _refuse_first(~packed.tensors["scale"].isfinite(), "scale", 0, "it is not finite")
    if packed.device.type == "cpu" and cpp.refusal() is None and _sound(packed):
        return
    _check_positions(packed)
    _check_past_k(packed)
    values = packed.tensors["values"]
    if values.dtype in INFINITY:
        bits = as_bits(values)
        magnitudes = bits & torch.iinfo(bits.dtype).max
        if magnitudes.max() >= INFINITY[values.dtype]:
            infinite = magnitudes >= INFINITY[values.dtype]
            _refuse_first(infinite, "values", window_of(packed.pattern) - 2, "it is not finite")


def _sound(packed: Packed) -> bool:
    """Say whether positions and values are sound, by check.cpp."""
    values, metadata = packed.tensors["values"].contiguous(), packed.tensors["metadata"].contiguous()
    (rows, slots), columns, window = values.shape, packed.shape[1], window_of(packed.pattern)
    in_group = 4 * torch.arange(slots // 4) % (window - 2)
    begins = ((in_group == 0) + 2 * (in_group == window - 4)).to(torch.uint8)
    infinity = INFINITY.get(values.dtype, 0)
    sizes = (rows, slots, window, columns, values.element_size(), infinity)
    weight = _Weight(values.data_ptr(), metadata.data_ptr(), begins.data_ptr(), *sizes)
    return bool(_library().slide24_sound(weight, cpp.threads_for(values.numel())))


@cache
def _library() -> ctypes.CDLL:
    library = cpp.load(Path(__file__).with_name("check.cpp"))
    library.slide24_sound.argtypes = (ctypes.POINTER(_Weight), ctypes.c_int)
    library.slide24_sound.restype = ctypes.c_bool
    return library


def _check_positions(packed: Packed) -> None:
    """Check the four slots of every byte, then each beside the next, which may be the next byte's first."""
    metadata = packed.tensors["metadata"]
    slots = window_of(packed.pattern) - 2
    shifts = [_positions_at(metadata, i) - i % 2 for i in range(4)]  # below 0 is 255
    for i in range(4):
        if shifts[i].max() > 2:  # 40 times as fast as comparing each
            _refuse_first(shifts[i] > 2, "metadata", slots, "the position is none that this slot can have", 4, i)
    shifts.append(F.pad(shifts[0][:, 1:], (0, 1)))
    first = 4 * torch.arange(metadata.shape[1], device=metadata.device)
    for i in range(4):
        same_group = (first + i + 1) % slots != 0
        backwards = (shifts[i] > shifts[i + 1]) & same_group
        _refuse_first(backwards, "metadata", slots, "the column does not lie above the one before", 4, i + 1)


def _positions_at(metadata: Tensor, i: int) -> Tensor:
    """Return the i-th position of every byte."""
    bits = metadata.new_full(metadata.shape[1:], 2 * i)  # shifts ten times as fast as a number does
    return (metadata >> bits) & 3


def _check_past_k(packed: Packed) -> None:
    """Check the groups that reach past K, and those before them whose positions are in the same bytes."""
    k, window = packed.shape[1], window_of(packed.pattern)
    groups = k // window // aligned_groups(window) * aligned_groups(window)
    first = groups * (window - 2)
    values = packed.tensors["values"][:, first:]
    shifts = shifts_of(packed.tensors["metadata"][:, first // 4 :], window)
    slots = torch.arange(first, first + values.shape[1], device=values.device).view(shifts.shape[1:])
    # Two columns of every group before are not stored.
    columns = slots + 2 * (slots // (window - 2)) + shifts
    past_k = (columns >= k).flatten(1) & (values.float() != 0)
    _refuse_first(past_k, "values", window - 2, f"a weight past column K = {k} is not zero", 1, first)


def _refuse_first(bad: Tensor, tensor: str, slots: int, what: str, step: int = 1, start: int = 0) -> None:
    """Raise `FormatError` for the first row, group and slot that are ``bad``.

    Args:
        bad: [N], or [N, count]: of the slots ``start``, ``start + step`` and so on.
        tensor: its name.
        slots: of a group.
        what: is wrong there.
    """
    if not bad.count_nonzero():  # five times as fast as `any` on a CPU
        return
    row, *column = bad.nonzero()[0].tolist()
    groups = "".join(f", group {slot // slots}, slot {slot % slots}" for slot in (start + step * at for at in column))
    raise FormatError(f"tensor {tensor}, at row {row}{groups}: {what}")
