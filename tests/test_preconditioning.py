"""The manager asks a preconditioner when it is due, and hands on its state."""

import dataclasses

import pytest
import torch
from torch import nn

from dpkfc.curvature.base import Preconditioner, PreconditionerState
from dpkfc.gradients.discovery import find_layers
from dpkfc.linalg.metric import Elementwise, Kronecker
from dpkfc.linalg.sides import Dense
from dpkfc.preconditioning import PreconditionerManager


class Noted(Preconditioner):
    """Notes with which arguments it is built."""

    def __init__(self, previous=False, keeps=False):
        self._previous, self._keeps = previous, keeps
        self.built = []

    uses_previous_state = property(lambda self: self._previous)

    def describe(self):
        return {"name": "noted"}

    def is_due(self, step):
        return step % 2 == 0

    def build(self, model, capture, step, rules=None, **more):
        self.built.append((step, more))
        if self._keeps and more["previous"] is not None:
            return more["previous"]
        return PreconditionerState(metric={}, step=step)


def manager(config):
    model = nn.Linear(2, 2)
    return PreconditionerManager(config, model, find_layers(model))


def run(config, steps=5):
    own = manager(config)
    for step in range(steps):
        own.refresh(step)
    return own


def test_the_metric_is_rebuilt_where_it_is_due_alone():
    config = Noted()
    assert run(config).refreshed == [0, 2, 4]
    assert config.built == [(0, {}), (2, {}), (4, {})]


def test_the_state_of_before_is_handed_on():
    config = Noted(previous=True)
    run(config)
    previous = [more["previous"] for _, more in config.built]
    assert previous[0] is None and [state.step for state in previous[1:]] == [0, 2]


def test_a_refresh_that_keeps_its_state_is_listed_once():
    assert run(Noted(previous=True, keeps=True)).refreshed == [0]


def test_the_state_of_another_model_is_not_restored():
    state = PreconditionerState(
        metric={"elsewhere": Elementwise({"weight": torch.ones(2, 2)})}, step=0
    )
    with pytest.raises(
        ValueError, match="belongs to another model: layer 'elsewhere' is not in the model"
    ):
        manager(Noted()).restore(state.state_dict())


@pytest.mark.parametrize(
    "entry",
    [
        Elementwise({"weight": torch.ones(9, 9)}),
        Kronecker(Dense(torch.eye(9), 1.0), Dense(torch.eye(9), 1.0)),
    ],
)
def test_the_state_of_a_model_of_other_shapes_is_not_restored(entry):
    one = manager(Noted())
    name = next(layer.name for layer in one._layers if "weight" in layer.parameters)
    state = PreconditionerState(metric={name: entry}, step=0)
    with pytest.raises(ValueError, match="belongs to another model: .* has other shapes"):
        one.restore(state.state_dict())


def test_a_state_keeps_its_notes():
    state = PreconditionerState(metric={}, step=3, scale=0.5, note="a note", drift=0.25)
    again = PreconditionerState.from_state_dict(state.state_dict())
    assert dataclasses.asdict(again) == dataclasses.asdict(state)
