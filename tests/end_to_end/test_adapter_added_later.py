"""Worry: "I added an adapter after building the session: it trains without a clip, or not at all,
and nobody says so".
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpkfc.session import Session
from tests.test_session import data, loss_fn, net, plan, train


class LowRank(nn.Module):
    """An adapter as peft adds it: the wrapped layer is frozen, B starts at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.a = base.requires_grad_(False), nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def adapted(model: nn.Module) -> None:
    model[0] = LowRank(model[0]).double()


def another_head(model: nn.Module) -> None:
    model.append(nn.Linear(3, 3).double())


def unfrozen(model: nn.Module) -> None:
    model[0].requires_grad_(True)


def frozen(model: nn.Module) -> None:
    model[2].requires_grad_(False)


def replaced(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())


def cast(model: nn.Module) -> None:
    model[2] = model[2].to(torch.float64)  # nothing changes, nothing is said
    model[2].weight = nn.Parameter(model[2].weight.float())


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (adapted, r"0\.(a|base)\.weight"),
        (another_head, "3.weight"),
        (unfrozen, "0.weight"),
        (frozen, "2.weight"),
        (replaced, "2.weight"),
        (cast, "2.weight"),
    ],
)
@pytest.mark.parametrize("after", [0, 2])
def test_a_changed_model_is_refused_by_name_before_a_release(
    change: Callable[[nn.Module], None], name: str, after: int
) -> None:
    model = net()
    if change is unfrozen:
        model[0].requires_grad_(False)
    p = plan(1.0)
    with Session(
        p, model, torch.optim.SGD([q for q in model.parameters() if q.requires_grad], 0.1), data()
    ) as s:
        if after:
            train(s, after)
        change(model)
        with pytest.raises(RuntimeError, match=f"parameter '{name}'"):
            train(s, 1)
        assert s.ledger.count == after


def test_adapters_added_before_are_trained_and_move() -> None:
    """B is zero, so A has no gradient in the first step: it moves by noise, and the rest is left
    alone.
    """
    model = net()
    adapted(model)
    model[2].requires_grad_(False)
    before = {n: q.detach().clone() for n, q in model.named_parameters()}
    trained = [q for q in model.parameters() if q.requires_grad]
    with Session(plan(1.0), model, torch.optim.AdamW(trained, 0.1), data()) as s:
        train(s, 1)
    moved = {n for n, q in model.named_parameters() if not torch.equal(q, before[n])}
    assert moved == {"0.a.weight", "0.b.weight"}


def test_adapters_of_peft() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential()
    inner = net(torch.float32)
    model.add_module("first", inner[0])
    model.add_module("act", inner[1])
    model.add_module("last", inner[2])
    x, y = data(dtype=torch.float32)
    stale = Session(plan(1.0), model, torch.optim.SGD(model.parameters(), 0.1), (x, y))
    lora = peft.get_peft_model(model, peft.LoraConfig(target_modules=["first"], r=2, lora_alpha=4))
    with stale, pytest.raises(RuntimeError, match=r"parameter '.*first"):
        train(stale, 1)
    before = {n: q.detach().clone() for n, q in lora.named_parameters()}
    trained = [q for q in lora.parameters() if q.requires_grad]

    with Session(plan(1.0), lora, torch.optim.SGD(trained, 0.1), (x, y)) as s:
        for batch in s.batches():
            s.step(batch, loss_fn)
        assert s.steps_done == 6
    moved = {n for n, q in lora.named_parameters() if not torch.equal(q, before[n])}
    assert len(moved) == 2 and all("lora" in n for n in moved)
