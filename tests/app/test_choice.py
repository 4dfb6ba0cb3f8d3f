"""A card says who chose the settings, or that nobody said so."""

import pytest

from dpkfc.app.choice import describe_choice
from dpkfc.app.methods import METHODS
from dpkfc.app.recipes.catalogue import RECIPES, run_config
from dpkfc.app.settings import RECIPE_DEFAULTS
from dpkfc.app.train import run
from tests.app.finished import read_card


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_settings_of_a_recipe_are_its_own(recipe):
    for method in METHODS:
        config = run_config(
            {
                "recipe": recipe,
                "method": method,
                "public_data": "x.safetensors",
                "epsilon": 1.0,
                "seed": 3,
            }
        )
        assert describe_choice(config) == config.run.chosen_by, method


@pytest.mark.parametrize(
    "chosen, named",
    [
        ({"lr": 0.123}, "lr"),
        (
            {"damping": 0.7, "lr": 0.5, "max_grad_norm": 3.0, "momentum": 0.1},
            "lr, max_grad_norm, damping, momentum",
        ),
        ({"optimizer": "adam"}, "optimizer"),
        ({"method": "disk", "filter_kappa": 0.3}, "filter_kappa"),
        ({"expected_batch_size": 100}, "expected_batch_size"),
        (
            {f"{n}": 1 for n in ("every", "leaves", "refine")}
            | {
                "epochs": 1,
                "damping": 1,
                "exponent": 0.4,
                "probe_size": 8,
                "power_exponent": 0.5,
                "max_rank": 4,
                "weight_decay": 0.1,
            },
            " and 2 more",
        ),
    ],
)
def test_settings_that_are_not_the_recipes_are_named(chosen, named):
    text = describe_choice(run_config({"recipe": "digits", **chosen}))
    assert (
        f"{named}: given, not stated how they were found; not covered by ε" in text
        and text.endswith(RECIPE_DEFAULTS)
    )


def test_what_was_stated_stands_on_the_card(tmp_path):
    chosen = {
        "recipe": "digits",
        "method": "dp-sgd",
        "steps": 2,
        "expected_batch_size": 48,
        "accountant": "rdp",
    }
    found = []
    for name, more in (("silent", {}), ("stated", {"chosen_by": "20 trials of mine"})):
        folder = run(run_config({**chosen, "out": str(tmp_path / name), **more})).folder
        found.append(read_card(folder)["hyper_parameters"]["chosen_by"])
    assert (
        found[0].startswith("expected_batch_size, steps: given, not stated")
        and found[1] == "20 trials of mine"
    )
