"""SlideSparse as its paper writes it, on plain rows and columns, and the weights that the format's tests share."""

import torch
from torch import Tensor

from semisparse.formats import Packed, get_format
from semisparse.formats.slide24.storage.disk import lifted_columns, quantised_dtype, unpack_values
from semisparse.formats.slide24.storage.gpu import in_rows
from semisparse.patterns import parse_pattern
from semisparse.quant.symmetric import quantise_rows

SLIDE24 = get_format("slide24")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = (None, "int8", "fp8")
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def random_weight(pattern: str, n: int, k: int, seed: int = 0) -> Tensor:
    """Return a weight [N, K] that obeys the pattern; later rows have fewer of the non-zeros that it allows."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator)
    weight *= torch.rand(n, k, generator=generator) < torch.linspace(1, 0.2, n)[:, None]
    return weight * parse_pattern(pattern).mask(weight.abs())


def packed_weight(
    pattern: str, n: int, k: int, kind: str | None = None, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Packed:
    options = {} if kind is None else {"kind": kind}
    return SLIDE24.pack(random_weight(pattern, n, k, seed).to(dtype), pattern, **options)


def changed(packed: Packed, **tensors: Tensor) -> Packed:
    """Return a weight with other tensors."""
    return Packed(packed.spec, {**packed.tensors, **tensors})


def assert_same_bits(a: Tensor, b: Tensor, what: str = "") -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape), what
    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), what


def exact_linear(x: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """Return x @ w.T in float64, of quantised operands where the weight is quantised, and that of their magnitudes."""
    packed = in_rows(packed)
    weight, dtype = unpack_values(packed).double(), quantised_dtype(packed.params)
    if dtype is None:
        return x.double() @ weight.T, x.double().abs() @ weight.abs().T
    quantised, token_scales = quantise_rows(x, dtype)
    scales = token_scales.double()[:, None] * packed.tensors["scale"].double()
    return quantised.double() @ weight.T * scales, quantised.double().abs() @ weight.abs().T * scales


def algorithm_2(row: list[float], window: int) -> list[float]:
    """Decompose a row of whole groups: the paper's greedy loop."""
    lifted = []
    for group in range(0, len(row), window):
        used = set()
        for start in range(group, group + window - 2, 2):
            taken = [c for c in range(start, start + 4) if row[c] != 0 and c not in used][:2]
            used |= set(taken)
            lifted += [row[c] if c in taken else 0.0 for c in range(start, start + 4)]
    return lifted


def lift(x: Tensor, window: int) -> Tensor:
    """Return x [M, K] lifted to [M, K'] (equation 4): window l of group g reads the 4 columns from 2N g + 2 l."""
    j = torch.arange(lifted_columns(x.shape[1], window) // 4, device=x.device)
    windows = window // 2 - 1
    begin = window * (j // windows) + 2 * (j % windows)
    columns = (begin[:, None] + torch.arange(4, device=x.device)).flatten()
    padded = torch.cat((x, x.new_zeros(len(x), int(columns.max()) + 1)), 1)
    return padded[:, columns]


def quantise_and_lift(x: Tensor, dtype: torch.dtype, window: int) -> tuple[Tensor, Tensor]:
    """Return x [M, K] in 8 bits, lifted, and its scales [M] (algorithm 1); a token of zeros has scale 1."""
    q_max = torch.tensor(LARGEST[dtype], device=x.device)
    a = x.float().abs().amax(1)
    a = torch.where(a == 0, q_max, a)
    r = torch.minimum(q_max / a, torch.tensor(torch.finfo(torch.float32).max, device=x.device))
    q = (lift(x, window).float() * r[:, None]).clamp(-q_max, q_max)
    return (q.round() if dtype == torch.int8 else q).to(dtype), a / q_max


def lifted_linear(x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """Return Psi(x) Phi(w)^T in float64, scaled: sums of 8-bit values are exact there, in any order."""
    window, weight = packed.pattern.window, unpack_values(packed)
    k = lifted_columns(packed.shape[1], window) * window // (2 * window - 4)
    rows = [algorithm_2(row + [0.0] * (k - len(row)), window) for row in weight.double().tolist()]
    if "scale" not in packed.tensors:
        y = lift(x, window).double() @ torch.tensor(rows, dtype=torch.float64).T
    else:
        lifted, scales = quantise_and_lift(x, weight.dtype, window)
        y = lifted.double() @ torch.tensor(rows, dtype=torch.float64).T
        y = y * scales.double()[:, None] * packed.tensors["scale"].double()
    return (y if bias is None else y + bias).to(x.dtype)
