"""Checking a layer whose memory was allocated after it was built.

The decorator imports torch's compiler, which takes half a second, so this module is imported only for such a layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import compiler

if TYPE_CHECKING:
    from semisparse.nn.sparse_linear import SparseLinear


@compiler.disable
def check_filled(layer: SparseLinear) -> None:
    """Validate and arrange a layer. Compiled code calls this, too, once."""
    layer.validate()
    layer.arrange()
    layer._unfilled = False
