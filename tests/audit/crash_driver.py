"""Kills training processes at chosen and at random moments, resumes them, and compares what is left
with a run left alone.

The driver imports torch once and forks a child for every trial. A child trains with a real ledger
and real checkpoints on a disk. It is killed by SIGKILL at a *place* (before, after or in the middle
of a write, a sync, a rename, a removal, a release, an update: the n-th time it comes there), or by
its parent after a random time. Before noise is drawn for a release the child writes one byte to a
witness of its own, so that `witness <= ledger` says that no release was left out.

In test mode the result of a run is a function of the number of its steps: weights after s steps of
a run that was killed must equal, bit for bit, those of a run left alone after s steps. What a crash
costs is steps: a release that was charged and not kept is not made again.

    python -m tests.audit.crash_driver '{"folder": ..., ...}' report.json
"""

import copy
import json
import os
import random
import shutil
import signal
import struct
import sys
import time
import traceback
import warnings
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq
import torch

from dpkfc import checkpoint
from dpkfc.privacy import ledger_lines as chain
from tests.app.accounting import remember_accounting
from tests.audit.crash_places import (
    LIMIT_S,
    Aim,
    Place,
    digest_of,
    full_disk,
    instrument,
    note_weights,
)
from tests.audit.crash_subjects import SUBJECTS


@dataclass
class Report:
    kills: int = 0
    by_time: int = 0
    power_cuts: int = 0
    runs: int = 0
    finished: int = 0
    releases: int = 0
    overcharged: int = 0
    undercounted: int = 0
    unreadable: int = 0
    mismatched: int = 0
    repeated_noise: int = 0
    seconds: float = 0.0
    places: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def spawn(act, errors):
    """Fork a child that runs `act` and ends with 0, or with 1 and a traceback in a file."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 2)
        random.seed(os.getpid())
        act()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait_for(child, limit_s=LIMIT_S):
    """The exit status of a child; one that hangs is killed and counts as status 255."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 255


