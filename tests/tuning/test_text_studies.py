"""Studies of texts: what they train is what their tables say, and ε counts all of it."""

import functools
from dataclasses import replace

import dp_accounting
import pytest
import torch

from dpkfc import PrivacyConfig, Session
from dpkfc.app.datasets.text import Texts
from dpkfc.features import LayerMeans, TextEncoder, Whitening, ZipfWords
from dpkfc_papers.studies import (
    byte_gpt2,
    fine_tuning,
    head_search,
    language,
    paper_methods,
    small_transformer,
)
from dpkfc_papers.studies import rows as rows_of_studies
from tests.models import save_encoder

WORDS = ZipfWords(vocabulary=120, shortest=2, longest=12)
TEXTS = WORDS.draw(12, seed=3)
LABELS = [row % 2 for row in range(12)]
DELTA = language.DELTA


@pytest.fixture
def encoder(tmp_path, monkeypatch):
    """Return a small encoder of random weights, whose blocks the study then takes."""
    save_encoder(tmp_path, WORDS.words, blocks=3)
    monkeypatch.setenv("DPKFC_CACHE", str(tmp_path / "cache"))
    made = TextEncoder(tmp_path)
    blocks = made.model.encoder.layer
    monkeypatch.setattr(fine_tuning, "encoder_blocks", lambda: blocks)
    means = functools.partial(LayerMeans, whitening=Whitening(WORDS, size=40))
    monkeypatch.setattr(fine_tuning, "LayerMeans", means)
    return made


@pytest.mark.parametrize("name", ["block-1", "block-2"])
def test_blocks_above_cached_states_give_the_logits_of_the_whole_encoder(encoder, name):
    arm = fine_tuning.ARMS[name]
    head = torch.randn(2, 4 * 8 + 1)
    model = fine_tuning.make_model(encoder, arm, head)
    rows = fine_tuning.make_rows(encoder, TEXTS, LABELS, 3 - arm.blocks)
    *inputs, labels = fine_tuning.collate([rows[row] for row in range(12)])
    order = torch.tensor([len(ids) for ids in encoder.tokens(TEXTS)]).argsort(stable=True)
    assert labels.tolist() == torch.tensor(LABELS)[order].tolist()
    expected = fine_tuning.LayerMeans(encoder)(TEXTS)[order] @ head.T
    # States are kept in bfloat16.
    assert torch.allclose(model(*inputs), expected, atol=0.05)


@pytest.mark.parametrize("name", ["biases", "lora-2", "block-1"])
def test_an_arm_trains_its_part_in_proved_passes(encoder, name):
    if name == "lora-2":
        pytest.importorskip("peft")
    arm = fine_tuning.ARMS[name]
    model = fine_tuning.make_model(encoder, arm, torch.randn(2, 4 * 8 + 1))
    rows = fine_tuning.make_rows(encoder, TEXTS, LABELS, 3 - arm.blocks)
    trained = {key for key, p in model.named_parameters() if p.requires_grad}
    wanted = {"biases": "bias", "lora-2": "lora_", "block-1": "blocks."}[name]
    assert trained and all(wanted in key and "head" not in key for key in trained)
    plan = PrivacyConfig(expected_batch_size=6, steps=1).with_noise(1.0, 1e-3, 12)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    shown = [rows[row] for row in range(4)]
    with Session(
        plan, model, optimizer, rows, collate_fn=fine_tuning.collate, public_records=shown
    ) as session:
        for batch in session.batches():
            session.step(batch, fine_tuning.loss_fn)
        assert not session.unproved_operation


def test_epsilon_of_blocks_includes_their_head():
    noise, spent = fine_tuning.upper_noise(3.0, 1.5, 8)
    head = fine_tuning.whitened_config(fine_tuning.TRAIN, 1.5, 1e-5, 2)
    plan = head.calibrate(1.5, 1e-5, fine_tuning.TRAIN)
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(plan.event, plan.steps)
    rate = fine_tuning.BATCH / fine_tuning.TRAIN
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(step, 8)
    assert 2.95 < spent <= 3.0
    assert accountant.get_epsilon(1e-5) == pytest.approx(spent, rel=0.01)


def test_steps_that_are_written_out_are_those_of_a_session(monkeypatch):
    """The noise alone differs, so almost none is drawn; C is small enough to bind."""
    features = torch.randn(400, 9)
    rows = torch.nn.functional.normalize(features, dim=1)
    labels = features[:, :3].argmax(1)
    monkeypatch.setattr(
        PrivacyConfig, "calibrate", lambda plan, *_: plan.with_noise(1e-4, DELTA, 400)
    )
    chosen = head_search.rule(rows, head_search.gaussian_noise(1.0, DELTA))
    expected, plan = language.train_private(rows, labels, 3, 1.0)
    assert (plan["clip"], plan["rate"]) == (chosen.clip, chosen.rate)
    shorter = chosen._replace(steps=7)
    found = head_search.train((rows, labels), 3, 0.0, [shorter, chosen])
    assert torch.allclose(found[1], expected.weight, atol=1e-4)
    alone = head_search.train((rows, labels), 3, 0.0, [shorter])
    assert torch.allclose(found[:1], alone, atol=1e-6)
    assert chosen.clip < 1 and found[0].abs().max() > 0.02


