"""What a run has written and a user hands back: ledgers, privacy cards, metrics. Damaged ones are
refused in one line.
"""

import hashlib
import json
import os
from contextlib import suppress

import dp_accounting
import pytest

from dpkfc.app.metrics import Metrics, Row
from dpkfc.privacy import accounting
from dpkfc.privacy.ledger import Ledger, verify
from dpkfc.privacy.ledger_lines import LedgerError
from dpkfc.report.verify import verify_ledger
from tests.audit.fuzzing import PICKLE, Mutator, Tally, no_pickle
from tests.audit.sizes import size

PLAN, HEADER = "a" * 64, {"certified": True, "rng": "secure"}
EVENT = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.5))
REPLACE = dp_accounting.SampledWithoutReplacementDpEvent(
    100, 10, dp_accounting.GaussianDpEvent(1.5)
)


@pytest.fixture(autouse=True)
def _light(monkeypatch):
    """No pickle; no waiting for the disk; ε from a formula, since not the accountants are under
    test here.
    """
    no_pickle(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(accounting.EpsilonCurve, "epsilon", lambda self, count: 0.01 * count)
    yield


def _ledger(path, event=EVENT):
    with Ledger.open(path, PLAN, HEADER) as ledger:
        for step in range(4):
            ledger.charge(step, event, 1.5, 3.0, 2.0)
    return path.read_bytes()


def _card(path):
    heads = verify(path).heads
    return {
        "ledger": {"file": path.name, "releases": 4, "head": heads[4]},
        "guarantee": {"epsilon": 1.0, "delta": 1e-5},
    }


def _use(path):
    """Everything that reads a ledger; a refusal by one must not hide what another does."""
    refusal = None
    for act in (
        lambda: verify(path),
        lambda: verify_ledger(path),
        lambda: Ledger.open(path, PLAN, HEADER, 9).close(),
    ):
        try:
            act()
        except LedgerError as error:
            refusal = error
    if refusal is not None:
        raise refusal


def chain_lines(lines):
    """A ledger whose hashes fit, whatever its lines hold: as a program would forge it."""
    written, head = [], ""
    for number, line in enumerate(lines):
        content = {k: v for k, v in line.items() if k != "hash"} if isinstance(line, dict) else line
        if isinstance(content, dict) and number and "prev" in content:
            content["prev"] = head
        text = json.dumps(content, separators=(",", ":"))
        head = hashlib.sha256(text.encode()).hexdigest()
        if isinstance(content, dict):
            text = json.dumps({**content, "hash": head}, separators=(",", ":"))
        written.append(text.encode() + b"\n")
    return b"".join(written)


def test_damaged_ledgers(tmp_path, evidence):
    seeds = [_ledger(tmp_path / "a.jsonl"), _ledger(tmp_path / "b.jsonl", REPLACE), PICKLE]
    mutator, tally, path = Mutator(seeds, 1), Tally(), tmp_path / "ledger.jsonl"
    tally.read(path, mutator.draw(size(150, 25_000)), lambda: _use(path))
    tally.check(evidence, "ledgers, bytes", 150)


def test_forged_ledgers(tmp_path, evidence):
    """Hashes that fit and content that does not: a number that is text, an event of another kind, a
    list where a line was.
    """
    seeds = [_ledger(tmp_path / "a.jsonl"), _ledger(tmp_path / "b.jsonl", REPLACE)]
    parsed = [[json.loads(line) for line in seed.splitlines()] for seed in seeds]
    mutator, tally, path = Mutator(seeds, 2), Tally(), tmp_path / "ledger.jsonl"
    for _ in range(size(150, 15_000)):
        lines = list(mutator.rng.choice(parsed))
        for _ in range(mutator.rng.choice((1, 1, 2))):
            number = mutator.rng.randrange(len(lines))
            lines[number] = mutator.json(lines[number])
        with suppress(RecursionError, ValueError):
            tally.read(path, [chain_lines(lines)], lambda: _use(path))
    tally.check(evidence, "ledgers, forged", 140)


def test_damaged_cards(tmp_path, evidence):
    """The card beside a ledger, whose head the ledger is compared with."""
    path, card = tmp_path / "ledger.jsonl", tmp_path / "privacy_card.json"
    _ledger(path)
    whole = _card(path)
    mutator, tally = Mutator([json.dumps(whole, indent=2).encode(), PICKLE], 3), Tally()
    for turn in range(size(120, 8_000)):
        content = mutator.bytes() if turn % 2 else _dump(mutator.json(whole))
        card.write_bytes(content)
        tally.attempt(lambda: verify_ledger(path), content, "ledger.jsonl", "privacy_card.json")
    tally.check(evidence, "privacy cards", 120)


def _dump(value):
    try:
        return json.dumps(value).encode()
    except (RecursionError, ValueError):
        return b"[" * 9000


def test_damaged_metrics(tmp_path, evidence):
    seeds = []
    for rows in (0, 1, 40):
        metrics = Metrics("validation", refreshes=[{"step": 0, "digest": "x", "scale": 1.5}])
        for step in range(rows):
            metrics.add(Row(step=step, epsilon=0.1 * step, accuracy=0.5, batch_size=step))
        metrics.write(tmp_path / "m.parquet")
        seeds.append((tmp_path / "m.parquet").read_bytes())
    mutator, tally, path = Mutator([*seeds, PICKLE], 4), Tally(), tmp_path / "m.parquet"
    tally.read(path, mutator.draw(size(80, 10_000)), lambda: Metrics.read(path))
    tally.check(evidence, "metrics, bytes", 80)
