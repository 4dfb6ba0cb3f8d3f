"""Run folders and results files for the tests of pages: made by the code that makes real ones, or
damaged on purpose.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpkfc.app.plots import Figures, LayerSignal, LayerSpectra, SensitivityMap
from dpkfc.app.run_folder import Metrics, Row
from dpkfc.config import Plan, PrivacyConfig
from dpkfc.report.card import CardFacts, build_card

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\"&lt;"
HOSTILE += "<a href='javascript:window.hacked=1'>"
FIGURES = Figures(
    measured="on the probe",
    spectra=[
        LayerSpectra(
            name="0 · Linear",
            values={"A": [3.0, 1.0, 0.1], "G": [2.0, 0.5]},
            damping={"A": 0.2, "G": 0.1},
        )
    ],
    signal_to_noise=[LayerSignal(name="0 · Linear", plain=1.0, preconditioned=2.0)],
    sensitivity_maps=[
        SensitivityMap(
            name="digits",
            method="dp-kfc",
            x="learning rate",
            x_values=[0.1, 0.3],
            y="clipping norm",
            y_values=[1.0, 3.0],
            values=[[0.0, 1.0], [0.5, None]],
            measured_on="validation",
        )
    ],
)


@functools.cache
def plan(sigma: float, *, test_mode: bool = False) -> Plan:
    config = PrivacyConfig(expected_batch_size=8, steps=4, test_mode_seed=3 if test_mode else None)
    return config.with_noise(sigma, 1e-5, 100)


def run_folder(
    path: Path,
    method: str = "dp-kfc",
    *,
    sigma: float = 1.0,
    seed: int = 0,
    accuracy: float = 0.5,
    recipe: str = "digits",
    test_mode: bool = False,
    figures: Figures | None = None,
    words: str = "",
) -> Path:
    """A finished run; `words` stand in every text of it."""
    made = plan(sigma, test_mode=test_mode)
    path.mkdir(parents=True)
    settings = {"recipe": recipe, "method": method, "seed": seed, "data_dir": "/where/the/data/lie"}
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    (path / "config.toml").write_text(
        f"[run]\n{lines}[optimizer]\nlr = 0.1\n{f'note = {json.dumps(words)}' if words else ''}\n"
    )
    facts = CardFacts(
        title=words or "DP-KFC on digits",
        releases=4,
        device="cpu",
        assumed_public={},
        ledger={"file": "ledger.jsonl", "releases": 4, "head": words or "ab"},
        chosen_by=words or "nobody",
        not_private={words or "metrics.parquet: seconds": words or "depends on batches"},
        results={"accuracy on the test set": accuracy, **({words: words} if words else {})},
        settings={"method": method},
    )
    card = build_card(made, facts)
    if words:
        card |= {"caveats": [words], "stamp": words}
    (path / "privacy_card.json").write_text(json.dumps(card))
    metrics = Metrics()
    for step in range(5):
        judged = accuracy * step / 4 if step % 2 == 0 else None
        metrics.add(Row(step=step, epsilon=made.epsilon(step), accuracy=judged, seconds=0.5))
    metrics.write(path / "metrics.parquet")
    if figures:
        figures.write(path / "figures.json")
    return path


def row(
    method: str = "dp-kfc",
    *,
    epsilon: float = 1.0,
    seed: int = 0,
    accuracy: float = 0.9,
    **more: Any,
) -> dict[str, Any]:
    """A row of a study, as `dpkfc.studies` writes it."""
    settings = {"epsilon": epsilon, "lr": 0.1}
    run = {
        "recipe": "mnist-cnn",
        "method": method,
        "settings": settings,
        "seed": seed,
        "evaluate_on": "test",
    }
    figures = {
        "accuracy": accuracy,
        "epsilon": 0.999 * epsilon,
        "target_epsilon": epsilon,
        "delta": 1e-5,
        "steps": 10,
    }
    rest = {
        "noise_multiplier": 1.5,
        "curve": [[0, 0.1], [10, accuracy]],
        "measured_on": "test",
        "caveats": [],
        "seconds": 2.0,
    }
    return {"run": run, **figures, **rest, **more}


def study(path: Path, rows: list[Mapping[str, Any]], version: int = 1) -> Path:
    content = {
        "kind": "dpkfc study",
        "version": version,
        "rows": {str(i): one for i, one in enumerate(rows)},
    }
    path.write_text(json.dumps(content))
    return path


def chart(path: Path, words: str = "NOT PRIVATE: said") -> Path:
    """What `dpkfc reproduce kfc-fig10` writes."""
    content = {
        "kind": "dpkfc figure",
        "version": 1,
        "name": path.stem,
        "title": words,
        "private": words,
        "missing": ["a: no"],
    }
    one = {
        **FIGURES.sensitivity_maps[0].as_dict(),
        "name": words,
        "method": words if "<" in words else "dp-kfc",
        "note": words,
    }
    path.write_text(
        json.dumps(content | {"rows": [], "sensitivity_maps": [one, {**one, "method": "dp-sgd"}]})
    )
    return path


def tuning(path: Path, words: str = "Tuning is NOT in ε.") -> Path:
    arm = {
        "name": "dp-kfc",
        "label": "DP-KFC",
        "control": False,
        "trials": 2,
        "pruned": 1,
        "failed": 0,
        "accuracy": 0.26,
    }
    arm |= {
        "params": {"lr": 0.1},
        "command": f"dpkfc train --recipe digits --lr 0.1{words if '<' in words else ''}",
    }
    path.write_text(
        json.dumps(
            {"version": 1, "recipe": "digits", "statement": words, "complete": True, "arms": [arm]}
        )
    )
    return path
