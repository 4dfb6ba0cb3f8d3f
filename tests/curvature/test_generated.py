"""Texts that a language model writes follow its own distribution, and the model stays as it was."""

import copy

import pytest
import torch
from torch import nn

from dpkfc.curvature import generated_text

transformers = pytest.importorskip("transformers")


def gpt2(vocab=12):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=vocab,
        n_positions=16,
        n_embd=8,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
    )
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.wte.weight.mul_(40)  # far from uniform
    return model.train()


def test_every_token_is_drawn_from_the_model_given_those_before():
    """Against the model without a cache: frequencies of the second and of the third token."""
    model, n = gpt2(), 4000
    ids = generated_text(model, n, 3, start_id=0, chunk=1000).inputs["input_ids"]
    model.eval()
    with torch.no_grad():
        first = model(torch.tensor([[0]])).logits[0, -1].double().softmax(0)
        third = (
            model(torch.stack([torch.zeros(12, dtype=torch.int64), torch.arange(12)], 1))
            .logits[:, -1]
            .double()
            .softmax(1)
        )
    assert first.max() > 0.2  # an ordinary model would be no test
    for expected, column in ((first, 1), (first @ third, 2)):
        found = torch.bincount(ids[:, column], minlength=12) / n
        deviation = (expected * (1 - expected) / n).sqrt()
        assert ((found - expected).abs() <= 5 * deviation + 1e-3).all()


def test_the_model_and_the_global_numbers_stay_as_they_are():
    model = gpt2()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    first = generated_text(model, 5, 8, start_id=0, seed=3, chunk=2)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert first == generated_text(model, 5, 8, start_id=0, seed=3, chunk=2)
    assert first != generated_text(model, 5, 8, start_id=0, seed=4, chunk=2)
    assert (
        first.describe()["source"] == "public"
        and "written by GPT2LMHeadModel, seed 3" in first.provenance
    )


def test_a_text_is_over_behind_its_end():
    data = generated_text(gpt2(4), 200, 10, start_id=1, end_id=1, pad_id=2)
    ids, mask = data.inputs["input_ids"], data.inputs["attention_mask"]
    assert ids.shape == mask.shape == (200, 10) and (ids[:, 0] == 1).all()
    for text, counted in zip(ids.tolist(), mask.tolist(), strict=True):
        size = next((i + 1 for i in range(1, 10) if text[i] == 1), 10)
        assert counted == [1] * size + [0] * (10 - size) and text[size:] == [2] * (10 - size)
    assert 0 < mask.sum() < mask.numel()


def test_what_cannot_write_is_refused():
    class Plain(nn.Module):
        def forward(self, input_ids, **_):
            return input_ids

    for model in (nn.Linear(3, 3), Plain()):
        with pytest.raises(TypeError, match="needs a causal language model"):
            generated_text(model, 2, 4, start_id=0)
    broken = gpt2()
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN or infinity"):
        generated_text(broken, 2, 4, start_id=0)
    for n, length in ((0, 4), (2, 1)):
        with pytest.raises(ValueError, match="must be an integer >="):
            generated_text(broken, n, length, start_id=0)
