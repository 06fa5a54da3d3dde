"""Recipes by name."""

from dataclasses import fields

import pytest

from semisparse.api import read_recipe, recipes
from semisparse.compress import Recipe
from semisparse.errors import RecipeError
from semisparse.formats.base import format_names, get_format


def test_every_built_in_recipe_reads():
    assert "rheosparse" in recipes()
    for name in recipes():
        assert read_recipe(name, targets={"bits": 3.0} if name == "auto" else None).to_dict()["pattern"]


def test_an_unknown_recipe_is_refused():
    with pytest.raises(RecipeError, match="unknown recipe"):
        read_recipe("nonsense")


def test_a_format_that_cannot_store_the_pattern_is_refused():
    with pytest.raises(RecipeError, match="format slide24 cannot store pattern 70%"):
        read_recipe("slidesparse", ["pattern=70%"])


def test_weights_pruned_singly_are_rounded_in_bitmask_and_groups_in_gqs():
    assert read_recipe("rheosparse", ["quant=w4"]).format == "bitmask"
    assert read_recipe("dense-w4").format == "gqs"
    for settings, advice in (
        (["pattern=g16@50%", "quant=w4", "format=bitmask"], "format=gqs"),
        (["pattern=2:4", "quant=w4", "format=auto"], "format=bitmask"),
        (["pattern=2:4", "quant=w3", "format=bitmask"], "no format does"),
    ):
        with pytest.raises(RecipeError, match=advice):
            read_recipe("rheosparse", settings)


def test_no_option_of_a_format_is_a_recipe_key():
    """--set KEY=VALUE would set the recipe's: ec_csr's `on_gpu` was once `gpu`."""
    keys = {field.name for field in fields(Recipe)}
    assert all(keys.isdisjoint(get_format(name).options) for name in format_names())
