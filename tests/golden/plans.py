"""Record the hash of the plan of every recipe and method, so that a change of the settings can be
shown to change none.

    python -m tests.golden.plans            # compare with tests/golden/plans.json
    python -m tests.golden.plans --write    # write that file

The noise multiplier is given, so nothing is calibrated, read or trained.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dpkfc.app.curvature_settings import Facts
from dpkfc.app.methods import METHODS
from dpkfc.app.plan_settings import make_plan
from dpkfc.app.recipes.catalogue import RECIPES, find_recipe, run_config
from dpkfc.app.run_config import RunConfig
from dpkfc.app.toml import ConfigError

PATH = Path(__file__).parent / "plans.json"
DATASET_SIZE = 60_000

# Settings of `digits` that differ from every default which reaches a plan.
KFAC = {
    "method": "dp-kfc",
    "sides": "both",
    "damping": 0.3,
    "damping_mode": "absolute",
    "gamma": 0.01,
    "exponent": 0.25,
    "scale": "trace",
    "every": 7,
    "sharing": "reduce",
    "source": "dead-leaves",
    "output_source": "white",
    "control": "random",
    "leaves": 16,
    "probe_size": 64,
    "labels": "uniform",
    "likelihood": "bernoulli",
    "max_factor_size": 512,
    "max_rank": 0,
    "tail_mass": 0.01,
    "factor_decay": 0.5,
    "later_probe_size": 32,
    "factor_drift": 0.1,
    "oversize": "identity",
    "layer_rules": "linear conv",
    "seed": 3,
}
PRIVACY = {
    "method": "dp-sgd",
    "delta": 1e-6,
    "steps": 12,
    "expected_batch_size": 64,
    "max_grad_norm": 0.5,
    "clipping": "automatic",
    "automatic_gamma": 0.1,
    "noise": "rounded",
    "augmentations": 2,
    "augment": "random-crop",
    "sampler": "truncated_poisson",
    "max_batch_size": 128,
    "accountant": "rdp",
    "test_mode": True,
    "weight_average": 0.9,
    "max_physical_batch_size": -1,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "kfac": KFAC,
    "privacy": PRIVACY,
    "shuffle": {
        "method": "dp-sgd",
        "sampler": "shuffle",
        "uncertified": True,
        "clipping": "per_layer",
    },
    "pink": {"method": "dp-kfc-a", "power_exponent": 1.5, "refine": 3},
    "ngd": {
        "method": "dp-ngd",
        "lambda_safe": 0.01,
        "lambda_base": 0.001,
        "ngd_order": "after",
        "readout": "whitened",
        "max_factor_size": 99,
        "source": "pink",
        "every": 5,
    },
    "adadps": {"method": "pink-adadps", "adadps_floor": 0.01, "probe_size": 10, "every": 5},
    "gep": {
        "method": "gep",
        "gep_rank": 9,
        "gep_embedding_norm": 2.0,
        "gep_residual_norm": 0.5,
        "source": "white",
    },
    "b-gep": {"method": "b-gep", "gep_rank": 9, "source": "white"},
    "sofim": {
        "method": "sofim",
        "sofim_rho": 0.1,
        "sofim_beta": 0.5,
        "sofim_direction": "momentum",
    },
    "adam-bc": {"method": "dp-adambc", "adam_bc_resolution": 3.0},
    "adam-bc floor": {"method": "dp-adambc", "adam_bc_floor": 1e-6},
    "disk": {"method": "disk", "filter_kappa": 0.6, "disk_gamma": 0.4, "filter_momentum": True},
    "doppler": {"method": "doppler", "doppler_cutoff": 0.2, "filter_momentum": True},
    **{
        name: {"method": "doppler", "filter": name, "filter_kappa": 0.6}
        for name in ("disk-look-ahead", "storm", "ema", "doppler-chebyshev")
    },
}


def plan_hash(config: RunConfig) -> str:
    """Return the hash of the plan of a run, or "refused" where its settings do not go together."""
    recipe = find_recipe(config.run.recipe)
    try:
        return make_plan(config, Facts(recipe.input_shape, DATASET_SIZE, recipe.probe)).hash
    except ConfigError:
        return "refused"


def recipe_config(recipe: str, method: str) -> RunConfig:
    """Return the settings of a recipe and a method, with the recipe's own probe in the place of
    public data.
    """
    settings = {
        "recipe": recipe,
        "method": method,
        "noise_multiplier": 1.0,
        "pretrain_epochs": 0,
        "gep_rank": 32,
    }
    if METHODS[method].settings.get("source") == "public":
        settings["source"] = run_config(
            {"recipe": recipe, "method": "dp-kfc"}
        ).preconditioner.source
    return run_config(settings)


def record(recipe: str) -> dict[str, str]:
    """Return the plan hash of each method of a recipe."""
    return {method: plan_hash(recipe_config(recipe, method)) for method in METHODS}


def record_settings(name: str) -> str:
    """Return the plan hash of `digits` with one of `SETTINGS`."""
    return plan_hash(run_config({"recipe": "digits", "noise_multiplier": 1.0, **SETTINGS[name]}))


def main() -> int:
    """Compare every hash with the file, or write the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    recorded = {recipe: record(recipe) for recipe in RECIPES}
    recorded["settings"] = {name: record_settings(name) for name in SETTINGS}
    if options.write:
        PATH.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n", "utf-8")
        return 0
    return 0 if recorded == json.loads(PATH.read_text("utf-8")) else 1


if __name__ == "__main__":
    sys.exit(main())
