"""Whole scripts as their authors wrote them for Opacus 1.6: BERT, a character LSTM, a bag of words.
Only imports change.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from dpkfc.integrations.opacus import PrivacyEngine
from tests.integrations.opacus_cases import FEW_ORDERS

opacus = pytest.importorskip("opacus")

OURS = (
    "from dpkfc.integrations.opacus import PrivacyEngine, BatchMemoryManager\nfrom torch.nn import"
    " LSTM as DPLSTM\n"
)
THEIRS = (
    "from opacus import PrivacyEngine\nfrom opacus.utils.batch_memory_manager import"
    " BatchMemoryManager\n"
    "from opacus.layers import DPLSTM\n"
)
N = 48

BERT = """
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(0)
config = BertConfig(
    vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=16, num_labels=3,
)
model = BertForSequenceClassification(config)
trainable = [model.bert.encoder.layer[-1], model.bert.pooler, model.classifier]
for p in model.parameters():
    p.requires_grad = False
for layer in trainable:
    for p in layer.parameters():
        p.requires_grad = True

train_dataloader = DataLoader(TensorDataset(*tokens()), batch_size=16)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-2, eps=1e-8)
model.train()
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, train_dataloader = privacy_engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=train_dataloader,
    target_delta=1e-3, target_epsilon=20.0, epochs=EPOCHS, max_grad_norm=1.0,
)
for epoch in range(EPOCHS):
    losses = []
    with BatchMemoryManager(
        data_loader=train_dataloader, max_physical_batch_size=6, optimizer=optimizer
    ) as memory_safe_data_loader:
        for step, batch in enumerate(memory_safe_data_loader):
            optimizer.zero_grad()
            batch = tuple(t.to(torch.device("cpu")) for t in batch)
            inputs = {"input_ids": batch[0], "attention_mask": batch[1], "labels": batch[2]}
            outputs = model(**inputs)
            loss = outputs[0]
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
    eps = privacy_engine.get_epsilon(1e-3)
"""

CHARACTERS = """
from torch.utils.data import DataLoader, TensorDataset

class CharNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.lstm = DPLSTM(8, 12, num_layers=1, batch_first=True)
        self.out = nn.Linear(12, 3)

    def forward(self, x, hidden=None):
        x, hidden = self.lstm(self.embedding(x), hidden)
        return self.out(x[:, -1, :])

