"""Block extraction against the paper's Algorithms 1 and 2, by loops."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from semisparse.formats.ec_csr.paper.extract import count_overlaps, extract, longest_runs, match_rows
from tests.formats.ec_csr.weights import EC_CSR, random_weight


@given(
    st.integers(1, 24),
    st.integers(1, 200),
    st.integers(0, 99),
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from((1, 8, 32)),
    st.sampled_from((1, 3, 15, 255)),
)
def test_blocks_cover_each_weight_once(n: int, k: int, zeros: int, granularity: int, multiple: int, reach: int):
    stored = torch.rand(n, k, generator=torch.Generator().manual_seed(n * k)) * 100 >= zeros
    covered = torch.zeros(n, k, dtype=torch.int64)
    for blocks in extract(stored, multiple, granularity, reach):
        assert blocks.granularity <= granularity
        assert blocks.granularity == 1 or not (blocks.columns.sum(1) % multiple).any()
        assert all(len(set(rows)) == len(rows) for rows in blocks.rows.tolist())
        for rows, columns in zip(blocks.rows, blocks.columns, strict=True):
            covered[rows] += columns
            if blocks.granularity == granularity > 1:  # of finer blocks, coarser ones may take columns
                assert columns.nonzero().flatten().diff().le(reach).all()
    assert torch.equal(covered, stored.long())


def test_rows_that_are_alike_become_one_block():
    """Rows 0, 2, 4, 6 share 64 columns, 1, 3, 5, 7 the other 64: two blocks of four rows, and nothing else."""
    stored = torch.zeros(8, 128, dtype=torch.bool)
    stored[::2, :64] = True
    stored[1::2, 64:] = True
    left = {blocks.granularity: blocks for blocks in extract(stored, 32, 8, 15)}
    assert sorted(left[4].rows.sort(1).values.tolist()) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert all(not len(blocks.rows) for granularity, blocks in left.items() if granularity != 4)


def test_a_second_round_takes_what_the_first_left():
    """As in the paper's figure 3: row 2 shares half of its columns with row 0, the other half with row 1."""
    stored = torch.zeros(3, 64, dtype=torch.bool)
    stored[0, :33] = stored[1, 32:] = stored[2, :] = True
    blocks = extract(stored, 1, 2, 15)[1]
    assert blocks.rows.tolist() == [[0, 2], [1, 2]]
    assert blocks.columns.sum(1).tolist() == [33, 31]


def test_a_gap_wider_than_a_delta_ends_a_block():
    """Two equal rows share 40 columns, 20 apart from 60 more: one block takes the 60, the next the 40."""
    stored = torch.zeros(2, 120, dtype=torch.bool)
    stored[:, :40] = stored[:, 59:119] = True
    assert [blocks.columns.sum(1).tolist() for blocks in extract(stored, 4, 2, 19)] == [[], [60, 40]]
    assert [blocks.columns.sum(1).tolist() for blocks in extract(stored, 4, 2, 20)] == [[], [100]]


def longest_run(columns: list[bool], reach: int) -> list[int]:
    best, run = [], []
    for column in (index for index, stored in enumerate(columns) if stored):
        run = [*run, column] if run and column - run[-1] <= reach else [column]
        best = max(best, run, key=len)  # the first of equals
    return best


@given(st.integers(1, 6), st.integers(1, 60), st.integers(0, 99), st.integers(1, 8), st.integers(0, 1000))
def test_longest_runs(rows: int, k: int, zeros: int, reach: int, seed: int):
    columns = torch.rand(rows, k, generator=torch.Generator().manual_seed(seed)) * 100 >= zeros
    kept = [row.nonzero().flatten().tolist() for row in longest_runs(columns, reach)]
    assert kept == [longest_run(row, reach) for row in columns.tolist()]


def greedy_pairs(overlaps: list[list[int]], least: int) -> list[tuple[int, int]]:
    free, pairs = list(range(len(overlaps))), []
    while free:
        row = free.pop(0)
        best = max(free, key=lambda other: overlaps[row][other], default=None)  # the first of equals
        if best is not None and overlaps[row][best] >= least:
            pairs.append((row, best))
            free.remove(best)
    return pairs


@given(st.integers(1, 30), st.integers(0, 12), st.integers(0, 1000))
def test_matching_is_the_papers_greedy_one(n: int, least: int, seed: int):
    stored = torch.rand(n, 20, generator=torch.Generator().manual_seed(seed)) > 0.4
    overlaps = count_overlaps(stored)
    assert overlaps.tolist() == [[int((a & b).sum()) for b in stored] for a in stored]
    # A row without a good enough partner leaves the free rows, as in Algorithm 2: it can be nobody's partner then.
    expected = greedy_pairs(overlaps.tolist(), max(least, 1))
    first, second = match_rows(overlaps.clone(), max(least, 1))
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == expected


def test_extraction_reports_its_progress():
    weight = random_weight(64, 1024, "50%")
    calls: list[tuple[int, int]] = []
    EC_CSR.pack(weight, "50%", layout="paper", progress=lambda done, total: calls.append((done, total)))
    assert len(calls) > 2
    assert calls[-1][0] == calls[-1][1] == 2 * weight.count_nonzero(), "both widths of deltas are tried"
    assert all(0 <= done <= total for done, total in calls)
