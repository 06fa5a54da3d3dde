"""A mixture's experts in one launch: few tokens, many, routing and the sum over experts; emulated, and on a GPU."""

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats import Packed, get_format
from semisparse.formats.bitmask.cuda import experts as bitmask_experts
from semisparse.formats.bitmask.storage.gpu import tiling
from semisparse.formats.gqs.cuda import experts as gqs_experts
from semisparse.formats.kernel import ExpertsProblem, ExpertsProduct
from semisparse.formats.product import structure_of
from semisparse.nn.experts_product import experts_product, reference_product
from semisparse.nn.stacking import stack_with_padding
from semisparse.patterns import parse_pattern
from semisparse.runtime.experts import Routing, most_jobs
from semisparse.runtime.gemm_schedule import Schedule
from tests.choosing import mostly_slow
from tests.cuda_emulator import emulate, needs_compiler

HALF, BFLOAT = torch.float16, torch.bfloat16
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels of experts: no GPU here")


def stack_of(
    form: str, experts: int, n: int, k: int, dtype: torch.dtype, pattern: str | None = None, **options: str
) -> Packed:
    """Stack random experts [n, k], the second without any weight, in the layout of a GPU.

    Args:
        form: a format, and behind a space its kind.
        experts: their number.
        n: output features of one.
        k: input features.
        dtype: of the weights.
        pattern: None for the format's usual one.
        options: of `Format.pack`.
    """
    form, _, kind = form.partition(" ")
    options |= {"kind": kind} if kind else {}
    pattern = pattern or {"bitmask": "32:64", "gqs": "g16@50%"}[form]
    generator, weights = torch.Generator().manual_seed(n + k), []
    for expert in range(experts):
        weight = torch.randn(n, k, generator=generator) * (expert != 1)
        weight *= parse_pattern(pattern).mask(weight.abs())
        weights.append(get_format(form).pack(weight.to(dtype), pattern, **options))
    stack = stack_with_padding(weights)
    assert stack is not None
    return get_format(form).arrange(stack, "cuda")