torch.manual_seed(0)
model = CharNN()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
ids, mask, labels = tokens()
train_loader = DataLoader(TensorDataset(ids, labels), batch_size=16, num_workers=0, pin_memory=False)
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, train_loader = privacy_engine.make_private(
    module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.5
)
for epoch in range(EPOCHS):
    model.train()
    losses = []
    for x, y in train_loader:
        logits = model(x)
        loss = criterion(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    eps = privacy_engine.get_epsilon(delta=1e-3)
"""

WORDS = """
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

def padded_collate(batch, padding_idx=0):
    x = pad_sequence([ids for ids, label in batch], batch_first=True, padding_value=padding_idx)
    y = torch.stack([label for ids, label in batch]).long()
    return x, y

class SampleNet(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.emb = nn.Embedding(vocab_size, 16, padding_idx=0)
        self.fc1 = nn.Linear(16, 16)
        self.fc2 = nn.Linear(16, 3)

    def forward(self, x):
        words = (x != 0).unsqueeze(-1)
        x = (self.emb(x) * words).sum(1) / words.sum(1).clamp(min=1)
        return self.fc2(F.relu(self.fc1(x)))

ids, mask, labels = tokens()
train_dataset = [(row[m.bool()], label) for row, m, label in zip(ids, mask, labels)]
train_loader = DataLoader(train_dataset, batch_size=16, collate_fn=padded_collate)
torch.manual_seed(0)
model = SampleNet(vocab_size=30)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=train_loader,
    target_epsilon=20.0, target_delta=1e-3, epochs=EPOCHS, max_grad_norm=1.0, poisson_sampling=True,
)
criterion = nn.CrossEntropyLoss()
for epoch in range(EPOCHS):
    model.train()
    losses = []
    for data, label in train_loader:
        optimizer.zero_grad()
        predictions = model(data).squeeze(1)
        loss = criterion(predictions, label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    eps = privacy_engine.get_epsilon(1e-3)
"""


def tokens(n: int = N):
    """Ids of different lengths, padded with 0, and a class that the first of them decides."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 9, (n,), generator=generator)
    mask = (torch.arange(8) < lengths[:, None]).long()
    ids = torch.randint(3, 30, (n, 8), generator=generator) * mask
    return ids, mask, ids[:, 0] % 3


def run(imports: str, script: str, epochs: int = 2) -> dict[str, object]:
    names = {"torch": torch, "nn": nn, "F": F, "tokens": tokens, "EPOCHS": epochs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(imports + script, "script", "exec"), names)
    return names


@pytest.mark.parametrize("script", [BERT, CHARACTERS, WORDS], ids=["bert", "characters", "words"])
def test_a_script_runs_with_only_its_imports_changed(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opacus.accountants.RDPAccountant, "DEFAULT_ALPHAS", FEW_ORDERS)
    mine, theirs = run(OURS, script), run(THEIRS, script)
    assert mine["eps"] == pytest.approx(theirs["eps"], rel=0.02)
    assert mine["optimizer"].noise_multiplier == pytest.approx(
        theirs["optimizer"].noise_multiplier, rel=0.02
    )
    assert len(mine["privacy_engine"].accountant) == 6
    assert len(mine["losses"]) > 0
    assert mine["privacy_engine"]._private.gradients == "whole batches, with a proved batch axis"


@pytest.mark.parametrize("script", [BERT, CHARACTERS, WORDS], ids=["bert", "characters", "words"])
def test_the_noise_really_reaches_the_weights(script: str) -> None:
    loud = script.replace("target_epsilon=20.0", "target_epsilon=1e-4").replace(
        "noise_multiplier=1.0", "noise_multiplier=1e5"
    )
    for adaptive in ("AdamW(", "Adam("):  # whose steps are of one size, however large a gradient is
        loud = loud.replace(adaptive, "SGD(").replace(", eps=1e-8", "")
    for rate in ("lr=5e-2", "lr=0.02", "lr=1.0"):
        loud = loud.replace(rate, "lr=5.0")
    names = run(OURS, loud, epochs=1)
    clip = names["optimizer"].max_grad_norm
    step = 5.0 * names["optimizer"].noise_multiplier * clip / 16
    assert step > 50
    entries = torch.cat([p.flatten() for p in moving(names["model"]).values()])
    # 0.82 without the noise of one of three steps
    assert 0.85 < entries.std() / (step * 3**0.5) < 1.2


def moving(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


# -- the same gradients as Opacus ------------------------------------------------------------------


def bert(**settings):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **settings,
    )
    model = BertForSequenceClassification(config).double()
    for p in model.bert.embeddings.parameters():
        p.requires_grad = False
    return model


class Characters(nn.Module):
    def __init__(self, recurrent: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.out = nn.Embedding(30, 8), nn.Linear(12, 3)
        self.lstm = recurrent(8, 12, num_layers=2, batch_first=True, bidirectional=False)

    def forward(self, input_ids, attention_mask):
        x, _ = self.lstm(self.embedding(input_ids))
        return self.out(x[:, -1])


def pair(kind: str) -> tuple[nn.Module, nn.Module]:
    """A model for this library and one with the same weights for Opacus."""
    if kind == "bert":
        return bert(), bert()
    mine, theirs = Characters(nn.LSTM).double(), Characters(opacus.layers.DPLSTM).double()
    own = dict(mine.named_parameters())
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.copy_(own[name])
    return mine, theirs


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> torch.Tensor:
    assert set(one) == set(other)
    return torch.stack([(one[name] - other[name]).square().sum() for name in one]).sum().sqrt()


@pytest.mark.parametrize("max_grad_norm", [1e6, 0.3])
@pytest.mark.parametrize("kind", ["bert", "characters"])
def test_the_updates_are_those_of_opacus(kind: str, max_grad_norm: float) -> None:
    mine, theirs = pair(kind)
    start = {name: p.clone() for name, p in moving(mine).items()}
    source = DataLoader(TensorDataset(*tokens()), batch_size=16)
    mine_private = PrivacyEngine().make_private(
        module=mine,
        optimizer=torch.optim.SGD([p for p in mine.parameters() if p.requires_grad], 0.5),
        data_loader=source,
        noise_multiplier=0.0,
        max_grad_norm=max_grad_norm,
        test_mode_seed=3,
    )
    theirs.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs_private = opacus.PrivacyEngine().make_private(
            module=theirs,
            optimizer=torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], 0.5),
            data_loader=source,
            noise_multiplier=0.0,
            max_grad_norm=max_grad_norm,
            poisson_sampling=False,
        )
    mine.train()
    for ids, mask, labels in mine_private[2]:
        for model, optimizer in (mine_private[:2], theirs_private[:2]):
            optimizer.zero_grad()
            if kind == "bert":
                outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
                loss = outputs[0]
            else:
                loss = F.cross_entropy(model(ids, mask), labels)
            loss.backward()
            optimizer.step()
    moved, apart = distance(moving(mine), start), distance(moving(mine), moving(theirs))
    assert moved > 1e-3
    assert apart < (1e-9 if max_grad_norm == 1e6 else 3e-4) * moved


# -- models that Opacus refuses or gets wrong ------------------------------------------------------


def test_positions_that_all_examples_share_may_train() -> None:
    """Full fine-tuning: position ids have the shape [1, T], which Opacus counts as one example."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config).double()
    reference = BertForSequenceClassification(config).double()
    reference.load_state_dict(model.state_dict())
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 1.0),
        data_loader=DataLoader(TensorDataset(*tokens()), batch_size=16),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        test_mode_seed=3,
    )
    model.train()
    ids, mask, labels = next(iter(loader))
    model(input_ids=ids, attention_mask=mask, labels=labels)[0].backward()
    optimizer.step()
    rows = []
    for i in range(len(ids)):
        loss = reference(
            input_ids=ids[i : i + 1], attention_mask=mask[i : i + 1], labels=labels[i : i + 1]
        )[0]
        rows.append(torch.autograd.grad(loss, list(reference.parameters())))
    norms = [torch.sqrt(sum(g.square().sum() for g in row)) for row in rows]
    for k, (name, p) in enumerate(reference.named_parameters()):
        expected = (
            sum(row[k] * (0.5 / norm).clamp(max=1) for row, norm in zip(rows, norms, strict=True))
            / 16
        )
        torch.testing.assert_close(
            p - dict(model.named_parameters())[name], expected, rtol=1e-6, atol=1e-9, msg=name
        )


class Unmasked(nn.Module):
    """Averages over padding too, so that the longest text of a batch changes what the others give."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.fc = nn.Embedding(30, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(self.emb(x).mean(1))


def padded(rows):
    return pad_sequence([ids for ids, _ in rows], batch_first=True), torch.stack(
        [label for _, label in rows]
    )


@pytest.mark.parametrize("width", [None, 12])
def test_padding_that_reaches_the_other_examples_is_found(width: int | None) -> None:
    """A mean over padding too: found where batches are padded to their longest text, no matter
    where to a fixed length.
    """
    ids, mask, labels = tokens()
    rows = [(row[m.bool()], label) for row, m, label in zip(ids, mask, labels, strict=True)]

    def to_width(batch):
        x, y = padded(batch)
        return (x if width is None else F.pad(x, (0, width - x.shape[1]))), y

    engine, model = PrivacyEngine(), Unmasked()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        data_loader=DataLoader(rows, batch_size=16, collate_fn=to_width),
    )
    x, y = next(iter(loader))
    if width is None:
        with pytest.raises(ValueError, match="padded to the length of a longer one"):
            model(x)
        return
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert len(engine.accountant) == 1
