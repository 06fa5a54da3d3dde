"""decode_rows.cu: y for 1 to 16 tokens from the layout on disk, a warp per row, without tensor cores.

It serves patterns that do not bound the non-zeros of a block. Like RheoSparse's kernel (section IV, algorithm 1) it
reads one 64-bit mask per row and 64 columns and the kept values, and builds no dense tile. It differs in three ways:

- A warp computes a row, and a lane two columns of each block. The paper has a thread per row.
- A lane finds its value by the popcount of the lower mask bits. The paper walks the mask with find-first-set.
- Values are not reordered for vector loads (section IV-B).

At 4096 x 4096, 32:64 and one token it takes 24.9 us on an H200, the authors' kernel 12.6, cuBLAS 13.2, decode.cu 8.2,
and unpacking for cuBLAS some 250.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.bitmask.cuda.operands import SCALARS
from semisparse.formats.bitmask.storage.codes import code_bits
from semisparse.formats.bitmask.storage.disk import BLOCK, values_per_block
from semisparse.formats.bitmask.storage.layouts import layout_of
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime.kernel import CudaSource, cuda_refusal
from semisparse.runtime.nvrtc import Defines
from semisparse.runtime.operands import bias_as

MAX_TOKENS = 16

ROWS_PER_CTA = 8
"""One per warp."""

SOURCE = CudaSource(
    Path(__file__).with_name("decode_rows.cu"),
    tuple({"SCALAR": scalar, "TOKENS": tokens} for scalar in SCALARS.values() for tokens in (1, 2, 4, 8, 16)),
)


def refusal(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    if problem.m > MAX_TOKENS:
        return f"takes 1 to {MAX_TOKENS} tokens, got {problem.m}"
    if layout_of(problem.params) != "rows":
        return "reads the layout rows, this weight is stored in tiles"
    if code_bits(problem.params):
        return f"reads values, this weight holds codes of kind {problem.params['kind']}"
    if problem.dtype not in SCALARS or problem.spec.dtype != problem.dtype:
        return f"x and w are both float16 or both bfloat16, got {problem.dtype} and {problem.spec.dtype}"
    return cuda_refusal(problem.device)


def prepare(problem: Problem) -> Product:
    """Compile and load the kernel for one problem."""
    n, k, device = problem.n, problem.k, problem.device
    macros: Defines = {"SCALAR": SCALARS[problem.dtype], "TOKENS": problem.m}
    kernel = SOURCE.build("semisparse_bitmask_decode_rows", macros).load(device)
    grid, threads = (-(-n // ROWS_PER_CTA), 1, 1), 32 * ROWS_PER_CTA
    blocks, count = -(-k // BLOCK), values_per_block(problem.pattern) or 0

    def decode_rows(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        x, m = x.contiguous(), x.shape[0]
        y = x.new_empty(m, n)
        stored = {name: tensor.contiguous() for name, tensor in packed.tensors.items()}
        kernel(
            grid, threads,
            x=x, masks=stored["masks"], values=stored["values"], row_starts=stored.get("row_starts"),
            bias=bias_as(bias, x.dtype), y=y, m=m, n=n, k=k, blocks=blocks, count=count,
        )  # fmt: skip
        return y

    return decode_rows
