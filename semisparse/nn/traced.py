"""What a traced graph remembers of a joined product: while a compiler traces, versions are those of its fake tensors.

Only `comptime` lets code see them. This module imports torch's compiler, so it is imported while that runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, compiler
from torch._dynamo.comptime import ComptimeContext, comptime

_seen: dict[str, bool] = {}


def note_version(whole: Tensor, x: Tensor) -> None:
    """Note on a product, while a compiler traces it, which version of its input it is of."""
    comptime(_note_version)


def is_of_this_trace(whole: Tensor, x: Tensor) -> bool:
    """Say whether a product was traced in this graph, and of what x still is."""
    comptime(_compare_version)
    return _unchanged()


def _note_version(trace: ComptimeContext) -> None:
    whole: Any = trace.get_local("whole").as_fake()
    whole.version_of_x = _version_of_x(trace)


def _compare_version(trace: ComptimeContext) -> None:
    noted = getattr(trace.get_local("whole").as_fake(), "version_of_x", None)
    _seen["unchanged"] = noted == _version_of_x(trace)


def _version_of_x(trace: ComptimeContext) -> int:
    x: Any = trace.get_local("x").as_fake()
    return int(x._version)


@compiler.assume_constant_result
def _unchanged() -> bool:
    return _seen.pop("unchanged")
