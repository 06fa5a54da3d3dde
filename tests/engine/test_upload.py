"""Tensors arrive on a device as they were, whatever their size, dtype and alignment."""

import pytest
import torch

from semisparse.engine import upload

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    unaligned = torch.randint(0, 256, (10_001,), dtype=torch.uint8)[1:]
    found = {
        "large": torch.randn(301, 1_007),
        "bfloat16": torch.randn(640, 64).bfloat16(),
        "float8": torch.randn(333).to(torch.float8_e4m3fn),
        "integers": torch.randint(-(1 << 40), 1 << 40, (3, 5, 7)),
        "bool": torch.rand(4_097) > 0.5,
        "unaligned": unaligned,
        "unaligned floats": unaligned[3 : 3 + 4 * 500].view(torch.uint8).clone().view(torch.float32),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 16),
    }
    return found | {f"many {i}": torch.randn(1 + 97 * i) for i in range(40)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [64, 4_096, upload.BUFFER_BYTES])
def test_tensors_are_copied_exactly(size: int, device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(upload, "BUFFER_BYTES", size)
    expected = tensors()
    found = dict(upload.on_device(expected, expected.__getitem__, torch.device(device)))
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].device.type == device
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].cpu().reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_while_reading_is_raised(device: str):
    def read(name: str) -> torch.Tensor:
        raise OSError(f"cannot read {name}")

    with pytest.raises(OSError, match="cannot read a"):
        list(upload.on_device(["a"], read, torch.device(device)))
