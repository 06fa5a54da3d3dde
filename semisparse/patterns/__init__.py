"""Sparsity patterns: parsing, choosing a mask from scores, checking a weight."""

from __future__ import annotations

from semisparse.errors import PatternError
from semisparse.patterns.base import Pattern
from semisparse.patterns.group import Group
from semisparse.patterns.nm import NM
from semisparse.patterns.unstructured import Unstructured
from semisparse.patterns.vector_nm import VectorNM

FAMILIES: tuple[type[Pattern], ...] = (NM, VectorNM, Group, Unstructured)

__all__ = ["FAMILIES", "NM", "Group", "Pattern", "Unstructured", "VectorNM", "parse_pattern"]


def parse_pattern(text: str | Pattern) -> Pattern:
    """Read a pattern's written form, such as ``6:8``, ``8:32v32``, ``g16@50%`` or ``70%/row``.

    Raises:
        PatternError: no family is written so, or its numbers are impossible.
    """
    if isinstance(text, Pattern):
        return text
    for family in FAMILIES:
        found = family.parse(text.strip())
        if found is not None:
            return found
    known = "; ".join(family.forms for family in FAMILIES)
    raise PatternError(f"unknown pattern {text!r}; a pattern is one of: {known}")
