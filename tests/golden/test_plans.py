"""The plan of every recipe and method has the hash that it had when `plans.json` was written."""

import json

import pytest

from dpkfc.app.recipes.catalogue import RECIPES
from tests.golden.plans import PATH, SETTINGS, record, record_settings

STORED = json.loads(PATH.read_text("utf-8"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_keeps_its_plans(recipe):
    assert record(recipe) == STORED[recipe]


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_keep_their_plan(name):
    assert record_settings(name) == STORED["settings"][name]
