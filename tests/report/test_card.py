"""The privacy card: what it promises, what it stamps, what it says is not protected."""

import json
import math
from dataclasses import replace

import pytest

from dpkfc.config import PrivacyConfig
from dpkfc.curvature import KFAC, PinkNoise
from dpkfc.privacy.accounting import epsilon
from dpkfc.report.card import CardFacts, build_card, dataset_size, software, stamp
from dpkfc.report.card_files import to_markdown

FACTS = CardFacts(
    title="DP-KFC on digits",
    releases=5,
    ledger={"file": "ledger.jsonl", "releases": 5, "head": "ab" * 32},
    assumed_public={"number of examples N": (1000, "the sampling rate follows from it")},
    device="cpu",
    chosen_by="tuned on a validation split | not accounted",
    not_private={"metrics.parquet: clipped_fraction": "computed before noise"},
    results={"accuracy on the test set": 0.9},
    seeds={"initial weights": 3},
    refreshes=[{"step": s, "digest": f"{s:064d}", "scale": 1.0} for s in range(0, 150, 10)],
    settings={"lr": 0.1},
)


def _plan(**changed):
    settings = {
        "expected_batch_size": 100,
        "steps": 5,
        "preconditioner": KFAC(probe=PinkNoise((1, 8, 8)), every=10),
    }
    return PrivacyConfig(**{**settings, **changed}).with_noise(
        changed.pop("sigma", 2.0), 1e-5, 1000
    )


def test_the_card_states_the_guarantee_and_the_mechanism():
    plan = _plan()
    card = build_card(plan, FACTS)
    promise, mechanism = card["guarantee"], card["mechanism"]
    assert promise["epsilon"] == epsilon(plan.event, 5, 1e-5) and promise["delta"] == 1e-5
    assert (
        promise["unit"] == "one example" and promise["neighbouring_relation"] == "add_or_remove_one"
    )
    assert (mechanism["noise_multiplier"], mechanism["divisor"], mechanism["max_grad_norm"]) == (
        2.0,
        100,
        1.0,
    )
    assert card["accounting"]["accountant"] == "pld"
    assert card["accounting"]["epsilon_by"]["pld"] <= card["accounting"]["epsilon_by"]["rdp"]
    assert (
        card["curvature"]["probe"]["kind"] == "PinkNoise"
        and len(card["curvature"]["refreshes"]) == 15
    )
    assert card["hyper_parameters"]["chosen_by"].startswith("tuned on")
    assert card["software"]["torch"] == software()["torch"]
    assert json.loads(json.dumps(card, allow_nan=False)) == card


@pytest.mark.parametrize(
    "device, seed, text",
    [("cpu", None, "AES-256"), ("cuda:0", None, "ChaCha20"), ("cpu", 0, "NOT PRIVATE")],
)
def test_the_card_says_where_noise_comes_from(device, seed, text):
    card = build_card(_plan(test_mode_seed=seed), replace(FACTS, device=device))
    assert text in card["mechanism"]["noise_generator"] and text in to_markdown(card)


def test_neighbours_differ_in_the_unit_of_the_plan():
    card = build_card(_plan(unit="patient", max_records_per_unit=4), FACTS)
    assert card["guarantee"]["neighbours_differ_in"] == "one patient added or removed"
    (size,) = dataset_size(_plan(unit="patient", max_records_per_unit=4))
    assert size == "number of units N (each one patient, with all records)"
    assert "for one patient (all records" in to_markdown(card) and "one example" not in to_markdown(
        card
    )


def test_the_markdown_says_all_of_it():
    text = to_markdown(build_card(_plan(), FACTS))
    assert text.startswith("# Privacy card: DP-KFC on digits\n")
    for part in (
        "differentially private",
        "one example added or removed",
        "PLD:",
        "RDP:",
        "poisson",
        "clipped_fraction",
        "15, before steps 0, 10,",
        "… 140",
        "number of examples N",
        "tuned on a validation split \\| not accounted",
        "ab" * 32,
        "PinkNoise",
    ):
        assert part in text, part
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.replace("\\|", "").count("|") in (3, 4) for line in rows)


@pytest.mark.parametrize(
    "changed, sigma, text",
    [
        ({}, 2.0, ""),
        ({"test_mode_seed": 3}, 2.0, "NOT PRIVATE: test mode"),
        ({"sampler": "shuffle", "uncertified": True}, 2.0, "UNCERTIFIED"),
        ({}, 0.0, "NOT PRIVATE"),
    ],
)
def test_stamps(changed, sigma, text):
    config = PrivacyConfig(expected_batch_size=100, steps=5, **changed)
    plan = config.with_noise(sigma, 1e-5, 1000)
    card = build_card(plan, FACTS)
    markdown = to_markdown(card)
    assert stamp(plan) == text and (card["stamp"] or "") == text
    assert ("differentially private** for" in markdown) == (not text)
    if text:
        assert f"**{text}**" in markdown and "no certified guarantee" in markdown
    if sigma == 0:
        assert card["guarantee"]["epsilon"] == "inf" and math.isinf(plan.epsilon())
    json.dumps(card, allow_nan=False)


def test_a_printed_epsilon_is_never_below_the_true_one():
    card = build_card(_plan(), FACTS)
    card["guarantee"]["epsilon"] = 1.00001
    assert "ε = 1.0001" in to_markdown(card)
