"""The engine's kernels, emulated or on a GPU, against torch's operations in the same rounding."""

import pytest
import torch
from torch import Tensor

from semisparse.engine import attention, ops, paged_attention
from semisparse.engine.attention import HeadNorms, Heads, LayerCache, RotaryTable
from semisparse.engine.attention_schedule import Schedule, choose_schedule, workspace_of
from semisparse.engine.ops import Columns
from semisparse.runtime.device import device_facts
from tests.choosing import mostly_slow
from tests.cuda_emulator import adverse, emulate, needs_compiler

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
EPSILON = 1e-5

RUNS = [
    pytest.param("early", marks=needs_compiler),
    pytest.param("late", marks=needs_compiler),
    pytest.param("gpu", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")),
]


@pytest.fixture(params=RUNS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Run an operation by its kernel, and by torch: on copies of its arguments, which both return."""
    workspace_of.cache_clear()

    def both(operation, *arguments):
        here = [_copied(argument, "cpu") for argument in arguments]
        expected = operation(*here)
        there = [_copied(argument, "cuda" if request.param == "gpu" else "cpu") for argument in arguments]
        with pytest.MonkeyPatch.context() as patch:
            if request.param != "gpu":
                emulate(patch, sms=6)
            adverse[0] = request.param == "late"
            found = operation(*there)
        return (found, there), (expected, here)

    yield both
    adverse[0] = False
    workspace_of.cache_clear()


def _copied(value, device: str):
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, LayerCache | RotaryTable | HeadNorms):
        return type(value)(*(_copied(part, device) for part in vars(value).values()))
    return value


def close(found: Tensor, expected: Tensor, steps: float = 1) -> None:
    """Compare, within ``steps`` units in the last place: a sum in another order may round differently."""
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(found.cpu(), expected, rtol=steps * eps, atol=steps * eps)


def close_averages(found: Tensor, expected: Tensor) -> None:
    """Compare attention's outputs, which are averages of values and so small: relative to the largest of them."""
    bound = 16 * torch.finfo(expected.dtype).eps * float(expected.abs().max())  # 5 were seen
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("dtype", "columns", "added"),
    mostly_slow(
        [(DTYPES[0], 64, True), (DTYPES[1], 172, False), (DTYPES[2], 1000, True), (DTYPES[0], 9000, True)], 1, 2
    ),
)
def test_rms_norm(kernels, dtype, columns, added):
    x, weight = torch.randn(3, columns).to(dtype), torch.randn(columns).to(dtype)
    delta = torch.randn(3, columns).to(dtype) if added else None
    (found, _), (expected, _) = kernels(ops.rms_norm, x, weight, EPSILON, delta)
    assert torch.equal(found[0].cpu(), expected[0])
    close(found[1], expected[1], 4)


@pytest.mark.parametrize(
    ("dtype", "columns"), mostly_slow([(DTYPES[0], 300), (DTYPES[1], 8), (DTYPES[2], 172), (DTYPES[0], 2000)], 1)
)
def test_silu_mul(kernels, dtype, columns):
    at = Columns((8, columns + 16), 2 * columns + 24)
    (found, _), (expected, _) = kernels(ops.silu_mul, 4 * torch.randn(2, at.width).to(dtype), at, columns)
    close(found, expected, 4)


def table_of(length: int, dim: int, dtype: torch.dtype) -> RotaryTable:
    angles = torch.arange(length)[:, None] / 10 ** torch.linspace(0, 3, dim // 2)
    return RotaryTable(angles.cos().to(dtype), angles.sin().to(dtype))


def cache_of(sequences: int, heads: Heads, length: int, dtype: torch.dtype) -> LayerCache:
    shape = (sequences, heads.kv_count, length, heads.dim)
    return LayerCache(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))


@pytest.mark.parametrize(
    ("dtype", "heads", "normed", "gap"),
    mostly_slow(
        [
            (DTYPES[1], Heads(4, 2, 8, 1.0), True, 4),
            (DTYPES[0], Heads(3, 1, 128, 1.0), False, 8),
            (DTYPES[1], Heads(5, 2, 128, 1.0), True, 8),
            (DTYPES[2], Heads(2, 2, 80, 1.0), True, 4),
            (DTYPES[0], Heads(3, 2, 80, 1.0), True, 8),
            (DTYPES[1], Heads(2, 1, 256, 1.0), True, 1),
        ],
        0,
        2,
    ),
)
def test_rotary_embedding_and_cache(kernels, dtype, heads, normed, gap):
    """With a gap of 8 values between queries, keys and values, loads are as wide as they can be."""
    widths = [count * heads.dim for count in (heads.count, heads.kv_count, heads.kv_count)]
    at = Columns((0, widths[0] + gap, widths[0] + widths[1] + 2 * gap), sum(widths) + 3 * gap)
    qkv = torch.randn(6, at.width).to(dtype)
    positions = torch.tensor([4, 5, 6, 0, 1, 2], dtype=torch.int32)
    norms = HeadNorms(torch.randn(heads.dim).to(dtype), torch.randn(heads.dim).to(dtype), EPSILON) if normed else None
    cache, table = cache_of(2, heads, 9, dtype), table_of(9, heads.dim, dtype)
    (found, there), (expected, here) = kernels(
        attention.rotate_and_cache, qkv, at, heads, table, positions, cache, norms
    )
    close(found, expected, 8 if normed else 0)
    close(there[5].keys, here[5].keys, 8 if normed else 0)
    assert torch.equal(there[5].values.cpu(), here[5].values)


@pytest.mark.parametrize("kernels", RUNS[-1:], indirect=True)  # emulated, its 65,537 CTAs take a minute
def test_rotary_embedding_of_more_tokens_than_a_grid_has_rows(kernels):
    tokens, heads, dtype = 65_537, Heads(1, 1, 8, 1.0), torch.float16
    qkv, positions = torch.randn(tokens, 24).to(dtype), torch.arange(tokens, dtype=torch.int32)
    cache, table = cache_of(1, heads, tokens, dtype), table_of(tokens, heads.dim, dtype)
    (found, there), (expected, here) = kernels(
        attention.rotate_and_cache, qkv, Columns((0, 8, 16), 24), heads, table, positions, cache, None
    )
    close(found, expected, 0)
    close(there[5].keys, here[5].keys, 0)


@pytest.mark.parametrize(
    ("dtype", "heads", "head_first"),
    mostly_slow(
        [
            (DTYPES[1], Heads(4, 4, 128, 0.09), False),
            (DTYPES[0], Heads(6, 1, 64, 0.12), True),
            (DTYPES[0], Heads(24, 2, 32, 0.2), False),
        ],
        0,
        1,
    ),
)
def test_attention_to_pages(kernels, dtype, heads, head_first):
    """Sequences of several lengths, one a captured graph's padding, one without a slot; pages are in no order."""
    page, lengths = 16, torch.tensor([37, 130, 0, 16, 1], dtype=torch.int32)
    shape = (50, 2, heads.kv_count, page, heads.dim) if head_first else (50, 2, page, heads.kv_count, heads.dim)
    cache = torch.randn(shape).to(dtype)
    numbers = torch.randperm(50)[:45].view(5, 9).to(torch.int32)
    counts = (heads.count, heads.kv_count, heads.kv_count)
    wide = torch.randn(5, sum(counts) + 3, heads.dim).to(dtype)
    ends = (lengths - 1).clamp(min=0).long()
    slots = numbers.long().gather(1, ends[:, None] // page)[:, 0] * page + ends % page
    slots[2:4] = -1

    def attend(wide: Tensor, cache: Tensor, numbers: Tensor, lengths: Tensor, slots: Tensor) -> Tensor:
        keys, values = (each.transpose(1, 2) if head_first else each for each in cache.unbind(1))
        q, *new = wide[:, :-3].split(counts, 1)
        if device_facts(wide.device).kind == "cuda":
            out = torch.full_like(q.contiguous(), float("nan"))
            kernel = paged_attention.paged_kernel(len(q), heads, page, 9 * page, q.dtype, q.device)
            kernel(q, *new, paged_attention.Pages(keys, values, numbers, lengths, slots), out)
            return out
        rows = []
        for row, (length, slot) in enumerate(zip(lengths.tolist(), slots.tolist(), strict=True)):
            read = []
            for part, own in zip((keys, values), new, strict=True):
                positions = part[numbers[row].long()].flatten(0, 1)[:length]
                positions[length - 1 :] = own[row]
                if slot >= 0:
                    part[slot // page, slot % page] = own[row]
                read.append(positions.float().repeat_interleave(heads.count // heads.kv_count, 1))
            weights = torch.einsum("hd,phd->hp", q[row].float(), read[0]).mul(heads.scale).softmax(-1)
            rows.append(torch.einsum("hp,phd->hd", weights, read[1]))
        return torch.stack(rows).to(q.dtype)

    (found, there), (expected, here) = kernels(attend, wide, cache, numbers, lengths, slots)
    close(found, expected, 8)
    assert torch.equal(there[1].cpu(), here[1])


def test_splits_are_no_more_ctas_than_are_resident():
    def splits(ctas: int, capability: tuple[int, int]) -> tuple[int, bool]:
        schedule = choose_schedule(ctas, 1, 128, 768, 2, 132, capability)
        return schedule.splits, schedule.clustered

    counts = (8, 32, 128, 256, 4096)
    assert [splits(ctas, (8, 0)) for ctas in counts] == [(12, False), (9, False), (3, False), (1, False), (1, False)]
    assert [splits(ctas, (9, 0)) for ctas in counts] == [(12, False), (8, True), (3, True), (1, False), (1, False)]


def test_ctas_that_take_several_waves_are_small():
    of = {ctas: choose_schedule(ctas, 1, 128, 768, 2, 132, (9, 0)) for ctas in (256, 264, 265, 1024)}
    assert {ctas: (one.splits, one.warps, one.ctas) for ctas, one in of.items()} == {
        256: (1, 8, 2),
        264: (1, 8, 2),
        265: (1, 4, 4),
        1024: (1, 4, 4),
    }


@pytest.mark.parametrize("dim", [8, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_partial_results_fit_the_shared_memory_of_every_kernel(group: int, dim: int):
    """48 KB are what a kernel has if it does not ask for more: its warps' partial results, and a cluster's."""
    for ctas in (1, 8, 30, 32, 128, 4096):
        schedule = choose_schedule(ctas, group, dim, 512, 2, 132, (9, 0))
        clusters = schedule.splits if schedule.clustered else 1
        assert (schedule.warps + clusters) * group * (dim + 4) * 4 <= 47 << 10
        assert schedule.splits >= 1


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(splits=8, warps=8, ahead=2, ctas=2, clustered=True),
        Schedule(splits=3, warps=4, ahead=5, ctas=2, clustered=True),
        Schedule(splits=5, warps=8, ahead=3, ctas=1),
        Schedule(splits=1, warps=8, ahead=5, ctas=2),
        Schedule(splits=1, warps=4, ahead=5, ctas=4),
    ],
    ids=str,
)
def test_attention_divided_in_any_way(kernels, schedule: Schedule, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "choose_schedule", lambda *of: schedule)
    heads, dtype, length, of = Heads(3, 3, 128, 0.1), DTYPES[1], 400, torch.tensor([371], dtype=torch.int32)
    cache, table = cache_of(1, heads, length, dtype), table_of(length, heads.dim, dtype)
    at = Columns((0, 384, 768), 1152)
    arguments = (torch.randn(1, at.width).to(dtype), at, heads, table, of, cache)
    for _ in range(2):
        (found, there), (expected, here) = kernels(attention.rotate_and_attend, *arguments)
        close_averages(found, expected)
        close(there[5].keys, here[5].keys, 8)


@pytest.mark.parametrize(
    ("dtype", "heads", "length", "positions"),
    mostly_slow(
        [
            (DTYPES[1], Heads(4, 4, 128, 0.09), 300, [299, 0]),
            (DTYPES[0], Heads(6, 2, 64, 0.1), 200, [5, 6, 130, 131]),
            (DTYPES[2], Heads(8, 4, 8, 0.3), 70, [69]),
            (DTYPES[0], Heads(14, 1, 16, 0.25), 40, [0, 39, 20]),
            (DTYPES[2], Heads(2, 1, 72, 0.1), 140, [139]),
        ],
        1,
        2,
        4,
    ),
)
def test_attention_to_the_cache(kernels, dtype, heads, length, positions):
    sequences = 2 if len(positions) % 2 == 0 else len(positions)
    q = torch.randn(len(positions), heads.count, heads.dim).to(dtype)
    cache = cache_of(sequences, heads, length, dtype)
    of = torch.tensor(positions, dtype=torch.int32)
    for _ in range(2):  # the second launch finds the counters at 0
        (found, _), (_, _) = kernels(attention.attend_to_cache, q, cache, of, heads)
        expected = attention.attend_to_cache(
            q.double(), LayerCache(cache.keys.double(), cache.values.double()), of, heads
        )
        close_averages(found.double().to(dtype), expected.to(dtype))


@pytest.mark.parametrize(
    ("dtype", "heads", "length", "positions", "normed"),
    mostly_slow(
        [
            (DTYPES[1], Heads(4, 4, 128, 0.09), 300, [298], False),
            (DTYPES[0], Heads(6, 2, 64, 0.1), 200, [5, 131], True),
            (DTYPES[2], Heads(8, 4, 16, 0.3), 70, [0], False),
            (DTYPES[0], Heads(14, 1, 16, 0.25), 40, [0, 39, 20], True),
            (DTYPES[2], Heads(2, 1, 80, 0.1), 140, [139], True),
        ],
        1,
        2,
    ),
)
def test_rotary_embedding_and_attention_in_one(kernels, dtype, heads, length, positions, normed):
    starts = (0, heads.count * heads.dim, (heads.count + heads.kv_count) * heads.dim + 8)
    at = Columns(starts, starts[2] + heads.kv_count * heads.dim)
    qkv = torch.randn(len(positions), at.width).to(dtype)
    norms = HeadNorms(torch.randn(heads.dim).to(dtype), torch.randn(heads.dim).to(dtype), EPSILON) if normed else None
    cache, table = cache_of(len(positions), heads, length, dtype), table_of(length, heads.dim, dtype)
    of = torch.tensor(positions, dtype=torch.int32)
    arguments = (qkv, at, heads, table, of, cache, norms)
    (found, there), (expected, here) = kernels(attention.rotate_and_attend, *arguments)
    close_averages(found, expected)
    close(there[5].keys, here[5].keys, 8 if normed else 0)
    assert torch.equal(there[5].values.cpu(), here[5].values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_step(kernels, dtype):
    logits = torch.randn(3, 1500).to(dtype)
    logits[0, [7, 900]] = 9.0
    logits[1, 1499] = 10.0
    logits[2, [40, 50]] = torch.tensor([float("inf"), float("nan")], dtype=dtype)
    state = (
        torch.zeros(3, dtype=torch.int64),
        torch.tensor([4, 5, 6], dtype=torch.int32),
        torch.zeros(2, 3, dtype=torch.int64),
        torch.tensor([1, 0], dtype=torch.int32),
    )
    (_, there), (_, here) = kernels(ops.greedy_step, logits, *state)
    assert there[1].tolist() == [7, 1499, 50]
    assert all(torch.equal(one.cpu(), other) for one, other in zip(there[1:], here[1:], strict=True))
    assert (there[2].tolist(), there[4].tolist()) == ([5, 6, 7], [2, 0])
