"""Row panels on a GPU: re-panelled for its SMs, and back to the bytes on disk."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semisparse.formats import Packed
from semisparse.formats.ec_csr.storage import gpu, panels
from semisparse.formats.product import problem_of
from tests.cuda_emulator import emulate
from tests.formats.ec_csr.weights import EC_CSR, random_weight, uneven_weight


def same(one: Packed, other: Packed) -> bool:
    return one.spec == other.spec and all(torch.equal(one.tensors[name], t) for name, t in other.tensors.items())


@pytest.mark.parametrize(
    ("n", "rows", "disk_rows"), [pytest.param(11008, 28, 32, marks=pytest.mark.slow), (11008, 28, 56)]
)
def test_panels_suit_the_gpu_and_come_back(monkeypatch: pytest.MonkeyPatch, n: int, rows: int, disk_rows: int):
    emulate(monkeypatch, sms=132)
    weight = random_weight(n, 30, "70%")
    packed = EC_CSR.pack(weight, "70%")
    packed = packed.in_layout(*panels.pack(weight, int(packed.params["delta_bits"]), disk_rows))
    arranged = EC_CSR.arrange(packed, "cuda")
    EC_CSR.validate(arranged)
    assert (arranged.params["panel_rows"], arranged.params["disk_panel_rows"]) == (rows, disk_rows)
    assert torch.equal(arranged.unpack(), weight)
    assert EC_CSR.arrange(arranged, "cuda") is arranged
    assert same(EC_CSR.arrange(arranged, "cpu"), packed)


def test_rows_of_a_paired_panel(monkeypatch: pytest.MonkeyPatch):
    """Panels of 36 rows: 18 of rows 0 to 49, then 18 of rows 50 to 98; the last panel has 14 and 13."""
    emulate(monkeypatch, sms=3)
    weight = torch.zeros(99, 32)
    weight[:, 0] = 1 + torch.arange(99.0)
    arranged = EC_CSR.arrange(EC_CSR.pack(weight.half(), "90%"), "cuda")
    assert (arranged.params["panel_rows"], arranged.params["paired"]) == (36, 1)
    EC_CSR.validate(arranged)
    stored, found = arranged.tensors["values"].view(-1, 32, 8)[:, 0].flatten(), []
    for start, end in zip(arranged.tensors["panel_loads"][:-1], arranged.tensors["panel_loads"][1:], strict=True):
        of_panel = stored[8 * start : 8 * end].tolist()
        found.append([int(value) - 1 for value in of_panel if value])
    halves = [list(range(18 * p, min(18 * p + 18, 50))) for p in range(3)]
    others = [list(range(50 + 18 * p, min(68 + 18 * p, 99))) for p in range(3)]
    assert found == [first + second for first, second in zip(halves, others, strict=True)]


def test_another_gpu_has_panels_of_its_own(monkeypatch: pytest.MonkeyPatch):
    weight = random_weight(11008, 30, "70%")
    packed = EC_CSR.pack(weight, "70%")
    emulate(monkeypatch, sms=132)
    first = EC_CSR.arrange(packed, "cuda")
    emulate(monkeypatch, sms=108)
    second = EC_CSR.arrange(first, "cuda")
    assert second.params["panel_rows"] != first.params["panel_rows"]
    assert torch.equal(second.unpack(), weight)
    assert same(EC_CSR.arrange(second, "cpu"), packed)


def test_panels_that_suit_stay_the_same_tensors(monkeypatch: pytest.MonkeyPatch):
    emulate(monkeypatch, sms=132)
    packed = EC_CSR.pack(random_weight(40, 300, "70%"), "70%")
    arranged = EC_CSR.arrange(packed, "cuda")
    assert all(arranged.tensors[name] is tensor for name, tensor in packed.tensors.items())
    back = EC_CSR.arrange(arranged, "cpu")
    assert back.spec == packed.spec
    assert all(back.tensors[name] is tensor for name, tensor in packed.tensors.items())
    for layout in ("banks", "paper"):
        other = EC_CSR.pack(random_weight(40, 300, "70%"), "70%", layout=layout, multiple=32)
        assert EC_CSR.arrange(other, "cpu" if layout == "banks" else "cuda") is other


def test_tensors_that_nothing_was_loaded_into_stay(monkeypatch: pytest.MonkeyPatch):
    """torch's to_empty allocates such tensors before a state dict is loaded."""
    emulate(monkeypatch, sms=2)
    packed = EC_CSR.pack(random_weight(100, 300, "70%"), "70%")
    for fill in (0, 3, -1):
        empty = Packed(packed.spec, {name: torch.full_like(t, abs(fill)) for name, t in packed.tensors.items()})
        empty.tensors["panel_loads"].fill_(fill)
        assert EC_CSR.arrange(empty, "cuda") is empty


@given(st.integers(1, 40_000), st.integers(1, 200))
def test_no_sm_has_many_more_rows_than_it_must(n: int, sms: int):
    busiest = {rows: math.ceil(math.ceil(n / rows) / sms) * rows for rows in panels.PANEL_ROWS}
    chosen = gpu.panel_rows_for(n, sms)
    assert busiest[chosen] <= 1.03 * min(busiest.values()) or (chosen == 32 and n <= 32 * sms)


def test_layers_of_one_shape_share_their_kernels(monkeypatch: pytest.MonkeyPatch):
    """Their numbers of non-zeros and their spans differ."""
    emulate(monkeypatch, sms=132)
    x = torch.zeros(1, 1100).half()
    few, many = random_weight(64, 1100, "90%"), random_weight(64, 1100, "0%")
    one, other = (EC_CSR.arrange(EC_CSR.pack(w, "0%", delta_bits=8, on_gpu="lists"), "cuda") for w in (few, many))
    assert one.params["span"] != other.params["span"]
    assert one.params["values"] != other.params["values"]
    assert problem_of(x, one) == problem_of(x, other)
    uneven = EC_CSR.arrange(EC_CSR.pack(uneven_weight(64, 1100), "0%", delta_bits=8, on_gpu="lists"), "cuda")
    assert uneven.params["span"] > 6
    assert uneven.params["span_limit"] >= uneven.params["span"]
    assert problem_of(x, uneven) != problem_of(x, one)
