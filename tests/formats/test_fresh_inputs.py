"""Every GPU kernel on inputs drawn anew at each run; the seed is in the test's message.

Under compute-sanitizer (SEMISPARSE_DRAWS) weights are packed on the CPU. SEMISPARSE_SEED gives its tools the same
inputs, so that kernels are compiled once.
"""

import os
import secrets
import sys

import pytest
import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats import Format, Kernel, linear, registry
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from tests.formats.cases import OPTIONS, accepted_patterns
from tests.formats.checking import TORCH_KERNELS, check_any_rounding, check_norm, exact_products

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="fresh inputs are for GPU kernels: no GPU here")

DRAWS = int(os.environ.get("SEMISPARSE_DRAWS", "60"))
SEED = os.environ.get("SEMISPARSE_SEED")
PACKED_ON = "cpu" if "SEMISPARSE_DRAWS" in os.environ else "cuda"
MOST_DRAWS = 200
"""Draws per wanted one, until the kernel has taken one: `full` of gqs takes one in 60."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

GPU_KERNELS = [
    pytest.param(form, kernel, id=f"{name}-{kernel.name}")
    for name, form in registry().items()
    for kernel in form.all_kernels
    if kernel.device == "cuda"
]


def multiply_on_cpu(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Stands in for cuBLAS under a sanitizer: racecheck crashes in it, initcheck does not see all that it writes."""
    own = None if bias is None else bias.cpu()
    return torch.nn.functional.linear(x.cpu(), w.cpu(), own).to(x.device)


@pytest.mark.parametrize(("form", "kernel"), GPU_KERNELS)
def test_fresh_inputs(form: Format, kernel: Kernel, monkeypatch: pytest.MonkeyPatch):
    if "SEMISPARSE_DRAWS" in os.environ:
        monkeypatch.setattr(sys.modules[kernel.prepare.__module__], "multiply_dense", multiply_on_cpu, raising=False)
    ran = 0
    patterns = sorted({*accepted_patterns(form.name), *(case.pattern for case in form.cases)})
    for draw in range(DRAWS * MOST_DRAWS):
        if draw >= DRAWS and ran:
            break
        seed = secrets.randbits(32) if SEED is None else int(SEED) + draw
        generator = torch.Generator().manual_seed(seed)

        def number(low: int, high: int, generator=generator) -> int:
            return int(torch.randint(low, high + 1, (), generator=generator))

        pattern = parse_pattern(patterns[number(0, len(patterns) - 1)])
        dtype = DTYPES[number(0, len(DTYPES) - 1)]
        m, n, k = number(1, (16, 300)[number(0, 1)]), number(1, 700), number(1, 900)
        n, k = (n - n % 16 or 16, k - k % 128 or 128) if number(0, 1) else (n, k)  # some kernels take whole tiles only
        weight = torch.randn(n, k, generator=generator)
        weight *= pattern.mask(weight.abs())
        options = OPTIONS.get(kernel.name) or form.variants[number(0, len(form.variants) - 1)]
        try:
            packed = form.pack(weight.to(PACKED_ON, dtype), pattern, **options).to("cuda")
        except FormatError:
            continue  # a pack option that is not for this pattern
        x = torch.randn(m, k, generator=generator).to(dtype).cuda()
        bias = torch.randn(n, generator=generator).to(dtype).cuda() if number(0, 1) else None
        if kernel.refusal(problem_of(x, packed)):
            continue
        ran += 1
        poison = torch.full((m, n), torch.nan, dtype=dtype, device="cuda")
        del poison  # the output's memory, most likely
        y = linear(x, packed, bias, kernel=kernel.name)
        try:
            if kernel.name in TORCH_KERNELS:
                assert any(check_norm(y, exact) for exact in exact_products(x, packed, bias))
            else:
                check_any_rounding(y, x, packed, bias)
            assert torch.equal(y, linear(x, packed, bias, kernel=kernel.name)), "two launches differ"
        except AssertionError as error:
            case = f"M, N, K = {m}, {n}, {k}, {pattern} {dict(options)}, {dtype}"
            raise AssertionError(f"seed {seed}: {case}: {error}") from error
    if not ran:
        pytest.skip(f"{form.name}'s kernel {kernel.name} takes none of the default packings")
