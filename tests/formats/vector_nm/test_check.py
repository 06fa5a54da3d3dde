"""What the checks of stored tensors refuse: a checkpoint is an untrusted file."""

from dataclasses import replace

import pytest
import torch

from semisparse.errors import FormatError
from semisparse.formats import Packed
from semisparse.formats.base import Params
from semisparse.formats.vector_nm.storage import gpu
from tests.cuda_emulator import emulate, needs_compiler
from tests.formats.vector_nm.reference import VECTOR_NM, pack


def changed(packed: Packed, name: str, index: int | tuple[int, ...], value: float) -> Packed:
    tensor = packed.tensors[name].clone()
    if isinstance(index, int):
        tensor.view(-1)[index] = torch.tensor(value).to(tensor.dtype)
    else:
        tensor[index] = value
    return Packed(packed.spec, {**packed.tensors, name: tensor})


@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("positions", (0, 1), 4, "below the window size 4"),
        ("positions", (1, 2), 255, "below the window size 4"),
        ("positions", (0, 1), 1, r"at \[0, 1\]: not above the position before"),
        ("positions", (1, 3), 3, r"at \[1, 3, 0\]: a weight in a column from K = 7 on"),
        ("values", (1, 0, 2), 1.0, r"at \[1, 0, 2\]: a weight in a row from N = 5 on"),
    ],
)
def test_damaged_vectors_are_refused(name: str, at: tuple[int, ...], value: float, message: str):
    weight = torch.zeros(5, 7)
    weight[:, [1, 2, 5, 6]] = 1.0
    packed = VECTOR_NM.pack(weight, "2:4v4")
    VECTOR_NM.validate(packed)
    with pytest.raises(FormatError, match=message):
        VECTOR_NM.validate(changed(packed, name, at, value))


@pytest.mark.parametrize("params", [{"rows": 4}, {"rows": 6}, {"rows": "five"}, {}, {"rows": 5, "layout": "tiles"}])
def test_other_params_are_refused(params: dict):
    packed = VECTOR_NM.pack(torch.zeros(5, 8), "2:4v4")
    with pytest.raises(FormatError, match=r"rows|layout"):
        VECTOR_NM.validate(Packed(replace(packed.spec, params=Params(params)), packed.tensors))


@needs_compiler
def test_damaged_orders_are_refused(monkeypatch):
    emulate(monkeypatch)
    ordered = VECTOR_NM.arrange(pack("8:32v32", 70, 100), "cuda")
    VECTOR_NM.validate(ordered)
    for name, index, wrong, message in (
        ("block_starts", 0, 1, "does not rise"),
        ("columns", 0, 1000, "is not below"),
        ("slots", 0, 999, "a slot is out of range"),
        ("slots", 0, gpu.NO_SLOT, "a slot is missing or repeated"),
        ("metadata", 0, 0, "2:4 group do not rise"),
        ("metadata", 1, 0, "the tiles marked as needing a block"),
    ):
        with pytest.raises(FormatError, match=message):
            VECTOR_NM.validate(changed(ordered, name, index, wrong))
    swapped = ordered.tensors["columns"].clone()
    swapped[0, :2] = swapped[0, :2].flip(0)
    with pytest.raises(FormatError, match="is not the slot's in positions"):
        VECTOR_NM.validate(Packed(ordered.spec, {**ordered.tensors, "columns": swapped}))
    empty = {**ordered.tensors, "slots": torch.full_like(ordered.tensors["slots"], gpu.SKIPPED - 0x10000)}
    with pytest.raises(FormatError, match="a slot is missing or repeated"):
        VECTOR_NM.validate(Packed(ordered.spec, empty))
    none = {**ordered.tensors, "block_starts": torch.zeros(2, dtype=torch.int32)}
    none |= {name: ordered.tensors[name][:0] for name in ("columns", "slots", "metadata")}
    with pytest.raises(FormatError, match="does not rise"):
        VECTOR_NM.validate(Packed(replace(ordered.spec, params=Params(ordered.params, blocks=0)), none))
