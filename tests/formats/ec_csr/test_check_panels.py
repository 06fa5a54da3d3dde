"""check_panels.cu accepts valid lists, and nothing that the check with torch refuses."""

import pytest
import torch

from semisparse.errors import FormatError
from semisparse.formats import Packed
from semisparse.formats.ec_csr.cuda import check_panels
from semisparse.formats.ec_csr.storage import check, panels
from semisparse.formats.ec_csr.storage.deltas import refuse_repeats
from tests.cuda_emulator import emulate, needs_compiler
from tests.formats.ec_csr.weights import EC_CSR, random_weight, uneven_weight


def by_torch(packed: Packed) -> int | None:
    try:
        span = check._check_lists(packed)
        refuse_repeats(position for position, _ in panels.stored_weights(packed))
    except FormatError:
        return None
    return span


def packed_weights(dtype: torch.dtype, bits: int) -> list[Packed]:
    """Weights in panels of 32 rows, and paired on two SMs, where the last panel lacks rows."""
    found = []
    for weight, pattern in ((random_weight(99, 300, "70%", dtype), "70%"), (uneven_weight(57, 70, dtype), "0%")):
        packed = EC_CSR.pack(weight, pattern, delta_bits=bits, on_gpu="lists")
        found += [packed, EC_CSR.arrange(packed, "cuda")]
    return found


@needs_compiler
@pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 4), (torch.float32, 8)])
def test_it_agrees_with_torch(emulated, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bits: int):
    emulate(monkeypatch, 2)
    generator, refused = torch.Generator().manual_seed(bits), 0
    for packed in packed_weights(dtype, bits):
        assert check_panels._checked(packed) == packed.params["span"]
        for number in range(60):
            name = ("deltas", "values", "bases")[number % 3]
            broken = packed.tensors[name].clone()
            at = int(torch.randint(broken.numel(), (1,), generator=generator))
            new = int(torch.randint(1, 16, (1,), generator=generator))
            flat = broken.view(-1)
            flat[at] = flat[at] ^ new if name == "deltas" else new
            changed = Packed(packed.spec, {**packed.tensors, name: broken})
            bases = changed.tensors["bases"].long()
            if (bases >= panels.panel_rows_of(packed.params) * panels.lane_columns_of(packed.shape[1])).any():
                continue  # refused before
            found, expected = check_panels._checked(changed), by_torch(changed)
            assert found is None or found == expected
            refused += found is None
    assert refused > 50


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu():
    for dtype, bits in ((torch.bfloat16, 4), (torch.float32, 8)):
        for packed in packed_weights(dtype, bits):
            there = Packed(packed.spec, {name: tensor.cuda() for name, tensor in packed.tensors.items()})
            assert check_panels.span_of(there) == packed.params["span"]
            EC_CSR.validate(there)
            there.tensors["deltas"].view(-1)[::7] ^= 9
            assert check_panels.span_of(there) is None
            with pytest.raises(FormatError, match="tensor deltas"):
                EC_CSR.validate(there)