def test_a_search_is_chosen_by_validation_rows_and_pays_for_its_trials(monkeypatch):
    calls = []

    def train(data, classes, whole, settings, seed=0):
        calls.append((whole, settings))
        return settings

    def judge(settings, data):
        assert data is (validation if len(calls) == 1 else test)
        near = -1.0 if data is validation else 1.0
        return [near * abs(setting.steps - 40) for setting in settings]

    monkeypatch.setattr(head_search, "train", train)
    monkeypatch.setattr(head_search, "judge", judge)
    data, validation, test = [(torch.zeros(50, 9), torch.zeros(50)) for _ in range(3)]
    row = head_search.execute(head_search.Parts(2, data, test, data, validation), "counted", 1.0, 2)
    (noise, settings), (last_noise, chosen) = calls
    nearest = min(settings, key=lambda setting: abs(setting.steps - 40))
    assert chosen == [nearest] * 2 and row["chosen"] == nearest._asdict()
    assert row["test"] == [abs(nearest.steps - 40)] * 2
    assert len(settings) == 20 and noise == last_noise
    # 21 runs share ε: together they have the noise of one run.
    whole = head_search.gaussian_noise(1.0, DELTA)
    assert 21 / noise**2 == pytest.approx(1 / whole**2)


@pytest.mark.quick("vectors-*", "bytes-kfc-inputs")
@pytest.mark.parametrize("name", small_transformer.COMPARISON.methods)
@pytest.mark.parametrize("study", [small_transformer, byte_gpt2], ids=["vectors", "bytes"])
def test_a_method_of_the_papers_trains_a_transformer(study, name, monkeypatch):
    if study is small_transformer:
        x = torch.randn(24, study.LENGTH, study.WIDTH)
        rows: tuple = x, torch.arange(24) % 4
    else:
        x = study.encode_texts(["a text", "", "a longer text " * 9] * 8)
        rows = (x,)
    monkeypatch.setattr(byte_gpt2, "WIDTH", 16)
    small = replace(
        study.COMPARISON,
        draw_inputs=lambda: rows[0][:16, : study.LENGTH],
        draw_batch=lambda: rows,
        batch=8,
        steps=2,
    )
    monkeypatch.setattr(paper_methods, "noise_multiplier", lambda *_: 1.0)
    row = small.execute(name, 8.0, small.methods[name].rates[0], 0, rows, rows)
    assert row["steps"] == 2 and 0 <= row["accuracy"] <= 100 and row["clip"] > 0


def test_bytes_of_a_text_and_one_end_count():
    """The mean is over the text and its end; a text that is cut ends nowhere."""
    ids = byte_gpt2.encode_texts(["ab", "x" * 100])
    model = byte_gpt2.make_model()
    _, _, counted = byte_gpt2.token_losses(model, ids)
    assert counted.sum(1).tolist() == [3, byte_gpt2.LENGTH]
    losses = byte_gpt2.loss_fn(model, (ids,))
    logits = model(input_ids=ids[:1, :3]).logits[0]
    wanted = torch.tensor([ord("a"), ord("b"), byte_gpt2.END])
    expected = torch.nn.functional.cross_entropy(logits, wanted)
    assert losses[0].item() == pytest.approx(expected.item(), rel=1e-5)


def test_tables_show_how_many_seeds_a_cell_has(monkeypatch):
    def row(epsilon, accuracy, **more):
        return {"epsilon": epsilon, "accuracy": accuracy, "processor_seconds": 30.0, **more}

    rows = {
        "head/1/0": row(1.0, 80.0),
        "lora-1/1/0": row(1.0, 81.0, head_accuracy=80.5),
        "lora-1/1/1": row(1.0, 82.0, head_accuracy=80.5),
        "lora-1/none": row(None, 83.0, head_accuracy=80.5),
        "validation/lora-1/0.004": row(3.0, 99.0),
    }
    monkeypatch.setattr(rows_of_studies, "read_json", lambda _: {"rows": rows})
    lines = fine_tuning.table().splitlines()
    assert lines[2] == "| head alone | 80.00 (1) | – | – | – | – | 0.5 |"
    assert lines[3].endswith("| 81.50\xa0±\xa06.35 (2) | – | – | 83.00 | +1.00 | 0.5 |")
    method = {"method": "dp-sgd", "rate": 0.1}
    rows = {"dp-sgd/8/0": row(8.0, 70.0, **method), "start": {"method": "start", "accuracy": 50.0}}
    monkeypatch.setattr(rows_of_studies, "read_json", lambda _: {"rows": rows})
    assert small_transformer.table().splitlines()[2:] == [
        "| no training | 50.00 | 50.00 | – | – |",
        "| DP-SGD | – | 70.00 (1) | – | 30.0 |",
    ]


def test_texts_of_the_test_split_are_left_out_of_training(study_module, monkeypatch, tmp_path):
    features = study_module("features")
    texts = Texts((["a", "b", "c"], [0, 1, 1]), (["b", "d"], [1, 0]), "a test")
    monkeypatch.setattr(features, "load_texts", lambda *_: texts)
    monkeypatch.setattr(features, "minilm_vectors", lambda lines, _: torch.ones(len(lines), 3))
    source = features.Sentences("ag-news", "", tmp_path)
    arm = features.read_arms("sentences")[0]
    for part, labels in (("train", [0, 1]), ("test", [1, 0])):
        assert source.labels(part).tolist() == labels
        assert torch.equal(source.inputs(arm, part), torch.full((2, 3), features.NORM))
