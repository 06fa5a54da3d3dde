"""Every GPU kernel on inputs drawn anew at each run; the seed is in the test's message."""

import secrets

import pytest
import torch

from semisparse.formats import Format, Kernel, linear, registry
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from tests.formats.cases import accepted_patterns
from tests.formats.checking import check_product

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="fresh inputs are for GPU kernels: no GPU here")

DRAWS = 40
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

GPU_KERNELS = [
    pytest.param(form, kernel, id=f"{name}-{kernel.name}")
    for name, form in registry().items()
    for kernel in form.kernels
    if kernel.device == "cuda"
]


@pytest.mark.parametrize(("form", "kernel"), GPU_KERNELS)
def test_fresh_inputs(form: Format, kernel: Kernel):
    ran = 0
    for _ in range(DRAWS):
        seed = secrets.randbits(32)
        generator = torch.Generator().manual_seed(seed)

        def number(low: int, high: int, generator=generator) -> int:
            return int(torch.randint(low, high + 1, (), generator=generator))

        patterns = accepted_patterns(form.name)
        pattern = parse_pattern(patterns[number(0, len(patterns) - 1)])
        dtype = DTYPES[number(0, len(DTYPES) - 1)]
        m, n, k = number(1, (16, 300)[number(0, 1)]), number(1, 700), number(1, 900)
        weight = torch.randn(n, k, generator=generator)
        weight *= pattern.mask(weight.abs())
        packed = form.pack(weight.to(dtype).cuda(), pattern).to("cuda")
        x = torch.randn(m, k, generator=generator).to(dtype).cuda()
        bias = torch.randn(n, generator=generator).to(dtype).cuda() if number(0, 1) else None
        if kernel.refusal(problem_of(x, packed)):
            continue
        ran += 1
        poison = torch.full((m, n), torch.nan, dtype=dtype, device="cuda")
        del poison  # the output's memory, most likely
        y = linear(x, packed, bias, kernel=kernel.name)
        try:
            check_product(y, x, packed, bias)
            assert torch.equal(y, linear(x, packed, bias, kernel=kernel.name)), "two launches differ"
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: M, N, K = {m}, {n}, {k}, {pattern}, {dtype}: {error}") from error
    if not ran:
        pytest.skip(f"{form.name}'s kernel {kernel.name} takes none of the default packings")
