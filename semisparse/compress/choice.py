"""A choice: how one linear layer is compressed, where layers of one model are compressed differently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from semisparse.compress.recipe import Recipe
from semisparse.patterns import NO_ZEROS


@dataclass(frozen=True)
class Choice:
    """One way to compress a linear layer.

    Args:
        pattern: in written form.
        quant: as in `Recipe`.
        format: name of the format that stores the result.
    """

    pattern: str
    quant: str
    format: str

    @property
    def label(self) -> str:
        """The name in tables: format, bits and pattern."""
        words = [self.format, self.quant, self.pattern]
        return " ".join(word for word in words if word not in ("none", NO_ZEROS))

    @property
    def is_dense(self) -> bool:
        """Whether the weight stays unchanged."""
        return self.pattern == NO_ZEROS and self.quant == "none"

    def recipe(self, recipe: Recipe) -> Recipe:
        """Return ``recipe`` with this pattern and number of bits for all layers, without search and tuning."""
        return replace(
            recipe, pattern=self.pattern, quant=self.quant, search="none", targets=(), gpu="auto", tune="none"
        )


@dataclass(frozen=True)
class Option:
    """A choice for some linear layers, and what it costs there.

    Args:
        choice: the same for all of these layers.
        costs: by name: ``bits``, which these layers take in all, and seconds by workload, such as ``decode``.
    """

    choice: Choice
    costs: Mapping[str, float]
