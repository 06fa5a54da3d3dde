"""GEMMs that expand each packed weight once for all tokens of a tile, on Hopper: cuda/expand_gemm, and its x.

A format has a .cu file with its own way to expand a tile of 16 rows by 256 columns; the rest is shared. The schedules
are in gemm_schedule.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from semisparse.runtime.device import device_facts
from semisparse.runtime.gemm_schedule import PERMUTE_WARPS, Launch, Schedule, Tiles, launch_of
from semisparse.runtime.kernel import Argument, CudaSource, KernelBuild, LoadedKernel
from semisparse.runtime.nvrtc import HEADERS
from semisparse.runtime.operands import bias_as

MAX_EARLY_TOKENS = 64
"""Maximum M of a GEMM that may start, and read its weight, while the kernel before the one that permutes x still runs,
if its caller promises that no kernel on the stream writes the weight. Steps of 8 blocks of llama2-7b take 1.4 to 3.7 %
less so for 32 sequences and up to 1.5 % less for 64, but 2 % more for 128; prompts of 512 tokens 2 to 4 % more
(results/h200/blocks-turns.csv)."""

PERMUTE_X = CudaSource(
    HEADERS / "expand_gemm" / "permute_x.cu", ({"TILE_M": 32, "BLOCK": 64}, {"TILE_M": 256, "BLOCK": 2})
)


@dataclass(frozen=True)
class Permutation:
    """The order in which a GEMM reads x (expand_gemm/permuted.cuh), for every M of a problem's bucket.

    Args:
        schedule: how y is computed.
        weight: the weight's tiles.
        block: consecutive columns that a lane takes in the weight fragments.
        sms: the device's SMs.
    """

    schedule: Schedule
    weight: Tiles
    block: int
    sms: int
    _launches: dict[int, Launch] = field(default_factory=dict, compare=False, repr=False)

    def allocate(self, m: int, dtype: torch.dtype, device: torch.device) -> PermutedX:
        """Return memory for x [M, K] in this order. Whoever writes x also zeroes the counters in it."""
        launch = self._launches.get(m)
        if launch is None:
            launch = self._launches[m] = launch_of(self.schedule, m, self.weight, self.sms)
        return PermutedX(m, dtype, self, launch, torch.empty(launch.workspace, dtype=torch.uint8, device=device))


@dataclass(slots=True)
class PermutedX:
    """x [M, K] in the order in which a GEMM reads it, in that GEMM's workspace. It is used once.

    Args:
        m: M.
        dtype: x's dtype.
        permutation: the order.
        launch: the GEMM's grids, and where x and the counters are.
        workspace: uint8.
    """

    m: int
    dtype: torch.dtype
    permutation: Permutation
    launch: Launch
    workspace: Tensor

    @property
    def addresses(self) -> list[int]:
        """The addresses of x, the counters and the partial accumulators."""
        begin = self.workspace.data_ptr()
        return [begin + offset for offset in self.launch.offsets]

    @property
    def arguments(self) -> dict[str, Argument]:
        """The arguments, by name, of a kernel that writes x in this order, in a grid with `Launch.tokens` rows.

        With them no kernel on the stream may write the GEMM's weight.
        """
        permuted, counters, _ = self.addresses
        return {
            "permuted": permuted,
            "counters": counters,
            "m": self.m,
            "column_tiles": self.permutation.weight.column_tiles,
            "tile_m": self.permutation.schedule.tile_m,
            "block": self.permutation.block,
            "counter_count": self.launch.counters,
            "early": int(self.m <= MAX_EARLY_TOKENS),
        }


Operands = Mapping[str, Argument]
"""A format's own arguments of its kernel, by name."""


class Matmul:
    """(x [M, K] or a `PermutedX`, `Operands`, bias [N] or None) -> y [M, N], accumulated in float32.

    Attributes:
        permutation: of the `PermutedX` that it takes.
    """

    def __init__(
        self, permutation: Permutation, shape: tuple[int, int], permute_x: LoadedKernel, gemm: LoadedKernel
    ) -> None:
        self.permutation = permutation
        self._n, self._k = shape
        self._permute_x, self._gemm = permute_x, gemm

    def permuted(self, x: Tensor, constant: bool = False) -> PermutedX:
        """Permute x [M, K]; ``constant``: no kernel on the stream writes the weight."""
        x, k = x.contiguous(), self._k
        own = self.permutation.allocate(len(x), x.dtype, x.device)
        permuted, counters, _ = own.addresses
        self._permute_x(
            (own.launch.permute_ctas, 1, 1), 32 * PERMUTE_WARPS, pdl=True,
            x=x, permuted=permuted, counters=counters,
            m=own.m, k=k, column_tiles=self.permutation.weight.column_tiles, counter_count=own.launch.counters,
            aligned=k % 2 == 0 and x.data_ptr() % 4 == 0, tokens=own.launch.tokens,
            early=int(constant and own.m <= MAX_EARLY_TOKENS),
        )  # fmt: skip
        return own

    def __call__(self, x: Tensor | PermutedX, operands: Operands, bias: Tensor | None) -> Tensor:
        if isinstance(x, Tensor):
            x = self.permuted(x)
        y = x.workspace.new_empty(x.m, self._n, dtype=x.dtype)
        permuted, counters, partials = x.addresses
        weight = self.permutation.weight
        # pdl: it starts beside the kernel that permutes x, and waits before it uses the permuted x and the counters.
        self._gemm(
            (x.launch.ctas, 1, 1), self.permutation.schedule.threads, pdl=True,
            x=permuted, **operands, bias=bias_as(bias, x.dtype), y=y,
            partials=partials, counters=counters,
            m=x.m, n=self._n, row_tiles=weight.row_tiles, column_tiles=weight.column_tiles,
        )  # fmt: skip
        return y


def prepare(
    kernel: Callable[[Schedule], KernelBuild],
    schedule: Schedule,
    weight: Tiles,
    block: int,
    shape: tuple[int, int],
    device: torch.device,
) -> Matmul:
    """Compile and load a format's kernel and permute_x.cu.

    Args:
        kernel: returns the format's kernel for a schedule.
        schedule: how y is computed.
        weight: its tiles.
        block: BLOCK of permute_x.cu: consecutive columns that a lane takes in the weight fragments.
        shape: (N, K).
        device: where all operands are.
    """
    permuting = PERMUTE_X.build("semisparse_permute_x", {"TILE_M": schedule.tile_m, "BLOCK": block})
    permute_x = replace(permuting, shares_sm=True).load(device)
    permutation = Permutation(schedule, weight, block, device_facts(device).sms)
    return Matmul(permutation, shape, permute_x, kernel(schedule).load(device))
