"""When Z:L patterns decompose into overlapping windows of M:N hardware (SlideSparse, section 3 and appendix C).

Two of the paper's claims do not hold as printed. `Decomposition.exists` and `Decomposition.tight` say what does; the
tests enumerate both:

- Theorem 2 (capacity of at least Z suffices) also needs ``N - M <= M`` and windows that end with the block. 2:7 on 1:4
  hardware has capacity 2, but the first window alone covers columns 0 to 2 and holds only one of them.
- C.1.7 (1:4 hardware reaches the bound L/Z for every Z:L) holds where ``L - Z <= 3``, with windows a column apart. At
  the stride of 3 that C.1.7 names, 6:8 has room for 2 windows only.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from semisparse.errors import PatternError


@dataclass(frozen=True)
class Decomposition:
    """Windows of ``hardware_window`` columns over a block of ``window``, each holding ``hardware_keep`` non-zeros.

    Args:
        keep: maximum non-zeros per block; the paper's Z.
        window: columns per block; the paper's L.
        hardware_keep: maximum non-zeros per window of the hardware; the paper's M.
        hardware_window: columns per window of the hardware; the paper's N.

    Raises:
        PatternError: a number is out of range, or a window of the hardware is longer than the block.
    """

    keep: int
    window: int
    hardware_keep: int = 2
    hardware_window: int = 4

    def __post_init__(self) -> None:
        if not (1 <= self.keep <= self.window and 1 <= self.hardware_keep < self.hardware_window <= self.window):
            raise PatternError(
                f"{self.keep}:{self.window} onto {self.hardware_keep}:{self.hardware_window}: a pattern keeps 1 to all "
                "of its window, the hardware keeps fewer than its own, and its window fits into the pattern's"
            )

    @property
    def stride(self) -> int:
        """Columns from one window to the next (C.1.2): two neighbours share ``hardware_keep`` columns."""
        return self.hardware_window - self.hardware_keep

    @property
    def windows(self) -> int:
        """Windows per block (equation 8, rounded down)."""
        return (self.window - self.hardware_window) // self.stride + 1

    @property
    def capacity(self) -> int:
        """Maximum non-zeros that the windows of a block hold together."""
        return self.windows * self.hardware_keep

    @property
    def expansion(self) -> Fraction:
        """Columns after the decomposition over columns before (equation 9); 2 - 2/N for (2N-2):2N on 2:4."""
        return Fraction(self.windows * self.hardware_window, self.window)

    @property
    def exists(self) -> bool:
        """Whether every block can be decomposed into these windows.

        The columns that only windows i to j cover must not be able to hold more than those windows do (Hall's theorem).
        The first window alone covers ``stride`` columns, hence ``stride <= hardware_keep``; all together cover all.
        """
        reach_the_end = (self.window - self.hardware_window) % self.stride == 0
        enough = self.stride <= self.hardware_keep and self.capacity >= self.keep
        return reach_the_end and (enough or self.keep <= self.hardware_keep)

    @property
    def tight(self) -> bool:
        """Whether ``keep / hardware_keep`` windows at any columns suffice: the bound of theorem 3 is reached.

        Window j then holds the non-zeros of rank jM to jM + M - 1, which lie in columns jM to jM + M - 1 + (L - Z).
        """
        shifts = self.window - self.keep
        return self.keep % self.hardware_keep == 0 and shifts <= self.hardware_window - self.hardware_keep
