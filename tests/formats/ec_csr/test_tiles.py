"""Mask tiles: the bytes that README.md gives, and the weight that comes back."""

from dataclasses import replace

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from semisparse.errors import FormatError
from semisparse.formats import Packed
from semisparse.formats.base import Params
from semisparse.formats.ec_csr.storage import tiles
from semisparse.formats.ec_csr.storage.gpu import to_tiles
from tests.cuda_emulator import emulate
from tests.formats.ec_csr.weights import EC_CSR, changed, random_weight, uneven_weight
from tests.formats.worked_example import worked_example


def read_tiles(packed) -> list[list[float]]:
    """Read the weight as README.md says, with plain loops."""
    n, k = packed.shape
    weight = [[0.0] * k for _ in range(n)]
    starts, column_tiles = packed.tensors["tile_starts"].tolist(), -(-k // 256)
    units = packed.tensors["tiles"].tolist()
    for tile, start in enumerate(starts[:-1]):
        masks = [word % 2**32 for unit in units[start : start + 4] for word in unit]
        for lane in range(32):
            number = 0
            for half in range(2):
                row = tile // column_tiles * 16 + lane // 4 + 8 * half
                for column in range(64):
                    word, offset = divmod((column + 1) % 64, 32)  # word h begins with column 32 h - 1
                    shift, byte = offset // 4, offset % 4
                    if masks[lane * 4 + half * 2 + word] >> (8 * byte + 7 - shift) & 1:
                        stored = torch.tensor([units[start + 4 + number // 2][lane]], dtype=torch.int32)
                        at = tile % column_tiles * 256 + lane % 4 * 64 + column
                        weight[row][at] = float(stored.view(packed.dtype)[number % 2])
                        number += 1
    return weight


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(40, 700), (16, 256), (1, 3)])
def test_the_weight_comes_back(monkeypatch: pytest.MonkeyPatch, n: int, k: int, dtype: torch.dtype):
    monkeypatch.setattr(tiles, "BATCH", 16 * 256 * 3)  # several batches
    for weight, pattern in ((random_weight(n, k, "70%", dtype), "70%"), (uneven_weight(n, k, dtype), "0%")):
        packed = to_tiles(EC_CSR.pack(weight, pattern))
        assert torch.equal(packed.unpack(), weight)
        assert read_tiles(packed) == weight.tolist()


class DevicesSeen(TorchDispatchMode):
    """Collects the devices of the tensors that torch's operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.types |= {one.device.type for one in pytree.tree_leaves(result) if isinstance(one, torch.Tensor)}
        return result


def test_unpacking_makes_no_tensor_on_the_host():
    """A copy from the host cannot be captured in a CUDA graph; the meta device stands for a GPU."""
    packed = to_tiles(EC_CSR.pack(random_weight(40, 700, "70%"), "70%"))
    held = Packed(packed.spec, {name: tensor.to("meta") for name, tensor in packed.tensors.items()})
    with DevicesSeen() as seen:
        weight = tiles.unpack(held)
    assert weight.shape == (40, 700)
    assert seen.types == {"meta"}


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_on_hopper_alone_a_weight_is_in_tiles_and_comes_back(monkeypatch: pytest.MonkeyPatch, capability):
    emulate(monkeypatch, 2, capability)
    packed = EC_CSR.pack(random_weight(100, 700, "70%"), "70%", on_gpu="tiles")
    arranged = EC_CSR.arrange(packed, "cuda")
    EC_CSR.verify(arranged)
    assert arranged.params["layout"] == ("tiles" if capability == (9, 0) else "banks")
    assert EC_CSR.arrange(arranged, "cuda") is arranged
    back = EC_CSR.arrange(arranged, "cpu")
    assert back.spec == packed.spec
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in packed.tensors.items())


def test_tiles_of_other_weights_are_refused():
    weight = random_weight(40, 300, "70%")
    for options, dtype in (({"on_gpu": "none"}, weight.dtype), ({"on_gpu": "tiles"}, torch.float32)):
        with pytest.raises(FormatError, match="gpu"):
            EC_CSR.pack(weight.to(dtype), "70%", **options)
    with pytest.raises(FormatError, match="gpu"):
        EC_CSR.pack(weight, "70%", layout="paper", multiple=32, on_gpu="tiles")


@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("tile_starts", (0,), 1, "tile_starts runs from 1"),
        ("tile_starts", (1,), 0, "tile_starts, at .0.: the tile has no words"),
        ("tile_starts", (1,), 10**6, "tile_starts, at .0.: the tile has no words, or not below"),
        ("tiles", (0, 0), -1, "tiles, at .0.: the masks mark more values"),
        ("tiles", (4, 0), 0x7C00, "tiles, at .0, 0.: the value is not finite"),
    ],
)
def test_what_is_wrong_with_tiles_is_named(name: str, at: tuple[int, ...], value: int, message: str):
    weight = torch.full((40, 300), 1.0).half()
    weight[:, 1::2] = 0
    packed = to_tiles(EC_CSR.pack(weight, "50%"))
    EC_CSR.validate(packed)
    with pytest.raises(FormatError, match=message):
        EC_CSR.validate(changed(packed, name, at, value))


def test_weights_past_the_shape_are_refused():
    """A tile whose masks mark a column from K on, or a row from N on, has been made for another shape."""
    packed = to_tiles(EC_CSR.pack(torch.ones(16, 256).half(), "0%"))
    for n, k in ((16, 255), (15, 256)):
        spec = replace(packed.spec, shape=(n, k), params=Params({**packed.params, "n": n, "k": k}))
        with pytest.raises(FormatError, match="past N, K"):
            EC_CSR.validate(Packed(spec, packed.tensors))


def test_the_worked_example_of_the_readme():
    shown = worked_example("ec_csr", "tiles")
    weight = torch.zeros(2, 70).half()
    weight[0, [0, 64, 33]] = torch.tensor([1.0, 2.0, 3.0]).half()
    weight[1, 0] = 4.0
    packed = to_tiles(EC_CSR.pack(weight, "90%"))
    units = packed.tensors["tiles"]
    stored = {"tile_starts": packed.tensors["tile_starts"], "masks": units[:4], "values": units[4:]}
    assert set(shown) == set(stored)
    for name, tensor in stored.items():
        expected, found = shown[name], tensor.numpy().tobytes()
        assert found[: len(expected)] == expected, name
        assert not any(found[len(expected) :]), name