def expected(x: Tensor, stack: Packed, bias: Tensor | None, routing: Routing, gated: bool) -> tuple[Tensor, Tensor]:
    """Return y [pairs, N] in float64, and which pairs have an expert."""
    weights = stack.unpack().double().unflatten(0, (routing.experts, -1))
    chosen = routing.chosen.flatten()
    exist = (chosen >= 0) & (chosen < routing.experts)
    rows = x.double()[torch.arange(routing.pairs, device=x.device) // (routing.pairs // len(x))]
    y = torch.stack([weights[int(e) if ok else 0] @ row for e, ok, row in zip(chosen, exist, rows, strict=True)])
    if bias is not None:
        y += bias.double().unflatten(0, (routing.experts, -1))[chosen.clamp(0, routing.experts - 1)]
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y, exist


def check(product: ExpertsProduct, stack: Packed, chosen: Tensor, experts: int, gated: bool, per_pair: bool) -> None:
    """Compare a kernel with float64, without bias and with one, and twice for the same bits.

    From the second call on the routing is complete: `bitmask` copies weights before it waits.
    """
    routing = Routing(chosen, experts)
    generator = torch.Generator().manual_seed(routing.pairs)
    x = torch.randn(routing.pairs if per_pair else len(chosen), stack.shape[1], generator=generator)
    x = (x / stack.shape[1] ** 0.5).to(stack.device, stack.dtype)
    bias = torch.randn(stack.shape[0], generator=generator).to(stack.device, stack.dtype)
    for given in (None, bias):
        y = product(x, stack, given, routing)
        exact, exist = expected(x, stack, given, routing, gated)
        assert y.shape == exact.shape
        bound = 4 * torch.finfo(y.dtype).eps * (exact.abs() + 0.5)
        excess = ((y.double() - exact).abs() - bound)[exist]
        assert excess.nan_to_num(nan=float("inf")).max() <= 0, f"off by {excess.max():.3g} more than rounding explains"
        assert torch.equal(product(x, stack, given, routing)[exist], y[exist])


def chosen_by(tokens: int, top_k: int, experts: int) -> Tensor:
    """Choose top_k different experts per token; two tokens of three choose expert 0, nobody the last one."""
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    scores[::3, 0] += 1
    scores[1::3, 0] += 1
    scores[:, -1] = -1
    return scores.topk(top_k, dim=-1).indices


DECODE = {"bitmask": lambda p: bitmask_experts.prepare_decode(p, one_of(p)), "gqs": gqs_experts.prepare_decode}
GEMM = {
    "bitmask": lambda p, s: bitmask_experts.prepare_gemm(p, one_of(p), s),
    "gqs": lambda p, s: gqs_experts.prepare_gemm(p, s),
}


def one_of(problem: ExpertsProblem):
    """Return the tiles of one expert."""
    whole = tiling(problem.spec)
    return replace(whole, row_tiles=whole.row_tiles // problem.experts)


def problem_of(stack: Packed, experts: int, pairs: int, gated: bool) -> ExpertsProblem:
    return ExpertsProblem(
        pairs, experts, structure_of(stack.spec), stack.dtype, stack.device, "silu_mul" if gated else "none"
    )


DECODED = [  # format, dtype, tokens, top_k, experts, N, K, gated, x per pair, SMs
    ("bitmask", HALF, 1, 2, 4, 64, 520, True, False, 2),
    ("gqs", BFLOAT, 1, 3, 4, 64, 512, True, False, 2),
    ("bitmask", BFLOAT, 17, 2, 5, 96, 512, True, False, 6),  # expert 0 has more pairs than a pass takes
    ("gqs", HALF, 17, 2, 5, 96, 512, True, False, 6),
    ("bitmask", HALF, 9, 4, 7, 48, 301, False, True, 132),
    ("gqs", BFLOAT, 9, 4, 7, 48, 300, False, True, 132),
    ("gqs", HALF, 2, 2, 4, 96, 172, True, True, 132),
    ("bitmask", BFLOAT, 2, 2, 4, 32, 77, True, True, 132),
    ("bitmask w4", HALF, 1, 2, 4, 64, 520, True, False, 2),
    ("bitmask w4", BFLOAT, 17, 2, 5, 96, 512, True, False, 6),
    ("bitmask w4", BFLOAT, 9, 4, 7, 48, 301, False, True, 132),
    ("bitmask w8", BFLOAT, 1, 3, 4, 64, 512, True, False, 2),
    ("bitmask w8", HALF, 17, 2, 5, 96, 301, False, False, 6),
    ("bitmask", BFLOAT, 2, 3, 4, 48, 1100, False, True, 132),
]


@needs_compiler
@pytest.mark.parametrize(
    ("form", "dtype", "tokens", "top_k", "experts", "n", "k", "gated", "per_pair", "sms"),
    mostly_slow(DECODED, 0, 1, 2, 3, 8, 9, 11, 13),
)
def test_decode(emulated, monkeypatch, form, dtype, tokens, top_k, experts, n, k, gated, per_pair, sms):
    emulate(monkeypatch, sms)
    stack = stack_of(form, experts, n, k, dtype)
    product = DECODE[form.split()[0]](problem_of(stack, experts, tokens * top_k, gated))
    check(product, stack, chosen_by(tokens, top_k, experts), experts, gated, per_pair)


GEMMS = [  # format, dtype, tokens, top_k, experts, N, K, gated, x per pair, SMs, schedule
    ("bitmask", HALF, 33, 2, 5, 96, 520, True, False, 3, Schedule(16, 1, 1, 0, 3, 1, 1)),
    ("gqs", BFLOAT, 33, 2, 5, 96, 512, True, False, 3, Schedule(16, 1, 1, 0, 3, 1, 1)),
    ("bitmask", BFLOAT, 40, 2, 4, 160, 301, False, True, 8, Schedule(32, 1, 2, 0, 2, 1, 1)),
    ("gqs", HALF, 40, 2, 4, 160, 300, False, True, 132, Schedule(32, 2, 1, 0, 2, 1, 1)),
    ("bitmask", HALF, 3, 1, 4, 32, 256, False, False, 132, Schedule(16, 1, 1, 0, 2, 1, 1)),  # more CTAs than work
    ("bitmask w4", BFLOAT, 33, 2, 5, 96, 520, True, False, 3, Schedule(16, 1, 1, 0, 3, 1, 1)),
    ("bitmask w4", HALF, 40, 2, 4, 160, 301, False, True, 8, Schedule(32, 1, 2, 0, 2, 1, 1)),
    ("bitmask w8", HALF, 33, 2, 5, 96, 520, True, False, 3, Schedule(16, 1, 1, 0, 3, 1, 1)),
]


@needs_compiler
@pytest.mark.parametrize(
    ("form", "dtype", "tokens", "top_k", "experts", "n", "k", "gated", "per_pair", "sms", "schedule"),
    mostly_slow(GEMMS, 0, 1, 5, 7),
)
def test_gemm(emulated, monkeypatch, form, dtype, tokens, top_k, experts, n, k, gated, per_pair, sms, schedule):
    emulate(monkeypatch, sms)
    stack = stack_of(form, experts, n, k, dtype)
    product = GEMM[form.split()[0]](problem_of(stack, experts, tokens * top_k, gated), schedule)
    check(product, stack, chosen_by(tokens, top_k, experts), experts, gated, per_pair)


@needs_compiler
@pytest.mark.parametrize(("pattern", "kind"), mostly_slow([("g128@0%", "w4"), ("g8@50%", "w3"), ("g32@0%", "w8")], 0))
def test_weights_that_only_the_gemm_takes(emulated, monkeypatch, pattern, kind):
    """Groups of other sizes and codes of other widths, on Hopper: any number of tokens."""
    emulate(monkeypatch, 4)
    monkeypatch.setattr("semisparse.runtime.kernel.unavailable", lambda: None)
    stack = stack_of("gqs", 4, 32, 300, HALF, pattern, kind=kind)
    product = gqs_experts.prepare(problem_of(stack, 4, 6, True))
    check(product, stack, chosen_by(3, 2, 4), 4, True, False)


@needs_compiler
@pytest.mark.parametrize("form", ["bitmask", "gqs"])
def test_experts_that_do_not_exist_compute_nothing(emulated, form):
    stack = stack_of(form, 4, 32, 256, HALF)
    for tokens, product in (
        (1, DECODE[form](problem_of(stack, 4, 2, False))),
        (12, DECODE[form](problem_of(stack, 4, 24, False))),
        (12, GEMM[form](problem_of(stack, 4, 24, False), Schedule(16, 1, 1, 0, 2, 1, 1))),
    ):
        chosen = chosen_by(tokens, 2, 6)
        check(product, stack, torch.where(chosen > 3, 4, chosen), 4, False, False)
        check_nothing(product, stack, torch.full_like(chosen, 4))


def check_nothing(product: ExpertsProduct, stack: Packed, chosen: Tensor) -> None:
    """Check that a step whose tokens chose no expert ends, and is combined to zeros."""
    routing = Routing(chosen, 4)
    y = product(torch.ones(len(chosen), stack.shape[1], dtype=stack.dtype), stack, None, routing)
    assert not routing.combine(y, torch.ones(chosen.shape)).any()


@needs_compiler
@pytest.mark.parametrize(("pairs", "experts", "tile_m"), [((1, 3), 4, 16), ((50, 2), 5, 16), ((300, 4), 40, 32)])
def test_jobs_have_each_pair_once_and_in_order(emulated, pairs, experts, tile_m):
    chosen = chosen_by(*pairs, experts + 1)
    jobs = Routing(chosen, experts).jobs(tile_m)
    count, flat, found = int(jobs.count), chosen.flatten(), {}
    assert count <= jobs.most
    for expert, slots in zip(jobs.experts[:count].tolist(), jobs.pairs.view(-1, tile_m)[:count].tolist(), strict=True):
        own = [pair for pair in slots if pair >= 0]
        assert own
        assert slots == own + [-1] * (tile_m - len(own))
        found.setdefault(expert, []).extend(own)
    assert found == {e: (flat == e).nonzero().flatten().tolist() for e in range(experts) if (flat == e).any()}
    assert list(found) == sorted(found)


def test_most_jobs_is_reached():
    """One expert of many pairs, and one pair for each other."""
    assert most_jobs(4, 8, 16) == 4
    assert most_jobs(8 + 32, 8, 16) == 7 + 3
    assert most_jobs(8 + 31, 8, 16) == 7 + 2


COMBINED = [(HALF, torch.float32), (BFLOAT, BFLOAT), (torch.float32, HALF)]  # of outputs and weights


@needs_compiler
@pytest.mark.parametrize(("dtype", "weight"), COMBINED)
def test_combine(emulated, dtype, weight):
    check_combined(dtype, weight, "cpu")


@needs_gpu
@pytest.mark.parametrize(("dtype", "weight"), COMBINED)
def test_combine_on_a_gpu(dtype, weight):
    check_combined(dtype, weight, "cuda")


def check_combined(dtype: torch.dtype, weight: torch.dtype, device: str) -> None:
    """Compare with a sum in float64; outputs of pairs without an expert are NaN and do not count."""
    generator = torch.Generator().manual_seed(0)
    for columns in (33, 48):
        chosen = torch.tensor([[0, 2, 3], [4, 1, -1], [3, 1, 0]])
        outputs, weights = torch.randn(9, columns, generator=generator).to(dtype), torch.rand(3, 3).to(weight)
        outputs[[3, 5]] = torch.nan
        exact = (outputs.double() * weights.double().view(9, 1)).nan_to_num(0).view(3, 3, -1).sum(1)
        y = Routing(chosen.to(device), 4).combine(outputs.to(device), weights.to(device)).cpu()
        torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_the_reference_agrees_and_gives_gradients():
    stack = get_format("gqs").arrange(stack_of("gqs", 4, 32, 64, torch.float32), "cpu")
    chosen = chosen_by(5, 2, 4)
    check(reference_product, stack, chosen, 4, False, False)
    x = torch.randn(5, 64, requires_grad=True)
    reference_product(x, stack, None, Routing(chosen, 4)).sum().backward()
    weights = stack.unpack().unflatten(0, (4, -1)).sum(1)
    torch.testing.assert_close(x.grad, weights[chosen].sum(1))


@pytest.mark.parametrize(
    ("form", "n", "dtype", "pattern"),
    [("gqs", 32, HALF, "g32@50%"), ("bitmask", 24, HALF, None), ("bitmask", 32, torch.float32, None)],
)
def test_what_no_kernel_takes(monkeypatch, form, n, dtype, pattern):
    emulate(monkeypatch, capability=(8, 0))
    monkeypatch.setattr("semisparse.runtime.kernel.unavailable", lambda: None)
    prepare = {"gqs": gqs_experts.prepare, "bitmask": bitmask_experts.prepare}[form]
    assert prepare(problem_of(stack_of(form, 2, n, 128, dtype, pattern), 2, 4, False)) is None


SHAPES = [
    ("bitmask", HALF, 704, 512),
    ("bitmask", BFLOAT, 96, 2048),
    ("bitmask w4", BFLOAT, 704, 512),
    ("bitmask w4", HALF, 96, 2048),
    ("bitmask w8", BFLOAT, 704, 512),
    ("bitmask w8", HALF, 96, 2048),
    ("gqs", BFLOAT, 704, 512),
    ("gqs", HALF, 96, 2050),
]


TOKENS, EXPERTS = (1, 2, 3, 8, 24, 64, 200, 700), 20
if os.environ.get("SEMISPARSE_DRAWS"):  # under compute-sanitizer, where a launch takes a hundred times as long
    SHAPES = [
        ("bitmask", HALF, 96, 520),
        ("bitmask w4", BFLOAT, 96, 512),
        ("bitmask w8", HALF, 64, 301),
        ("gqs", BFLOAT, 96, 300),
    ]
    TOKENS, EXPERTS = (1, 8, 40), 6  # one pair per CTA, eight pairs per CTA, the GEMM


@needs_gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("form", "dtype", "n", "k"), SHAPES)
def test_on_a_gpu(form, dtype, n, k, tokens, gated, nan_filled_memory):
    stack, chosen = stack_of(form, EXPERTS, n, k, dtype).to("cuda"), chosen_by(tokens, 4, EXPERTS).cuda()
    product = experts_product(stack, EXPERTS, chosen.numel(), dtype, "silu_mul" if gated else "none")
    check(product, stack, chosen, EXPERTS, gated, False)
    check(product, stack, chosen, EXPERTS, gated, True)


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 8, 200])
@pytest.mark.parametrize("form", ["bitmask", "bitmask w4", "gqs"])
def test_captured_with_other_experts_at_each_replay(form, tokens):
    stack, chosen = stack_of(form, 20, 96, 512, HALF).to("cuda"), chosen_by(tokens, 4, 20).cuda()
    x, weights = torch.randn(tokens, 512, device="cuda").half(), torch.rand(tokens, 4, device="cuda")
    product = experts_product(stack, 20, chosen.numel(), HALF)

    def step() -> Tensor:
        routing = Routing(chosen, 20)
        return routing.combine(product(x, stack, None, routing), weights)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for seed in range(3):
        chosen.copy_(torch.rand(tokens, 20, generator=torch.Generator().manual_seed(seed)).topk(4, -1).indices)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, step())
