"""Run folders and tuning reports for the tests of pages, made by the code that makes real ones."""

import functools
import json

from dpkfc.app.html.contents import RunSummary
from dpkfc.app.metrics import Metrics, Row
from dpkfc.app.tuning.tuned import ArmResult, Tuned
from dpkfc.config import PrivacyConfig
from dpkfc.report.card import CardFacts, build_card

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\"&lt;"
HOSTILE += "<a href='javascript:window.hacked=1'>"


@functools.cache
def plan(sigma, *, test_mode=False):
    config = PrivacyConfig(expected_batch_size=8, steps=4, test_mode_seed=3 if test_mode else None)
    return config.with_noise(sigma, 1e-5, 100)


def run_folder(
    path,
    method="dp-kfc",
    *,
    sigma=1.0,
    seed=0,
    accuracy=0.5,
    recipe="digits",
    test_mode=False,
    words="",
    **settings,
):
    """A finished run; `words` stand in every text of it."""
    made = plan(sigma, test_mode=test_mode)
    path.mkdir(parents=True)
    settings |= {"recipe": recipe, "method": method, "seed": seed}
    settings |= {"data_dir": "/where/the/data/lie"}
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    (path / "config.toml").write_text(
        f"[run]\n{lines}[optimizer]\nlr = 0.25\n{f'note = {json.dumps(words)}' if words else ''}\n"
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
    return path


def change_card(path, **parts):
    """Put values into the card of a run folder, as an editor does."""
    file = path / "privacy_card.json"
    card = json.loads(file.read_text())
    for name, values in parts.items():
        card[name] = {**card[name], **values} if isinstance(values, dict) else values
    file.write_text(json.dumps(card))


def summary(
    method="dp-kfc",
    *,
    epsilon=1.0,
    seed=0,
    accuracy=0.9,
    smoke=False,
    **more,
):
    """Make a run as it is read from a folder."""
    values = {
        "source": "folder",
        "task": "mnist-cnn (smoke run)" if smoke else "mnist-cnn",
        "method": method,
        "measured_on": "test",
        "accuracy": accuracy,
        "epsilon": 0.999 * epsilon,
        "target": epsilon,
        "delta": 1e-5,
        "sigma": 1.5,
        "steps": 10,
        "seconds": 2.0,
        "seed": seed,
        "settings": {"lr": 0.1},
        "smoke": smoke,
        "curve": [(0.0, 0.1), (10.0, accuracy)],
    }
    return RunSummary(**{**values, **more})


def tuning(path, words="Tuning is NOT in ε.", search="tpe"):
    """Write the report of a tuning study."""
    arm = ArmResult(
        name="dp-kfc",
        label="DP-KFC",
        control=False,
        trials=13,
        pruned=1,
        failed=0,
        accuracy=0.26,
        params={"lr": 0.1},
        command=f"dpkfc train --recipe digits --lr 0.1{words if '<' in words else ''}",
    )
    Tuned(
        recipe="digits",
        search=search,
        planned=2,
        validation=50,
        epsilon=1.0,
        delta=1e-5,
        statement=words,
        unpublished="All 13 runs",
        epsilon_with_tuning=None,
        epsilon_with_training=None,
        epsilon_composed=None,
        runs_begun=13,
        arms=[arm],
        complete=True,
        failures={"DP-KFC, trial 13": "why"},
    ).write(path.parent)
    return path.parent / "tune.json"
