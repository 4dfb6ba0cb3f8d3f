"""What the papers say in one table, beside the difference between two arms here that tests it.

    python benchmarks/claims.py    # the Markdown table; `make results` puts it into docs/results.md

Both arms of a comparison were tuned on the same data set and judged on its test set at ε = 1. Where
a grid holds an arm, whose every point ran to its end, its tests stand for those of the twenty
trials, most of which were pruned.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, read_json

# data set to arm to accuracies on the test set, %
Accuracies = Mapping[str, Mapping[str, Sequence[float]]]

ARMS = {
    "DP-SGD, clip C=1": "dp-sgd",
    "DP-SGD, normalised clip": "dp-sgd-normalised",
    "A only": "dp-kfc-a",
    "G only": "dp-kfc-g",
    "DP-KFC, pink noise": "dp-kfc-noise",
}
NOISE = ("dp-kfc-pink", "dp-kfc-tokens")
STUDIES = {
    "mnist-cnn": "MNIST, CNN",
    "fashion-mnist-cnn": "Fashion-MNIST, CNN",
    "imdb-logistic": "IMDB, logistic regression",
    "mnist-mlp": "MNIST, MLP",
}
GRIDS = {  # data set, and the arms of a grid by the names they have in the studies
    "mlp": (
        "mnist-mlp",
        {"dp-sgd": "dp-sgd", "dp-adam": "dp-adam", "normalised dp-sgd": "dp-sgd-normalised"},
    ),
    "imdb": (
        "imdb-logistic",
        {
            "DP-SGD": "dp-sgd",
            "normalised DP-SGD": "dp-sgd-normalised",
            "DP-Adam": "dp-adam",
            "DP-AdamBC": "dp-adambc",
            "DiSK": "disk",
            "DP-KFC, A only, random words": "dp-kfc-a",
            "A only, same spectrum, random directions": "dp-kfc-a-random",
            "DP-KFC, both sides, random words": "dp-kfc-noise",
            "DP-KFC + AdamBC": "dp-kfc+adam-bc",
            "AdaDPS, random words": "adadps",
            "DP-KFC, A only, private oracle (NOT PRIVATE)": "dp-kfc-a-oracle",
        },
    ),
    "mapped": (
        "mnist-cnn",
        {
            "A only, dead leaves, natural gradient": "leaves-mapped",
            "A only, dead leaves, preconditioned, Adam": "leaves-along",
            "both sides, dead leaves, natural gradient": "leaves-both",
            "A only, pink noise, natural gradient": "pink-mapped",
            "A only, same spectrum, random directions, natural gradient": "random-mapped",
            "A only, private oracle (NOT PRIVATE), natural gradient": "oracle-mapped",
        },
    ),
    "fashion": (
        "fashion-mnist-cnn",
        {
            "A only, dead leaves, natural gradient": "leaves-mapped",
            "A only, dead leaves, preconditioned, Adam": "leaves-along",
            "A only, pink noise, natural gradient": "pink-mapped",
            "A only, same spectrum, random directions, natural gradient": "random-mapped",
            "A only, private oracle (NOT PRIVATE), natural gradient": "oracle-mapped",
        },
    ),
}
FEDERATED = {
    "cifar10": "CIFAR-10 features",
    "mnist": "MNIST features",
    "pneumoniamnist": "PneumoniaMNIST features",
}


@dataclass(frozen=True)
class Claim:
    """One arm that should be above another."""

    paper: str
    says: str
    above: str
    below: str
    same_on: tuple[
        str, ...
    ] = ()  # data sets on which both are one mechanism, so that a difference shows the search alone


CLAIMS = (
    Claim("DP-KFC", "whitening with curvature from noise beats DP-SGD", "dp-kfc-noise", "dp-sgd"),
    Claim(
        "",
        "… and normalised clipping is not the reason (inputs alone whitened)",
        "dp-kfc-a",
        "dp-sgd-normalised",
    ),
    Claim(
        "",
        "… nor is the spectrum: random directions with the same one are worse",
        "dp-kfc-noise",
        "dp-kfc-random",
    ),
    Claim(
        "",
        "… nor is the spectrum: random directions are worse (inputs alone whitened)",
        "dp-kfc-a",
        "dp-kfc-a-random",
    ),
    Claim("", "noise is no worse than public data of another set", "dp-kfc-noise", "dp-kfc-public"),
    Claim(
        "",
        "noise is no worse than the private data themselves (oracle, NOT PRIVATE)",
        "dp-kfc-noise",
        "dp-kfc-oracle",
    ),
    Claim("", "… inputs alone whitened", "dp-kfc-a", "dp-kfc-a-oracle"),
    Claim(
        "",
        "both factors are better than that of the inputs alone",
        "dp-kfc-noise",
        "dp-kfc-a",
        same_on=("imdb-logistic",),
    ),
    Claim("", "DP-AdamBC behind it adds to it", "dp-kfc+adam-bc", "dp-kfc-noise"),
    Claim("AdaDPS", "scaling by public second moments beats DP-SGD", "adadps", "dp-sgd"),
    Claim("DP-NGD", "clamped public curvature, natural gradient, beats DP-SGD", "dp-ngd", "dp-sgd"),
    Claim("DiSK", "filtering gradients over time beats DP-SGD", "disk", "dp-sgd"),
    Claim("DP-AdamBC", "second moments without the noise beat DP-Adam", "dp-adambc", "dp-adam"),
    Claim(
        "this project",
        "the natural gradient beats the preconditioned gradient (dead leaves)",
        "leaves-mapped",
        "leaves-along",
    ),
    Claim(
        "",
        "… and directions are the reason: random ones with the same spectrum are worse",
        "leaves-mapped",
        "random-mapped",
    ),
    Claim("", "… from inputs alone no worse than from both sides", "leaves-mapped", "leaves-both"),
    Claim(
        "",
        "… and dead leaves are a better probe for it than pink noise",
        "leaves-mapped",
        "pink-mapped",
    ),
    Claim(
        "",
        "… no worse than the private images themselves (oracle, NOT PRIVATE)",
        "leaves-mapped",
        "oracle-mapped",
    ),
    Claim("DP-FedSOFIM", "its server step beats DP-FedGD, both tuned", "sofim", "fedgd"),
    Claim("", "… also at a matched learning rate", "sofim", "fedgd-matched"),
    Claim(
        "",
        "… and its momentum form beats momentum at a matched learning rate",
        "sofim-momentum",
        "fedavgm-matched",
    ),
)


def measured(folder: Path) -> Accuracies:
    """Everything that two arms were compared in, where each has two seeds or more."""
    import grids
    from dpkfc.app.html.read import winners_tests
    from dpkfc.app.tuning.runs import Store

    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read_json(folder / "accuracy.json").get("runs", {}).values():
        if row["evaluate_on"] == "test" and row["optimizer"] == "adam":
            found["MNIST, CNN (best rate with Adam)"][ARMS[row["arm"]]].append(
                100 * row["accuracy"]
            )
    for name in ("cnn", "imdb", "mlp"):
        for row in winners_tests(
            read_json(folder / "accuracy" / f"{name}.json").get("rows", {}).values()
        ):
            if row["target_epsilon"] != 1.0:
                continue
            arm = row["tag"]["arm"]
            found[STUDIES[row["run"]["recipe"]]]["dp-kfc-noise" if arm in NOISE else arm].append(
                100 * row["accuracy"]
            )
    for row in _tests(read_json(folder / "federated_accuracy.json")):
        if row["run"]["partition"] == "iid":
            found[FEDERATED[row["run"]["task"]]][row["tag"]["arm"]].append(100 * row["accuracy"])
    imdb = found[STUDIES["imdb-logistic"]]
    if "dp-ngd" in imdb:  # the grid has none of it, so it is compared within the trials
        found["IMDB, twenty trials"] = {
            arm: imdb[arm] for arm in ("dp-ngd", "dp-sgd") if arm in imdb
        }
    # the latter two beside the grid's DP-KFC: another damping and clip
    for arm in (
        "dp-ngd",
        "dp-kfc-random",
        "dp-kfc-oracle",
    ):
        imdb.pop(arm, None)
    for name, (recipe, arms) in GRIDS.items():
        store = Store(folder / "grids" / f"{name}.json")
        for label, arm in arms.items():
            if tests := grids.GRIDS[name].tests(store, label):
                found[STUDIES[recipe]][arm] = [100 * row["accuracy"] for row in tests]
    return found


def _tests(results: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    rows = results.get("rows", {}).values()
    return (
        row
        for row in rows
        if row["measured_on"] == "test" and row.get("target_epsilon") == 1.0 and "arm" in row["tag"]
    )


def compared(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """Difference of the means, and half of its 95 % interval (Welch's t, since three seeds say
    little about a variance).
    """
    from scipy.stats import t

    parts = [statistics.variance(values) / len(values) for values in (above, below)]
    gain, spread = statistics.mean(above) - statistics.mean(below), sum(parts)
    if spread == 0:
        return gain, 0.0
    freedom = spread**2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (above, below), strict=True)
    )
    return gain, float(t.ppf(0.975, freedom)) * math.sqrt(spread)


def verdict(differences: Mapping[str, tuple[float, float]]) -> str:
    """In how many data sets the difference is beyond its error, and on which side; two comparisons
    on one set are one vote.
    """
    votes: dict[str, set[str]] = defaultdict(set)
    for where, (gain, error) in differences.items():
        votes[where.partition(" (")[0]].add(
            "holds" if gain > error else "the reverse" if gain < -error else "no difference"
        )
    cast = [vote.pop() if len(vote) == 1 else "no difference" for vote in votes.values()]
    parts = [
        f"{name} in {count}"
        for name in ("holds", "no difference", "the reverse")
        if (count := cast.count(name))
    ]
    return parts[0].rpartition(" in ")[0] if len(parts) == 1 else ", ".join(parts)


def table(found: Accuracies) -> str:
    """Claim, differences in points with their 95 % intervals, verdict."""
    lines, paper = [], ""
    for claim in CLAIMS:
        paper = claim.paper or paper
        pairs = {
            where: (arms.get(claim.above, ()), arms.get(claim.below, ()))
            for where, arms in found.items()
        }
        same = {STUDIES[recipe] for recipe in claim.same_on}
        known = {
            where: compared(*pair)
            for where, pair in pairs.items()
            if where not in same and min(map(len, pair)) > 1
        }
        if known:
            told = "<br>".join(
                f"{where}: {gain:+.2f} ± {error:.2f}" for where, (gain, error) in known.items()
            )
            lines.append([paper, claim.says, told, f"**{verdict(known)}**"])
    head = [["paper", "claim", "difference here, points (± 95 % interval)", "here"], ["---"] * 4]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*head, *lines])


if __name__ == "__main__":
    print(table(measured(RESULTS)))
    sys.exit(0)
