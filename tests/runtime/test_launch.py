"""Launching compiled kernels: needs a GPU."""

import ctypes
import os

import pytest
import torch

from semisparse.bench.machine_facts import SOURCE
from semisparse.errors import KernelError
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel
from semisparse.runtime.nvrtc import Cubin, compile_cubin, unavailable

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="launching kernels needs a GPU"),
    pytest.mark.skipif(unavailable() is not None, reason=f"NVRTC: {unavailable()}"),
]

DEVICE = torch.device("cuda")


@pytest.fixture(scope="module")
def cubin() -> Cubin:
    return compile_cubin(SOURCE.path, device_facts(DEVICE).arch)


@pytest.fixture(scope="module")
def copy(cubin) -> CudaKernel:
    return CudaKernel(cubin, "semisparse_copy", (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int))


def test_a_kernel_gets_its_arguments(copy):
    source, target = torch.randn(1000, device=DEVICE), torch.full((1000,), torch.nan, device=DEVICE)
    copy(DEVICE, (4, 1, 1), 256, source.data_ptr(), target.data_ptr(), 900)
    assert torch.equal(target[:900], source[:900])
    assert target[900:].isnan().all()


@pytest.mark.skipif(
    "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ, reason="torch captures no graph without its caching allocator"
)
def test_a_kernel_runs_on_the_current_stream_and_in_a_graph(copy):
    source, target = torch.zeros(256, device=DEVICE), torch.zeros(256, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        source.add_(1)
        copy(DEVICE, (1, 1, 1), 256, source.data_ptr(), target.data_ptr(), 256)
    for step in (1, 2):
        graph.replay()
        assert (target == step).all()


def test_a_launch_that_the_driver_refuses_is_an_error(copy):
    with pytest.raises(KernelError, match="launching semisparse_copy"):
        copy(DEVICE, (1, 1, 1), 4096, 0, 0, 0)


def test_more_shared_memory_than_the_device_has_is_an_error(cubin):
    with pytest.raises(KernelError, match="shared memory"):
        CudaKernel(cubin, "semisparse_nothing", (), shared=1 << 20)(DEVICE, (1, 1, 1), 32)


def test_a_kernel_with_much_shared_memory_runs(cubin):
    parameters = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    source, target = torch.randn(256, device=DEVICE), torch.zeros(256, device=DEVICE)
    copy = CudaKernel(cubin, "semisparse_copy", parameters, shared=96 << 10)
    copy(DEVICE, (1, 1, 1), 256, source.data_ptr(), target.data_ptr(), 256)
    assert torch.equal(target, source)


def test_a_kernel_that_the_cubin_lacks_is_an_error(cubin):
    with pytest.raises(KernelError, match="not missing"):
        CudaKernel(cubin, "missing", ())
