"""Small models that tests of several parts use: the same weights at every call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.recording import Heard

VOCABULARY = 23


def randn(*shape: int) -> Tensor:
    """Draw normal numbers in float64, in which tests compare with brute force."""
    return torch.randn(*shape, dtype=torch.float64)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw normal numbers of a stream of their own."""
    return torch.randn(*shape, generator=stream(seed), dtype=dtype)


def stream(seed: int = 0) -> torch.Generator:
    """Return a new stream of random numbers."""
    return torch.Generator().manual_seed(seed)


def weights(model: nn.Module) -> Tensor:
    """Return all entries of the parameters in float64."""
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def mlp(*middle: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Build a perceptron from 6 features to 3 classes, with `middle` after its activation."""
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *middle, nn.Linear(8, 3)).to(dtype)


class Small(nn.Module):
    """A device whose memory holds so many examples; it says so as torch does."""

    def __init__(self, capacity: int, kind: Callable[..., Exception]) -> None:
        super().__init__()
        self.capacity, self.kind = capacity, kind
        self.seen, self.failed = Heard(), Heard()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.capacity:
            self.failed.append(len(x))
            raise self.kind("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.seen.append(len(x))
        return x


def limited(
    capacity: int,
    *middle: nn.Module,
    kind: Callable[..., Exception] = torch.cuda.OutOfMemoryError,
) -> nn.Sequential:
    """Build `mlp` for a device whose memory holds so many examples."""
    return mlp(*middle, Small(capacity, kind))


class Words(nn.Module):
    """Token ids `[n, t]` to classes, by the mean of embeddings.

    Args:
        outputs: classes.
        masked: leave padding, which has the id 0, out of the mean.
        dim: of the positions.
    """

    def __init__(self, outputs: int = 2, *, masked: bool = False, dim: int = 1) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.table, self.head = nn.Embedding(50, 4), nn.Linear(4, outputs)
        self.masked, self.dim = masked, dim

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids > 0) if self.masked else torch.ones_like(ids)
        total = (self.table(ids) * mask.unsqueeze(-1)).sum(self.dim)
        return self.head(total / mask.sum(self.dim).clamp(min=1).unsqueeze(-1))


# -- models of transformers and peft ---------------------------------------------------------------


def bert(kind: str = "ForSequenceClassification", **settings: Any) -> nn.Module:
    """Build a small BERT without dropout, in float64; tests without transformers are skipped."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        **{
            "num_labels": 3,
            "pad_token_id": 0,
            "max_position_embeddings": 12,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            **settings,
        },
    )
    torch.default_generator.manual_seed(0)
    return getattr(transformers, f"Bert{kind}")(config).double()


def save_encoder(folder: Path, words: Iterable[str], blocks: int = 2) -> None:
    """Write a small BERT of random weights and a tokenizer of these words into a folder."""
    transformers = pytest.importorskip("transformers")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (folder / "vocab.txt").write_text("\n".join(names), "utf-8")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(names),
        hidden_size=8,
        num_hidden_layers=blocks,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    transformers.BertModel(config).save_pretrained(folder)


def gpt2(**settings: Any) -> nn.Module:
    """Build a small GPT-2 without dropout, in float64."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=12,
        n_layer=2,
        n_head=2,
        **{
            "vocab_size": VOCABULARY,
            "n_positions": 12,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            **settings,
        },
    )
    torch.default_generator.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).double()


def add_lora(model: nn.Module, targets: list[str], **settings: Any) -> nn.Module:
    """Wrap a model in adapters of rank 3 that begin at zero."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, target_modules=targets, lora_dropout=0.0, **settings)
    return peft.get_peft_model(model, config).double()


def classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross-entropy of one label for each example."""
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    return F.cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")


def predict_next(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy over the labelled tokens that follow; without one, zero."""
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    logits, labels = model(**inputs).logits[:, :-1], batch["labels"][:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return losses.sum(1) / (labels != -100).sum(1).clamp(min=1)
