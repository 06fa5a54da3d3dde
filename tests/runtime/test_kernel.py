"""Kernels: their parameters, read from the source; what a launch passes to the driver; launches on a GPU."""

import ctypes
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from semisparse.bench.machine_facts import SOURCE
from semisparse.errors import KernelError
from semisparse.runtime import kernel as kernels
from semisparse.runtime.device import DeviceFacts
from semisparse.runtime.kernel import CudaSource, KernelBuild, LoadedKernel, offsets_in_workspace, parameters_of
from semisparse.runtime.nvrtc import Cubin, unavailable
from tests.cuda_emulator import C_TYPES

needs_bindings = pytest.mark.skipif(unavailable() is not None, reason=f"CUDA bindings: {unavailable()}")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="launching kernels needs a GPU")

TEXT = """
// semisparse_scale(comments do not count)
template <typename T> __device__ void helper(T* x, int n) {}
extern "C" __global__ void __launch_bounds__(256, 2) semisparse_scale(
    const float* __restrict__ x,  // [m, n], of which
    __half *y, const unsigned int n, long long big,
    unsigned long long bigger, float factor, Word bits
) { helper(x, n); }
extern "C" __global__ void semisparse_nothing() {}
extern "C" __global__ void semisparse_odd(double x) {}
"""
CODES = (("x", "P"), ("y", "P"), ("n", "I"), ("big", "q"), ("bigger", "Q"), ("factor", "f"), ("bits", "I"))


@pytest.fixture
def source(tmp_path: Path) -> CudaSource:
    path = tmp_path / "scale.cu"
    path.write_text(TEXT)
    return CudaSource(path)


def test_parameters_are_read_from_the_source(source):
    assert parameters_of(source.path, "semisparse_scale") == CODES
    assert parameters_of(source.path, "semisparse_nothing") == ()
    with pytest.raises(KernelError, match="has no kernel semisparse_missing"):
        parameters_of(source.path, "semisparse_missing")
    with pytest.raises(KernelError, match="double x"):
        parameters_of(source.path, "semisparse_odd")


