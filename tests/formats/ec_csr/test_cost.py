"""What plan and reports say of a weight: its layout, its bytes and its passes on each generation of GPUs."""

from dataclasses import replace

import pytest
import torch

from semisparse.bench.machines import find_machine
from semisparse.bench.roofline import Candidate, estimate_matmul, problem_on
from semisparse.formats.base import bytes_on_gpu
from semisparse.formats.kernel import Problem
from tests.cuda_emulator import emulate
from tests.formats.ec_csr.weights import EC_CSR, random_weight

N, K = 128, 2048
HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.mark.parametrize("wanted", ["both", "tiles", "lists"])
@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
def test_the_layout_and_the_bytes_are_those_of_arrange(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], wanted: str
):
    emulate(monkeypatch, 4, capability)
    packed = EC_CSR.pack(random_weight(N, K, "70%"), "70%", on_gpu=wanted)
    arranged = EC_CSR.arrange(packed, "cuda")
    assert EC_CSR.spec_on_gpu(packed.spec, capability).params["layout"] == arranged.params["layout"]
    assert bytes_on_gpu(packed, capability) == pytest.approx(arranged.nbytes, rel=0.02)
    if capability == AMPERE:
        assert bytes_on_gpu(packed, capability) == packed.nbytes
    assert bytes_on_gpu(packed) == max(bytes_on_gpu(packed, gpu) for gpu in (HOPPER, AMPERE))


def test_padded_tiles_are_counted(monkeypatch: pytest.MonkeyPatch):
    """A tile has 16 rows and 256 columns: this weight fills half of its tiles."""
    emulate(monkeypatch, 4, HOPPER)
    packed = EC_CSR.pack(random_weight(128, 128, "70%"), "70%", on_gpu="tiles")
    assert bytes_on_gpu(packed, HOPPER) == pytest.approx(EC_CSR.arrange(packed, "cuda").nbytes, rel=0.1)


def test_a_floor_counts_what_is_read(monkeypatch: pytest.MonkeyPatch):
    """With lists and tiles side by side, one and two tokens read the lists, more read the tiles."""
    emulate(monkeypatch, 4, HOPPER)
    packed = EC_CSR.pack(random_weight(N, K, "70%"), "70%")
    both = EC_CSR.arrange(packed, "cuda")
    structure = EC_CSR.structure(both.spec)
    tile_bytes = sum(both.tensors[name].nbytes for name in ("tiles", "tile_starts"))
    for m, weight_bytes in ((1, both.nbytes - tile_bytes), (2, both.nbytes - tile_bytes), (8, tile_bytes)):
        (step,) = EC_CSR.cost(Problem(m, structure, torch.float16, torch.device("cuda")), both.nbytes)
        assert step.bytes == pytest.approx(weight_bytes + 2 * m * (N + K), rel=0.02), m


def test_plan_knows_which_gpus_have_tiles():
    """Before Hopper the weight is unpacked for 32 tokens: a pass that writes it, and cuBLAS."""
    candidate = Candidate("ec_csr", "70%")
    passes = {}
    for gpu in ("a100", "h200"):
        machine = find_machine(gpu)
        problem, weight_bytes, stored = problem_on(candidate, 32, 4096, 4096, torch.bfloat16, machine)
        passes[gpu] = EC_CSR.cost(problem, weight_bytes)
        assert (weight_bytes > 1.5 * stored) == (gpu == "h200")
    assert len(passes["a100"]) == 2
    assert len(passes["h200"]) == 1


def test_a_gpu_without_tiles_is_predicted_slower():
    """Of two GPUs that differ in nothing but the generation."""
    hopper = replace(find_machine("h200"), name="a Hopper without a table")
    blackwell = replace(hopper, capability=(10, 0))
    candidate = Candidate("ec_csr", "70%")
    times = [
        estimate_matmul(candidate, 32, 11008, 4096, torch.bfloat16, machine)[0].seconds
        for machine in (hopper, blackwell)
    ]
    assert times[1] > 1.5 * times[0]
