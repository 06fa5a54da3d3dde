"""Reading a format's params, where few values may stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from semisparse.errors import FormatError
from semisparse.formats.base import Params

Choice = TypeVar("Choice", int, str)


def choice_of(form: str, params: Params, key: str, choices: Sequence[Choice], default: Choice | None = None) -> Choice:
    """Give the value that ``params`` have for ``key``, one of ``choices``.

    Args:
        form: the format's name, for the message.
        default: what holds where ``params`` have none; None if they must.
    Raises:
        FormatError: it is none of them.
    """
    found = params.get(key, default)
    for choice in choices:
        if found == choice and type(found) is type(choice):
            return choice
    raise FormatError(f"format {form} has no {key} {found!r}; it has {', '.join(map(str, choices))}")