class Driver:
    """A driver that records the configuration, function and arguments of each launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple, int, tuple]] = []
        self.status = 0
        self.before_reading = lambda: None

    def __call__(self, config: int, function: int, pointers: int, extra: None) -> int:
        self.before_reading()
        kinds = {**C_TYPES, "Q": ctypes.c_uint64}
        at = (ctypes.c_void_p * len(CODES)).from_address(pointers)
        values = [kinds[code].from_address(address).value for (_, code), address in zip(CODES, at, strict=True)]
        configured = kernels.LAUNCH_CONFIG.unpack(ctypes.string_at(config, kernels.LAUNCH_CONFIG.size))
        self.launches.append((configured, function, tuple(values)))
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    facts = DeviceFacts("GPU", "cuda", "sm_90a", 132, 0, 0, "", (9, 0))
    monkeypatch.setattr(kernels, "device_facts", lambda device: facts)
    monkeypatch.setattr(KernelBuild, "compile", lambda build, arch: Cubin(b"", {build.name: None}))
    monkeypatch.setattr(kernels, "_function_of", lambda cubin, build, index: (None, 4321))
    monkeypatch.setattr(kernels, "_launcher", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", lambda index: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77 + index, raising=False)
    return fake


def arguments(value: int = 0) -> dict:
    return {name: value for name, _ in CODES}


def test_the_driver_gets_every_argument_in_order(driver, source):
    kernel = LoadedKernel(source.build("semisparse_scale", shared=1000), 0)
    x = torch.zeros(3)
    mixed = {"bits": 2**32 - 1, "factor": 0.5, "big": -3, "bigger": 2**63, "n": 9, "y": None, "x": x}
    kernel((5, 6, 7), 128, **mixed)
    ((configured, function, found),) = driver.launches
    assert configured[:-2] == (5, 6, 7, 128, 1, 1, 1000, 77)
    assert configured[-1] == 0, "attributes"
    assert function == 4321
    assert found == (x.data_ptr(), None, 9, -3, 2**63, 0.5, 2**32 - 1)


def test_an_argument_too_few_or_too_many_is_refused(driver, source):
    kernel = LoadedKernel(source.build("semisparse_scale"), 0)
    with pytest.raises(KeyError, match="factor"):
        kernel((1, 1, 1), 32, **{name: 0 for name, _ in CODES if name != "factor"})
    with pytest.raises(TypeError, match="semisparse_scale takes x, y, n"):
        kernel((1, 1, 1), 32, **arguments(), more=1)
    assert not driver.launches


def test_a_tensor_without_memory_is_refused_and_one_without_elements_is_address_0(driver, source):
    kernel = LoadedKernel(source.build("semisparse_scale"), 0)
    freed = torch.zeros(3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(KernelError, match=r"memory of a torch.float32 \[3\] was freed"):
        kernel((1, 1, 1), 32, **arguments() | {"x": freed})
    assert not driver.launches
    kernel((1, 1, 1), 32, **arguments() | {"x": torch.zeros(0)})
    assert driver.launches[0][2][0] is None


def test_threads_launch_with_their_own_arguments(driver, source):
    """Each thread packs its arguments and waits for all others: a shared buffer would hold only the last thread's."""
    count, kernel = 4, LoadedKernel(source.build("semisparse_scale"), 0)
    driver.before_reading = threading.Barrier(count).wait
    threads = [threading.Thread(target=kernel, args=((i, 1, 1), 32), kwargs=arguments(i)) for i in range(1, count + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted((found[0][0], found[2]) for found in driver.launches) == [(i, (i,) * 7) for i in range(1, 5)]


@needs_bindings
def test_a_launch_that_the_driver_refuses_names_the_error(driver, source):
    driver.status = 700
    with pytest.raises(KernelError, match=r"with \(1, 1, 1\) CTAs of 32 threads failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        LoadedKernel(source.build("semisparse_scale"), 0)((1, 1, 1), 32, **arguments())


@needs_bindings
def test_a_pdl_launch_has_the_attribute_as_the_bindings_write_it(driver, source):
    from cuda.bindings import driver as bindings

    attribute = bindings.CUlaunchAttribute()
    attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    LoadedKernel(source.build("semisparse_scale"), 0)((1, 1, 1), 32, **arguments(), pdl=True)
    ((*_, address, count), _, _) = driver.launches[0]
    size = ctypes.sizeof(kernels.PDL_ATTRIBUTE)
    assert count == 1
    assert ctypes.string_at(address, size) == ctypes.string_at(attribute.getPtr(), size)


@needs_bindings
def test_the_configuration_is_as_the_bindings_write_it():
    from cuda.bindings import driver as bindings

    config = bindings.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 1, 2, 3
    config.blockDimX, config.blockDimY, config.blockDimZ = 4, 5, 6
    config.sharedMemBytes, config.hStream = 7, bindings.CUstream(2**40 + 8)
    written = kernels.LAUNCH_CONFIG.pack(1, 2, 3, 4, 5, 6, 7, 2**40 + 8, 0, 0)
    assert ctypes.string_at(config.getPtr(), kernels.LAUNCH_CONFIG.size) == written


def test_loading_for_another_gpu_leaves_the_current_one(driver, source, monkeypatch):
    made_current: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", made_current.append, raising=False)
    LoadedKernel(source.build("semisparse_scale"), 1)
    assert made_current == [1, 0]


def test_nothing_is_compiled_or_loaded_while_a_graph_is_captured(driver, source, monkeypatch):
    build, again = source.build("semisparse_scale"), source.build("semisparse_scale", {"TOKENS": 8})
    loaded = build.load(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert build.load(torch.device("cuda")) is loaded
    with pytest.raises(KernelError, match="run the model once with as many tokens"):
        again.load(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert again.load(torch.device("cuda")).name == "semisparse_scale"


def test_refusals_name_the_capability(monkeypatch):
    monkeypatch.setattr(kernels, "device_facts", lambda device: SimpleNamespace(capability=(7, 5)))
    assert "8.0 (Ampere)" in str(kernels.cuda_refusal(torch.device("cuda")))
    assert "9.0 (Hopper)" in str(kernels.cuda_refusal(torch.device("cuda"), kernels.HOPPER))
    assert "wgmma" in str(kernels.hopper_refusal(torch.device("cuda")))
    monkeypatch.setattr(kernels, "device_facts", lambda device: SimpleNamespace(capability=(10, 0)))
    assert "wgmma" in str(kernels.hopper_refusal(torch.device("cuda")))


@pytest.mark.parametrize("sizes", [(1,), (0, 5), (256, 257, 1)])
def test_arrays_that_share_an_allocation_do_not_overlap(sizes):
    *offsets, whole = offsets_in_workspace(*sizes)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    assert all(offset % kernels.ALIGNMENT == 0 for offset in offsets)
    assert all(end <= following for end, following in zip(ends, [*offsets[1:], whole], strict=True))


# On a GPU


@needs_gpu
@needs_bindings
@pytest.mark.parametrize("shared", [0, 96 << 10])
def test_a_kernel_gets_its_arguments(shared):
    copy = SOURCE.build("semisparse_copy", shared=shared).load(torch.device("cuda"))
    source, target = torch.randn(1000, device="cuda"), torch.full((1000,), torch.nan, device="cuda")
    copy((4, 1, 1), 256, source=source, target=target, count=900)
    assert torch.equal(target[:900], source[:900])
    assert target[900:].isnan().all()


@needs_gpu
@needs_bindings
def test_a_kernel_without_arguments_is_launched():
    SOURCE.build("semisparse_nothing").load(torch.device("cuda"))((1, 1, 1), 32)
    torch.cuda.synchronize()


@needs_gpu
@needs_bindings
@pytest.mark.skipif(
    "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ, reason="torch captures no graph without its caching allocator"
)
def test_a_kernel_runs_on_the_current_stream_and_in_a_graph():
    copy = SOURCE.build("semisparse_copy").load(torch.device("cuda"))
    source, target = torch.zeros(256, device="cuda"), torch.zeros(256, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        source.add_(1)
        copy((1, 1, 1), 256, source=source, target=target, count=256)
    for step in (1, 2):
        graph.replay()
        assert (target == step).all()


@needs_gpu
@needs_bindings
def test_a_kernel_runs_in_a_thread_of_its_own():
    copy = SOURCE.build("semisparse_copy").load(torch.device("cuda"))
    source, target = torch.randn(256, device="cuda"), torch.zeros(256, device="cuda")
    thread = threading.Thread(
        target=copy, args=((1, 1, 1), 256), kwargs={"source": source, "target": target, "count": 256}
    )
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(target, source)


@needs_gpu
@needs_bindings
def test_a_launch_or_load_that_the_device_refuses_is_an_error():
    device = torch.device("cuda")
    copy = SOURCE.build("semisparse_copy").load(device)
    with pytest.raises(KernelError, match="launching semisparse_copy"):
        copy((1, 1, 1), 4096, source=None, target=None, count=0)
    with pytest.raises(KernelError, match="shared memory"):
        SOURCE.build("semisparse_nothing", shared=1 << 20).load(device)
    with pytest.raises(KernelError, match="not semisparse_missing"):
        SOURCE.build("semisparse_missing").load(device)
