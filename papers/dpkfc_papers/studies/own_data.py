"""Accuracy and seconds of `dpkfc train --data` on a table and on a folder of images.

    python -m dpkfc_papers.studies.own_data  # minutes; papers/results/own_data.json
    python -m dpkfc_papers.studies.own_data --only table  # the same without the images
    python -m dpkfc_papers.studies.own_data --table  # the table
    python -m dpkfc_papers.studies.own_data --write FOLDER  # the table's file and its schema alone

The table has the columns of the UCI Adult data: six numbers and eight categories, missing values
among them, and a class that a third of the columns decide. All of it is drawn from a public seed.
Without privacy scikit-learn fits a linear model to the same rows. The images are the digits of
scikit-learn as PNG files of 16 pixels. Features train at the defaults. The network takes the best
of four rates on 300 validation images, and the epochs and weight average of the features.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from dpkfc_papers.studies.harness import (
    RESULTS,
    half_interval,
    hardware,
    markdown,
    now,
    read_json,
    write_json,
)

PATH = RESULTS / "own_data.json"
ROWS = 30_000
# ε of the table and of the images.
EPSILONS = {"table": (1.0, 3.0), "images": (3.0,)}
SEEDS = 5

WORK = ("private", "self-employed", "federal", "state", "local", "without-pay")
EDUCATION = (
    "preschool,1-4,5-6,7-8,9,10,11,12,hs-grad,some-college,assoc-voc,assoc-acdm,bachelors,masters,"
    "prof-school,doctorate"
).split(",")
MARRIED = ("married", "divorced", "never-married", "separated", "widowed", "absent", "af-spouse")
JOBS = (
    "tech-support,craft-repair,other-service,sales,exec-managerial,prof-specialty,cleaners,"
    "machine-op,adm-clerical,farming,transport,house-serv,protective,armed-forces"
).split(",")
RELATION = ("wife", "own-child", "husband", "not-in-family", "other-relative", "unmarried")
RACE = ("white", "black", "asian", "native", "other")
HEADER = (
    "age,workclass,fnlwgt,education,education_num,marital_status,occupation,relationship,race,sex,"
    "capital_gain,capital_loss,hours_per_week,native_country,income"
).split(",")
SCHEMA = """\
target = "income"
classes = ["<=50K", ">50K"]

[columns.age]
kind = "number"
bounds = [17, 90]

[columns.workclass]
kind = "category"
categories = {work}

[columns.fnlwgt]
kind = "ignore"

[columns.education]
kind = "category"
categories = {education}

[columns.education_num]
kind = "number"
bounds = [1, 16]

[columns.marital_status]
kind = "category"
categories = {married}

[columns.occupation]
kind = "category"
categories = {jobs}

[columns.relationship]
kind = "category"
categories = {relation}

[columns.race]
kind = "category"
categories = {race}

[columns.sex]
kind = "category"
categories = ["female", "male"]

[columns.capital_gain]
kind = "number"
bounds = [0, 20000]

[columns.capital_loss]
kind = "number"
bounds = [0, 3000]

[columns.hours_per_week]
kind = "number"
bounds = [0, 80]

[columns.native_country]
kind = "category"
buckets = 16
"""


def write_table(path: Path, rows: int, seed: int = 0) -> None:
    """Write a table of so many rows, drawn from a public seed."""
    rng = np.random.default_rng(seed)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        for _ in range(rows):
            writer.writerow(_row(rng))


def _row(rng: np.random.Generator) -> list[object]:
    age = int(np.clip(rng.gamma(8.0, 4.8), 17, 90))
    education = int(np.clip(rng.normal(9.5, 2.6), 0, 15))
    male = rng.random() < 0.67
    is_married = rng.random() < (0.1 if age < 25 else 0.58)
    married = "married" if is_married else MARRIED[1 + rng.integers(6)]
    relation = RELATION[rng.integers(1, 6)]
    if is_married:
        relation = "husband" if male else "wife"
    job = JOBS[min(13, int(abs(rng.normal(8 - education / 3, 4))))]
    hours = int(np.clip(rng.normal(40, 11), 1, 99))
    gain = int(rng.lognormal(8.8, 0.9)) if rng.random() < 0.08 else 0
    loss = int(rng.normal(1900, 350)) if rng.random() < 0.05 else 0
    score = -5.9 + 0.34 * education + 1.9 * is_married + 0.035 * (hours - 40)
    score += 1.1 * (job in ("exec-managerial", "prof-specialty", "tech-support"))
    score += 0.3 * male + 0.9 * (gain > 5000) * 3 + 0.6 * (loss > 1800)
    score -= 0.0021 * (age - 50) ** 2 - 0.7 * (30 < age < 60) * (education > 9)
    is_rich = rng.random() < 1 / (1 + np.exp(-1.6 * score))
    work = WORK[min(5, int(rng.exponential(0.8)))]
    missing = rng.random() < 0.06
    return [
        age,
        "?" if missing else work,
        int(rng.lognormal(12, 0.5)),
        EDUCATION[education],
        education + 1,
        married,
        "?" if missing else job,
        relation,
        RACE[min(4, int(rng.exponential(0.5)))],
        "male" if male else "female",
        gain,
        loss,
        hours,
        "?" if rng.random() < 0.02 else f"country-{int(rng.exponential(1.5))}",
        ">50K" if is_rich else "<=50K",
    ]


def write_schema(path: Path) -> None:
    """Write the public schema of the table."""
    lists = {
        "work": WORK,
        "education": EDUCATION,
        "married": MARRIED,
        "jobs": JOBS,
        "relation": RELATION,
        "race": RACE,
    }
    path.write_text(SCHEMA.format(**{n: json.dumps(list(v)) for n, v in lists.items()}), "utf-8")


def accuracy_without_privacy(table: Path, schema: Path) -> float:
    """Return the test accuracy of scikit-learn's logistic regression on the same split."""
    from sklearn.linear_model import LogisticRegression

    from dpkfc.app.recipes.catalogue import recipe_of, run_config

    config = run_config({"data": str(table), "schema": str(schema)})
    data = recipe_of(config).data(config)
    model = LogisticRegression(max_iter=5000).fit(*(part.numpy() for part in data.train))
    return float(model.score(*(part.numpy() for part in data.test)))


