"""Validity of a cached output while dynamo traces: it compares version counters of the trace's fake tensors.

User code can read those only through `comptime`. This module imports torch's compiler, so it is imported only while the
compiler runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, compiler
from torch._dynamo.comptime import ComptimeContext, comptime

_comparison: dict[str, bool] = {}


def record_version(y: Tensor, x: Tensor) -> None:
    """Record on y, while dynamo traces, the version of x from which y was computed."""
    comptime(_record_version)


def is_current(y: Tensor, x: Tensor) -> bool:
    """Return whether y was traced in this graph and x has not been written to since."""
    comptime(_compare_version)
    return _is_unchanged()


# The functions below run while dynamo traces. They read the arguments of their caller by name.


def _record_version(trace: ComptimeContext) -> None:
    y: Any = trace.get_local("y").as_fake()
    y.version_of_x = _version_of_x(trace)


def _compare_version(trace: ComptimeContext) -> None:
    recorded = getattr(trace.get_local("y").as_fake(), "version_of_x", None)
    _comparison["unchanged"] = recorded == _version_of_x(trace)


def _version_of_x(trace: ComptimeContext) -> int:
    x: Any = trace.get_local("x").as_fake()
    return int(x._version)


@compiler.assume_constant_result
def _is_unchanged() -> bool:
    return _comparison.pop("unchanged")
