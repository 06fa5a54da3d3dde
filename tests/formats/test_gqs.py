"""Format gqs beyond the contract: its bytes, every kind and size, scales from elsewhere, bits a weight."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import semisparse
from semisparse.errors import FormatError, RecipeError
from semisparse.formats import linear, registry
from semisparse.formats.base import Packed
from semisparse.formats.gqs.activations import rounded
from semisparse.patterns import parse_pattern
from semisparse.quant.group import KINDS, GroupScales, scales_of
from semisparse.quant.symmetric import quantise_rows
from tests.formats.test_contract import check_product, random_operands

GQS = registry()["gqs"]
SIZES = (4, 8, 16, 32, 64, 128)


def sparse(n: int, k: int, size: int, percent: float, seed: int = 0) -> torch.Tensor:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    return weight * parse_pattern(f"g{size}@{percent}%").mask(weight.abs())


def as_multiplied(x: torch.Tensor, packed: Packed, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Give x as a kernel multiplies it: for ``w4a8`` in 8 bits by tokens, exactly or as they are in ``dtype``."""
    if packed.params["kind"] != "w4a8":
        return x
    codes, scale = quantise_rows(x.cpu(), torch.int8)
    whole = codes.double() * scale.double()[:, None] if dtype == torch.float64 else codes.float() * scale[:, None]
    return whole.to(dtype).to(x.device)


def by_hand(packed: Packed) -> torch.Tensor:
    """Read the bytes as README.md says, bit by bit."""
    (n, k), size = packed.shape, int(re.match(r"g(\d+)", str(packed.pattern))[1])
    bits, tensors = KINDS[packed.params["kind"]], packed.tensors
    weight = torch.zeros(n, k, dtype=torch.float64)
    unit = min(8, size)
    place = 0
    for tile, masks in enumerate(tensors["masks"].tolist()):
        for column_tile, mask in enumerate(masks):
            assert tensors["starts"][tile * len(masks) + column_tile] == place
            for bit in range(64):
                if not mask >> bit & 1:
                    continue
                row, first = 16 * tile + bit // 4, (4 * column_tile + bit % 4) * size
                stream = int.from_bytes(bytes(tensors["codes"][place].tolist()), "little")
                zero = int(tensors["zero"][place]) * 2.0 ** (bits - 8)
                for column in range(min(size, k - first)):
                    inside = column % unit
                    slot = column // unit * unit + inside // 2 + (unit // 2 if inside % 2 else 0)
                    code = stream >> bits * slot & 2**bits - 1
                    weight[row, first + column] = (code - zero) * float(tensors["scale"][place])
                place += 1
    assert tensors["starts"][-1] == place == packed.params["kept"]
    return weight.to(packed.dtype)


@pytest.mark.parametrize("kind", KINDS)
@given(
    n=st.integers(1, 37), k=st.integers(1, 300), size=st.sampled_from(SIZES), percent=st.sampled_from([0, 30, 50, 90])
)
def test_the_bytes_are_those_of_the_readme(kind: str, n: int, k: int, size: int, percent: float):
    if kind == "w3" and size == 4:
        return
    weight = sparse(n, k, size, percent).half()
    packed = GQS.pack(weight, f"g{size}@{percent}%", kind=kind)
    GQS.validate(packed)
    assert torch.equal(packed.unpack(), by_hand(packed))
    assert torch.equal(packed.unpack(), scales_of(weight, KINDS[kind], size, torch.float16).rounded(weight))


def test_the_worked_example():
    text = (Path(semisparse.__file__).parent / "formats/gqs/README.md").read_text()
    told = dict(line.split(maxsplit=1) for line in re.search(r"```bytes\n(.*?)```", text, re.DOTALL)[1].splitlines())
    weight = torch.zeros(2, 12)
    weight[0, 4:8] = torch.tensor([-1.0, 2.0, 0.0, 0.6])
    weight[1, 8:12] = torch.tensor([0.5, 1.0, 1.5, 7.5])
    packed = GQS.pack(weight.half(), "g4@50%")
    for name, tensor in packed.tensors.items():
        assert bytes.fromhex(told[name]) == tensor.contiguous().view(torch.uint8).numpy().tobytes(), name


@pytest.mark.parametrize(("percent", "bits"), [(0, 5.594), (20, 4.494), (30, 3.944), (40, 3.394), (50, 2.844)])
def test_bits_a_weight(percent: float, bits: float):
    packed = GQS.pack(sparse(256, 512, 16, percent).half(), f"g16@{percent}%")
    assert packed.bits_per_weight == pytest.approx(bits, abs=0.003)


def test_tuned_scales_are_stored_and_their_codes_found_again():
    """Compression ends in rounded weights and their scales: packing must not round them anew."""
    weight = sparse(20, 70, 16, 50)
    for bits, dtype in ((4, torch.bfloat16), (8, torch.float16), (2, torch.float32)):
        tuned = scales_of(weight, bits, 16, dtype)
        tuned = replace(tuned, scale=tuned.scale * 0.9, zero=(tuned.zero + 3).clamp(0, 255))
        rounded = tuned.rounded(weight)
        packed = GQS.pack(rounded, "g16@50%", kind=f"w{bits}", scales=tuned)
        assert torch.equal(packed.unpack() + 0.0, rounded + 0.0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"bits": 8}, "expected"),
        ({"size": 8}, "expected"),
        ({"scale": torch.ones(3, 1)}, "expected"),
        ({"scale": torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])}, "row 1, group 1 is 0.0"),
        ({"scale": torch.tensor([[1.0, 1.0], [1.0, 1.0], [float("nan"), 1.0]])}, "row 2, group 0 is nan"),
    ],
)
def test_scales_of_another_weight_are_refused(change: dict, told: str):
    scales = replace(GroupScales(4, 16, torch.ones(3, 2), torch.zeros(3, 2)), **change)
    with pytest.raises(FormatError, match=told):
        GQS.pack(torch.ones(3, 30), "g16@0%", scales=scales)


