"""Checkpoint activations: parts of the model run twice, or a refusal says why they may not."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from tests.gradients.loop import loss_fn, record_gradients
from tests.integrations.opacus_cases import make_scaled, private
from tests.models import randn
from tests.mutation_cases import weights
from tests.sessions import assert_refused, open_session, train

N, D = 3, 4


class Block(nn.Module):
    """Every kind of rule in one residual block."""

    def __init__(self, dropout):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(D, 6), nn.LayerNorm(6), nn.Linear(6, D)
        self.attention, self.reader = (
            nn.MultiheadAttention(D, 2, batch_first=True),
            nn.GRU(D, D, batch_first=True),
        )
        self.gain, self.dropout = nn.Parameter(torch.ones(D)), nn.Dropout(dropout)

    def mixed(self, x):
        x = x + self.dropout(self.down(torch.relu_(self.norm(self.up(x)))))
        return self.reader(x + self.attention(x, x, x, need_weights=False)[0])[0]


class Called(Block):
    def __init__(self, dropout):
        super().__init__(dropout)
        self.gain.requires_grad_(False)

    def forward(self, x):
        return self.mixed(x)


class Deep(nn.Module):
    def __init__(self, block, reentrant, *, dropout=0.0, first=True):
        super().__init__()
        self.table, self.head = nn.Linear(3, D).requires_grad_(first), nn.Linear(D, 2)
        self.blocks, self.reentrant = nn.ModuleList([block(dropout), block(dropout)]), reentrant

    def forward(self, x):
        x = self.table(x)
        for block in self.blocks:
            x = (
                block(x)
                if self.reentrant is None
                else checkpoint(block, x, use_reentrant=self.reentrant)
            )
        return self.head(x).mean(1)


def test_dropout_inside_a_checkpoint_draws_the_same_numbers():
    found = []
    for reentrant in (None, False):
        torch.manual_seed(0)
        model, batch = Deep(Called, reentrant, dropout=0.5).double(), (randn(N, 5, 3),)
        torch.manual_seed(1)
        found.append(record_gradients(model, loss_fn, batch, N))
    for one, other in zip(*found, strict=True):
        for name, gradient in one.items():
            assert_close(other[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("first", [True, False])
def test_reentrant_checkpoints_are_refused_with_the_fix(first):
    model = Deep(Called, True, first=first).double()
    with pytest.raises(
        ValueError, match=r"layer 'blocks.0.up'.*use_reentrant=False.*gradient_checkpointing_kwargs"
    ):
        record_gradients(model, loss_fn, (randn(N, 5, 3),), N)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(p.requires_grad for p in model.blocks[0].up.parameters())


class TrainingOnly(Deep):
    """Checkpointed in training mode only, as the models of transformers are."""

    def forward(self, x):
        kept, self.reentrant = self.reentrant, self.reentrant if self.training else None
        try:
            return super().forward(x)
        finally:
            self.reentrant = kept


@pytest.mark.quick("True")
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_session_with_checkpoints(reentrant):
    """Verification runs in eval mode, where these checkpoints are off; a reentrant one is refused
    before a release.
    """
    weights = []
    for kind in (None, reentrant):
        torch.manual_seed(0)
        model = TrainingOnly(Called, kind, first=False).double()
        x = torch.randn(20, 5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        if kind:
            refused = open_session(model, (x,))
            return assert_refused(refused, r"'blocks.0.up'.*use_reentrant=False", loss_fn)
        train(model, (x,), loss_fn)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert_close(weights[1], weights[0], rtol=1e-10, atol=1e-12)


class Unfollowed(nn.Module):
    """Leaves torch, so that its examples are run one at a time."""

    def __init__(self):
        super().__init__()
        self.body = make_scaled()

    def forward(self, x):
        largest = torch.from_numpy(x.detach().numpy().max(1, keepdims=True))
        return self.body(x / largest)


def weight_normed():
    """Return a model whose public rows pass through torch.func, which no hooks may see."""
    model = make_scaled()
    torch.nn.utils.parametrizations.weight_norm(model.first)
    return model


@pytest.mark.parametrize("make", [make_scaled, Unfollowed, weight_normed])
def test_a_script_may_checkpoint_its_whole_model(make):
    found = []
    for is_checkpointed in (False, True):
        engine, model, optimizer, loader = private(make())
        with engine:
            for x, y in loader:
                call = partial(checkpoint, model, use_reentrant=False) if is_checkpointed else model
                nn.functional.cross_entropy(call(x), y).backward()
                optimizer.step()
        found.append(weights(model))
    assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)
