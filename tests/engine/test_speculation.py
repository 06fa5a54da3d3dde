"""Draft tokens by look-up in the text so far."""

import pytest

from semisparse.engine.speculation import NGRAMS, look_up


@pytest.mark.parametrize(
    ("tokens", "count", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]),
        ([1, 2, 3, 9, 1, 2, 3], 9, [9, 1, 2, 3]),  # no more than there are
        ([5, 3, 8, 6, 3, 7, 3], 1, [7]),  # the last of the earlier occurrences
        ([1, 2, 3, 9, 4, 3, 8, 1, 2, 3], 1, [9]),  # three tokens in common rather than one, although it is earlier
        ([7, 7], 3, [7]),
        ([1, 2, 3], 4, []),
        ([1], 4, []),
    ],
)
def test_what_followed_the_same_tokens_before_is_proposed(tokens: list[int], count: int, expected: list[int]):
    assert max(NGRAMS) == 3
    assert look_up(tokens, count) == expected