@pytest.mark.parametrize(
    ("pattern", "kind", "told"),
    [("g5@50%", "w4", "groups along K"), ("2:4", "w4", "groups along K"), ("g16@50%", "w5", "no kind 'w5'"),
     ("g4@50%", "w3", "do not fill bytes")],
)  # fmt: skip
def test_what_cannot_be_stored_is_refused(pattern: str, kind: str, told: str):
    with pytest.raises(FormatError, match=told):
        GQS.pack(torch.zeros(4, 40), pattern, kind=kind)


def test_masks_and_scales_from_a_stranger_are_checked():
    packed = GQS.pack(sparse(20, 40, 16, 50), "g16@50%")

    def corrupted(name: str, place: tuple[int, ...], value: float) -> Packed:
        tensor = packed.tensors[name].clone()
        tensor[place] = value
        return replace(packed, tensors={**packed.tensors, name: tensor})

    for name, place, value, told in (
        ("masks", (1, 0), 1 << 20, "past row N = 20"),
        ("masks", (0, 0), 1 << 3, "past column K = 40"),
        ("starts", (1,), 10**6, "at chunk 1: 1000000 groups"),
        ("scale", (2,), float("inf"), "at group 2: inf"),
        ("scale", (2,), -1.0, "at group 2: -1.0"),
    ):
        with pytest.raises(FormatError, match=told):
            GQS.validate(corrupted(name, place, value))


def test_a_recipe_needs_a_kind_that_the_format_stores():
    for setting in ("quant=none", "quant=int8", "format=bitmask", "format=auto"):
        with pytest.raises(RecipeError, match="does not store quant="):
            semisparse.api.read_recipe("gqsa", ["tune=bqpo", setting])
    with pytest.raises(RecipeError, match="rounds the groups of a pattern"):
        semisparse.api.read_recipe("rheosparse", ["quant=w4"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cpu_kernel_reads_every_kind_and_size(kind: str, dtype: torch.dtype):
    for size in SIZES if kind != "w3" else SIZES[1:]:
        packed = GQS.pack(sparse(21, 150, size, 50).to(dtype), f"g{size}@50%", kind=kind)
        x = torch.randn(3, 150, generator=torch.Generator().manual_seed(1))
        found = linear(x, packed, kernel="cpu")
        widened = {**packed.tensors, "scale": packed.tensors["scale"].float()}
        stored = replace(packed, dtype=torch.float32, tensors=widened, declaration="")  # before it is rounded to dtype
        weight, multiplied = stored.unpack().double(), as_multiplied(x, packed).double()
        bound = (150 + 4) * 2.0**-24 * (multiplied.abs() @ weight.abs().T)
        assert ((found.double() - multiplied @ weight.T).abs() <= bound + 1e-30).all(), size


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("m", [0, 1, 2, 9, 40])
def test_activations_have_8_bits_however_many_tokens_there_are(m: int, device: str):
    packed = GQS.pack(sparse(30, 200, 16, 50).half().to(device), "g16@50%", kind="w4a8")
    x, bias = random_operands(packed, m, torch.float16, device)
    y = linear(x, packed, bias)
    exact = as_multiplied(x, packed).double() @ packed.unpack().double().T + bias.double()
    unrounded = x.double() @ packed.unpack().double().T + bias.double()
    assert (y.double() - exact).norm() <= 0.1 * (unrounded - exact).norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the decode kernel: no GPU here")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["w4", "w8", "w4a8"])
@pytest.mark.parametrize("k", [172, 520, 1024])
def test_more_rows_than_blocks_on_a_gpu(kind: str, dtype: torch.dtype, k: int):
    """The contract's weights have a block for each 16 rows; these are divided among blocks, in another build."""
    weight = sparse(9000, k, 16, 50)
    weight[4000:4100] = 0
    packed = GQS.pack(weight.to(dtype).cuda(), "g16@50%", kind=kind)
    for m in (1, 2, 3, 4, 8, 16):
        x, bias = random_operands(packed, m, dtype, "cuda")
        y = linear(x, packed, bias, kernel="decode")
        # Where weights are made of the codes, activations are taken in 16 bits.
        check_product(y, x, packed, bias, as_multiplied(x, packed, dtype if m > 2 else torch.float64))
        assert torch.equal(y, linear(x, packed, bias, kernel="decode"))
        assert torch.equal(y, linear(x * 1, packed, bias, kernel="decode"))  # after a kernel that it overlaps


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the decode kernel: no GPU here")
def test_graphs_of_one_stream_replay_at_once():
    """A product leaves nothing in memory that another graph could find."""
    packed = GQS.pack(sparse(9000, 1024, 16, 50).half().cuda(), "g16@50%", kind="w4")
    tokens, graphs = torch.randn(2, 1, 1024, device="cuda").half(), []
    expected = [linear(x, packed, kernel="decode") for x in tokens]
    for x in tokens:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [linear(x, packed, kernel="decode") for _ in range(30)]
        graphs.append((graph, found, torch.cuda.Stream()))
    torch.cuda.synchronize()
    for _ in range(10):
        for graph, _, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for y, (_, found, _) in zip(expected, graphs, strict=True):
        assert all(torch.equal(y, other) for other in found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel that rounds activations: no GPU here")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tokens_rounded_on_a_gpu_have_the_bits_of_the_reference(dtype: torch.dtype):
    for m, k in ((1, 1), (3, 173), (300, 4096)):
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(k)).to(dtype)
        assert torch.equal(rounded(x.cuda(), dtype).cpu(), rounded(x, dtype))
