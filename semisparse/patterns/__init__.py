"""Sparsity patterns: parse them, choose a mask from saliency scores, check a weight."""

from __future__ import annotations

from semisparse.errors import PatternError
from semisparse.patterns.base import Pattern
from semisparse.patterns.group import Group
from semisparse.patterns.nm import NM
from semisparse.patterns.unstructured import Unstructured
from semisparse.patterns.vector_nm import VectorNM

FAMILIES: tuple[type[Pattern], ...] = (NM, VectorNM, Group, Unstructured)
"""The kinds of patterns, in the order in which `parse_pattern` tries them."""

MAX_CHARACTERS = 64
"""Maximum length of a written pattern."""

NO_ZEROS = "0%"
"""The pattern that every weight obeys."""

__all__ = ["FAMILIES", "NM", "NO_ZEROS", "Group", "Pattern", "Unstructured", "VectorNM", "parse_pattern"]


def parse_pattern(text: str | Pattern) -> Pattern:
    """Parse the written form of a pattern, such as ``6:8``, ``8:32v32``, ``g16@50%`` or ``70%/row``.

    Raises:
        PatternError: no family has this form, or its numbers are out of range.
    """
    if isinstance(text, Pattern):
        return text
    if isinstance(text, str) and len(text) > MAX_CHARACTERS:
        raise PatternError(f"unknown pattern {text[:MAX_CHARACTERS]!r}...: it has {len(text)} characters")
    for family in FAMILIES:
        pattern = family.parse(text.strip()) if isinstance(text, str) else None
        if pattern is not None:
            return pattern
    known = "; ".join(family.forms for family in FAMILIES)
    raise PatternError(f"unknown pattern {text!r}; a pattern is one of: {known}")
