"""Outputs are verified before they are timed, beside dense; the CSV can be read back. On a CPU."""

import dataclasses
import time
from pathlib import Path

import pytest
import torch

from semisparse.bench import kernels
from semisparse.bench.compare import compare, median_errors
from semisparse.bench.kernels import Measurement, Setup, Skipped, measure_layer
from semisparse.bench.machine_facts import machine_facts
from semisparse.bench.machines import Machine
from semisparse.bench.model import Workload, make_sparse, measure_in_engine
from semisparse.bench.roofline import Candidate, candidates, random_weight
from semisparse.bench.shapes import LayerShape
from semisparse.bench.table import read_csv, write_csv
from semisparse.bench.timing import MOST_COPIES, Timing, rotating_copies, time_calls
from semisparse.checkpoint import load_model
from semisparse.errors import InputError, KernelError
from semisparse.formats import get_format
from semisparse.nn import SparseLinear
from semisparse.patterns import parse_pattern

MODELS = Path(__file__).parents[2] / "../shared/models"

CPU = torch.device("cpu")

UNITS = ("tensor fp16", "tensor fp8", "tensor int8", "fp32")
SLOW = Machine("slow", "invented", 1e10, dict.fromkeys(UNITS, 1e11), 1e-6, "cpu")

LAYER = LayerShape("up_proj", 96, 128, 2)


def measured(dtype: torch.dtype = torch.float32, tokens=(1, 5)) -> list[Measurement | Skipped]:
    setup = Setup("toy", dtype, CPU, SLOW)
    return list(measure_layer(setup, LAYER, tokens, candidates(["bitmask"])))


def test_every_kernel_is_verified_and_timed_beside_dense():
    rows = [row for row in measured() if isinstance(row, Measurement)]
    assert {(row.format, row.kernel, row.m) for row in rows} >= {("dense", "blas", 1), ("dense", "blas", 5)}
    for row in rows:
        dense = next(r for r in rows if r.format == "dense" and r.m == row.m)
        assert row.dense_us == dense.us
        assert row.speedup == pytest.approx(dense.us / row.us)
        assert 0 < row.low_us <= row.us <= row.high_us
        assert row.fraction == pytest.approx(row.floor_us / row.us)
        assert row.error < 1e-5
    dense = rows[0]
    assert dense.bytes == 4 * (96 * 128 + 96 + 128)
    assert dense.floor_us == pytest.approx(dense.bytes / 1e10 * 1e6)


def test_a_skipped_kernel_has_a_reason():
    reasons = {(row.candidate, row.kernel): row.reason for row in measured() if isinstance(row, Skipped)}
    assert reasons["bitmask 32:64", "decode"] == "runs on cuda, the operands are on cpu"


@pytest.mark.parametrize("spoil", [lambda y: y * 1.01, lambda y: torch.full_like(y, torch.nan)])
def test_a_wrong_kernel_is_never_timed(monkeypatch, spoil):
    form = get_format("dense")
    blas = next(kernel for kernel in form.kernels if kernel.name == "blas")
    broken = dataclasses.replace(
        blas, prepare=lambda problem: lambda *operands: spoil(blas.prepare(problem)(*operands))
    )
    monkeypatch.setitem(form.__dict__, "kernels", (broken,))
    monkeypatch.setattr("semisparse.bench.kernels.time_calls", lambda *arguments: pytest.fail("timed"))
    with pytest.raises(KernelError, match="dense blas is wrong at M, N, K = 1, 96, 128"):
        measured()


@pytest.mark.parametrize(("weight", "error"), [([[1.0, -1.0]], 1e-6 / 2**0.5), ([[0.0, 0.0]], 0.0)])
def test_the_error_of_an_output_near_zero_is_relative_to_its_terms(weight: list[list[float]], error: float):
    packed = get_format("dense").pack(torch.tensor(weight), "0%")
    measured_error = kernels._relative_error(
        lambda x, packed, bias: torch.full((1, 1), error * 2**0.5), torch.ones(1, 2), packed
    )
    assert measured_error == pytest.approx(error)


def test_the_last_rows_are_verified_too(monkeypatch):
    form = get_format("dense")
    blas = next(kernel for kernel in form.kernels if kernel.name == "blas")

    def forgetful(problem):
        def forget_the_last(x, packed, bias):
            y = blas.prepare(problem)(x, packed, bias)
            y[-1] = 0
            return y

        return forget_the_last

    monkeypatch.setitem(form.__dict__, "kernels", (dataclasses.replace(blas, prepare=forgetful),))
    with pytest.raises(KernelError, match="is wrong at M, N, K = 1000"):
        measured(tokens=(1000,))


