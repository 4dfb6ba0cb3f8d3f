"""Padding: how far a batch was padded changes nothing, and padded tokens contribute nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.rules import blocks_of
from dpkfc.gradients.tape import Tape
from tests.gradients.whitened import clipped, metric_of

transformers = pytest.importorskip("transformers")

V, LENGTHS = 23, (6, 3, 5, 1)
Batch = dict[str, Tensor]


def padded(to: int, side: str = "right") -> Batch:
    generator = torch.Generator().manual_seed(3)
    ids, mask = (
        torch.zeros(len(LENGTHS), to, dtype=torch.long),
        torch.zeros(len(LENGTHS), to, dtype=torch.long),
    )
    for i, length in enumerate(LENGTHS):
        rows = slice(0, length) if side == "right" else slice(to - length, to)
        ids[i, rows] = torch.randint(1, V, (length,), generator=generator)
        mask[i, rows] = 1
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
        "y": torch.arange(4) % 3,
    }


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The sum over an example's own tokens; an example of one token has nothing to predict."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    losses = F.cross_entropy(
        logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], ignore_index=-100, reduction="none"
    )
    return losses.sum(1)


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits, batch["y"], reduction="none")


_SMALL = {
    "vocab_size": V,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
}
_SMALL |= {
    "max_position_embeddings": 20,
    "num_labels": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[str, str, dict, Callable[[nn.Module, Batch], Tensor]]] = {
    "bert": ("BertForSequenceClassification", "BertConfig", _SMALL, class_loss),
    "bert mlm": ("BertForMaskedLM", "BertConfig", _SMALL, token_loss),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", _SMALL, class_loss),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": V,
            "n_embd": 8,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 20,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        token_loss,
    ),
}


def build(name: str, attention: str) -> tuple[nn.Module, Callable[[nn.Module, Batch], Tensor]]:
    model, config, settings, loss_fn = MODELS[name]
    torch.manual_seed(0)
    built = getattr(transformers, model)(
        getattr(transformers, config)(**settings, attn_implementation=attention)
    )
    return built.double().eval(), loss_fn


@pytest.mark.parametrize("kind", [None, "dense"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_how_far_a_batch_is_padded_changes_no_clipped_sum(
    name: str, attention: str, kind: str | None
) -> None:
    model, loss_fn = build(name, attention)
    layers = find_layers(model)
    metric = metric_of(layers, kind) if kind else {}
    results = [clipped(model, layers, padded(to), loss_fn, 0.7, metric) for to in (6, 7, 15)]
    for norms, total in results[1:]:
        torch.testing.assert_close(norms, results[0][0], rtol=1e-10, atol=1e-12)
        for parameter, expected in results[0][1].items():
            torch.testing.assert_close(total[parameter], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_what_stands_in_the_padding_changes_nothing(attention: str) -> None:
    model, loss_fn = build("gpt2", attention)
    layers, batch = find_layers(model), padded(9)
    expected = clipped(model, layers, batch, loss_fn, 0.7)
    filled = {
        **batch,
        "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 17),
    }
    norms, total = clipped(model, layers, filled, loss_fn, 0.7)
    torch.testing.assert_close(norms, expected[0])
    for parameter in total:
        torch.testing.assert_close(total[parameter], expected[1][parameter], rtol=1e-9, atol=1e-11)


def test_rows_of_padded_positions_are_zero() -> None:
    """The gradients at every layer's output vanish there, except in what attention reads without
    using it.
    """
    model, loss_fn = build("gpt2", "eager")
    layers, batch = find_layers(model), padded(9)
    tape = Tape(model, layers, batch_size=4)
    with tape:
        losses = loss_fn(model, batch)
    calls = tape.backward(losses)
    out = batch["attention_mask"] == 0
    for layer in layers:
        for call in calls[layer.name]:
            assert float(call.output_gradients[0][out].abs().max()) == 0, layer.name


def test_padding_idx_and_an_example_without_a_label() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(V, 4, padding_idx=0), nn.Linear(4, V)).double()
    layers = find_layers(model)

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["input_ids"])
        return F.cross_entropy(
            logits.transpose(1, 2), batch["labels"], reduction="none", ignore_index=-100
        ).sum(1)

    batch = padded(8)
    batch["labels"][2] = -100
    norms, total = clipped(model, layers, batch, loss_fn, 1e9)
    assert norms[2] == 0
    assert float(total["0.weight"][0].abs().max()) == 0
    tape = Tape(model, layers)
    with tape:
        losses = loss_fn(model, batch)
    block = blocks_of(layers[0], tape.backward(losses)["0"], 4)
    assert float(block.b[batch["input_ids"] == 0].abs().max()) == 0
