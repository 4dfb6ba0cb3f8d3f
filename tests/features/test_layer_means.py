"""Features of texts: each depends on its own text, and on public facts."""

import math

import pytest
import torch

from dpkfc.features import LayerMeans, TextEncoder, Whitening, ZipfWords
from dpkfc.features import layer_means as module
from tests.models import save_encoder

transformers = pytest.importorskip("transformers")

WORDS = ZipfWords(vocabulary=150, shortest=2, longest=12)
TEXTS = ["the good film", "", "of and to a in is it that was for on with as i", "best bad"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a small encoder of random weights and its tokenizer."""
    path = tmp_path_factory.mktemp("encoder")
    save_encoder(path, WORDS.words)
    return path


@pytest.fixture
def encoder(folder, tmp_path, monkeypatch):
    """Return the encoder, with a cache folder of the test's own."""
    monkeypatch.setenv("DPKFC_CACHE", str(tmp_path / "cache"))
    return TextEncoder(folder)


def test_features_have_norm_one_and_depend_on_their_text_alone(encoder):
    features = LayerMeans(encoder, Whitening(WORDS, size=60))
    together = features(TEXTS)
    assert together.shape == (4, 3 * 8 + 1)
    assert torch.allclose(together.norm(dim=1), torch.ones(4), atol=1e-6)
    for text, row in zip(TEXTS, together, strict=True):
        assert torch.equal(features([text])[0], row)


def test_means_equal_a_loop_without_padding(encoder):
    for text, row in zip(TEXTS, encoder.means(TEXTS), strict=True):
        ids = torch.tensor(encoder.tokens([text]))
        states = encoder.model(input_ids=ids, output_hidden_states=True).hidden_states
        alone = torch.cat([layer[0].mean(0) for layer in states])
        assert torch.allclose(row, alone, atol=1e-5)


def test_whitening_is_the_root_of_the_damped_covariance(encoder):
    features = LayerMeans(encoder, Whitening(WORDS, size=60))
    means = encoder.means(WORDS.draw(60)).double()
    covariance = means.T.cov(correction=0)
    damped = covariance + 0.1 * covariance.trace() / 24 * torch.eye(24)
    assert features._root is not None
    root = features._root.double()
    assert torch.allclose(root @ damped @ root, torch.eye(24, dtype=torch.float64), atol=1e-3)


def test_whitening_is_made_once_a_machine(encoder, monkeypatch, tmp_path):
    whitening = Whitening(WORDS, size=20)
    first = LayerMeans(encoder, whitening)(TEXTS)
    (file,) = (tmp_path / "cache").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(module.LayerMeans, "_fit", None)
        assert torch.equal(LayerMeans(encoder, whitening)(TEXTS), first)
    file.write_bytes(b"damaged")
    assert torch.equal(LayerMeans(encoder, whitening)(TEXTS), first)
    monkeypatch.setenv("DPKFC_CACHE", "")
    file.unlink()
    assert torch.equal(LayerMeans(encoder, whitening)(TEXTS), first)
    assert not file.exists()


def test_without_whitening_directions_stay(encoder):
    means = encoder.means(TEXTS)
    features = LayerMeans(encoder, Whitening(size=0))(TEXTS)
    scaled = means / means.norm(dim=1, keepdim=True) / math.sqrt(1.01)
    assert torch.allclose(features[:, :-1], scaled, atol=1e-6)


def test_long_texts_are_cut_at_the_window(encoder):
    long = " ".join(["good"] * 100)
    assert encoder.length == 16 and len(encoder.tokens([long])[0]) == 16


@pytest.mark.parametrize("broken", ["none", "of another encoder"])
def test_a_tokenizer_that_is_not_of_the_encoder_is_refused(folder, tmp_path, broken):
    names = ["config.json", "model.safetensors"]
    for name in names:
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    if broken != "none":
        words = [path.read_text("utf-8") for path in [folder / "vocab.txt"]]
        (tmp_path / "vocab.txt").write_text(words[0] + "\nmore\nwords", "utf-8")
        transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="add the tokenizer of this encoder") as error:
        TextEncoder(tmp_path)
    assert len(str(error.value)) <= 160


def test_lone_surrogates_and_half_precision_are_read(folder):
    whole = TextEncoder(folder)
    half = TextEncoder(folder, precision="bfloat16")
    texts = ["the good \ud800 film", "best bad"]
    assert torch.allclose(half.means(texts), whole.means(texts), atol=0.05)
    assert half.digest != whole.digest


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match="not a text encoder with a tokenizer") as error:
        TextEncoder(tmp_path)
    assert len(str(error.value)) <= 160


def test_texts_that_are_not_read_whole_or_not_known_are_counted(encoder):
    from dpkfc.app.pretrained import unread_shares

    texts = ["the good film", "", "42", "собака бежит", " ".join(["good"] * 100)]
    counts = unread_shares(encoder, texts)
    assert counts == {("cut", "texts"): 1, ("of unknown language", "texts"): 1}
