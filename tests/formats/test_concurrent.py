"""Every GPU kernel as programs run it: at any alignment and stride, on streams, threads and GPUs, and captured."""

import threading
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats import Format, Kernel, Packed, linear, registry
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from tests.formats.cases import OPTIONS, accepted_patterns
from tests.formats.checking import TORCH_KERNELS, check_norm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs kernels on a GPU: no GPU here")

N = 1552
COLUMNS = (1040, 1152)
"""Several tiles of every kernel along N and K, the last of them partly filled; the second K is for kernels that take
whole groups of 128 only."""

TOKENS = (1, 4, 40, 300, 2100)
"""The smallest M that a kernel takes is run."""

REPEATS = 20

GPU_KERNELS = [
    pytest.param(form, kernel, id=f"{name}-{kernel.name}")
    for name, form in registry().items()
    for kernel in form.all_kernels
    if kernel.device == "cuda"
]


def operands(form: Format, kernel: Kernel, device: str = "cuda") -> tuple[Tensor, Packed, Tensor]:
    """Return x, a weight and a bias that the kernel takes: the first of the patterns, pack options and dtypes."""
    patterns = (*accepted_patterns(form.name), *(case.pattern for case in form.cases))
    options = (*form.variants, *([OPTIONS[kernel.name]] if kernel.name in OPTIONS else ()))
    for k, pattern, chosen, dtype in product(
        COLUMNS, map(parse_pattern, patterns), options, (torch.bfloat16, torch.float32)
    ):
        generator = torch.Generator().manual_seed(0)
        scores = torch.randn(N, k, generator=generator)
        try:
            packed = form.pack((scores * pattern.mask(scores.abs())).to(dtype), pattern, **chosen).to(device)
        except FormatError:
            continue
        for m in TOKENS:
            x = torch.randn(m, k, generator=generator).to(device, dtype)
            if kernel.refusal(problem_of(x, packed)) is None:
                return x, packed, torch.randn(N, generator=generator).to(device, dtype)
    pytest.skip(f"{form.name}'s kernel {kernel.name} takes none of the weights here")


def shifted(x: Tensor, elements: int) -> Tensor:
    """Return x with its first element ``elements`` behind an address aligned to 256 bytes."""
    return torch.cat([x.new_zeros(elements), x.flatten()])[elements:].view_as(x)


