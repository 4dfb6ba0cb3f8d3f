"""Change the parameters of a model after its session was built: refused by name."""

import warnings

import pytest
import torch
from torch import nn

from tests.sessions import open_session
from tests.test_session import data, net, train


class LowRank(nn.Module):
    """An adapter as peft adds it: the wrapped layer is frozen, B starts at zero."""

    def __init__(self, base):
        super().__init__()
        self.base, self.a = base.requires_grad_(False), nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def adapted(model):
    model[0] = LowRank(model[0]).double()


def replace_head(model):
    model.append(nn.Linear(3, 3).double())


def unfreeze(model):
    model[0].requires_grad_(True)


def freeze(model):
    model[2].requires_grad_(False)


def remove(model):
    model[2] = nn.Identity()


def replace(model):
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())


def cast(model):
    model[2] = model[2].to(torch.float64)  # nothing changes, nothing is said
    model[2].weight = nn.Parameter(model[2].weight.float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (adapted, r"'0\.(a|base)\.weight'"),
        (replace_head, "'3.weight' is trainable but in no covered layer"),
        (unfreeze, "'0.weight' is trainable but in no covered layer"),
        (freeze, "'2.weight' was frozen or taken out"),
        (remove, "'2.weight' was frozen or taken out"),
        (replace, "'2.weight'"),
        (cast, "'2.weight'"),
    ],
)
@pytest.mark.parametrize("after", [0, 2])
def test_a_changed_model_is_refused_by_name_before_a_release(change, message, after):
    model = net()
    if change is unfreeze:
        model[0].requires_grad_(False)
    with open_session(model, data(), steps=4) as s:
        if after:
            train(s, after)
        change(model)
        with pytest.raises(RuntimeError, match=f"parameter {message}"):
            train(s, 1)
        assert s.ledger.count == after


class Beside(nn.Module):
    """A model that never calls its second layer, or calls it for nothing."""

    def __init__(self, *, is_called):
        super().__init__()
        self.head, self.other = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()
        self.is_called = is_called

    def forward(self, x):
        return self.head(x) + 0.0 * self.other(x) if self.is_called else self.head(x)


@pytest.mark.parametrize("is_called", [False, True])
def test_a_parameter_that_the_loss_never_uses_is_named_in_a_warning(is_called):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with open_session(Beside(is_called=is_called), data()) as s:
            train(s, 1)
    named = [str(x.message) for x in caught if "noise alone" in str(x.message)]
    assert len(named) == (not is_called)
    assert is_called or "'other.weight'" in named[0] and "(2 such)" in named[0]