class Scenarios:
    """Runs of one subject that are killed until they are done."""

    def __init__(self, subject, root, seed):
        root.mkdir(parents=True)
        self.subject, self.root, self.mutant = subject, root, ""
        self.rng, self.report = random.Random(seed), Report()
        self.expected = []
        # what is imported at first use, and calibrations, are there for all children
        subject.train(root / "warm")
        self._run_without_kill()

    def planted(self, mutant):
        """The same runs with a fault in every process."""
        other = copy.copy(self)
        other.mutant, other.root, other.report = mutant, self.root / mutant, Report()
        other.root.mkdir()
        return other

    def _child(self, place, aim, note=False, cap=None):
        def act():
            mutant = "" if note else self.mutant
            instrument(aim, place, mutant)
            passed = []
            place.notes.with_suffix(".begun").touch()
            started = time.monotonic()
            if note:
                note_weights(passed)
            with full_disk(cap) if cap is not None else nullcontext():
                self.subject.train(place.folder)
            if note:
                content = {
                    "weights": passed,
                    "counts": aim.counts,
                    "seconds": time.monotonic() - started,
                }
                place.notes.write_bytes(json.dumps(content).encode())

        return spawn(act, place.errors)

    def _run_without_kill(self):
        place = Place(self.root, "alone")
        status = wait_for(self._child(place, Aim(), note=True))
        if status:
            raise RuntimeError(f"a run left alone ended with {status}: {place.errors.read_text()}")
        notes = json.loads(place.notes.read_text())
        self.expected, self.counts, self.seconds = (
            notes["weights"],
            notes["counts"],
            notes["seconds"],
        )
        self.places = sorted(self.counts)
        self.rng.shuffle(self.places)

    def run(self, kills):
        started, turn = time.monotonic(), 0
        while self.report.kills < kills:
            place = Place(self.root, f"run-{self.report.runs}")
            self.report.runs += 1
            before = self.report.kills
            while True:
                status = self._trial(place, turn)
                turn += 1
                if status != -signal.SIGKILL:
                    break
                self.report.kills += 1
                self._after_kill(place, self.report.kills - before)
                if self.report.kills >= kills + 40:  # enough: let this one end
                    break
            if status != 0 and wait_for(self._child(place, Aim())) != 0:
                self._problem(
                    f"{place.name} could not be ended ({status}):"
                    f" {place.errors.read_text()[-2000:]}"
                )
                continue
            self._after_end(place)
            shutil.rmtree(place.folder)
        self.report.seconds = time.monotonic() - started
        return self.report

    def _trial(self, place, turn):
        """One child; how it ended."""
        if turn % 3 == 2:
            begun = place.notes.with_suffix(".begun")
            begun.unlink(missing_ok=True)
            child = self._child(place, Aim())
            until = time.monotonic() + LIMIT_S
            while not begun.exists() and time.monotonic() < until:
                time.sleep(0.0005)
            time.sleep(self.rng.uniform(0, 0.5 * self.seconds))
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            status = wait_for(child)
            if status == -signal.SIGKILL:
                self.report.by_time += 1
                self.report.places["a random moment"] += 1
            return status
        name = self.places[turn % len(self.places)]
        number = self.rng.randint(1, -(-self.counts[name] // 3))
        status = wait_for(self._child(place, Aim(name, number)))
        if status == -signal.SIGKILL:
            self.report.places[name] += 1
            if turn % 4 == 1:
                self._cut_power(place)
        return status

    def _cut_power(self, place):
        """What was not synced may be gone: the ledger ends somewhere behind its last sync."""
        if not place.ledger.exists():
            return
        known = place.synced.read_bytes()
        safe = struct.unpack("<q", known)[0] if known else 0
        size = place.ledger.stat().st_size
        if size > safe:
            os.truncate(place.ledger, self.rng.randint(safe, size))
            self.report.power_cuts += 1

    def _after_kill(self, place, kills):
        ledger, seen = (
            self._charged(place),
            place.witness.stat().st_size if place.witness.exists() else 0,
        )
        if seen > ledger:
            self.report.undercounted += seen - ledger
        if ledger > seen + kills:
            self._problem(
                f"{place.name}: {ledger} releases are charged and {seen} were made, after {kills}"
                " kills"
            )
        if ledger > self.subject.steps:
            self._problem(
                f"{place.name}: {ledger} releases are charged where the plan allows"
                f" {self.subject.steps}"
            )
        saved = place.folder / "checkpoint"
        if saved.exists() or saved.with_name("checkpoint.old").exists():
            try:
                checkpoint.read(saved)
            except checkpoint.CheckpointError as error:
                self.report.unreadable += 1
                self._problem(f"{place.name}: {error}")
        elif ledger or seen:
            self._problem(f"{place.name}: {ledger} releases and no checkpoint")
        elif place.folder.exists():
            shutil.rmtree(place.folder)  # killed before it began: a run begins anew

    def _charged(self, place):
        """Releases in a ledger whose last line may be torn; its chain must hold."""
        content = place.ledger.read_bytes() if place.ledger.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        torn = content[len(whole) :]
        kept = chain.is_complete(torn) if torn else False
        try:
            return len(chain.parse(whole, str(place.ledger)).releases) + kept if whole else 0
        except chain.LedgerError as error:
            self._problem(f"{place.name}: {error}")
            return 0

    def _after_end(self, place):
        report, steps = self.report, self.subject.steps
        report.finished += 1
        made, charged = place.witness.stat().st_size, self._charged(place)
        report.releases += made
        report.overcharged += charged - made
        if charged != steps:
            self._problem(f"{place.name} ended with {charged} releases, the plan has {steps}")
        tensors, meta = checkpoint.read(place.folder / "checkpoint")
        step = meta["step"]
        if (
            self.subject.bit_for_bit
            and step
            and digest_of(tensors["model"]) != self.expected[step - 1]
        ):
            report.mismatched += 1
        seen = place.seen.read_bytes()
        digests = [seen[i : i + 32] for i in range(0, len(seen), 32)]
        if not self.subject.bit_for_bit:
            report.repeated_noise += len(digests) - len(set(digests))
        card = place.folder / "privacy_card.json"
        if self.subject.name.startswith("dpkfc train"):
            self._check_card(place, json.loads(card.read_text("utf-8")), tensors["model"])

    def _check_card(self, place, card, model):
        """What a finished `dpkfc train` leaves agrees with its ledger and its checkpoint."""
        from safetensors.torch import load_file

        rows = [row["step"] for row in pq.read_table(place.folder / "metrics.parquet").to_pylist()]
        head = chain.parse(place.ledger.read_bytes(), "").heads[-1]
        for wrong, what in (
            (
                card["guarantee"]["releases"] != self.subject.steps,
                "the card has another number of releases",
            ),
            (card["ledger"]["head"] != head, "the card has another head"),
            (rows != sorted(set(rows)), "the metrics have a step twice"),
            (
                digest_of(load_file(place.folder / "model.safetensors")) != digest_of(model),
                "other weights were delivered",
            ),
            (any(place.folder.rglob("*.part")), "something half written is left"),
        ):
            if wrong:
                self._problem(f"{place.name}: {what}")

    def _problem(self, text):
        self.report.problems.append(text)

    def full_disk(self, cap):
        """A run whose files cannot grow beyond a size, then the same with room: what was charged,
        made, and came of it.
        """
        place = Place(self.root, f"full-{cap}")
        status = wait_for(self._child(place, Aim(), cap=cap))
        error = place.errors.read_text()[-3000:]
        made, charged = (
            place.witness.stat().st_size if place.witness.exists() else 0,
            self._charged(place),
        )
        again = wait_for(self._child(place, Aim()))
        step = checkpoint.read(place.folder / "checkpoint")[1]["step"] if again == 0 else -1
        same = (
            again == 0
            and digest_of(checkpoint.read(place.folder / "checkpoint")[0]["model"])
            == self.expected[step - 1]
        )
        return {
            "cap": cap,
            "status": status,
            "error": error,
            "made": made,
            "charged": charged,
            "again": again,
            "same": same,
        }

    def two_at_once(self):
        """A second process in the folder of one that is alive (it is stopped, not ended), and a
        third after its death.
        """
        place = Place(self.root, "two")
        begun = place.notes.with_suffix(".begun")
        first = self._child(place, Aim())
        until = time.monotonic() + LIMIT_S
        while not (begun.exists() and self._charged(place) > 1) and time.monotonic() < until:
            time.sleep(0.001)
        os.kill(first, signal.SIGSTOP)
        held = self._charged(place)
        second = wait_for(self._child(place, Aim()))
        error, kept = place.errors.read_text()[-3000:], self._charged(place) == held
        os.kill(first, signal.SIGKILL)
        wait_for(first)
        return {
            "second": second,
            "error": error,
            "kept": kept,
            "third": wait_for(self._child(place, Aim())),
        }


def main(asked):
    """Kill, fill disks, start twice.

    Args:
        asked: `folder` and `seed`; `subjects`: name to kills; `mutants`: name to kills, of the
            `default` subject; `caps`: sizes of files at which the disk of the default subject is
            full; `two`: subjects that are started twice in one folder.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # test mode says that it is not private
    root, seed, default = Path(asked["folder"]), int(asked.get("seed", 0)), asked["default"]
    made = {}

    def find_scenarios(name):
        if name not in made:
            made[name] = Scenarios(
                SUBJECTS[name](), root / f"subject-{len(made)}", seed + len(made)
            )
        return made[name]

    with remember_accounting():
        subjects = {
            name: vars(find_scenarios(name).run(kills))
            for name, kills in asked.get("subjects", {}).items()
        }
        mutants = {
            name: vars(find_scenarios(default).planted(name).run(kills))
            for name, kills in asked.get("mutants", {}).items()
        }
        full = [find_scenarios(default).full_disk(cap) for cap in asked.get("caps", [])]
        two = [find_scenarios(name).two_at_once() for name in asked.get("two", [])]
    return {"subjects": subjects, "mutants": mutants, "full": full, "two": two}


def drive(asked, report):
    """`main`, with its report in a file."""
    report.write_text(json.dumps(main(asked)), "utf-8")


if __name__ == "__main__":
    drive(json.loads(sys.argv[1]), Path(sys.argv[2]))