@pytest.mark.parametrize(("form", "kernel"), GPU_KERNELS)
def test_any_alignment_and_stride_gives_the_same(form: Format, kernel: Kernel):
    """Bit for bit; where torch multiplies, whose kernel depends on the alignment, up to some roundings."""
    x, packed, bias = operands(form, kernel)
    by_torch = kernel.name in ("unpack", "unpack_tiles", *TORCH_KERNELS)

    def same(given: Tensor, given_bias: Tensor, what: str) -> None:
        y = linear(given, packed, given_bias, kernel.name)
        alike = check_norm(y, expected) if by_torch else torch.equal(y, expected)
        assert alike, what

    expected = linear(x, packed, bias, kernel.name)
    for elements in range(1, 16 // x.itemsize + 1):
        same(shifted(x, elements), bias, f"x at {elements}")
        same(x, shifted(bias, elements), f"bias at {elements}")
    for other in (torch.stack((x, x), -1)[..., 0], torch.cat((x, x), 1)[:, : x.shape[1]], x.T.contiguous().T):
        same(other, bias, f"x of strides {other.stride()}")
    same(x, torch.stack((bias, bias), 1)[:, 0], "bias of stride 2")


@pytest.mark.parametrize(("form", "kernel"), GPU_KERNELS)
def test_streams_and_threads_do_not_disturb_each_other(form: Format, kernel: Kernel):
    """Eight threads on eight streams multiply by one weight; each gets the result that one thread alone gets."""
    x, packed, bias = operands(form, kernel)
    inputs = [x * scale for scale in (0.5, 1, 2, 4, 8, 16, 32, 64)]
    expected = [linear(own, packed, bias, kernel.name) for own in inputs]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[] for _ in inputs]

    def multiply(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found[i] = [linear(inputs[i], packed, bias, kernel.name) for _ in range(REPEATS)]

    threads = [threading.Thread(target=partial(multiply, i)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for i, (results, y) in enumerate(zip(found, expected, strict=True)):
        assert len(results) == REPEATS, f"thread {i} ended early"
        assert all(torch.equal(result, y) for result in results), f"thread {i}"


@pytest.mark.parametrize(("form", "kernel"), GPU_KERNELS)
def test_two_streams_of_one_thread(form: Format, kernel: Kernel):
    """Launches on two streams in turn, with nothing between them that waits: neither reads the other's workspace."""
    x, packed, bias = operands(form, kernel)
    inputs = (x, x * 2)
    expected = [linear(own, packed, bias, kernel.name) for own in inputs]
    torch.cuda.synchronize()
    streams, found = (torch.cuda.Stream(), torch.cuda.Stream()), ([], [])
    for _ in range(REPEATS):
        for stream, own, results in zip(streams, inputs, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(linear(own, packed, bias, kernel.name))
    torch.cuda.synchronize()
    for results, y in zip(found, expected, strict=True):
        assert all(torch.equal(result, y) for result in results)


@pytest.mark.parametrize(("form", "kernel"), GPU_KERNELS)
def test_captured_on_a_side_stream(form: Format, kernel: Kernel):
    """A graph captured on a stream of its own computes on what its input holds when it is replayed."""
    x, packed, bias = operands(form, kernel)
    expected = linear(x * 2, packed, bias, kernel.name)
    held, side = x.clone(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        linear(held, packed, bias, kernel.name)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        y = linear(held, packed, bias, kernel.name)
    held.copy_(x * 2)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two_gpus
@pytest.mark.parametrize(("form", "kernel"), GPU_KERNELS)
def test_two_gpus_in_one_process(form: Format, kernel: Kernel):
    """The second GPU is not the current one. Launches on both in turns, with nothing between them that waits."""
    torch.cuda.set_device(0)
    given = [operands(form, kernel, device) for device in ("cuda:1", "cuda:0")]
    expected = [linear(x, packed, bias, kernel.name) for x, packed, bias in given]
    assert torch.cuda.current_device() == 0
    assert torch.equal(expected[0].cpu(), expected[1].cpu())
    found = [[linear(x, packed, bias, kernel.name) for x, packed, bias in given] for _ in range(REPEATS)]
    for gpu in range(2):
        torch.cuda.synchronize(gpu)
    for results in found:
        assert all(torch.equal(result, y) for result, y in zip(results, expected, strict=True))


@two_gpus
@pytest.mark.parametrize(("form", "kernel"), GPU_KERNELS)
def test_a_thread_per_gpu_and_a_graph_on_each(form: Format, kernel: Kernel):
    """Each thread launches on streams of its GPU, captures a graph there and replays it, while the other does too."""
    given = [operands(form, kernel, f"cuda:{gpu}") for gpu in range(2)]
    expected = [linear(x * 2, packed, bias, kernel.name) for x, packed, bias in given]
    found: list[list[Tensor]] = [[], []]

    def compute(gpu: int) -> None:
        torch.cuda.set_device(gpu)
        x, packed, bias = given[gpu]
        held, side = x * 2, torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found[gpu] = [linear(held, packed, bias, kernel.name) for _ in range(REPEATS)]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):  # the other thread allocates
            y = linear(held, packed, bias, kernel.name)
        for _ in range(REPEATS):
            graph.replay()
        torch.cuda.synchronize()
        found[gpu].append(y.clone())

    threads = [threading.Thread(target=partial(compute, gpu)) for gpu in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results, y in zip(found, expected, strict=True):
        assert len(results) == REPEATS + 1, "a thread ended early"
        assert all(torch.equal(result, y) for result in results)
