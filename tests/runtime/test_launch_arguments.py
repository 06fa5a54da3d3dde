"""What a launch hands to the driver, read back by one made up for it; no GPU is needed."""

import ctypes
import struct
import threading
from types import SimpleNamespace

import pytest
import torch

from semisparse.errors import KernelError
from semisparse.runtime import launch
from semisparse.runtime.nvrtc import Cubin, unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"CUDA bindings: {unavailable()}")

DEVICE = torch.device("cuda", 0)
PARAMETERS = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_float, ctypes.c_void_p, ctypes.c_int)
FAILURE = 700


class Driver:
    """Keeps, of each launch, its configuration, function and arguments."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple, int, tuple]] = []
        self.status = 0
        self.before_reading = lambda: None

    def __call__(self, config: int, function: int, pointers: int, extra: None) -> int:
        self.before_reading()
        at = (ctypes.c_void_p * len(PARAMETERS)).from_address(pointers)
        found = [kind.from_address(place).value for kind, place in zip(PARAMETERS, at, strict=True)]
        configured = launch.CONFIG.unpack(ctypes.string_at(config, launch.CONFIG.size))
        self.launches.append((configured, function, tuple(found)))
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    import cuda.core

    found = Driver()
    code = SimpleNamespace(get_kernel=lambda name: SimpleNamespace(handle=4321))
    monkeypatch.setattr(cuda.core, "ObjectCode", SimpleNamespace(from_cubin=lambda cubin: code))
    monkeypatch.setattr(launch, "_launcher", lambda: found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77 + index, raising=False)
    return found


def kernel(shared: int = 0) -> launch.CudaKernel:
    return launch.CudaKernel(Cubin(b"", {"kernel": None}), "kernel", PARAMETERS, shared)


def test_the_driver_gets_every_argument_in_its_place(driver):
    kernel(shared=1000)(DEVICE, (5, 6, 7), 128, 2**40 + 1, -3, 2**63, 0.5, None, 2**31 - 1)
    ((grid_and_more, function, arguments),) = driver.launches
    assert grid_and_more[:-2] == (5, 6, 7, 128, 1, 1, 1000, 77)
    assert grid_and_more[-1] == 0, "attributes"
    assert function == 4321
    assert arguments == (2**40 + 1, -3, 2**63, 0.5, None, 2**31 - 1)


def test_a_dependent_launch_has_the_attribute_as_the_bindings_write_it(driver):
    from cuda.bindings import driver as bindings

    attribute = bindings.CUlaunchAttribute()
    attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    kernel()(DEVICE, (1, 1, 1), 32, *[0] * len(PARAMETERS), dependent=True)
    ((*_, place, count), _, _) = driver.launches[0]
    size = ctypes.sizeof(launch.OVERLAP)
    assert count == 1
    assert ctypes.string_at(place, size) == ctypes.string_at(attribute.getPtr(), size)


def test_the_configuration_lies_as_the_bindings_write_it():
    from cuda.bindings import driver as bindings

    config = bindings.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 1, 2, 3
    config.blockDimX, config.blockDimY, config.blockDimZ = 4, 5, 6
    config.sharedMemBytes, config.hStream = 7, bindings.CUstream(2**40 + 8)
    written = launch.CONFIG.pack(1, 2, 3, 4, 5, 6, 7, 2**40 + 8, 0, 0)
    assert ctypes.string_at(config.getPtr(), launch.CONFIG.size) == written


def test_threads_launch_what_they_asked_for(driver):
    """Each waits, once it has written its arguments, until all have: memory in common would hold the last one's."""
    threads, shared = 4, kernel()
    driver.before_reading = threading.Barrier(threads).wait
    started = [threading.Thread(target=shared, args=(DEVICE, (i, 1, 1), 32, i, i, i, i, i, i)) for i in range(1, 5)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert sorted((found[0][0], found[2]) for found in driver.launches) == [(i, (i,) * 6) for i in range(1, 5)]


def test_what_the_driver_refuses_is_an_error_that_names_it(driver):
    driver.status = FAILURE
    with pytest.raises(KernelError, match=r"on \(1, 1, 1\) blocks of 32 threads failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        kernel()(DEVICE, (1, 1, 1), 32, *[0] * len(PARAMETERS))


def test_a_wrong_number_of_arguments_is_refused(driver):
    with pytest.raises(struct.error):
        kernel()(DEVICE, (1, 1, 1), 32, 0, 0)
    assert not driver.launches


@pytest.mark.parametrize("sizes", [(1,), (0, 5), (256, 257, 1)])
def test_arrays_that_share_an_allocation_do_not_overlap(sizes):
    *places, whole = launch.places_of(*sizes)
    ends = [place + size for place, size in zip(places, sizes, strict=True)]
    assert all(place % launch.ALIGNMENT == 0 for place in places)
    assert all(end <= following for end, following in zip(ends, [*places[1:], whole], strict=True))
