"""What the dense kinds store."""

import pytest
import torch

from semisparse.errors import FormatError
from semisparse.formats import Packed, get_format
from semisparse.formats.dense.storage import int4

DENSE = get_format("dense")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

KINDS = ("int8", "fp8", "fp8_tensor", "int4")


def weight(n: int = 64, k: int = 256, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)).to(dtype)


@pytest.mark.parametrize(
    ("kind", "bits", "error"),
    [("int8", 8.125, 0.01), ("fp8", 8.125, 0.03), ("fp8_tensor", 8.002, 0.03), ("int4", 5, 0.09)],
)
def test_a_rounded_weight_is_near_and_as_large_as_declared(kind: str, bits: float, error: float):
    """Errors of a normal weight: amax 3 to 4 over 254, 15 or so levels, or e4m3's 3 bits of mantissa."""
    packed = DENSE.pack(weight(), "0%", kind=kind)
    DENSE.validate(packed)
    assert packed.bits_per_weight == pytest.approx(bits, abs=1e-3)
    assert packed.unpack().dtype == torch.bfloat16
    relative = (packed.unpack().float() - weight().float()).norm() / weight().float().norm()
    assert error / 4 < relative < error


def test_the_readmes_example():
    packed = DENSE.pack(torch.tensor([[127, -1, 0, 63.5], [0, 0, 0, 0]]), "0%", kind="int8")
    assert packed.tensors["values"].numpy().tobytes().hex(" ") == "7f ff 00 40 00 00 00 00"
    assert packed.tensors["scale"].numpy().tobytes().hex(" ") == "00 00 80 3f 00 00 80 3f"


def test_zero_weights_are_exact_in_every_kind():
    for kind in KINDS:
        packed = DENSE.pack(torch.zeros(8, 128), "0%", kind=kind)
        assert not packed.unpack().any(), kind


def test_what_cannot_be_stored_is_refused_with_what_can():
    with pytest.raises(FormatError, match="no kind 'int3'; it has int8, fp8, fp8_tensor, int4"):
        DENSE.pack(weight(), "0%", kind="int3")
    with pytest.raises(FormatError, match="N in multiples of 8 and K of 128"):
        DENSE.pack(weight(64, 172), "0%", kind="int4")


@pytest.mark.parametrize(("kind", "name"), [("int8", "scale"), ("int4", "scale_and_zero"), (None, "values")])
def test_numbers_that_are_not_finite_are_refused(kind: str | None, name: str):
    packed = DENSE.pack(weight(), "0%", kind=kind)
    bad = packed.tensors[name].clone()
    bad[3] = torch.inf
    with pytest.raises(FormatError, match=name):
        DENSE.validate(Packed(packed.spec, {**packed.tensors, name: bad}))


def test_int4_places_each_value_where_the_tensor_core_wants_it():
    """Lane, word and shift of single values, worked out by hand from the fragment of mma.m16n8k16."""
    groups = torch.arange(16.0).repeat(8, 8)
    for row, column, lane, word, shift in [
        (0, 0, 0, 0, 0),
        (1, 3, 5, 0, 16),
        (7, 9, 28, 0, 20),
        (2, 31, 11, 0, 28),
        (0, 66, 1, 2, 0),
    ]:
        raised = groups.clone()
        raised[row, column] = 15.0 - raised[row, column]
        before, after = (int4.pack(w)["values"][0, 0].long() for w in (groups, raised))
        changed = (before != after).nonzero().tolist()
        assert changed == [[lane, word]]
        difference = (before[lane, word] ^ after[lane, word]) & 0xFFFFFFFF
        assert difference.item() == 15 << shift


@pytest.mark.skipif(DEVICE == "cpu", reason="torch's int4 packer needs a GPU")
def test_int4_is_torchs_own_layout():
    packed = DENSE.pack(weight().cuda(), "0%", kind="int4")
    scale, zero = packed.tensors["scale_and_zero"].float().transpose(0, 1).unbind(-1)
    codes = ((packed.unpack().float().unflatten(1, (-1, 32)) - zero[..., None]) / scale[..., None] + 8).round()
    codes = codes.flatten(1).to(torch.uint8)
    expected = torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
    assert torch.equal(packed.tensors["values"], expected)
