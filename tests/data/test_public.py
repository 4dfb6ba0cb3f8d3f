"""Rows that a public and a private dataset share are found whatever holds them, and refused by
name.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dpkfc import PrivacyConfig
from dpkfc.curvature import (
    KFAC,
    FeatureNoise,
    Preconditioner,
    PreconditionerState,
    Probe,
    PublicData,
)
from dpkfc.data.checks import check_disjoint, check_probes, shared_rows

X = torch.randn(20, 2, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 3


def test_equal_rows_are_found_in_every_form() -> None:
    public = torch.cat([torch.randn(3, 2, 3), X[[4, 9]]])
    expected = [(3, 4), (4, 9)]
    forms = [
        X,
        X.double(),
        (X, Y),
        {"x": X},
        torch.utils.data.TensorDataset(X, Y),
        [(X[i], int(Y[i])) for i in range(20)],
        [(X[i].numpy(), 0) for i in range(20)],
    ]
    for private in forms:
        own = {"x": public} if isinstance(private, dict) else public
        assert shared_rows(own, private) == expected
    assert shared_rows(X[:4], X[4:]) == []


def test_tokens_are_compared_without_their_labels() -> None:
    ids, mask = torch.randint(0, 50, (6, 4)), torch.ones(6, 4, dtype=torch.long)
    public = {"input_ids": ids[2:3], "attention_mask": mask[2:3], "labels": torch.tensor([9])}
    rows = [
        {"input_ids": ids[i].tolist(), "attention_mask": mask[i].tolist(), "label": i}
        for i in range(6)
    ]
    assert shared_rows(public, rows) == [(0, 2)]
    assert shared_rows(public, {"input_ids": ids, "attention_mask": mask}) == [(0, 2)]
    assert shared_rows([{"text": "a b"}], [{"text": "a"}, {"text": "a b"}]) == [(0, 1)]


def test_shared_rows_are_refused_by_name() -> None:
    check_disjoint(X[:5], (X[5:], Y[5:]))
    with pytest.raises(ValueError, match=r"share 8 rows \(public rows 0, 1, 2, 3, 4, …\)"):
        check_disjoint(X[:8], (X, Y))
    with pytest.raises(ValueError, match="the probe of NGD and the private dataset share 1 rows"):
        check_disjoint(X[:1], (X, Y), "the probe of NGD")


class _Held(Probe):
    """A probe of stored inputs, kept in one of the ways that Python has."""

    def sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, None]:
        return self.inputs[:n], None

    def describe(self) -> dict[str, object]:
        return {"source": "public", "name": type(self).__name__}


@dataclass(frozen=True)
class InAField(_Held):
    inputs: Tensor


@dataclass(frozen=True, slots=True)
class InASlot(_Held):
    inputs: Tensor


class InAProperty(_Held):
    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    @property
    def inputs(self) -> Tensor:
        return self._rows


def make_probe_with_class_attribute(rows: Tensor) -> Probe:
    return type("OfAClass", (_Held,), {"inputs": rows})()


class Derived(Preconditioner):
    """A preconditioner of a user, with its probe in a property or wherever."""

    def __init__(self, probe: object) -> None:
        self._inner = probe

    @property
    def probe(self) -> object:
        return self._inner

    def is_due(self, step: int) -> bool:
        return step == 0

    def describe(self) -> dict[str, object]:
        return {"name": "derived"}

    def build(self, *args: object, **more: object) -> PreconditionerState:
        raise NotImplementedError


WAYS = [InAField, InASlot, InAProperty, make_probe_with_class_attribute]


@pytest.mark.parametrize("keep", WAYS, ids=lambda keep: keep.__name__)
@pytest.mark.parametrize(
    "outer", [lambda probe: KFAC(probe=probe), Derived], ids=["KFAC", "own preconditioner"]
)
def test_private_rows_are_found_however_a_probe_keeps_its_inputs(
    keep: object, outer: object
) -> None:
    rows = torch.randn(20, 3)
    with pytest.raises(ValueError, match="private dataset share 20 rows"):
        check_probes(outer(keep(rows)), (rows, Y))


def test_what_is_no_probe_is_refused_in_a_preconditioner_of_ones_own() -> None:
    class Duck:
        inputs = torch.randn(20, 3)

    with pytest.raises(
        ValueError, match=r"probe of Derived must derive from dpkfc\.curvature\.Probe, got Duck"
    ):
        PrivacyConfig(expected_batch_size=4, steps=1, preconditioner=Derived(Duck()))


def test_probes_of_a_preconditioner_are_looked_at() -> None:
    rows = X.flatten(1)
    public, noise = PublicData(rows[:2], provenance="rows"), FeatureNoise(6)
    check_probes(KFAC(probe=public), (rows[2:], Y[2:]))
    check_probes(KFAC(probe=noise), (rows, Y))
    check_probes(None, (rows, Y))
    whole = torch.utils.data.TensorDataset(rows, Y)
    check_probes(KFAC(probe=public), torch.utils.data.Subset(whole, range(2, 20)))
    check_probes(KFAC(probe=public), Loaded(whole))  # would be read through
    listed = [whole[i] for i in range(20)]
    held = [
        (rows, Y),
        [rows.numpy(), Y.numpy()],
        whole,
        listed,
        torch.utils.data.Subset(whole, range(5)),
    ]
    for config, name in (
        (KFAC(probe=public), "probe"),
        (KFAC(probe=noise, output_probe=public), "output probe"),
    ):
        for private in held:
            with pytest.raises(
                ValueError, match=f"the {name} of KFAC and the private dataset share 2 rows"
            ):
                check_probes(config, private)
    check_probes(KFAC(probe=public), [object()] * 3)  # examples of a kind that cannot be compared


class Loaded(torch.utils.data.Dataset):
    """A dataset that might read its examples from a disk."""

    def __init__(self, inner: torch.utils.data.TensorDataset) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, ...]:
        return self.inner[i]


def test_every_way_to_train_compares_the_probe_with_tensors_that_lie_in_a_dataset() -> None:
    from dpkfc.config import PrivacyConfig
    from dpkfc.integrations.opacus import PrivacyEngine
    from dpkfc.session import Session

    rows, labels = X.flatten(1), Y
    config = KFAC(probe=PublicData(rows[:2], provenance="rows"), probe_size=2)
    model, dataset = torch.nn.Linear(6, 3), torch.utils.data.TensorDataset(rows, labels)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = PrivacyConfig(expected_batch_size=5, steps=1, preconditioner=config).with_noise(
        1.0, 1e-3, 20
    )
    with pytest.raises(ValueError, match="share 2 rows"):
        Session(plan, model, optimizer, dataset)
    with pytest.raises(ValueError, match="share 2 rows"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=torch.utils.data.DataLoader(dataset, batch_size=5),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            preconditioner=config,
        )
    assert not model._forward_pre_hooks and not optimizer._optimizer_step_pre_hooks


def test_minus_zero_and_shape() -> None:
    assert shared_rows(torch.tensor([[-0.0, 1.0]]), torch.tensor([[0.0, 1.0]])) == [(0, 0)]
    assert shared_rows(torch.zeros(1, 2, 3), torch.zeros(1, 3, 2)) == []
