"""Untrusted files: every mask, start and scale that a kernel would follow out of its tensors is refused."""

from collections.abc import Callable

import pytest
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats import Packed
from tests.formats.gqs.reference import GQS, packed_weight


def put(place: tuple[int, ...], value: float) -> Callable[[Tensor], None]:
    return lambda tensor: tensor.__setitem__(place, value)


@pytest.mark.parametrize(
    ("name", "corrupt", "message"),
    [
        ("masks", put((1, 0), 1 << 20), "keeps a group past row N = 20"),
        ("masks", put((1, 0), -(1 << 63)), "keeps a group past row N = 20"),
        ("masks", put((0, 0), 1 << 3), "keeps a group past column K = 40"),
        ("masks", lambda masks: masks.zero_(), "tensor starts, at chunk 1"),
        ("starts", put((1,), 10**6), "at chunk 1: 1000000 groups"),
        ("starts", put((0,), -1), "at chunk 0: -1 groups"),
        ("scale", put((2,), float("inf")), "at group 2: inf"),
        ("scale", put((2,), float("nan")), "at group 2: nan"),
        ("scale", put((2,), -1.0), "at group 2: -1.0"),
        ("scale", put((0,), 0.0), "at group 0: 0.0"),
    ],
)
def test_corrupted_content_is_refused(name: str, corrupt: Callable[[Tensor], None], message: str):
    packed = packed_weight(20, 40)
    GQS.validate(packed)
    tensors = {other: tensor.clone() for other, tensor in packed.tensors.items()}
    corrupt(tensors[name])
    with pytest.raises(FormatError, match=message):
        GQS.validate(Packed(packed.spec, tensors))