@pytest.mark.parametrize("m", [1, 40])
@pytest.mark.parametrize("candidate", candidates(), ids=lambda candidate: candidate.label)
def test_every_variant_of_every_format_is_within_its_tolerance(candidate: Candidate, m: int, monkeypatch):
    """A variant that rounds x must declare it in its cost, or its output would be rejected."""
    monkeypatch.setattr("semisparse.bench.kernels.time_calls", lambda calls, device: Timing(1.0, 1.0, 1.0))
    assert list(measure_layer(Setup("toy", torch.float32, CPU, SLOW), LAYER, [m], [candidate]))


def test_copies_outgrow_the_cache_and_share_no_memory():
    packed = get_format("dense").pack(torch.randn(16, 64), "0%")
    copies = rotating_copies(packed, cache_bytes=10 * packed.nbytes)
    assert len(copies) == 40
    assert len({copy.tensors["values"].data_ptr() for copy in copies}) == 40
    assert len(rotating_copies(packed, cache_bytes=1 << 40)) == MOST_COPIES
    assert len(rotating_copies(packed, cache_bytes=1)) == 2


def test_time_is_the_median_of_calls():
    naps = iter([0.001] * 12 + [0.02] * 3 + [0.001] * 1000)

    def nap() -> torch.Tensor:
        time.sleep(next(naps))
        return torch.empty(0)

    found = time_calls([nap], CPU)
    assert 1000 < found.low_us <= found.us < 3000


def test_random_weights_obey_and_repeat():
    pattern = parse_pattern("8:32v32")
    first, second = (random_weight(pattern, 64, 96, torch.float16, "cpu") for _ in range(2))
    assert torch.equal(first, second)
    pattern.check(first)
    assert (first != 0).float().mean() == pytest.approx(0.25)


def test_a_csv_gives_back_what_was_written(tmp_path):
    rows = [row for row in measured() if isinstance(row, Measurement)]
    path = tmp_path / "results" / "kernels.csv"
    write_csv(path, rows)
    found = read_csv(path, Measurement)
    assert [(r.format, r.kernel, r.n, r.m) for r in found] == [(r.format, r.kernel, r.n, r.m) for r in rows]
    assert [r.us for r in found] == pytest.approx([r.us for r in rows], rel=1e-5)
    assert len(path.read_text().splitlines()) == len(rows) + 1


def test_a_csv_of_something_else_is_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="does not hold Measurement records"):
        read_csv(path, Measurement)
    with pytest.raises(InputError, match="cannot be read"):
        read_csv(tmp_path / "absent.csv", Measurement)


def test_predictions_are_compared_with_the_fastest_kernel():
    row = next(row for row in measured() if isinstance(row, Measurement))
    slower = dataclasses.replace(row, kernel="slower", us=row.us * 2)
    (found,) = compare([slower, row], SLOW)
    assert found.kernel == "blas"
    predicted = row.bytes / 1e10 * 1e6 + 1
    assert found.predicted_us == pytest.approx(predicted)
    assert found.error == pytest.approx(predicted / row.us - 1)
    assert median_errors([found]) == {"dense": abs(found.error)}


def test_machine_facts_name_their_units(tmp_path, monkeypatch):
    monkeypatch.setenv("SEMISPARSE_CACHE", str(tmp_path))
    units = {fact.name: fact.unit for fact in machine_facts(CPU)}
    assert units["read bandwidth"] == "TB/s"
    assert units["peak, fp32"] == "T(FL)OP/s"


@pytest.mark.skipif(not MODELS.is_dir(), reason="../shared/models is absent")
def test_a_model_is_measured_dense_and_sparse():
    model = load_model(MODELS / "babyllama-1m", "cpu")
    workload = Workload(batch=2, prompt=16, new=3)
    dense = measure_in_engine(model, "babyllama-1m", "dense", workload)
    make_sparse(model, Candidate("bitmask", "32:64"))
    layers = [module for module in model.modules() if isinstance(module, SparseLinear)]
    assert len(layers) == 5 * 7
    sparse = measure_in_engine(model, "babyllama-1m", "bitmask 32:64", workload)
    assert sparse.weight_gb < dense.weight_gb
    for found in (dense, sparse):
        assert found.prefill_tokens_per_second == pytest.approx(32 / (found.first_token_ms / 1e3))
        assert found.decode_tokens_per_second == pytest.approx(2 / (found.decode_ms / 1e3))
    with pytest.raises(InputError, match="context is 256 tokens"):
        measure_in_engine(model, "babyllama-1m", "dense", Workload(prompt=200, new=100))
