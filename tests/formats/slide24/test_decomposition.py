"""The paper's theory of decompositions against plain enumeration."""

from fractions import Fraction
from itertools import combinations, combinations_with_replacement

import pytest

from semisparse.errors import PatternError
from semisparse.formats.slide24.storage.decomposition import Decomposition


def covers(starts, length: int, capacity: int, nonzeros) -> bool:
    """Whether windows of ``length`` columns can hold the non-zeros: a matching by augmenting paths."""
    held: dict[tuple[int, int], int] = {}

    def assign(column: int, seen: set) -> bool:
        for window, start in enumerate(starts):
            for slot in range(capacity if start <= column < start + length else 0):
                if (window, slot) not in seen:
                    seen.add((window, slot))
                    if (window, slot) not in held or assign(held[window, slot], seen):
                        held[window, slot] = column
                        return True
        return False

    return all(assign(column, set()) for column in nonzeros)


def every_pattern(longest: int):
    for hardware_window in range(2, 6):
        for hardware_keep in range(1, hardware_window):
            for window in range(hardware_window, longest + 1):
                for keep in range(1, window + 1):
                    yield Decomposition(keep, window, hardware_keep, hardware_window)


def test_a_decomposition_exists_where_enumeration_finds_one_for_every_block():
    for decomposition in every_pattern(8):
        starts = [decomposition.stride * i for i in range(decomposition.windows)]
        blocks = combinations(range(decomposition.window), decomposition.keep)
        length, capacity = decomposition.hardware_window, decomposition.hardware_keep
        assert decomposition.exists == all(covers(starts, length, capacity, block) for block in blocks), decomposition


def test_the_bound_is_reached_where_some_starts_of_windows_reach_it():
    for decomposition in every_pattern(6):
        length, capacity = decomposition.hardware_window, decomposition.hardware_keep
        count, odd = divmod(decomposition.keep, capacity)
        blocks = list(combinations(range(decomposition.window), decomposition.keep))
        reached = not odd and any(
            all(covers(starts, length, capacity, block) for block in blocks)
            for starts in combinations_with_replacement(range(decomposition.window - length + 1), count)
        )
        assert decomposition.tight == reached, decomposition


def test_the_papers_table():
    for half in (2, 3, 4, 5, 6, 8, 40):
        onto = Decomposition(2 * half - 2, 2 * half)
        assert onto.exists
        assert onto.tight
        assert (onto.stride, onto.windows, onto.capacity) == (2, half - 1, 2 * half - 2)
        assert onto.expansion == 2 - Fraction(2, half)


def test_what_the_paper_says_wrongly():
    assert Decomposition(8, 10).expansion == Fraction(8, 5)  # section D.3: 1.67
    onto_one_of_four = Decomposition(6, 8, 1, 4)  # section C.1.7: six windows
    assert (onto_one_of_four.windows, onto_one_of_four.capacity, onto_one_of_four.exists) == (2, 2, False)
    assert onto_one_of_four.tight  # but with six windows a column apart
    assert not Decomposition(2, 8, 1, 4).tight  # "any Z:L"
    theorem_2 = Decomposition(2, 7, 1, 4)
    assert theorem_2.capacity >= theorem_2.keep
    assert not theorem_2.exists


def test_impossible_patterns_are_refused():
    for numbers in ((3, 2, 2, 4), (0, 8, 2, 4), (2, 3, 2, 4), (6, 8, 4, 4), (6, 8, 0, 4)):
        with pytest.raises(PatternError, match="the hardware keeps fewer"):
            Decomposition(*numbers)
