"""Claims of papers and of this project, beside the difference between two arms that tests each.

The claims are in `claims.toml`. Both arms of a comparison were tuned on the same data set and
judged on its test set at ε = 1. Claims about features compare all rows of `features.py` that differ
in one part. `make results` writes the tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpkfc_papers.studies.features_table import Row
from dpkfc_papers.studies.harness import compare_means, markdown, read_toml
from dpkfc_papers.studies.scores import TITLES, Accuracies

# Difference in points and half of its 95 % interval, by data set and what else tells pairs apart.
Differences = Mapping[str, tuple[float, float]]
# A claim that begins so is a control of the one before.
CONTROL = "… "
# What a data set can say of a claim.
SAID = ("holds", "no difference", "the reverse")
# Data sets of features.py, and networks on the same pixels.
NETWORKS = {"mnist": TITLES["mnist-cnn"], "fashion-mnist": TITLES["fashion-mnist-cnn"]}


@dataclass(frozen=True)
class Claim:
    """One arm, or one part of an arm, that should be above another.

    Attributes:
        says: the claim.
        paper: whose it is; "" for the paper of the claim before it.
        above: an arm, or values of a part.
        below: what it is compared with.
        part: of an arm of `features.py`; "" for arms of other studies.
        heads: whether linear heads on features are compared with networks on the pixels.
        is_tuned: whether the last blocks of the encoder train with the head.
        same_on: recipes on which both arms are one mechanism, so that a difference shows the search
            alone.
        withdrawn: why no verdict is given.
    """

    says: str
    paper: str = ""
    above: Any = ""
    below: Any = ""
    part: str = ""
    heads: bool = False
    is_tuned: bool = False
    same_on: Sequence[str] = ()
    withdrawn: str = ""

    def differences(self, found: Accuracies, rows: Sequence[Row]) -> Differences:
        """Return the difference and half of its 95 % interval for each data set or pair."""
        if self.heads:
            return _compare_heads(found, rows)
        if self.part:
            return self._compare_parts(rows)
        same = {TITLES[recipe] for recipe in self.same_on}
        known = {}
        for where, arms in found.items():
            pair = arms.get(self.above, ()), arms.get(self.below, ())
            if where not in same and min(map(len, pair)) > 1:
                known[where] = compare_means(*pair)
        return known

    def _compare_parts(self, rows: Sequence[Row]) -> Differences:
        """Compare rows that differ in the part alone."""
        above, below = map(_freeze, (self.above, self.below))
        at_one = {(row.data, row.arm): row for row in rows if row.epsilon == 1.0}
        known = {}
        for (data, arm), row in at_one.items():
            if arm.is_tuned != self.is_tuned or getattr(arm, self.part) not in above:
                continue
            for value in below:
                other = at_one.get((data, replace(arm, **{self.part: value})))
                pair = _pair_searches(row, other)
                if pair is not None:
                    known[f"{row.title} ({arm.label})"] = compare_means(*pair)
        return known


def _freeze(values: Sequence[Any]) -> list[Any]:
    """Return values as arms hold them."""
    return [tuple(value) if isinstance(value, list) else value for value in values]


def _pair_searches(row: Row, other: Row | None) -> tuple[Sequence[float], ...] | None:
    """Return tests of two cells whose searches tried the same epochs; None without such a pair."""
    if other is None:
        return None
    for mine in (row, *row.others):
        for yours in (other, *other.others):
            if mine.epochs == yours.epochs:
                return mine.test, yours.test
    return None


def _compare_heads(found: Accuracies, rows: Sequence[Row]) -> Differences:
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


CONTENT = read_toml(Path(__file__).with_name("claims.toml"))
CLAIMS = [Claim(**one) for one in CONTENT["claim"]]


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
    parts = [f"{name} in {cast.count(name)}" for name in SAID if name in cast]
    return parts[0].rpartition(" in ")[0] if len(parts) == 1 else ", ".join(parts)


def judge(cast: Sequence[str]) -> str:
    """Return the verdict of all data sets in one or two words."""
    holds, _, reverse = (cast.count(name) for name in SAID)
    if holds == len(cast):
        return "holds"
    if holds:
        return "mixed" if reverse else "holds in part"
    return "does not hold" if reverse else "no difference"


def list_known(found: Accuracies, rows: Sequence[Row]) -> Iterator[tuple[str, Claim, Differences]]:
    """Yield claims with something to compare: whose they are, the claim, its differences."""
    paper = ""
    for claim in CLAIMS:
        paper = claim.paper or paper
        if differences := claim.differences(found, rows):
            yield paper, claim, differences


def table(found: Accuracies, rows: Sequence[Row] = ()) -> str:
    """Claim, differences in points with their 95 % intervals, verdict."""
    lines = []
    for paper, claim, differences in list_known(found, rows):
        cells = "<br>".join(
            f"{where}: {gain:+.2f} ± {error:.2f}" for where, (gain, error) in differences.items()
        )
        said = f"**{verdict(differences)}**"
        if claim.withdrawn:
            said = f"**withdrawn**: {claim.withdrawn}"
        lines.append([paper, claim.says, cells, said])
    head = ["paper", "claim", "difference here, points (± 95 % interval)", "here"]
    return markdown(head, lines)


def verdict_table(found: Accuracies, rows: Sequence[Row] = ()) -> str:
    """Claim, on how many data sets it held, and the verdict."""
    lines = []
    for paper, claim, differences in list_known(found, rows):
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
    for paper, claim, differences in list_known(found, rows):
        if paper == "this project":
            continue
        cast = votes(differences)
        said = f"{judge(cast)} ({', '.join(str(cast.count(name)) for name in SAID)})"
        if claim.says.startswith(CONTROL) and controls:
            controls[-1].append(f"{claim.says.removeprefix(CONTROL)}: {said}")
        else:
            lines.append([paper, claim.says, f"**{said}**"])
            controls.append([])
    rows_of = [[*line, "; ".join(of) or "–"] for line, of in zip(lines, controls, strict=True)]
    verdicts = "verdict (sets on which it holds, is level, is reversed)"
    return markdown(["paper", "claim", verdicts, "controls"], rows_of)
