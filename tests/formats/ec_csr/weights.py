"""What the tests of this folder share: weights, operands, a float64 reference, and a reader of README.md's bytes."""

from itertools import pairwise

import torch
from torch import Tensor

from semisparse.formats import Packed, get_format
from semisparse.patterns import parse_pattern
from tests.formats.cases import build, random

EC_CSR = get_format("ec_csr")
LAYOUTS = ("banks", "paper")


def random_weight(n: int, k: int, pattern: str, dtype: torch.dtype = torch.float16) -> Tensor:
    return build(parse_pattern(pattern), random, n, k).to(dtype)


def uneven_weight(n: int, k: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Lanes whose rows are far apart in a segment: lane 3 has all rows, lane 4 the last two, others every third."""
    weight = torch.zeros(n, k)
    weight[:, 3::32] = 1.5
    weight[-2:, 4::32] = -0.75
    weight[::3, 5::7] = 2.0
    return weight.to(dtype)


def operands(packed: Packed, m: int) -> tuple[Tensor, Tensor]:
    """Return a random x [M, K] and bias [N] in the weight's dtype, where it is."""
    n, k = packed.shape
    generator = torch.Generator().manual_seed(m)
    x, bias = torch.randn(m, k, generator=generator), torch.randn(n, generator=generator)
    return x.to(packed.device, packed.dtype), bias.to(packed.device, packed.dtype)


def check(y: Tensor, x: Tensor, packed: Packed, bias: Tensor) -> None:
    """Compare with float64: an error of K float32 additions, then one rounding to y's dtype, or two with the bias."""
    wide_x, weight = x.double(), packed.unpack().double()
    product = wide_x @ weight.T
    summed = (packed.shape[1] + 2) * 2.0**-23 * (wide_x.abs() @ weight.abs().T + bias.double().abs())
    facts = torch.finfo(y.dtype)
    rounded = facts.eps / 2 * (product.abs() + (product + bias).abs() + 2 * summed) + facts.smallest_normal * facts.eps
    off = ((y.double() - product - bias).abs() - summed - rounded).nan_to_num(nan=float("inf"))
    assert y.dtype == x.dtype
    assert off.max() <= 0, f"off by {off.max():.3g} more than rounding explains"


def changed(packed: Packed, name: str, at: tuple[int, ...], value: float) -> Packed:
    tensor = packed.tensors[name].clone()
    tensor[at] = value
    return Packed(packed.spec, {**packed.tensors, name: tensor})


def delta(packed: Packed, number: int) -> int:
    stored = packed.tensors["deltas"]
    if packed.params["delta_bits"] == 8:
        return int(stored[number])
    return int(stored[number // 2]) >> 4 * (number % 2) & 15


def unsigned(stored: Tensor) -> list[list[int]]:
    return [[number % 2 ** (8 * stored.dtype.itemsize) for number in row] for row in stored.tolist()]


def read_panels(packed: Packed) -> list[list[float]]:
    n, k = packed.shape
    rows = packed.params["panel_rows"]
    lane_columns, vector = -(-k // 32), 16 // packed.dtype.itemsize
    weight = [[0.0] * k for _ in range(n)]
    bases, values = unsigned(packed.tensors["bases"]), packed.tensors["values"].tolist()
    for panel, (start, end) in enumerate(pairwise(packed.tensors["panel_loads"].tolist())):
        loads = end - start
        for segment in range(16):
            for lane in range(32):
                position = bases[panel * 16 + segment][lane]
                for load in range(segment * loads // 16, (segment + 1) * loads // 16):
                    for entry in range(vector):
                        number = ((start + load) * 32 + lane) * vector + entry
                        position += delta(packed, number)
                        if values[number]:
                            row, column = panel * rows + position // lane_columns, position % lane_columns * 32 + lane
                            assert weight[row][column] == 0
                            weight[row][column] = values[number]
    return weight


def read_paper(packed: Packed) -> list[list[float]]:
    n, k = packed.shape
    weight = [[0.0] * k for _ in range(n)]
    bases, values = unsigned(packed.tensors["bases"]), packed.tensors["values"].tolist()
    slots, starts = packed.tensors["slots"].tolist(), packed.tensors["row_slots"].tolist()
    row_of = [row for row in range(n) for _ in range(starts[row], starts[row + 1])]
    for number, fields in enumerate(packed.tensors["bundles"].tolist()):
        granularity, vector, columns, first_delta, first_value, first_slot = fields
        for lane in range(32):
            column = bases[number][lane]
            for entry in range(columns):
                inside = (entry // vector * 32 + lane) * vector + entry % vector
                column += delta(packed, first_delta + inside)
                for member in range(granularity):
                    value = values[first_value + inside * granularity + member]
                    if value:
                        weight[row_of[slots[first_slot + member]]][column] = value
    return weight


READERS = {"banks": read_panels, "paper": read_paper}
