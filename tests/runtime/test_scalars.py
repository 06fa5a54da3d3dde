"""The shared header's conversions, of every 16-bit number."""

import ctypes
from pathlib import Path

import pytest
import torch

from semisparse.runtime import cpp

pytestmark = pytest.mark.skipif(cpp.refusal() is not None, reason=str(cpp.refusal()))

SOURCE = """
#include "scalars.hpp"
extern "C" void widen(int64_t type, const uint16_t* from, float* to) {
    with_type(type, [=](auto number) {
        for (int i = 0; i < 65536; ++i) to[i] = number.widen(from[i]);
    });
}
"""


@pytest.mark.parametrize(("number", "dtype"), [(1, torch.float16), (2, torch.bfloat16)])
@pytest.mark.parametrize("flush", [False, True], ids=["", "subnormals flushed"])
def test_every_number_is_widened_exactly(number: int, dtype: torch.dtype, flush: bool, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SEMISPARSE_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "widen.cpp"
    source.write_text(SOURCE)
    stored = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    expected = stored.view(dtype).float()
    found = torch.empty(65536)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (stored, found)]
    library = cpp.load(source)
    torch.set_flush_denormal(flush)
    try:
        library.widen(ctypes.c_int64(number), *pointers)
    finally:
        torch.set_flush_denormal(False)
    known = ~expected.isnan()
    assert torch.equal(found[known].view(torch.int32), expected[known].view(torch.int32))
    assert found[~known].isnan().all()
