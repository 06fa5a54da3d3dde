"""What `compress` does to a model, as plain settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from semisparse.errors import PatternError, RecipeError
from semisparse.patterns import Group, parse_pattern
from semisparse.quant.group import KINDS as GROUP_KINDS

KNOWN_VALUES: dict[str, tuple[str, ...]] = {
    "prune": ("magnitude", "wanda", "sparsegpt", "none"),
    "quant": ("none", "int8", "fp8", *GROUP_KINDS),
    "search": ("evolution", "rheosparse", "none"),
    "tune": ("bqpo", "bqpo+e2e", "none"),
    "refine": ("cg", "none"),
    "order": ("windows", "columns"),
    "target": ("residual", "local"),
}
"""The values of each key that has a fixed choice; a new stage adds its name here."""

Options = Mapping[str, Sequence[str | int]]
"""A format's own keys, each with its values; () for any whole number."""

MAX_YAML_BYTES = 1 << 16
"""Of a recipe file."""

COUNTS = ("search_tokens", "search_effort", "search_banks", "tune_epochs")
"""The keys that are whole numbers."""

NEEDS_DENSE = ("search", "tune")
"""The stages that compare with the dense model, so that they have no place in a recipe that prunes nothing."""

SHARES = ("damping", "tune_rate")
"""The keys that are numbers above 0."""


@dataclass(frozen=True)
class Recipe:
    """Settings of a compression. `refine`, `order`, `target` and `damping` shape `prune` = ``sparsegpt`` only.

    Args:
        pattern: written form of the pattern of every layer, such as ``32:64``.
        prune: how the weights to keep are chosen; ``none`` keeps the weights and checks that they obey the pattern.
        quant: how the kept weights are rounded, the format's ``kind``: ``int8`` and ``fp8`` with a scale a row, and the
            activations with them, when they are packed; ``w8``, ``w4``, ``w3`` and ``w2`` to codes of so many bits
            with a scale and a zero point for each group of a pattern such as ``g16@50%``, while they are pruned;
            ``w4a8`` as ``w4``, and the activations to 8 bits when the model runs.
        format: name of the format that stores the result, or ``auto``.
        search: how density is spread over the layers, the kept weights of all together being those of `pattern`:
            ``evolution``, ``rheosparse`` (the paper's) or ``none``.
        tune: how the kept weights are trained: ``bqpo`` block by block, towards the dense block's outputs; with
            ``bqpo+e2e`` then the scales and zero points of rounded groups, on the language-model loss.
        ignore: glob patterns over module names; what they match stays dense.
        refine: ``cg`` solves the kept weights again, by conjugate gradients, after the last column is pruned.
        order: ``windows`` prunes first the windows that lose most; ``columns`` takes them from left to right.
        target: ``residual`` makes each layer undo the error of the layers before it; ``local`` only its own.
        damping: added to the diagonal of the Hessian, as a share of it.
        search_tokens: calibration tokens that a candidate is scored on.
        search_effort: what a search may spend, in candidates scored on all of these tokens; the paper's is 384. More
            candidates on fewer tokens found more than fewer on more (LOG.md).
        search_banks: how often ``evolution`` prunes the layers anew in each of its three stages, at densities near the
            best that it has found. Each costs as much as pruning.
        tune_epochs: passes of a tuning over the calibration tokens, at most.
        tune_rate: its learning rate, as a share of a layer's root mean square weight.
        options: what the format packs with beside these, such as ``delta_bits``; each its own key when it is set.

    Raises:
        RecipeError: a value is not known.
    """

    pattern: str = "32:64"
    prune: str = "sparsegpt"
    quant: str = "none"
    format: str = "auto"
    search: str = "none"
    tune: str = "none"
    ignore: tuple[str, ...] = ()
    refine: str = "cg"
    order: str = "windows"
    target: str = "residual"
    damping: float = 0.01
    search_tokens: int = 2048
    search_effort: int = 192
    search_banks: int = 1
    tune_epochs: int = 10
    tune_rate: float = 0.03
    options: tuple[tuple[str, str | int], ...] = ()

    def __post_init__(self) -> None:
        for key, known in KNOWN_VALUES.items():
            if getattr(self, key) not in known:
                raise RecipeError(f"recipe key {key!r} is {getattr(self, key)!r}; it is one of: {', '.join(known)}")
        for key in SHARES:
            if not 0 < getattr(self, key) < float("inf"):
                raise RecipeError(f"recipe key {key!r} is {getattr(self, key)}; it is a share above 0, such as 0.01")
        for key in COUNTS:
            if getattr(self, key) < 1:
                raise RecipeError(f"recipe key {key!r} is {getattr(self, key)}; it is a number of 1 or more")
        for key in NEEDS_DENSE:
            if self.prune == "none" and getattr(self, key) != "none":
                raise RecipeError(
                    f"{key}={getattr(self, key)} needs the dense model, and prune=none takes one that was pruned "
                    f"elsewhere; set {key}=none, or another prune"
                )
        if self.tune == "bqpo+e2e" and not self.code_bits:
            raise RecipeError(f"tune=bqpo+e2e trains the scales of rounded groups, quant={self.quant} has none; set w4")
        try:
            pattern = parse_pattern(self.pattern)
        except PatternError as error:
            raise RecipeError(f"recipe key 'pattern': {error}") from error

        if self.code_bits and not isinstance(pattern, Group):
            raise RecipeError(f"quant={self.quant} rounds the groups of a pattern such as g16@50%, not {self.pattern}")

    @property
    def code_bits(self) -> int:
        """Bits of a kept weight's code where groups are rounded; 0 where they are not."""
        return GROUP_KINDS.get(self.quant, 0)

    @classmethod
    def read(cls, mapping: Mapping[str, Any], options: Options | None = None) -> Recipe:
        """Make a recipe of keys and values, as a YAML file or `to_dict` gives them; keys left out keep their defaults.

        Args:
            mapping: the keys and values.
            options: the format's own keys.
        Raises:
            RecipeError: a key or a value is not known.
        """
        return cls().with_changes(mapping, options)

    def with_changes(self, changes: Mapping[str, Any], options: Options | None = None) -> Recipe:
        """Change some keys; ``prune=none`` takes the recipe's stages away that need the dense model.

        Args:
            changes: keys and values, as `parse_settings` or a YAML file gives them.
            options: the format's own keys.
        Raises:
            RecipeError: a key or a value is not known.
        """
        own = {} if options is None else options
        known = [field.name for field in fields(Recipe) if field.name != "options"]
        changed: dict[str, Any] = {}
        packing = dict(self.options)
        for key, value in changes.items():
            if key == "options" and isinstance(value, Mapping):
                packing |= {name: _option(name, each, own) for name, each in value.items()}
            elif key in known:
                changed[key] = _typed(key, value)
            else:
                packing[key] = _option(key, value, own)
        left_out = dict.fromkeys(NEEDS_DENSE, "none") if changed.get("prune") == "none" else {}
        return replace(self, **{**left_out, **changed}, options=tuple(sorted(packing.items())))

    def with_settings(self, settings: Iterable[str], options: Options | None = None) -> Recipe:
        """Change some keys, each written ``key=value``, as `with_changes` does."""
        return self.with_changes(parse_settings(settings), options)

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain JSON values; `read` makes an equal recipe of them."""
        values = {**asdict(self), "ignore": list(self.ignore), "options": dict(self.options)}
        return values if self.options else {key: value for key, value in values.items() if key != "options"}


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Read settings written ``key=value``; the value is text, or a YAML list or mapping in brackets.

    Raises:
        RecipeError: a setting is not so written.
    """
    changes = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise RecipeError(f"setting {setting!r} is not written key=value")
        # Outside of brackets the value is taken as it is written: in YAML *.mlp.experts would be an alias.
        brackets = value.lstrip()[:1] in ("[", "{")
        changes[key.strip()] = _parse_yaml(value, f"setting {setting!r}") if brackets else value.strip()
    return changes


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a recipe's keys and values from a YAML file.

    Raises:
        RecipeError: the file cannot be read, is too large, or is no plain YAML mapping.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_YAML_BYTES + 1)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}") from error
    if len(content) > MAX_YAML_BYTES:
        raise RecipeError(f"the recipe {path} is larger than {MAX_YAML_BYTES} bytes")
    found = _parse_yaml(text, f"recipe {path}")
    if not isinstance(found, dict):
        raise RecipeError(f"recipe {path} holds no key: value lines")
    return found


