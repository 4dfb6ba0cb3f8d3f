"""A card says who chose the settings, or that nobody said so."""

import pytest

from dpkfc.app.choice import describe_choice
from dpkfc.app.methods import METHODS
from dpkfc.app.plan_settings import settle
from dpkfc.app.recipes.catalogue import RECIPES, run_config
from dpkfc.app.settings import RECIPE_DEFAULTS
from dpkfc.app.train import run
from dpkfc.privacy.attack_rates import attack_rates
from dpkfc.report.card_files import write_card_files
from dpkfc_verify.run import HOLDS, verify_run
from tests.app.finished import read_card
from tests.command_line import call


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
        assert describe_choice(settle(config, 60_000), 60_000) == config.run.chosen_by, method


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
    text = describe_choice(run_config({"recipe": "digits", **chosen}), 1437)
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


def table_settings(folder):
    """Return settings for a table of a number of which a user states nothing but ε."""
    rows = "".join(f"{stay % 60},{stay % 9}\n" for stay in range(100))
    (folder / "stays.csv").write_text(f"age,days\n{rows}", "utf-8")
    schema = 'target = "days"\ntarget_bounds = [0, 9]\n[columns.age]\nkind = "number"\n'
    (folder / "stays.toml").write_text(schema + "bounds = [0, 60]\n", "utf-8")
    places = {"data": str(folder / "stays.csv"), "schema": str(folder / "stays.toml")}
    return {**places, "epsilon": 3.0, "threads": 0, "out": str(folder / "run")}


def test_a_user_who_states_only_a_budget_has_chosen_nothing(tmp_path):
    """The batch of all records, the loss of a number and its rate follow from file and schema."""
    chosen = table_settings(tmp_path)
    card = read_card(run(run_config(chosen)).folder)
    assert card["hyper_parameters"]["chosen_by"] == RECIPE_DEFAULTS
    chosen |= {"expected_batch_size": 20, "lr": 0.3, "out": str(tmp_path / "other")}
    card = read_card(run(run_config(chosen)).folder)
    assert card["hyper_parameters"]["chosen_by"].startswith("lr, expected_batch_size: given")


def test_the_officer_of_a_table_reads_what_moments_and_steps_mean_together(tmp_path):
    folder = run(run_config(table_settings(tmp_path))).folder
    card = read_card(folder)
    meaning, epsilon = card["meaning"], card["guarantee"]["epsilon"]
    general = attack_rates(None, card["guarantee"]["releases"], epsilon, card["guarantee"]["delta"])
    assert meaning["right_at_even_odds"] < 0.8 < general.right
    assert epsilon < meaning["groups"]["2"]["epsilon"] < 3 * epsilon
    assert call("ledger", "verify", folder).exit_code == 0
    assert verify_run(folder).verdict == HOLDS
    # Earlier cards of such runs have the bounds that hold for any releases.
    card["meaning"] = {
        "right_at_even_odds": general.right,
        "found_at_1_percent_false_alarms": general.found,
        "rates_by": general.by,
        "groups": {},
    }
    write_card_files(folder, card)
    assert call("ledger", "verify", folder).exit_code == 0
    card["meaning"]["right_at_even_odds"] = 0.51
    write_card_files(folder, card)
    assert "another meaning of ε" in call("ledger", "verify", folder).output


def test_data_that_were_moved_during_a_run_cost_no_card(tmp_path):
    (tmp_path / "stays.csv").write_text("age,died\n1,0\n", "utf-8")
    schema = 'target = "died"\nclasses = [0, 1]\n[columns.age]\nkind = "flag"\n'
    (tmp_path / "stays.toml").write_text(schema, "utf-8")
    places = {"data": str(tmp_path / "stays.csv"), "schema": str(tmp_path / "stays.toml")}
    config = run_config({**places, "lr": 0.1})
    (tmp_path / "stays.csv").unlink()
    assert describe_choice(config, 1).startswith("settings: given")