def write_digits(folder: Path) -> None:
    """Write the digits of scikit-learn as PNG files, one folder a class."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        place = folder / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15.9).astype(np.uint8)).save(place / f"{number}.png")


def train(out: Path, epsilon: float, *options: str) -> dict[str, float]:
    """Run `dpkfc train` once, and return accuracy, seconds and seconds of processor time."""
    begin, before = time.perf_counter(), os.times()
    command = [sys.executable, "-m", "dpkfc", "train", "--epsilon", str(epsilon), "--quiet"]
    command += ["--out", str(out), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - begin, os.times()
    busy = after.children_user + after.children_system
    busy -= before.children_user + before.children_system
    card = json.loads((out / "privacy_card.json").read_text("utf-8"))
    accuracy = next(value for name, value in card["results"].items() if name.startswith("accuracy"))
    return {
        "accuracy": round(accuracy, 4),
        "seconds": round(seconds, 1),
        "busy": round(busy, 1),
    }


def repeat(folder: Path, data: str, model: str, epsilon: float, *options: str) -> dict[str, object]:
    """Return the runs of five seeds."""
    runs = []
    for seed in range(SEEDS):
        out = folder / f"{data}-{model}-{epsilon}-{seed}".replace(" ", "-")
        runs.append(train(out, epsilon, *options, "--seed", str(seed)))
        print(f"{data}, {model}, ε = {epsilon}, seed {seed}: {runs[-1]}", flush=True)
    return {"data": data, "model": model, "epsilon": epsilon, "runs": runs}


def measure_table(folder: Path) -> list[dict[str, object]]:
    """Return the rows of the table."""
    table, schema = folder / "adult-like.csv", folder / "adult-like.toml"
    write_table(table, ROWS)
    write_schema(schema)
    options = ("--data", str(table), "--schema", str(schema))
    found = [
        repeat(folder, "adult-like", "linear", epsilon, *options) for epsilon in EPSILONS["table"]
    ]
    plain = {"accuracy": round(accuracy_without_privacy(table, schema), 4)}
    return [*found, {"data": "adult-like", "model": "linear, without privacy", "runs": [plain]}]


def measure_images(folder: Path) -> list[dict[str, object]]:
    """Return the rows of the images: features, and the network at its best rate."""
    write_digits(folder / "digits")
    rows = []
    (epsilon,) = EPSILONS["images"]
    for features in ("synthetic", "network"):
        schema = folder / f"{features}.toml"
        form = f'[images]\nsize = 16\nchannels = 1\nfeatures = "{features}"\n'
        schema.write_text(form, "utf-8")
        options = ["--data", str(folder / "digits"), "--schema", str(schema)]
        if features == "synthetic":
            rows.append(repeat(folder, "digits", "features without data", epsilon, *options))
            continue
        options += ["--method", "dp-kfc-natural", "--optimizer", "adam"]
        tried = {}
        for rate in ("1e-3", "3e-3", "1e-2", "3e-2"):
            search = ["--lr", rate, "--eval-on", "validation", "--validation-size", "300"]
            tried[rate] = train(folder / f"search-{rate}", epsilon, *options, *search)["accuracy"]
        best = max(tried, key=lambda rate: tried[rate])
        options += ["--lr", best]
        row = repeat(folder, "digits", "network, DP-KFC natural", epsilon, *options)
        rows.append({**row, "rate": best, "validation": tried})
    return rows


def table(results: dict[str, Any]) -> str:
    """Return the Markdown table."""
    lines = []
    for row in results["rows"]:
        values = [100 * run["accuracy"] for run in row["runs"]]
        text = f"{statistics.mean(values):.1f}"
        seconds = "–"
        if len(values) > 1:
            text += f" ± {half_interval(values):.1f}"
            seconds = f"{statistics.median(run['busy'] for run in row['runs']):.0f}"
        epsilon = f"{row['epsilon']:g}" if "epsilon" in row else "–"
        lines.append([row["data"], row["model"], epsilon, text, seconds])
    return markdown(["data", "model", "ε", "test %", "processor seconds"], lines)


def main() -> None:
    """Measure what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="print what has been run and stop")
    parser.add_argument("--write", type=Path, help="write the table and its schema here and stop")
    parser.add_argument("--only", choices=("images", "table"), help="measure this part alone")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(read_json(PATH)))
        return
    if arguments.write:
        arguments.write.mkdir(parents=True, exist_ok=True)
        write_table(arguments.write / "adult-like.csv", ROWS)
        write_schema(arguments.write / "adult-like.toml")
        return
    parts = {"images": measure_images, "table": measure_table}
    rows = []
    for part, measure in parts.items():
        if arguments.only in (None, part):
            with tempfile.TemporaryDirectory() as scratch:
                rows += measure(Path(scratch))
    measured = {row["data"] for row in rows}
    kept = [row for row in read_json(PATH).get("rows", []) if row["data"] not in measured]
    write_json(PATH, {"hardware": hardware(1), "date": now(), "rows": kept + rows})
    print(table(read_json(PATH)))


if __name__ == "__main__":
    main()