class _PlainLoader(yaml.BaseLoader):
    """YAML without aliases, every scalar as text: by YAML 1.1's own rules ``2:4`` is the base-60 number 124."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not read; write a pattern that begins with * in quotes")
        return super().compose_node(parent, index)


def _parse_yaml(text: str, what: str) -> Any:
    try:
        return yaml.load(text, _PlainLoader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{what} is not valid YAML: {error}") from error
    except RecursionError as error:
        raise RecipeError(f"{what} is nested too deeply") from error


def _option(key: str, value: Any, options: Options) -> str | int:
    """Read the value of one of a format's own keys."""
    if key not in options:
        known = [field.name for field in fields(Recipe) if field.name != "options"]
        raise RecipeError(f"unknown recipe key {key!r}; the known keys are: {', '.join([*known, *options])}")
    allowed = options[key]
    for choice in allowed:
        if value == choice or value == str(choice):
            return choice
    if not allowed and str(value).isdecimal():
        return int(value)
    kind = f"one of: {', '.join(map(str, allowed))}" if allowed else "a whole number"
    raise RecipeError(f"recipe key {key!r} is {value!r}; it is {kind}")


def _typed(key: str, value: Any) -> Any:
    if key == "ignore":
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise RecipeError(f"recipe key 'ignore' is {value!r}; it is a list of module name patterns")
        return tuple(names)
    if key in SHARES:
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"recipe key {key!r} is {value!r}; it is a number such as 0.01") from error
    if key in COUNTS:
        try:
            return int(value)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"recipe key {key!r} is {value!r}; it is a whole number such as 384") from error
    if not isinstance(value, str):
        raise RecipeError(f"recipe key {key!r} is {value!r}; it is a word such as {getattr(Recipe, key)!r}")
    return value
