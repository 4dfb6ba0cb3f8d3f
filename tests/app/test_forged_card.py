"""A card that was edited, and weights that were exchanged, do not pass for those of the run."""

import json

import pytest

from dpkfc.privacy.events import event_from_dict
from dpkfc.privacy.ledger import Ledger, verify
from dpkfc.report.card_files import write_card_files
from dpkfc.report.promise import agrees
from dpkfc.report.verify import verify_ledger
from tests.app.finished import SETTINGS, call, flags, read_card, refuse


def edit_card(folder, change, *, everywhere=False):
    """Change a card; a careful forger changes its pages too."""
    card = read_card(folder)
    change(card)
    if everywhere:
        write_card_files(folder, card)
    else:
        (folder / "privacy_card.json").write_text(json.dumps(card))


def guarantee(**changed):
    return lambda card: card["guarantee"].update(changed)


def audit(folder):
    return call("audit", folder, "--kind", "membership", "--quiet")


@pytest.mark.parametrize(
    "change, message",
    [
        (guarantee(epsilon=0.5), "states another ε than its ledger (0.5 instead of"),
        (guarantee(epsilon=True), "states another ε"),
        (guarantee(epsilon="inf"), "states another ε"),
        (guarantee(delta=0.001), "states another delta"),
        (
            guarantee(unit="one hospital"),
            "states another unit than its ledger (one hospital instead of one example)",
        ),
        (guarantee(neighbouring_relation="replace_one"), "states another neighbouring relation"),
        (guarantee(releases=1), "states another number of releases"),
        (guarantee(certified=False), "states another certified"),
        (lambda card: card.update(plan_hash="a" * 64), "states another plan"),
        (lambda card: card["accounting"].update(accountant="mine"), "names no known accountant"),
    ],
    ids=[
        "ε",
        "a truth",
        "infinite",
        "δ",
        "unit",
        "relation",
        "releases",
        "certified",
        "plan",
        "accountant",
    ],
)
def test_an_edited_promise_does_not_pass(folder, change, message):
    edit_card(folder, change)
    assert message in refuse("ledger", "verify", folder)


def mechanism(**changed):
    return lambda card: card["mechanism"].update(changed)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda card: card.pop("layout"), "it has no layout"),
        (lambda card: card.pop("dates"), "was changed, or is damaged (KeyError: 'dates')"),
        (guarantee(neighbours_differ_in="ten added or removed"), "another difference of"),
        (guarantee(planned_steps=999), "another planned number of releases"),
        (guarantee(target_epsilon=0.01), "another target of ε"),
        (lambda card: card["accounting"].update(epsilon_by={}), "another set of accountants"),
        (
            lambda card: card["accounting"].update(epsilon_by={"pld": 0.01, "rdp": 0.01}),
            "another ε by PLD",
        ),
        (mechanism(divisor=1), "another divisor"),
        (mechanism(sampler={"kind": "x"}), "another sampled dataset"),
        (lambda card: card["mechanism"]["sampler"].update(sample_rate=0.5), "another sample_rate"),
        (mechanism(event={"type": "GaussianDpEvent", "noise_multiplier": 9.0}), "another event"),
        (
            lambda card: card.update(total={"epsilon": 0.01, "delta": 1e-5, "runs": ["a"]}),
            "this run alone has",
        ),
        (lambda card: card.update(total={"epsilon": 99.0}), "KeyError: 'delta'"),
    ],
)
def test_an_edited_card_with_fitting_pages_does_not_pass(folder, change, message):
    path = folder / "privacy_card.json"
    card = json.loads(path.read_text())
    change(card)
    path.write_text(json.dumps(card))
    for name in ("privacy_card.md", "card.json"):
        (folder / name).unlink()
    assert message in refuse("ledger", "verify", folder)


@pytest.mark.parametrize(
    "change, where",
    [
        (
            lambda card: card["mechanism"].update(noise_multiplier=40.0),
            "mechanism, noise_multiplier: the card says 40",
        ),
        (
            lambda card: card["mechanism"]["sampler"].update(sample_rate=0.001),
            "mechanism, sampler, sample_rate",
        ),
        (lambda card: card["mechanism"].pop("stddev"), "mechanism, stddev: the card says nothing"),
        (lambda card: card["mechanism"].update(secure=True), "mechanism, secure"),
        (
            lambda card: card["guarantee"].update(neighbours_differ_in="one hospital"),
            "guarantee, neighbours_differ_in",
        ),
        (lambda card: card.update(caveats=["none"]), "caveats"),
        (
            lambda card: card["accounting"]["epsilon_by"].update(pld=0.1),
            "accounting, epsilon_by, pld",
        ),
        (lambda card: card.update(curvature={"name": "kfac"}), "curvature"),
    ],
)
def test_an_audit_compares_the_card_with_settings_and_ledger(folder, change, where):
    edit_card(folder, change)
    assert audit(folder).exit_code == 2
    assert where in json.loads((folder / "audit.json").read_text())["card"]["detail"]


