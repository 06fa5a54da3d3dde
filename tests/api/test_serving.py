"""What is refused before vLLM starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from semisparse.api import serving
from semisparse.errors import InputError
from semisparse.runtime.device import DeviceFacts
from tests.serving import Served, one, write

GPU = DeviceFacts("Some GPU", "cuda", "sm_90a", 132, 50 << 20, 10**9, "CUDA 13.0", (9, 0))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    def use(**changes: object) -> None:
        monkeypatch.setattr(serving, "device_facts", lambda device: replace(GPU, **changes))

    use()
    return use


def check(size: int, *arguments: str) -> None:
    serving.check_gpu({"layer_bytes": size, "gpu_layer_bytes": size}, arguments)


def test_layers_that_do_not_fit_the_gpus_are_refused(gpu):
    check(10**9)
    with pytest.raises(
        InputError, match=r"take 3\.9 GB on each of 1 GPUs, and Some GPU has 1\.0 GB: .*--tensor-parallel"
    ):
        check(39 * 10**8, "--max-model-len", "64")
    with pytest.raises(InputError, match=r"take 1\.3 GB on each of 3 GPUs"):
        check(39 * 10**8, "-tp", "3")
    check(39 * 10**8, "--tensor-parallel-size=2", "-pp", "2")


def test_a_gpu_without_the_kernels_instructions_is_refused(gpu):
    gpu(capability=(7, 5))
    with pytest.raises(InputError, match=r"Some GPU has compute capability 7\.5, and the kernels .* need 8\.0"):
        check(1)


def test_dense_directories_are_left_to_vllm(gpu):
    gpu(capability=(7, 5), memory_bytes=1)
    check(0)


@pytest.mark.parametrize("arguments", [(), ("-tp", "many"), ("-tp",), ("-tp", "0"), ("--tensor-parallel-size", "-1")])
def test_numbers_of_ranks_that_cannot_be_read_are_left_to_vllm(arguments: tuple[str, ...]):
    assert serving.ranks_of(arguments) == 1


def test_ranks_that_cut_a_group_are_refused(tmp_path: Path):
    """The attention's output has 256 columns, two groups: four ranks would begin in the middle of them."""
    directory = write(Served("coarse", "gqs", one("g128@0%"), {"kind": "w4"}), tmp_path / "coarse")
    serving.check_cuts(directory, ())
    serving.check_cuts(directory, ("-tp", "2"))
    sentence = (
        r"layer model\.layers\.0\.self_attn\.o_proj cannot be served on 4 tensor-parallel GPUs: .* columns 0 to 64 .*"
    )
    with pytest.raises(InputError, match=sentence):
        serving.check_cuts(directory, ("--tensor-parallel-size", "4"))
