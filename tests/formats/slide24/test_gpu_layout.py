"""The layouts on a GPU, tested on a CPU: converting back restores the bytes, and invalid content is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semisparse.errors import FormatError
from semisparse.formats import Packed
from semisparse.formats.slide24.storage import gpu
from tests.cuda_emulator import emulate
from tests.formats.slide24.reference import KINDS, SLIDE24, assert_same_bits, changed, packed_weight


@pytest.mark.parametrize("kind", KINDS)
@given(half=st.integers(2, 8), n=st.integers(1, 200), k=st.integers(1, 300), seed=st.integers(0, 99))
def test_tiles_come_back_as_the_same_rows(kind, half, n, k, seed):
    packed = packed_weight(f"{2 * half - 2}:{2 * half}", n, k, kind, seed=seed)
    tiles = gpu.in_tiles(packed)
    SLIDE24.validate(tiles)
    assert tiles.params["layout"] == "tiles"
    assert torch.equal(tiles.unpack(), packed.unpack())
    back = tiles.to("cpu")
    assert back.spec == packed.spec
    for name, tensor in packed.tensors.items():
        assert_same_bits(back.tensors[name], tensor, name)


def test_what_lies_outside_of_a_weight_in_tiles_is_refused():
    packed = gpu.in_tiles(packed_weight("6:8", 5, 40, "int8"))
    for at, value in (((0, 1, 7), 1), ((0, 0, 4096 + 5 * 16), 0)):  # values of row 64, metadata of rows 5 and on
        tiles = packed.tensors["tiles"].clone()
        tiles[at] = value
        with pytest.raises(FormatError, match="tiles must hold padding"):
            SLIDE24.validate(changed(packed, tiles=tiles))


def test_layouts_that_cannot_be_are_refused():
    packed = packed_weight("6:8", 5, 40, "int8")
    for params, message in (
        ({"layout": "heaps"}, "no layout 'heaps'"),
        ({"layout": "compressed"}, "do not give every dimension"),
        ({"layout": "tiles"}, "stores \\['scale', 'tiles'\\]"),
    ):
        with pytest.raises(FormatError, match=message):
            SLIDE24.validate(packed.in_layout({**packed.params, **params}, packed.tensors))
    opaque = {"compressed": torch.zeros(9, dtype=torch.uint8), "scale": packed.tensors["scale"]}
    params = {"kind": "int8", "layout": "compressed", "bytes": 9}
    with pytest.raises(FormatError, match="exists on a GPU only"):
        SLIDE24.validate(packed.in_layout(params, opaque))
    wide = packed_weight("6:8", 5, 40, dtype=torch.float32).in_layout({"layout": "tiles"}, {})
    tiles = torch.zeros(SLIDE24.shapes(wide.spec)["tiles"], dtype=torch.uint8)
    with pytest.raises(FormatError, match="layout tiles holds 8 or 16 bits per value"):
        SLIDE24.validate(changed(wide, tiles=tiles))


@pytest.mark.parametrize(("capability", "layout"), [((9, 0), "tiles"), ((7, 5), "rows")])
def test_a_gpu_gets_the_layout_of_its_kernel(capability, layout, monkeypatch):
    packed = packed_weight("6:8", 5, 40, "int8")
    assert SLIDE24.arrange(packed, "cuda") is packed  # its tensors are on a CPU, so nothing is converted
    emulate(monkeypatch, capability=capability)
    arranged = SLIDE24.arrange(packed, "cuda")
    assert gpu.layout_of(arranged.params) == layout
    assert isinstance(arranged, Packed)
    assert arranged.nbytes >= packed.nbytes
    plain = packed_weight("6:8", 5, 40, dtype=torch.float32)
    assert SLIDE24.arrange(plain, "cuda") is plain
