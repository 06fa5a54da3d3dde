"""`list_formats` asks kernels about a layer in the layout that it has on their device."""

from dataclasses import replace

import pytest
import torch

from semisparse.api import availability
from semisparse.formats.base import Packed, get_format
from semisparse.formats.ec_csr.storage.gpu import to_tiles
from semisparse.formats.kernel import Kernel, Problem


def reads_tiles(problem: Problem) -> str | None:
    """Return why a kernel that reads mask tiles does not take a problem."""
    layout = problem.params.get("layout")
    return None if layout == "tiles" else f"reads mask tiles, this weight is stored in {layout}"


def test_a_kernel_that_reads_a_layout_of_gpus_runs(monkeypatch: pytest.MonkeyPatch):
    """ec_csr's `decode_tiles` and `gemm` read tiles, which no file has."""
    availability._problem.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Packed, "to", lambda packed, device: to_tiles(packed))
    kernel = Kernel("of tiles", "cuda", reads_tiles, lambda problem: None)
    form = replace(get_format("ec_csr"), kernels=(kernel,))
    assert availability._describe(form, kernel) == {"name": "of tiles", "device": "cuda", "runs": True, "reason": None}
    availability._problem.cache_clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_hopper_the_kernels_of_mask_tiles_run():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("ec_csr has mask tiles on Hopper only")
    kernels = {row["name"]: row["kernels"] for row in availability.list_formats()}["ec_csr"]
    runs = {kernel["name"]: kernel["runs"] for kernel in kernels}
    assert all(runs[name] for name in ("decode", "decode_tiles", "gemm"))
