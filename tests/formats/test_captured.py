"""Every GPU kernel can be captured in a CUDA graph; replaying it on other tokens gives their product."""

import os

import pytest
import torch

from semisparse.formats import Format, Kernel, linear, registry
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from tests.formats.cases import accepted_patterns

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs: no GPU here"),
    pytest.mark.skipif(
        "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ, reason="torch captures no graph without its caching allocator"
    ),
]

GPU_KERNELS = [
    pytest.param(form, kernel, id=f"{name}-{kernel.name}")
    for name, form in registry().items()
    for kernel in form.kernels
    if kernel.device in ("cuda", None)
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("m", [1, 16, 40, 300])
@pytest.mark.parametrize(("form", "kernel"), GPU_KERNELS)
def test_replays_on_other_tokens(form: Format, kernel: Kernel, m: int, dtype: torch.dtype):
    ran = 0
    for written in accepted_patterns(form.name):
        pattern = parse_pattern(written)
        weight = torch.randn(192, 256)
        weight *= pattern.mask(weight.abs())
        packed = form.pack(weight.to(dtype), pattern).to("cuda")
        x = torch.zeros(m, 256, dtype=dtype, device="cuda")
        if kernel.refusal(problem_of(x, packed)):
            continue
        ran += 1
        linear(x, packed, kernel=kernel.name)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = linear(x, packed, kernel=kernel.name)
        x.copy_(torch.randn(m, 256))
        graph.replay()
        assert torch.equal(y, linear(x, packed, kernel=kernel.name)), pattern
    if not ran:
        pytest.skip(f"{form.name}'s kernel {kernel.name} takes none of the patterns with {m} tokens in {dtype}")
