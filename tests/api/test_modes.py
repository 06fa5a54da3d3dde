"""Modes and defaults of torch that a caller has set for code of its own change nothing."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

import semisparse
from semisparse.runtime.modes import torch_defaults
from tests.models import byte_tokenizer, random_model

Mode = Callable[[], AbstractContextManager[object]]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Mode] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "default dtype bfloat16": partial(default_dtype, torch.bfloat16),
    "default dtype float64": partial(default_dtype, torch.float64),
    "default device": partial(torch.device, "meta"),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dense")
    random_model("llama").save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def results(dense: Path, out: Path) -> tuple[bytes, str, torch.Tensor]:
    """Return a tuned model's bytes, what the engine makes of it, and a packed weight unpacked."""
    settings = ("tune=bqpo", "tune_epochs=1")
    semisparse.compress(
        dense, None, "gqsa", ["a text of some length " * 9], out, settings=settings, samples=2, seqlen=16
    )
    text = semisparse.Engine(out).generate(["a text"], 4)[0].text
    ramp = torch.arange(16 * 32, dtype=torch.float32, device="cpu").reshape(16, 32)
    return (out / "model.safetensors").read_bytes(), text, semisparse.pack(ramp, "gqs", "g16@0%").unpack()


@pytest.fixture(scope="module")
def plain(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, str, torch.Tensor]:
    return results(dense, tmp_path_factory.mktemp("plain") / "out")


@pytest.mark.parametrize("name", MODES)
def test_the_same_in_any_mode(dense: Path, plain: tuple[bytes, str, torch.Tensor], tmp_path: Path, name: str):
    with MODES[name]():
        stored, text, weight = results(dense, tmp_path / "out")
    assert stored == plain[0]
    assert text == plain[1]
    assert torch.equal(weight, plain[2])


@pytest.mark.parametrize("name", MODES)
def test_modes_hold_again_afterwards(name: str):
    def state() -> tuple[object, ...]:
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        return *modes, torch.get_default_dtype(), torch.get_default_device()

    with MODES[name]():
        before = state()
        with torch_defaults():
            assert torch.zeros(1).dtype == torch.float32
            assert torch.zeros(1).device.type == "cpu"
            assert not torch.is_inference_mode_enabled()
            assert not torch.is_autocast_enabled("cpu")
        assert state() == before
