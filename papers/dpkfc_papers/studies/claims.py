"""Claims of papers and of this project, beside the difference between two arms that tests each.

    python -m dpkfc_papers.studies.claims  # the Markdown table of docs/results/claims.md

`make results` writes it, and the verdicts alone into docs/results.md. Both arms of a comparison
were tuned on the same data set and judged on its test set at ε = 1. Where a grid holds an arm,
whose every point ran to its end, its tests stand for those of the twenty trials, most of which were
pruned. Claims about features compare all rows of `features.py` that differ in one part.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpkfc_papers.studies import features_table
from dpkfc_papers.studies.features_table import Row
from dpkfc_papers.studies.harness import RESULTS, compare_means, markdown, read_json

# data set to arm to accuracies on the test set, %
Accuracies = Mapping[str, Mapping[str, Sequence[float]]]
# difference in points and half of its 95 % interval, by data set and what else tells pairs apart
Differences = Mapping[str, tuple[float, float]]

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
    "mnist-vit": "MNIST, ViT (with Adam)",
    "stackoverflow-head": "StackOverflow, head on sentences",
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
    "fashion-baselines": (
        "fashion-mnist-cnn",
        {"DP-SGD": "dp-sgd", "DP-AdamBC": "dp-adambc", "DiSK": "disk"},
    ),
    "vit": (
        "mnist-vit",
        {
            "DP-Adam": "dp-sgd",
            "A only, pink noise": "dp-kfc-a",
            "both sides, pink noise": "dp-kfc-noise",
        },
    ),
}
# A claim that begins so is a control of the one before.
CONTROL = "… "
# What a data set can say of a claim.
SAID = ("holds", "no difference", "the reverse")
# data sets of features.py, and networks on the same pixels
NETWORKS = {"mnist": "MNIST, CNN", "fashion-mnist": "Fashion-MNIST, CNN"}
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
    # data sets on which both are one mechanism, so that a difference shows the search alone
    same_on: tuple[str, ...] = ()
    # why no verdict is given
    withdrawn: str = ""

    def differences(self, found: Accuracies, rows: Sequence[Row]) -> Differences:
        """Return the difference and half of its 95 % interval on each data set."""
        same = {STUDIES[recipe] for recipe in self.same_on}
        known = {}
        for where, arms in found.items():
            pair = arms.get(self.above, ()), arms.get(self.below, ())
            if where not in same and min(map(len, pair)) > 1:
                known[where] = compare_means(*pair)
        return known


@dataclass(frozen=True)
class FeatureClaim:
    """A part of an arm of `features.py` that should be better than another in its place."""

    paper: str
    says: str
    part: str
    above: Sequence[str]
    below: Sequence[str]
    withdrawn: str = ""
    # whether the last blocks of the encoder train with the head
    is_tuned: bool = False

    def differences(self, found: Accuracies, rows: Sequence[Row]) -> Differences:
        """Return the difference and half of its 95 % interval for each pair of rows."""
        at_one = {(row.data, row.arm): row for row in rows if row.epsilon == 1.0}
        known = {}
        for (data, arm), row in at_one.items():
            if arm.is_tuned != self.is_tuned or getattr(arm, self.part) not in self.above:
                continue
            for value in self.below:
                other = at_one.get((data, replace(arm, **{self.part: value})))
                pair = _equally_searched(row, other)
                if pair is not None:
                    known[f"{row.title} ({arm.label})"] = compare_means(*pair)
        return known


def _equally_searched(row: Row, other: Row | None) -> tuple[Sequence[float], ...] | None:
    """Return tests of two cells whose searches tried the same epochs; None without such a pair."""
    if other is None:
        return None
    for mine in (row, *row.others):
        for yours in (other, *other.others):
            if mine.epochs == yours.epochs:
                return mine.test, yours.test
    return None


@dataclass(frozen=True)
class HeadClaim:
    """Heads on features should be better than networks on the pixels."""

    paper: str
    says: str
    withdrawn: str = ""

    def differences(self, found: Accuracies, rows: Sequence[Row]) -> Differences:
        """Compare the best features of the search with the natural method and with networks."""
        known = {}
        for data in dict.fromkeys(row.data for row in rows):
            own = [row for row in rows if row.data == data and row.epsilon == 1.0]
            heads = [row for row in own if row.arm.is_head]
            if not heads:
                continue
            best = max(heads, key=lambda row: row.validation)
            rivals = {f"over {row.arm.label}": row.test for row in own if row.arm.is_network}
            study = found.get(NETWORKS.get(data, ""), {})
            for arm in ("leaves-mapped", "dp-kfc-natural"):
                if len(study.get(arm, ())) > 1:
                    rivals["over the CNN with DP-KFC natural"] = study[arm]
                    break
            for rival, values in rivals.items():
                known[f"{best.title} ({rival})"] = compare_means(best.test, values)
        return known


CLAIMS: tuple[Claim | FeatureClaim | HeadClaim, ...] = (
    Claim("DP-KFC", "whitening with curvature from noise beats DP-SGD", "dp-kfc-noise", "dp-sgd"),
    Claim(
        "",
        "… and normalised clipping is not the reason (inputs whitened)",
        "dp-kfc-a",
        "dp-sgd-normalised",
    ),
    Claim(
        "",
        "… nor is the spectrum: random directions are worse",
        "dp-kfc-noise",
        "dp-kfc-random",
    ),
    Claim(
        "",
        "… nor is the spectrum (inputs alone whitened)",
        "dp-kfc-a",
        "dp-kfc-a-random",
    ),
    Claim("", "noise is no worse than public data of another set", "dp-kfc-noise", "dp-kfc-public"),
    Claim(
        "",
        "noise is no worse than private data (NOT PRIVATE)",
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
    Claim("DP-NGD", "clamped public curvature beats DP-SGD", "dp-ngd", "dp-sgd"),
    Claim("DiSK", "filtering gradients over time beats DP-SGD", "disk", "dp-sgd"),
    Claim("DP-AdamBC", "second moments without the noise beat DP-Adam", "dp-adambc", "dp-adam"),
    Claim(
        "this project",
        "natural beats preconditioned gradients (dead leaves)",
        "leaves-mapped",
        "leaves-along",
    ),
    Claim(
        "",
        "… directions are the reason: random ones are worse",
        "leaves-mapped",
        "random-mapped",
    ),
    Claim("", "… from inputs alone no worse than from both sides", "leaves-mapped", "leaves-both"),
    Claim(
        "",
        "… dead leaves beat pink noise as its probe (chosen on tests)",
        "leaves-mapped",
        "pink-mapped",
        withdrawn="dead leaves became the default when the tests of both were known",
    ),
    Claim(
        "",
        "… no worse than the private images (NOT PRIVATE)",
        "leaves-mapped",
        "oracle-mapped",
    ),
    HeadClaim("", "linear heads on synthetic features beat networks on pixels"),
    FeatureClaim(
        "",
        "an encoder of synthetic images adds to scattering",
        "maps",
        ("scattering+encoder2", "scattering+encoder4"),
        ("scattering",),
    ),
    FeatureClaim(
        "", "… and scattering adds to it", "maps", ("scattering+encoder2",), ("encoder2",)
    ),
    FeatureClaim(
        "",
        "… finer cells, 4 × 4, add to it",
        "maps",
        ("scattering+encoder4",),
        ("scattering+encoder2",),
    ),
    FeatureClaim(
        "",
        "the encoder's last block trains with the head",
        "maps",
        ("tuned1",),
        ("encoder2",),
        is_tuned=True,
    ),
    FeatureClaim("", "a mean with the mirrored image adds", "more", (("mirrored",),), ((),)),
    FeatureClaim(
        "", "scales of synthetic images beat one number", "scales", ("synthetic",), ("none",)
    ),
    FeatureClaim("", "… those of white noise", "scales", ("synthetic",), ("white",)),
    FeatureClaim("", "… those of pink noise", "scales", ("synthetic",), ("pink",)),
    FeatureClaim("", "… those of dead leaves", "scales", ("synthetic",), ("leaves",)),
    FeatureClaim("", "whitening adds to features with scales", "method", ("dp-kfc",), ("dp-sgd",)),
    FeatureClaim(
        "",
        "… where the encoder's last block trains too",
        "method",
        ("dp-kfc",),
        ("dp-sgd",),
        is_tuned=True,
    ),
    FeatureClaim("", "… random directions are worse", "more", ((),), (("random directions",),)),
    Claim("DP-FedSOFIM", "its server step beats DP-FedGD, both tuned", "sofim", "fedgd"),
    Claim("", "… also at a matched learning rate", "sofim", "fedgd-matched"),
    Claim(
        "",
        "… its momentum form beats momentum at that rate",
        "sofim-momentum",
        "fedavgm-matched",
    ),
)


def measured(folder: Path) -> Accuracies:
    """Everything that two arms were compared in, where each has two seeds or more."""
    from dpkfc_papers.store import Store, winners_tests
    from dpkfc_papers.studies import grids

    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read_json(folder / "accuracy.json").get("runs", {}).values():
        if row["evaluate_on"] == "test" and row["optimizer"] == "adam":
            found["MNIST, CNN (best rate with Adam)"][ARMS[row["arm"]]].append(
                100 * row["accuracy"]
            )
    for name in ("cnn", "imdb", "mlp", "sentences"):
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


def votes(differences: Differences) -> list[str]:
    """Return what each data set says: of its comparisons, the one that is worst for the claim."""
    cast: dict[str, list[str]] = defaultdict(list)
    for where, (gain, error) in differences.items():
        said = "no difference"
        if gain > error:
            said = "holds"
        elif gain < -error:
            said = "the reverse"
        cast[where.partition(" (")[0]].append(said)
    return [max(said, key=SAID.index) for said in cast.values()]


def verdict(differences: Differences) -> str:
    """In how many data sets the difference is beyond its error, and on which side."""
    cast = votes(differences)
    parts = [f"{name} in {count}" for name in SAID if (count := cast.count(name))]
    return parts[0].rpartition(" in ")[0] if len(parts) == 1 else ", ".join(parts)


def judge(cast: Sequence[str]) -> str:
    """Return the verdict of all data sets in one or two words."""
    holds, _, reverse = (cast.count(name) for name in SAID)
    if holds == len(cast):
        return "holds"
    if holds:
        return "mixed" if reverse else "holds in part"
    return "does not hold" if reverse else "no difference"


def known(found: Accuracies, rows: Sequence[Row]) -> Iterator[tuple[str, Any, Differences]]:
    """Yield claims with something to compare: whose they are, the claim, its differences."""
    paper = ""
    for claim in CLAIMS:
        paper = claim.paper or paper
        if differences := claim.differences(found, rows):
            yield paper, claim, differences


def table(found: Accuracies, rows: Sequence[Row] = ()) -> str:
    """Claim, differences in points with their 95 % intervals, verdict."""
    lines = []
    for paper, claim, differences in known(found, rows):
        cells = "<br>".join(
            f"{where}: {gain:+.2f} ± {error:.2f}" for where, (gain, error) in differences.items()
        )
        said = f"**{verdict(differences)}**"
        if claim.withdrawn:
            said = f"**withdrawn**: {claim.withdrawn}"
        lines.append([paper, claim.says, cells, said])
    head = [["paper", "claim", "difference here, points (± 95 % interval)", "here"], ["---"] * 4]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*head, *lines])


def verdict_table(found: Accuracies, rows: Sequence[Row] = ()) -> str:
    """Claim, on how many data sets it held, and the verdict."""
    lines = []
    for paper, claim, differences in known(found, rows):
        cast = votes(differences)
        counts = [str(cast.count(name)) for name in SAID]
        said = "withdrawn" if claim.withdrawn else judge(cast)
        whose = paper.replace("this project", "ours")
        lines.append([f"{whose}: {claim.says}", *counts, f"**{said}**"])
    return markdown(["claim", "holds", "level", "reverse", "verdict"], lines)


def paper_table(found: Accuracies, rows: Sequence[Row] = ()) -> str:
    """Claim of a paper, the verdict, data sets by what they say, and controls that explain it.

    A control is a claim that goes on where the one before it ended.
    """
    lines: list[list[str]] = []
    controls: list[list[str]] = []
    for paper, claim, differences in known(found, rows):
        if paper == "this project":
            continue
        cast = votes(differences)
        said = f"{judge(cast)} ({', '.join(str(cast.count(name)) for name in SAID)})"
        if claim.says.startswith(CONTROL) and controls:
            controls[-1].append(f"{claim.says.removeprefix(CONTROL)}: {said}")
        else:
            lines.append([paper, claim.says, f"**{said}**"])
            controls.append([])
    rows = [[*line, "; ".join(of) or "–"] for line, of in zip(lines, controls, strict=True)]
    head = [
        ["paper", "claim", "verdict (sets on which it holds, is level, is reversed)", "controls"],
        ["---"] * 4,
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*head, *rows])


if __name__ == "__main__":
    print(table(measured(RESULTS), features_table.read_rows()))
    sys.exit(0)
