"""Transformers models train as they are: per-example gradients of every family against a loop over
single examples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.config import PrivacyConfig
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.tape import Tape
from dpkfc.session import Session
from tests.gradients.whitened import check

transformers = pytest.importorskip("transformers")

N, T, V = 4, 7, 29
_BERT = {
    "vocab_size": V,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
_BERT |= {"max_position_embeddings": 12, "num_labels": 3, "pad_token_id": 0}
_GPT2 = {"vocab_size": V, "n_embd": 12, "n_layer": 2, "n_head": 2, "n_positions": 12}
_LLAMA = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA |= {
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}


def tokens() -> dict[str, Tensor]:
    """Right-padded token ids of different lengths."""
    ids = torch.randint(3, V, (N, T))
    mask = (torch.arange(T) < torch.tensor([7, 4, 6, 2])[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def classified() -> dict[str, Tensor]:
    return {**tokens(), "labels": torch.randint(0, 3, (N,))}


def modelled() -> dict[str, Tensor]:
    batch = tokens()
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def masked() -> dict[str, Tensor]:
    batch = modelled()
    chosen = torch.rand(N, T) < 0.5
    chosen[:, 0] = True
    return {**batch, "labels": batch["labels"].masked_fill(~chosen, -100)}


def pictures() -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(N, 3, 8, 8, dtype=torch.float64),
        "labels": torch.randint(0, 3, (N,)),
    }


def loss_of_class(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    return F.cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")


def loss_of_tokens(model: nn.Module, batch: dict[str, Tensor], shift: int = 0) -> Tensor:
    """Mean over each example's own labelled positions."""
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    logits, labels = model(**inputs).logits, batch["labels"]
    logits, labels = logits[:, : logits.shape[1] - shift], labels[:, shift:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return losses.sum(1) / (labels != -100).sum(1)


def loss_of_next(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss_of_tokens(model, batch, shift=1)


@dataclass(frozen=True)
class Family:
    name: str
    model: str
    config: str
    settings: dict[str, Any]
    batch: Callable[[], dict[str, Tensor]]
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    tolerance: float = 1e-9

    def build(self, attention: str = "eager", dropout: bool = False) -> nn.Module:
        settings = dict(self.settings)
        config = getattr(transformers, self.config)(**settings, attn_implementation=attention)
        torch.manual_seed(0)
        model = getattr(transformers, self.model)(config).to(torch.float64)
        for p in model.parameters():  # biases and gains away from zeros and ones
            p.data.add_(torch.randn_like(p) * 0.1)
        return model if dropout else model.eval()


FAMILIES = [
    Family("bert", "BertForSequenceClassification", "BertConfig", _BERT, classified, loss_of_class),
    Family("bert mlm", "BertForMaskedLM", "BertConfig", _BERT, masked, loss_of_tokens),
    Family(
        "roberta",
        "RobertaForSequenceClassification",
        "RobertaConfig",
        _BERT | _ENDS,
        classified,
        loss_of_class,
    ),
    Family(
        "distilbert",
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {
            "vocab_size": V,
            "dim": 12,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 16,
            "max_position_embeddings": 12,
        }
        | {"num_labels": 3},
        classified,
        loss_of_class,
    ),
    Family("gpt2", "GPT2LMHeadModel", "GPT2Config", _GPT2 | _ENDS, modelled, loss_of_next),
    # Llama computes its norms and rotations in float32 inside.
    Family("llama", "LlamaForCausalLM", "LlamaConfig", _LLAMA, modelled, loss_of_next, 2e-5),
    Family(
        "llama tied",
        "LlamaForCausalLM",
        "LlamaConfig",
        _LLAMA | {"tie_word_embeddings": True},
        modelled,
        loss_of_next,
        2e-5,
    ),
    Family(
        "vit",
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 12,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 16,
        }
        | {"image_size": 8, "patch_size": 4, "num_labels": 3},
        pictures,
        loss_of_class,
    ),
]


@pytest.mark.quick("*-sdpa-plain", "gpt2-eager-dense metric", "bert-eager-dense metric")
@pytest.mark.parametrize("kind", [None, "dense"], ids=["plain", "dense metric"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_per_example_gradients_equal_a_loop(
    family: Family, attention: str, kind: str | None
) -> None:
    model = family.build(attention)
    keys = list(model.state_dict())
    check(model, family.batch(), family.loss, kind, family.tolerance)
    assert list(model.state_dict()) == keys


def family(name: str) -> Family:
    return next(f for f in FAMILIES if f.name == name)


@pytest.mark.parametrize("name", ["bert", "gpt2", "distilbert"])
def test_training_mode_gives_the_same_numbers_with_and_without_the_tape(name: str) -> None:
    """Dropout draws as it did: handing positions on one row an example changes no shape that a
    random number has.
    """
    model, batch = family(name).build(dropout=True).train(), family(name).batch()
    torch.manual_seed(1)
    plain = family(name).loss(model, batch)
    torch.manual_seed(1)
    with Tape(model, find_layers(model), batch_size=N):
        assert torch.equal(family(name).loss(model, batch), plain)


def rows_of(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: x[i] for name, x in batch.items()} for i in range(N)]


def session(
    model: nn.Module,
    data: list[dict[str, Tensor]],
    steps: int,
    public: list[dict[str, Tensor]] | None = None,
) -> Session:
    config = PrivacyConfig(expected_batch_size=N, steps=steps, test_mode_seed=5, max_grad_norm=0.5)
    return Session(
        config.with_noise(1.0, 1e-3, N),
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        data,
        public_records=public,
    )


def test_a_model_generates_after_a_session_and_keeps_its_names() -> None:
    gpt2 = family("gpt2")
    model = gpt2.build()
    keys, ids = list(model.state_dict()), torch.randint(3, V, (1, 4))
    before = model.lm_head.weight.detach().clone()
    with session(model, rows_of(gpt2.batch()), 2) as s:
        for batch in s.batches():
            s.step(batch, gpt2.loss)
    assert not torch.equal(model.lm_head.weight, before)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert list(model.state_dict()) == keys
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 7)


@pytest.mark.parametrize("frozen", [False, True])
def test_ids_without_a_row_in_public_records_are_named(frozen: bool) -> None:
    bert = family("bert")
    model, batch = bert.build(), bert.batch()
    model.bert.embeddings.requires_grad_(not frozen)
    batch["input_ids"][:, 0] = V
    match = (
        rf"'bert.embeddings.word_embeddings' has {V} rows.*outside 0 … {V - 1}.*len\(tokenizer\)"
    )
    rows = rows_of(bert.batch())
    with (
        session(model, rows, 1, public=rows_of(batch)) as s,
        pytest.raises(ValueError, match=match),
    ):
        for drawn in s.batches():
            s.step(drawn, bert.loss)
    assert s.ledger.count == 0


def test_a_sequence_longer_than_the_positions_is_named() -> None:
    gpt2 = family("gpt2")
    batch = {name: x.repeat(1, 2) for name, x in gpt2.batch().items()}
    with (
        session(gpt2.build(), rows_of(batch), 1) as s,
        pytest.raises(ValueError, match=r"'transformer.wpe' has 12 rows"),
    ):
        for drawn in s.batches():
            s.step(drawn, gpt2.loss)
