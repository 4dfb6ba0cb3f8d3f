"""Rows of results as a study stores them, of runs that nobody has made."""

import json


def row_of(run, accuracy=0.5, **more):
    return {
        "run": run.describe(),
        "hash": run.hash,
        "accuracy": accuracy,
        "epsilon": 1.0,
        "steps": 3,
        "noise_multiplier": 1.25,
        "measured_on": run.evaluate_on,
        "accountant": "rdp",
        "sampler": "poisson",
        "delta": 1e-5,
        "dataset_size": 1000,
        **more,
    }


def make_test_row(recipe, arm, accuracy, epsilon=1.0):
    """Return what pages read of a row of the accuracy study."""
    return {
        "accuracy": accuracy,
        "measured_on": "test",
        "target_epsilon": epsilon,
        "tag": {"arm": arm},
        "run": {"recipe": recipe, "method": arm},
    }


def write_accuracy(folder, name, rows):
    (folder / "accuracy").mkdir()
    content = {"rows": dict(enumerate(rows))}
    (folder / "accuracy" / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return folder
