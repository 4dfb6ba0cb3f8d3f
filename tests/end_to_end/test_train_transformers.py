"""Train models of transformers and adapters of peft, as they are, on padded texts."""

import pytest
import torch
from torch.testing import assert_close

from dpkfc import PrivacyConfig, Session
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.tape import Tape
from tests.gradients.whitened import clip_in_library, metric_of
from tests.models import VOCABULARY, bert, classify, gpt2, predict_next

pytest.importorskip("transformers")

N, LENGTHS = 4, (6, 3, 5, 1)


def padded(to=6):
    """Texts of 6, 3, 5 and 1 tokens, padded to so many."""
    generator = torch.Generator().manual_seed(3)
    mask = (torch.arange(to) < torch.tensor(LENGTHS).unsqueeze(1)).long()
    ids = torch.zeros(N, to, dtype=torch.long)
    for row, length in zip(ids, LENGTHS, strict=True):
        row[:length] = torch.randint(3, VOCABULARY, (length,), generator=generator)
    return {"input_ids": ids, "attention_mask": mask}


def add_labels(batch):
    return {**batch, "labels": torch.arange(N) % 3}


def modelled(batch):
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return {**batch, "labels": labels}


def rows_of(batch):
    return [{name: x[i] for name, x in batch.items()} for i in range(N)]


def session(model, batch, steps=2, public=None, **settings):
    config = PrivacyConfig(expected_batch_size=N, steps=steps, test_mode_seed=5, **settings)
    return Session(
        config.with_noise(1.0, 1e-3, N),
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1),
        rows_of(batch),
        public_records=None if public is None else rows_of(public),
    )


def train(s, loss):
    with s:
        for batch in s.batches():
            s.step(batch, loss)


# -- whole models ----------------------------------------------------------------------------------


def test_a_model_generates_after_a_session_and_keeps_its_names_and_its_tie():
    model = gpt2()
    keys, before = list(model.state_dict()), model.lm_head.weight.detach().clone()
    train(session(model, modelled(padded())), predict_next)
    assert not torch.equal(model.lm_head.weight, before)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert list(model.state_dict()) == keys
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    ids = torch.randint(3, VOCABULARY, (1, 4))
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 7)


@pytest.mark.parametrize("build", [bert, gpt2])
def test_dropout_draws_the_same_numbers_with_and_without_the_tape(build):
    """One row of positions for each example changes no shape that a random number has."""
    drops = {"hidden_dropout_prob": 0.1} if build is bert else {"embd_pdrop": 0.1}
    model = build(**drops).train()
    batch, loss = (
        (add_labels(padded()), classify) if build is bert else (modelled(padded()), predict_next)
    )
    torch.manual_seed(1)
    plain = loss(model, batch)
    torch.manual_seed(1)
    with Tape(model, find_layers(model)):
        assert torch.equal(loss(model, batch), plain)


@pytest.mark.parametrize("frozen", [False, True])
def test_ids_without_a_row_in_public_records_are_named(frozen):
    model, batch = bert(), add_labels(padded())
    model.bert.embeddings.requires_grad_(not frozen)
    public = {**batch, "input_ids": batch["input_ids"].clone()}
    public["input_ids"][:, 0] = VOCABULARY
    s = session(model, batch, public=public)
    with pytest.raises(
        ValueError,
        match=rf"'bert.embeddings.word_embeddings' has {VOCABULARY} rows"
        rf".*outside 0 … {VOCABULARY - 1}.*len\(tokenizer\)",
    ):
        train(s, classify)
    assert s.ledger.count == 0


def test_a_sequence_longer_than_the_positions_is_named():
    with pytest.raises(ValueError, match=r"'transformer.wpe' has 12 rows"):
        train(session(gpt2(), modelled(padded(13))), predict_next)


# -- padding ---------------------------------------------------------------------------------------


@pytest.mark.quick("bert-eager-dense", "bert-sdpa-None", "gpt2-eager-None", "gpt2-sdpa-dense")
@pytest.mark.parametrize("kind", [None, "dense"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("build", [bert, gpt2])
def test_neither_the_length_nor_the_content_of_padding_changes_a_clipped_sum(
    build, attention, kind
):
    model = build(attn_implementation=attention).eval()
    layers = find_layers(model)
    metric = metric_of(layers, kind) if kind else {}
    make, loss = (add_labels, classify) if build is bert else (modelled, predict_next)
    batches = [make(padded(to)) for to in (6, 7, 11)]
    filled = batches[-1]["input_ids"].masked_fill(batches[-1]["attention_mask"] == 0, 17)
    batches.append({**batches[-1], "input_ids": filled})
    results = [clip_in_library(model, layers, batch, loss, 0.7, metric) for batch in batches]
    for norms, total in results[1:]:
        assert_close(norms, results[0][0], rtol=1e-10, atol=1e-12)
        for parameter, expected in results[0][1].items():
            assert_close(total[parameter], expected, rtol=1e-9, atol=1e-11)


# -- adapters --------------------------------------------------------------------------------------
