"""Recipes: what `compress` does to a model, as plain settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from semisparse.errors import PatternError, RecipeError
from semisparse.patterns import NM, parse_pattern
from semisparse.quant.group import KINDS as GROUP_KINDS

KNOWN_VALUES: dict[str, tuple[str, ...]] = {
    "prune": ("magnitude", "wanda", "sparsegpt", "sparsegpt-published", "none"),
    "quant": ("none", "int8", "fp8", *GROUP_KINDS, "keep"),
    "search": ("profile", "evolution", "rheosparse", "joint", "none"),
    "tune": ("bqpo", "bqpo+e2e", "bqpo+kl", "bqpo+distil", "none"),
    "refine": ("cg", "swaps", "none"),
    "order": ("windows", "columns"),
    "target": ("residual", "local"),
    "saliency": ("loss", "eq4"),
    "scales": ("fit", "range"),
    "search_units": ("auto", "inputs", "linears"),
    "tune_units": ("layers", "submodules"),
}
"""The values of the keys that have a fixed choice."""

Options = Mapping[str, Sequence[str | int]]
"""The keys that a format adds to recipes, each with its values; () stands for any integer of 0 or more."""

INTEGERS = ("search_tokens", "search_effort", "search_banks", "tune_epochs")
"""The keys that are integers of 1 or more."""

POSITIVE = ("damping", "tune_rate")
"""The keys that are numbers above 0."""

TARGETS = {
    "bits": "stored bits per weight",
    "size": "bytes relative to dense",
    "decode": "speed-up of one token",
    "batch32": "speed-up of 32 tokens",
    "prompt": "speed-up of a prompt",
}
"""The targets of ``search=joint``; speed-ups are those of the linear layers over dense ones."""

STORED = ("bits", "size")
"""The targets that are not speed-ups."""

NEEDS_DENSE = ("search", "tune")
"""The stages that compare with the dense model. With ``prune=none`` there is no dense model: they must be ``none``."""


@dataclass(frozen=True)
class Recipe:
    """Settings of a compression. `refine`, `order`, `target`, `saliency` and `scales` are for ``prune=sparsegpt``.

    Args:
        pattern: written form of the pattern of every linear layer, such as ``32:64``.
        prune: how the weights to keep are chosen. ``sparsegpt``: SparseGPT with repeated masks
            (docs/decisions/sparsegpt-order.md); ``sparsegpt-published``: as its authors published it. ``none`` keeps
            all and checks that they obey the pattern.
        quant: how kept weights are quantised. ``int8``, ``fp8``: one scale per row, when packed; activations are
            quantised, too. ``w8``, ``w4``, ``w3``, ``w2``: to that many bits, during pruning. A pattern of groups, such
            as ``g16@50%``, has a scale and a zero point per group; other patterns have a scale per row and 64 columns.
            ``w4a8``: as ``w4``, with 8-bit activations at inference. ``keep``: each layer keeps the quantised values
            that another tool gave it; this needs ``prune=none``.
        format: name of the format that stores the result, or ``auto``.
        search: how density is distributed over the linear layers: ``profile``, ``evolution``, ``rheosparse`` (the
            paper's) or ``none`` (uniform). The total number of kept weights is that of `pattern`. ``joint`` chooses
            pattern, bits and format of each layer instead, such that `targets` hold.
        tune: how kept weights are trained. ``bqpo``: one decoder layer at a time, to match the dense one's outputs.
            ``bqpo+e2e``: then also the scales and zero points of quantised groups, on the language-model loss.
            ``bqpo+kl``: the same, but on the KL divergence from the dense model's predictions. ``bqpo+distil``: on
            that, also all kept weights.
        ignore: glob patterns of module names; linear layers that match stay dense.
        refine: ``cg`` optimises the kept weights by conjugate gradients once the mask is final. ``swaps`` then
            exchanges kept and pruned weights within the windows of an n:m pattern, as long as that lowers the layer's
            output error, and optimises again.
        order: ``windows`` prunes the windows with the largest loss first; ``columns`` prunes windows from left to
            right. Inside a window of 16 columns or more, both prune the column with the largest loss first.
        target: ``residual`` makes each linear layer also compensate the error of those before it; ``local`` only its
            own.
        saliency: the score of a weight: ``loss``, what pruning it costs, or ``eq4``, GQSA's equation 4 read literally.
        scales: of quantised groups: ``range`` spans each group's weights; ``fit`` minimises the squared rounding error,
            weighted by column with what an error there costs.
        damping: added to each entry of SparseGPT's Hessian diagonal, as a fraction of that entry, or for
            ``sparsegpt-published`` of the diagonal's mean.
        search_tokens: calibration tokens that a candidate is scored on.
        search_effort: budget of ``evolution`` and ``rheosparse``, in candidates scored on all `search_tokens`; the
            paper's is 384. More candidates on fewer tokens gave better results than fewer candidates on more tokens
            (docs/experiments/search.md).
        search_banks: how often each of the three stages of ``evolution`` prunes the linear layers anew, at densities
            near those of its best candidate. Each time costs as much as pruning.
        search_units: what gets one choice in a ``joint`` search: the linear layers that read one input (``inputs``),
            which one matmul can then compute, or each linear layer (``linears``). ``auto``: ``linears`` if all targets
            are bits or bytes, else ``inputs``.
        tune_units: what ``bqpo`` trains at once: a decoder layer (``layers``), to match its output, or first its
            attention and then its MLP (``submodules``), each to match the residual stream after it.
        tune_epochs: maximum number of passes of tuning over the calibration tokens.
        tune_rate: learning rate of tuning, as a fraction of a linear layer's root mean square weight.
        options: keys that the format adds, such as ``delta_bits``, as (key, value); each is set as a key of its own.
        targets: what ``search=joint`` has to reach, as (key of `TARGETS`, value).
        gpu: the machine that speed-ups are predicted for, as in `plan`.

    Raises:
        RecipeError: a value is unknown, or out of range.
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
    saliency: str = "loss"
    scales: str = "fit"
    damping: float = 0.01
    search_tokens: int = 2048
    search_effort: int = 192
    search_banks: int = 1
    search_units: str = "auto"
    tune_units: str = "layers"
    tune_epochs: int = 10
    tune_rate: float = 0.03
    options: tuple[tuple[str, str | int], ...] = ()
    targets: tuple[tuple[str, float], ...] = ()
    gpu: str = "auto"

    def __post_init__(self) -> None:
        self._check_values()
        self._check_combinations()

    def _check_values(self) -> None:
        for key, known in KNOWN_VALUES.items():
            if getattr(self, key) not in known:
                raise RecipeError(f"recipe key {key!r} is {getattr(self, key)!r}; it is one of: {', '.join(known)}")
        for key in POSITIVE:
            if not 0 < getattr(self, key) < float("inf"):
                raise RecipeError(f"recipe key {key!r} is {getattr(self, key)}; it is a number above 0")
        for key in INTEGERS:
            if getattr(self, key) < 1:
                raise RecipeError(f"recipe key {key!r} is {getattr(self, key)}; it is an integer of 1 or more")
        try:
            parse_pattern(self.pattern)
        except PatternError as error:
            raise RecipeError(f"recipe key 'pattern': {error}") from error

    def _check_combinations(self) -> None:
        for key in NEEDS_DENSE:
            if self.prune == "none" and getattr(self, key) != "none":
                raise RecipeError(
                    f"{key}={getattr(self, key)} needs the dense model, but with prune=none the model is already "
                    f"pruned; set {key}=none, or another prune"
                )
        if self.quant == "keep" and self.prune != "none":
            raise RecipeError(
                f"quant=keep stores weights as another tool rounded them, prune={self.prune} changes them; "
                "set prune=none"
            )
        if (self.search == "joint") != bool(self.targets):
            targets = ", ".join(f"{key} ({what})" for key, what in TARGETS.items())
            raise RecipeError(
                f"search={self.search} takes {'at least one target' if self.search == 'joint' else 'no target'}; "
                f"a target goes with --recipe auto, and is KEY=VALUE with one of: {targets}"
            )
        if self.gpu != "auto" and not self.targets:
            raise RecipeError(f"gpu={self.gpu} names the GPU for which targets are predicted; give a target, too")
        if self.tune in ("bqpo+e2e", "bqpo+kl") and not self.code_bits and self.search != "joint":
            raise RecipeError(
                f"tune={self.tune} trains the scales of quantised groups, quant={self.quant} has none; set quant=w4"
            )
        swappable = self.prune == "sparsegpt" and isinstance(parse_pattern(self.pattern), NM) and not self.targets
        if self.refine == "swaps" and not swappable:
            raise RecipeError(
                f"refine=swaps exchanges weights within the windows of an n:m pattern after prune=sparsegpt; got "
                f"prune={self.prune}, {'targets' if self.targets else f'pattern {self.pattern}'}: set refine=cg"
            )

    @property
    def code_bits(self) -> int:
        """Bits per code if groups are quantised, else 0."""
        return GROUP_KINDS.get(self.quant, 0)

    @property
    def tunes_end_to_end(self) -> bool:
        """Whether the whole model is trained once all decoder layers are compressed."""
        return self.tune in ("bqpo+e2e", "bqpo+kl", "bqpo+distil")

    @property
    def needs_predictions(self) -> bool:
        """Whether the dense model's predictions are kept while it is compressed."""
        return self.tune in ("bqpo+kl", "bqpo+distil")

    @property
    def searches_bank(self) -> bool:
        """Whether a search scores candidates made of weights that were all compressed before."""
        return self.search not in ("none", "profile")

    @property
    def chooses_each_linear(self) -> bool:
        """Whether a joint search chooses for each linear layer by itself."""
        if self.search_units != "auto":
            return self.search_units == "linears"
        return bool(self.targets) and all(key in STORED for key, _ in self.targets)

    @classmethod
    def read(cls, mapping: Mapping[str, Any], options: Options | None = None) -> Recipe:
        """Build a recipe from keys and values; keys left out keep their defaults.

        Args:
            mapping: keys and values, from a YAML file or `to_dict`.
            options: the keys that the format adds.
        Raises:
            RecipeError: a key or a value is unknown.
        """
        return cls().with_changes(mapping, options)

    def with_changes(self, changes: Mapping[str, Any], options: Options | None = None) -> Recipe:
        """Return the recipe with some keys changed; ``prune=none`` also removes the stages that need the dense model.

        Args:
            changes: keys and values, from a YAML file or settings.
            options: the keys that the format adds.
        Raises:
            RecipeError: a key or a value is unknown.
        """
        options = options or {}
        changed: dict[str, Any] = {}
        packing = dict(self.options)
        for key, value in changes.items():
            if key == "targets":
                changed[key] = read_targets(value)
            elif key == "options" and isinstance(value, Mapping):
                packing |= {name: _option(name, each, options) for name, each in value.items()}
            elif key in _known_keys():
                changed[key] = _typed(key, value)
            else:
                packing[key] = _option(key, value, options)
        removed = dict.fromkeys(NEEDS_DENSE, "none") if changed.get("prune") == "none" else {}
        return replace(self, **{**removed, **changed}, options=tuple(sorted(packing.items())))

    @property
    def needs_calibration(self) -> bool:
        """Whether one of the stages measures errors on calibration text."""
        without = self.prune == "none" or (self.prune == "magnitude" and self.search == "none")
        return not (without and self.tune == "none")

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as JSON values, from which `read` builds an equal recipe."""
        values = {
            **asdict(self),
            "ignore": list(self.ignore),
            "options": dict(self.options),
            "targets": dict(self.targets),
        }
        unused = {key for key in ("options", "targets") if not values[key]} | ({"gpu"} if not self.targets else set())
        return {key: value for key, value in values.items() if key not in unused}


def read_targets(targets: Any) -> tuple[tuple[str, float], ...]:
    """Return the value of the key ``targets``, from a mapping of keys to values such as 3.0 or ``2.5x``.

    Raises:
        RecipeError: a key is unknown, or a value is out of range.
    """
    if not isinstance(targets, Mapping):
        raise RecipeError(f"recipe key 'targets' is {targets!r}; it is a mapping such as {{bits: 3.0}}")
    result = {}
    for key, value in targets.items():
        if key not in TARGETS:
            raise RecipeError(f"unknown target {key!r}; the known ones are: {', '.join(TARGETS)}")
        text = str(value).strip()
        try:
            number = float(text if key in STORED else text.removesuffix("x"))
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf or (key == "size" and number > 1):
            unit = "a share above 0 and up to 1" if key == "size" else "a number above 0"
            example = {"bits": "3.0", "size": "0.2"}.get(key, "1.5x")
            raise RecipeError(f"target {key} is {text!r}; it is {unit}, such as {key}={example}")
        result[key] = number
    return tuple(sorted(result.items()))


def _known_keys() -> list[str]:
    """Return the keys that every recipe has."""
    return [field.name for field in fields(Recipe) if field.name not in ("options", "targets")]


def _option(key: str, value: Any, options: Options) -> str | int:
    """Check and convert the value of a key that a format adds."""
    if key not in options:
        raise RecipeError(f"unknown recipe key {key!r}; the known keys are: {', '.join([*_known_keys(), *options])}")
    allowed = options[key]
    for choice in allowed:
        if value == choice or value == str(choice):
            return choice
    if not allowed and str(value).isdecimal():
        return int(value)
    kind = f"one of: {', '.join(map(str, allowed))}" if allowed else "an integer of 0 or more"
    raise RecipeError(f"recipe key {key!r} is {value!r}; it is {kind}")


def _typed(key: str, value: Any) -> Any:
    """Convert the value of a key that every recipe has to the key's type."""
    if key == "ignore":
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise RecipeError(f"recipe key 'ignore' is {value!r}; it is a list of module name patterns")
        return tuple(names)
    if key in POSITIVE:
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise RecipeError(f"recipe key {key!r} is {str(value)[:99]!r}; it is a number such as 0.01") from error
    if key in INTEGERS:
        try:
            return int(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise RecipeError(f"recipe key {key!r} is {str(value)[:99]!r}; it is an integer such as 384") from error
    if not isinstance(value, str):
        raise RecipeError(f"recipe key {key!r} is {value!r}; it is text such as {getattr(Recipe, key)!r}")
    return value
