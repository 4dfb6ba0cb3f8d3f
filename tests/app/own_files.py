"""Small files of a user's own data, in every form that `--data` takes."""

import csv
import json

import numpy as np
from PIL import Image

from dpkfc.app.recipes.catalogue import run_config

HEADER = ["patient_id", "age", "sex", "job", "smoker", "note", "outcome"]
SCHEMA = """\
target = "outcome"
classes = ["no", "yes"]

[columns.patient_id]
kind = "ignore"

[columns.age]
kind = "number"
bounds = [20, 80]

[columns.sex]
kind = "category"
categories = ["female", "male"]

[columns.job]
kind = "category"
buckets = 4

[columns.smoker]
kind = "flag"

[columns.note]
kind = "text"
buckets = 16
"""
QUICK = {"steps": 2, "expected_batch_size": 24, "accountant": "rdp", "probe_size": 16}


def own_config(data, schema, out="", **settings):
    """Settings of a short run on data of one's own."""
    files = {"data": str(data), "schema": str(schema), "out": str(out)}
    return run_config({**QUICK, **files, **settings})


def write_rows(path, rows, header=HEADER):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def patients(count=200):
    """Rows with missing values, an unknown category, and a number outside of its bounds."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        age = int(rng.integers(20, 80))
        rows.append(
            [
                number // 2,
                ["", "n/k", 120, age][min(number, 3)],
                ["female", "male", "other", "NA"][number % 4],
                ["nurse", "cook, part-time", "?"][number % 3],
                ["yes", "no", "maybe"][number % 3],
                f"pain since {number % 7} days",
                "yes" if age > 50 else "no",
            ]
        )
    return rows


def write_patients(folder, count=200):
    """Write a CSV file and its schema."""
    schema = folder / "patients.toml"
    schema.write_text(SCHEMA, "utf-8")
    return write_rows(folder / "patients.csv", patients(count)), schema


def write_images(folder, count=60):
    """Write PNG and JPEG files of two classes, one folder each; cats are bright on the left."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
    for number in range(count):
        pixels = rng.integers(0, 100, (12, 10, 3), dtype=np.uint8)
        name = ("cat", "dog")[number % 2]
        half = slice(0, 5) if name == "cat" else slice(5, 10)
        pixels[:, half] += 150
        suffix = "png" if number % 4 < 2 else "jpg"
        Image.fromarray(pixels).save(folder / name / f"{number}.{suffix}")
    return folder


def write_texts(path, count=120):
    """Write a JSONL file with an empty line."""
    lines = []
    for number in range(count):
        good = number % 2 == 0
        text = f"{'good mild' if good else 'bad severe'} case {number}"
        lines.append(json.dumps({"note": text, "code": 1 if good else 0, "id": number // 2}))
    lines.insert(3, "")
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


TEXT_SCHEMA = (
    'target = "code"\nclasses = [0, 1]\n\n[text]\nkey = "note"\nencoder = "words"\nbuckets = 64\n'
)
