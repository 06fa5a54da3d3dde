"""What describes a stored weight beside its tensors: format, pattern, shape, dtype and the format's own params."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from semisparse.errors import FormatError
from semisparse.patterns import Pattern, parse_pattern

WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

Scalar = int | float | str


class Params(Mapping[str, Scalar]):
    """A format's own params (bit widths, layouts, counts): JSON numbers and strings by name, immutable.

    Args:
        values: the numbers and strings by name. Keyword arguments add to them or replace them.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Scalar] | None = None, **more: Scalar) -> None:
        self._values = {**(values or {}), **more}

    def __getitem__(self, name: str) -> Scalar:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Params({self._values})"

    def without(self, *names: str) -> Params:
        """Return these params without those of the given names."""
        return Params({name: value for name, value in self._values.items() if name not in names})


@dataclass(frozen=True)
class TensorSpec:
    """One stored tensor.

    Args:
        name: its name inside of a module; a checkpoint has it as ``model.layers.0.mlp.up_proj.<name>``.
        dtype: torch dtype, or None for the weight's own (float16, bfloat16 or float32).
        shape: one name per dimension: ``N``, ``K``, or a count the format names; ``N+1`` adds one, for offsets from 0.
        split_n: the dimension to slice when the weight is sliced along N; None keeps the tensor whole in every slice.
        split_k: the same for K. If no tensor has one for the sliced axis, or the slice is off `Format.grain`, the
            weight is packed again instead.
    """

    name: str
    dtype: torch.dtype | None
    shape: tuple[str, ...]
    split_n: int | None = None
    split_k: int | None = None


@dataclass(frozen=True, eq=False)
class WeightSpec:
    """What describes a stored weight ``w[N, K]`` beside its tensors. Hashable; specs are equal if their JSON is.

    Args:
        format: the format's name.
        version: version of the format's layout.
        pattern: the pattern that the weight obeys.
        shape: (N, K).
        dtype: dtype of the dense weight, as it was packed and as `Packed.unpack` returns it.
        params: the format's own.

    Attributes:
        json: the spec as canonical JSON, for equality and traced graphs.
    """

    format: str
    version: int
    pattern: Pattern
    shape: tuple[int, int]
    dtype: torch.dtype
    params: Params = field(default_factory=Params)
    json: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "params", Params(self.params))
        object.__setattr__(self, "json", json.dumps(self.to_dict(), sort_keys=True))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, WeightSpec) and self.json == other.json)

    def __hash__(self) -> int:
        return hash(self.json)

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as plain JSON values, as config.json holds it."""
        return {
            "format": self.format,
            "version": self.version,
            "pattern": str(self.pattern),
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "params": dict(self.params),
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> WeightSpec:
        """Read what `to_dict` wrote; unknown keys are ignored.

        Raises:
            FormatError: a key is missing or of another type, or the dtype is unknown.
            PatternError: the pattern is unknown.
        """
        try:
            n, k = values["shape"]
            spec = WeightSpec(
                _typed(values["format"], str),
                _typed(values["version"], int),
                parse_pattern(_typed(values["pattern"], str)),
                (_typed(n, int), _typed(k, int)),
                _DTYPES[values["dtype"]],
                Params({_typed(name, str): _param(value) for name, value in values["params"].items()}),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(
                f"the declaration {str(dict(values))[:300]} is unreadable: {repr(error)[:300]}"
            ) from error
        return spec

    @staticmethod
    def from_json(text: str) -> WeightSpec:
        """Read what the attribute `json` holds."""
        return WeightSpec.from_dict(json.loads(text))


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in WEIGHT_DTYPES}


def _typed(value: Any, *types: type) -> Any:
    if type(value) not in types:
        raise TypeError(f"{value!r} is {type(value).__name__}, expected {' or '.join(t.__name__ for t in types)}")
    return value


def _param(value: Any) -> Scalar:
    """Return ``value`` if it is a string or a number between -2^63 and 2^63.

    Raises:
        TypeError, ValueError: it is of another type, or out of range.
    """
    number = _typed(value, int, float, str)
    if not isinstance(number, str) and not abs(number) < 1 << 63:
        raise ValueError(f"{str(number)[:20]} is not a finite number below 2^63")
    return number
