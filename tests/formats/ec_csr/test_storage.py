"""The layouts on disk against a reader of their bytes written from README.md alone, with Python integers and loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semisparse.api.packing import pack_for_disk
from semisparse.errors import FormatError
from semisparse.formats.ec_csr.storage import panels
from tests.formats.ec_csr.weights import EC_CSR, LAYOUTS, READERS, random_weight, read_panels
from tests.formats.worked_example import worked_example


@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from((4, 8)),
    st.sampled_from(("0%", "50%", "70%", "90%/row", "99%")),
    st.integers(1, 40),
    st.integers(1, 300),
    st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
)
def test_bytes_mean_the_weight(layout: str, bits: int, pattern: str, n: int, k: int, dtype: torch.dtype):
    weight = random_weight(n, k, pattern, dtype)
    packed = EC_CSR.pack(weight, pattern, layout=layout, delta_bits=bits, multiple=32)
    EC_CSR.validate(packed)
    assert READERS[layout](packed) == weight.tolist()
    assert torch.equal(packed.unpack(), weight + 0.0)


def test_the_worked_example_of_the_readme():
    shown = worked_example("ec_csr", "banks")
    assert set(shown) == {"panel_loads", "deltas", "values"}
    weight = torch.zeros(2, 70)
    weight[0, [0, 64, 33]] = torch.tensor([1.0, 2.0, 3.0])
    weight[1, 0] = 4.0
    packed = EC_CSR.pack(weight, "90%", delta_bits=4)
    for name, expected in shown.items():
        stored = packed.tensors[name].numpy().tobytes()
        assert stored[: len(expected)] == expected, name
        assert not any(stored[len(expected) :])
    bases = packed.tensors["bases"].clone()
    assert bases[15, 1] == 1
    bases[15, 1] = 0
    assert not bases.any()


@pytest.mark.parametrize("n", [40, 11008])
def test_what_is_written_knows_no_card(n: int):
    packed = EC_CSR.pack(random_weight(n, 30, "70%"), "70%")
    assert packed.params["panel_rows"] == 32
    assert set(packed.params) == {"layout", "delta_bits", "n", "k", "panel_rows", "values", "span"}


@pytest.mark.parametrize("rows", [28, 64])
def test_panels_of_any_height_are_read(rows: int):
    """Files of earlier versions have them."""
    weight = random_weight(70, 300, "70%")
    params, tensors = panels.pack(weight, 4, rows)
    packed = EC_CSR.pack(weight, "70%").in_layout(params, tensors)
    assert packed.params["panel_rows"] == rows
    EC_CSR.validate(packed)
    assert read_panels(packed) == weight.tolist()


def test_panels_are_packed_alike_in_any_number_of_batches(monkeypatch: pytest.MonkeyPatch):
    weight = random_weight(200, 300, "70%")
    whole = EC_CSR.pack(weight, "70%")
    monkeypatch.setattr(panels, "BATCH", 20_000)
    parts = EC_CSR.pack(weight, "70%")
    assert parts.params == whole.params
    assert all(torch.equal(parts.tensors[name], tensor) for name, tensor in whole.tensors.items())
    assert torch.equal(parts.unpack(), weight)


def test_the_narrower_delta_is_taken_where_it_is_smaller():
    for pattern, bits in (("70%", 4), ("97%", 8)):
        weight = random_weight(64, 4096, pattern)
        packed = EC_CSR.pack(weight, pattern)
        assert packed.params["delta_bits"] == bits
        assert packed.nbytes == min(EC_CSR.pack(weight, pattern, delta_bits=width).nbytes for width in (4, 8))


def test_a_wide_layer_is_less_than_45_percent_of_csr():
    """Compare with CSR of 32 bits per column and row, at 70 % zeros in float16."""
    weight = random_weight(256, 8192, "70%")
    csr = 6 * int(weight.count_nonzero()) + 4 * 257
    assert EC_CSR.pack(weight, "70%").nbytes <= 0.45 * csr


@pytest.mark.parametrize(("pattern", "smallest"), [("90%", "bitmask"), ("95%", "ec_csr")])
def test_the_format_of_fewest_bytes_of_a_wide_layer(pattern: str, smallest: str):
    """With 4,096 columns `ec_csr` becomes smaller than `bitmask` at 93 % zeros (docs/experiments/audit.md)."""
    assert pack_for_disk(random_weight(256, 4096, pattern), "auto", pattern).spec.format == smallest


def test_unknown_options_are_refused():
    unknown = {"layout": "csr", "delta_bits": 5, "granularity": 3, "multiple": 33, "clip": -1}
    for name, value in (*unknown.items(), ("delta_bits", "narrow")):
        with pytest.raises(FormatError, match=name):
            EC_CSR.pack(torch.zeros(2, 64), "50%", **{name: value})


def test_bundles_of_coarse_blocks_and_of_many_columns_come_first():
    """So that the longest warps begin first (section 5)."""
    weight = random_weight(24, 4096, "50%")
    packed = EC_CSR.pack(weight, "50%", layout="paper", delta_bits=8, clip=2, multiple=32)
    table = packed.tensors["bundles"][:, :3].tolist()
    granularities = [rows for rows, _, _ in table]
    assert len(set(granularities)) > 1
    assert granularities == sorted(granularities, reverse=True)
    for kind in {(rows, vector) for rows, vector, _ in table}:
        columns = [each for rows, vector, each in table if (rows, vector) == kind]
        assert columns == sorted(columns, reverse=True)


def test_clipped_blocks_are_not_longer_than_asked():
    weight = random_weight(16, 4096, "50%")
    columns = {}
    for clip in (1, 4, 1000):
        packed = EC_CSR.pack(weight, "50%", layout="paper", clip=clip, granularity=1)
        assert torch.equal(packed.unpack(), weight)
        columns[clip] = int(packed.tensors["bundles"][:, 2].max())
    assert columns[1] == 4
    assert columns[4] == 16
    assert columns[1000] > 16
