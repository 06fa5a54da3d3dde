"""Recipes are read as they were written; unknown keys and values are refused."""

import json
from pathlib import Path

import pytest

from semisparse.compress import Recipe, parse_settings, read_yaml
from semisparse.errors import RecipeError


def test_to_dict_is_json_and_reads_back():
    recipe = Recipe(pattern="g16@50%", prune="wanda", ignore=("*.o_proj", "model.layers.0.*"), damping=0.03)
    assert Recipe.read(json.loads(json.dumps(recipe.to_dict()))) == recipe


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("pattern=2:4", "pattern", "2:4"),  # plain YAML 1.1 reads 124
        ("pattern=50%", "pattern", "50%"),
        ("prune=none", "prune", "none"),
        ("format=bitmask", "format", "bitmask"),
        ("damping=1e-3", "damping", 0.001),
        ("ignore=[a.*, b]", "ignore", ("a.*", "b")),
        ("ignore=lm_head", "ignore", ("lm_head",)),
        ("ignore=[]", "ignore", ()),
        ("ignore=*.mlp.experts", "ignore", ("*.mlp.experts",)),
    ],
)
def test_settings(setting: str, key: str, value: object):
    assert getattr(Recipe(pattern="4:8", ignore=("x",)).with_changes(parse_settings([setting])), key) == value


def test_a_model_pruned_elsewhere_has_nothing_to_search_or_to_tune():
    plan = Recipe(search="evolution", tune="bqpo")
    assert plan.with_changes(parse_settings(["prune=none"])) == Recipe(prune="none")
    for setting in ("search=evolution", "tune=bqpo"):
        with pytest.raises(RecipeError, match=f"{setting} needs the dense model"):
            plan.with_changes(parse_settings([setting, "prune=none"]))
    with pytest.raises(RecipeError, match="needs the dense model"):
        Recipe.read({"prune": "none", "search": "evolution"})


def test_settings_keep_the_other_keys():
    recipe = Recipe(pattern="4:8", ignore=("x",), refine="none").with_changes(
        parse_settings(["prune=wanda", "order=columns"])
    )
    assert recipe == Recipe(pattern="4:8", ignore=("x",), refine="none", prune="wanda", order="columns")


def test_yaml_file(tmp_path: Path):
    path = tmp_path / "recipe.yaml"
    path.write_text("pattern: 2:4\ndamping: 0.05\nignore:\n  - '*.mlp.*'\n")
    assert Recipe.read(read_yaml(path)) == Recipe(pattern="2:4", damping=0.05, ignore=("*.mlp.*",))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("patern=2:4", "the known keys are: pattern, prune"),
        ("prune=sparsegtp", "magnitude, wanda, sparsegpt, sparsegpt-published, none"),
        ("target=global", "residual, local"),
        ("pattern=9:8", "counts the kept weights"),
        ("pattern=half", "unknown pattern"),
        ("damping=0", "above 0"),
        ("damping=nan", "above 0"),
        ("damping=much", "a number"),
        ("tune_rate=-1", "'tune_rate' is -1.0; it is a number above 0"),
        ("tune_epochs=0", "1 or more"),
        ("tune_epochs=few", "an integer"),
        ("ignore={a: b}", "a list"),
        ("prune=[wanda]", "text such as"),
        ("pattern", "key=value"),
        ("ignore=[a", "not valid YAML"),
    ],
)
def test_bad_settings(setting: str, message: str):
    with pytest.raises(RecipeError, match=message):
        Recipe().with_changes(parse_settings([setting]))


@pytest.mark.parametrize(
    "content",
    [
        b"- a\n- b\n",
        b"\xff\xfe",
        b"pattern: [",
        b"",
        b"pattern: 2:4\n" + b"#" * 100_000,
        b"ignore: " + b"[" * 5_000,
        b"ignore: &a [x, x]\nformat: *a\n",
    ],
    ids=["list", "not UTF-8", "not YAML", "empty", "too large", "nested too deeply", "alias"],
)
def test_bad_yaml_file(tmp_path: Path, content: bytes):
    (tmp_path / "recipe.yaml").write_bytes(content)
    with pytest.raises(RecipeError, match=r"recipe\.yaml"):
        read_yaml(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("damping", 10**400, "a number"),
        ("tune_epochs", float("inf"), "an integer"),
        ("search_tokens", "9" * 5000, "an integer"),
        ("targets", {"bits": 10**400}, "a number above 0"),
    ],
    ids=["damping", "tune_epochs", "search_tokens", "targets"],
)
def test_numbers_that_python_cannot_convert(key: str, value: object, message: str):
    with pytest.raises(RecipeError, match=message):
        Recipe.read({key: value})


OPTIONS = {"layout": ("rows", "paper"), "bits": (4, 8), "clip": ()}


def test_keys_that_a_format_adds():
    recipe = Recipe().with_changes(parse_settings(["layout=paper", "bits=8", "clip=12"]), OPTIONS)
    assert dict(recipe.options) == {"layout": "paper", "bits": 8, "clip": 12}
    assert Recipe.read(json.loads(json.dumps(recipe.to_dict())), OPTIONS) == recipe
    assert "options" not in Recipe().to_dict()
    for setting, message in (
        ("layout=none", "one of: rows, paper"),
        ("bits=5", "one of: 4, 8"),
        ("clip=-1", "an integer of 0 or more"),
        ("width=3", "known keys are: pattern, .*, layout, bits, clip"),
    ):
        with pytest.raises(RecipeError, match=message):
            Recipe().with_changes(parse_settings([setting]), OPTIONS)
    with pytest.raises(RecipeError, match="unknown recipe key 'layout'"):
        Recipe().with_changes(parse_settings(["layout=paper"]))


def test_missing_yaml_file(tmp_path: Path):
    with pytest.raises(RecipeError, match="cannot read"):
        read_yaml(tmp_path / "absent.yaml")


def test_switches_that_did_not_help_every_model_are_off():
    """docs/decisions/swaps-by-name.md"""
    assert (Recipe().refine, Recipe().tune_units) == ("cg", "layers")