def test_a_card_without_a_digest_says_so_and_fails_an_audit(folder):
    edit_card(folder, lambda card: card.pop("weights"), everywhere=True)
    assert "names no digest" in verify_ledger(folder / "ledger.jsonl")["weights"]
    assert audit(folder).exit_code == 2
    elsewhere = {"file": "../../elsewhere", "sha256": "0" * 64}
    edit_card(folder, lambda card: card.update(weights=elsewhere), everywhere=True)
    assert "elsewhere is not next to the card" in verify_ledger(folder / "ledger.jsonl")["weights"]


def test_a_card_that_cannot_be_shown_is_left_alone_and_fails(folder):
    edit_card(folder, lambda card: card["accounting"].update(accountant=[]))
    for text in ((folder / "privacy_card.json").read_text(), "[]"):
        (folder / "privacy_card.json").write_text(text)
        assert audit(folder).exit_code == 2 and refuse("ledger", "verify", folder)
        assert (folder / "privacy_card.json").read_text() == text
    assert "is damaged" in json.loads((folder / "audit.json").read_text())["card"]["detail"]


# -- what a ledger says by itself ------------------------------------------------------------------


def test_a_ledger_says_whom_it_is_about(folder):
    (folder / "privacy_card.json").unlink()
    header = verify(folder / "ledger.jsonl").header
    assert (
        header["unit"] == "one example" and header["neighbouring_relation"] == "add_or_remove_one"
    )
    assert (
        (header["delta"], header["steps"]) == (1e-5, 3)
        and header["dataset_size"] > 1000
        and header["dpkfc"]
    )
    result = call("ledger", "verify", folder)
    assert (
        "one example" in result.output
        and "at δ = 1e-05" in result.output
        and "NOT PRIVATE" not in result.output
    )


def test_without_a_card_delta_is_that_of_the_first_line(folder, tmp_path):
    first = verify(folder / "ledger.jsonl").releases[0]
    for delta, shown in ((0.002, "0.002"), (7.0, "1e-05"), ("[bold]", "1e-05")):
        path = tmp_path / f"{shown}{delta!s:.1}.jsonl"
        with Ledger.open(
            path, "a" * 64, {"certified": True, "rng": "secure", "delta": delta, "unit": "[/red]"}
        ) as ledger:
            ledger.charge(
                0,
                event_from_dict(first["event"]),
                *(first[x] for x in ("noise_multiplier", "stddev", "sensitivity")),
            )
        result = call("ledger", "verify", path)
        assert (
            result.exit_code == 0
            and f"at δ = {shown}" in result.output
            and "[/red]" in result.output
        )


@pytest.mark.parametrize(
    "header, first",
    [
        ({"certified": False, "rng": "repeatable"}, "NOT PRIVATE: the noise repeats from a seed"),
        ({"certified": False, "rng": "secure"}, "UNCERTIFIED: the run that wrote this ledger"),
        ({}, "UNCERTIFIED: the run that wrote this ledger"),
        ({"certified": True}, "UNCERTIFIED: the ledger does not say where its noise came from"),
    ],
)
def test_what_speaks_against_a_ledger_comes_first(folder, tmp_path, header, first):
    found = verify(folder / "ledger.jsonl").releases[0]
    path = tmp_path / "other.jsonl"
    with Ledger.open(path, "a" * 64, header) as ledger:
        ledger.charge(
            0,
            event_from_dict(found["event"]),
            found["noise_multiplier"],
            found["stddev"],
            found["sensitivity"],
        )
    answers = verify_ledger(path)
    assert next(iter(answers)) == "guarantee" and answers["guarantee"].startswith(first)
    assert all(
        name.startswith("ε if it were certified")
        for name in answers
        if "ε" in name and "planned" not in name
    )


def test_a_head_that_was_kept_is_looked_for(folder):
    found = verify(folder / "ledger.jsonl")
    for releases in (3, 1, 0):
        assert (
            call(
                "ledger", "verify", folder, "--head", found.heads[releases], "--releases", releases
            ).exit_code
            == 0
        )
    for head, releases in (
        (found.heads[3], 2),
        (found.heads[3], 9),
        ("ab" * 32, 3),
        (found.heads[2], -2),
    ):
        assert "does not contain the head" in refuse(
            "ledger", "verify", folder, "--head", head, "--releases", releases
        )
    assert "belong together" in refuse("ledger", "verify", folder, "--head", found.heads[3])
    assert "belong together" in refuse("ledger", "verify", folder, "--releases", 3)


def test_training_ends_with_the_head(tmp_path):
    result = call("train", *flags(SETTINGS), "--out", tmp_path / "run", "--quiet")
    assert (
        f"ledger: 3 releases, head {verify(tmp_path / 'run' / 'ledger.jsonl').heads[3]}"
        in result.output
    )


def test_numbers_agree_to_their_last_digits_and_kinds_exactly():
    assert agrees({"a": [1.0, "x"]}, {"a": [1.0 + 1e-9, "x"]}) and agrees(1, 1.0)
    numbers = ((1.01, 1.0), (True, 1.0), (True, 1), ("1", 1), (10**400, 1.0))
    for stated, held in (*numbers, (None, "x"), ([1.0], [1.0, 2.0]), ({"a": 1}, {"b": 1})):
        assert not agrees(stated, held)
