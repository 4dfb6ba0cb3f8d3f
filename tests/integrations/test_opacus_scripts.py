"""Whole scripts as written for Opacus 1.6: digits, pictures, BERT, a character LSTM, names of different lengths, a bag of words. Only imports change."""

import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.integrations.opacus_cases import FEW_ORDERS

opacus = pytest.importorskip("opacus")

OURS = (
    "from dpkfc.integrations.opacus import PrivacyEngine, BatchMemoryManager, ModuleValidator\n"
    "from torch.nn import LSTM as DPLSTM\n"
)
THEIRS = (
    "from opacus import PrivacyEngine\nfrom opacus.utils.batch_memory_manager import"
    " BatchMemoryManager\n"
    "from opacus.layers import DPLSTM\n"
    "from opacus.validators import ModuleValidator\n"
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
data = TensorDataset(ids, labels)
train_loader = DataLoader(data, batch_size=16, num_workers=0, pin_memory=False)
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, train_loader = privacy_engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=train_loader,
    noise_multiplier=1.0,
    max_grad_norm=1.5,
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

DIGITS = """
from torch.utils.data import DataLoader, TensorDataset

class SampleConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, 2, padding=2)
        self.conv2 = nn.Conv2d(6, 8, 3, 1)
        self.fc1 = nn.Linear(32, 16)
        self.fc2 = nn.Linear(16, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))

def train(model, train_loader, optimizer, privacy_engine, epoch):
    model.train()
    criterion = nn.CrossEntropyLoss()
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        norms.append([p.grad.norm().item() for p in model.parameters()])
    return privacy_engine.accountant.get_epsilon(delta=1e-3)

def test(model, test_loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            correct += model(data).argmax(dim=1, keepdim=True).eq(target.view_as(target[:, None])).sum()
    return correct.item() / len(test_loader.dataset)

train_loader = DataLoader(TensorDataset(*images(1, 12)), batch_size=16, num_workers=0, pin_memory=False)
test_loader = DataLoader(TensorDataset(*images(1, 12)), batch_size=24, shuffle=True)
run_results, losses, norms = [], [], []
for _ in range(2):
    torch.manual_seed(0)
    model = SampleConvNet().to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0)
    privacy_engine = PrivacyEngine(secure_mode=False, accountant="rdp")
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.0,
    )
    for epoch in range(1, EPOCHS + 1):
        eps = train(model, train_loader, optimizer, privacy_engine, epoch)
    run_results.append(test(model, test_loader))
torch.save(run_results, FOLDER / "run_results.pt")
torch.save(model._module.state_dict(), FOLDER / "model.pt")
again = SampleConvNet()
again.load_state_dict(torch.load(FOLDER / "model.pt"))
"""

PICTURES = """
import math
from torch.utils.data import DataLoader, TensorDataset

class Block(nn.Module):
    def __init__(self, inside, out, norm_layer, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = norm_layer(out), norm_layer(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.downsample = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), norm_layer(out))

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.downsample(x))

norm = lambda c: nn.GroupNorm(min(c, 4), c)
torch.manual_seed(0)
model = nn.Sequential(Block(3, 8, norm, 1), Block(8, 8, norm, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
train_loader = DataLoader(TensorDataset(*images(3, 8)), batch_size=16, num_workers=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, train_loader = privacy_engine.make_private(
    module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=10.0,
    clipping="flat", grad_sample_mode="hooks",
)
criterion, losses, accuracies = nn.CrossEntropyLoss(), [], []
for epoch in range(EPOCHS):
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * 0.5 * (1.0 + math.cos(math.pi * epoch / EPOCHS))
    model.train()
    with BatchMemoryManager(
        data_loader=train_loader, max_physical_batch_size=5, optimizer=optimizer
    ) as memory_safe_loader:
        for i, (images_, target) in enumerate(memory_safe_loader):
            output = model(images_)
            loss = criterion(output, target)
            preds = output.detach().cpu().numpy().argmax(axis=1)
            accuracies.append((preds == target.detach().cpu().numpy()).mean() if len(target) else 0.0)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if i % 2 == 0:
                eps = privacy_engine.accountant.get_epsilon(delta=1e-3)
    torch.save(
        {"epoch": epoch, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()},
        FOLDER / "checkpoint.tar",
    )
eps = privacy_engine.get_epsilon(1e-3)
"""

TUTORIAL = """
import numpy as np
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(72, 3)
)
errors = ModuleValidator.validate(model, strict=False)
assert len(errors) == 1
model = ModuleValidator.fix(model)
assert not ModuleValidator.validate(model, strict=False)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
train_loader = DataLoader(TensorDataset(*images(3, 8)), batch_size=16)
test_loader = DataLoader(TensorDataset(*images(3, 8)), batch_size=16, shuffle=False)
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=train_loader, epochs=EPOCHS,
    target_epsilon=20.0, target_delta=1e-3, max_grad_norm=1.2,
)
print(f"Using sigma={optimizer.noise_multiplier} and C={optimizer.max_grad_norm}")
criterion, losses, top1 = nn.CrossEntropyLoss(), [], []

def accuracy(preds, labels):
    return (preds == labels).mean()

for epoch in range(EPOCHS):
    model.train()
    with BatchMemoryManager(
        data_loader=train_loader, max_physical_batch_size=8, optimizer=optimizer
    ) as memory_safe_data_loader:
        for i, (images_, target) in enumerate(memory_safe_data_loader):
            optimizer.zero_grad()
            output = model(images_)
            loss = criterion(output, target)
            top1.append(accuracy(np.argmax(output.detach().cpu().numpy(), axis=1), target.cpu().numpy()))
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
    eps = privacy_engine.get_epsilon(1e-3)
model.eval()
with torch.no_grad():
    tested = [accuracy(model(x).argmax(1).numpy(), y.numpy()) for x, y in test_loader]
"""

NAMES = """
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

class CharNNClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.lstm = DPLSTM(8, 12, num_layers=1, batch_first=True)
        self.out_layer = nn.Linear(12, 3)

    def forward(self, x, hidden=None):
        lengths = (x != 0).sum(1)
        x, hidden = self.lstm(self.embedding(x), hidden)
        last = (lengths - 1).view(-1, 1, 1).expand(-1, 1, x.shape[2])
        return self.out_layer(x.gather(1, last).squeeze(1))

def padded_collate(batch):
    x = pad_sequence([ids for ids, label in batch], batch_first=True, padding_value=0)
    return x, torch.stack([label for ids, label in batch])

ids, mask, labels = tokens()
train_ds = [(row[m.bool()], label) for row, m, label in zip(ids, mask, labels)]
train_loader = DataLoader(train_ds, batch_size=16, num_workers=0, pin_memory=True, collate_fn=padded_collate)
torch.manual_seed(0)
model = CharNNClassifier().to("cpu")
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
privacy_engine = PrivacyEngine(secure_mode=False, accountant="rdp")
model, optimizer, train_loader = privacy_engine.make_private(
    module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.5,
)
losses = []
for epoch in range(EPOCHS):
    model.train()
    for x, y in train_loader:
        logits = model(x)
        loss = criterion(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    eps = privacy_engine.get_epsilon(delta=1e-3)
    model.eval()
"""

ALL = {
    "digits": DIGITS,
    "pictures": PICTURES,
    "image tutorial": TUTORIAL,
    "bert": BERT,
    "characters": CHARACTERS,
    "names": NAMES,
    "words": WORDS,
}


def images(channels, size, n=N):
    """Random pictures and classes."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 3, (n,), generator=generator)
    return torch.randn(n, channels, size, size, generator=generator), labels


def tokens(n=N):
    """Ids of different lengths, padded with 0, and a class that the first of them decides."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 9, (n,), generator=generator)
    mask = (torch.arange(8) < lengths[:, None]).long()
    ids = torch.randint(3, 30, (n, 8), generator=generator) * mask
    return ids, mask, ids[:, 0] % 3


def run(imports, script, epochs=2):
    names = {"torch": torch, "nn": nn, "F": F, "tokens": tokens, "images": images}
    names["EPOCHS"] = epochs
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names["FOLDER"] = Path(folder)
        exec(compile(imports + script, "script", "exec"), names)
    return names


@pytest.mark.quick("digits", "names")
@pytest.mark.parametrize("script", ALL.values(), ids=ALL.keys())
def test_a_script_runs_with_only_its_imports_changed(script, monkeypatch):
    monkeypatch.setattr(opacus.accountants.RDPAccountant, "DEFAULT_ALPHAS", FEW_ORDERS)
    mine, theirs = run(OURS, script), run(THEIRS, script)
    assert mine["eps"] == pytest.approx(theirs["eps"], rel=0.02)
    assert mine["optimizer"].noise_multiplier == pytest.approx(
        theirs["optimizer"].noise_multiplier, rel=0.02
    )
    assert len(mine["privacy_engine"].accountant) == 6
    assert len(mine["losses"]) > 0
    assert mine["privacy_engine"]._private.gradients == "whole batches, with a proved batch axis"
