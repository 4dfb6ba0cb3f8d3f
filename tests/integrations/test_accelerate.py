"""A session beside an Accelerator: what may stay, and what would let un-noised gradients or losses
through.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from dpkfc.config import PrivacyConfig
from dpkfc.integrations.accelerate import guard
from dpkfc.integrations.opacus import PrivacyEngine
from dpkfc.session import Session
from tests.mutation_cases import weights

N = 40


@pytest.fixture(autouse=True)
def _fresh():
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def data():
    return TensorDataset(torch.randn(N, 6), torch.randint(0, 3, (N,)))


def losses(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1], reduction="none")


def make_session(model, optimizer=None, noise=1.0):
    plan = PrivacyConfig(expected_batch_size=8, steps=4, accountant="rdp").with_noise(
        noise, 1e-3, N
    )
    return Session(plan, model, optimizer or torch.optim.SGD(model.parameters(), 0.1), data())


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_prepared_model_trains_privately_and_only_so(precision):
    accelerator = Accelerator(mixed_precision=precision, cpu=True)
    model, loader = accelerator.prepare(mlp(), DataLoader(data(), 8))
    with make_session(model, noise=1e5) as session:
        handle = guard(accelerator, session)
        for batch in session.batches():
            session.step(batch, losses)
        assert session.steps_done == 4
        assert weights(model).norm() > 1e3
        before = weights(model)
        accelerator.backward(losses(model, next(iter(loader))).mean())
        assert any(p.grad is not None for p in model.parameters())
        with pytest.raises(RuntimeError, match="without a release of the session"):
            session.optimizer.step()
        assert torch.equal(weights(model), before)
        assert all(p.grad is None for p in model.parameters())
        handle.remove()
        accelerator.backward(losses(model, next(iter(loader))).mean())
        session.optimizer.step()
        assert not torch.equal(weights(model), before)


def test_a_prepared_optimizer_is_refused():
    accelerator = Accelerator(cpu=True)
    model = mlp()
    plain = torch.optim.SGD(model.parameters(), 0.1)
    model, prepared = accelerator.prepare(model, plain)
    for optimizer in (prepared, plain):
        with (
            pytest.raises(ValueError, match="leave it out of prepare"),
            make_session(model, optimizer) as session,
        ):
            guard(accelerator, session)


def test_another_model_than_the_sessions_is_refused():
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(mlp())
    with (
        pytest.raises(ValueError, match="given another model than the session's"),
        make_session(mlp()) as session,
    ):
        guard(accelerator, session)


class Wrapper(nn.parallel.DistributedDataParallel):
    """As prepare wraps a model where there are several processes."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module

    def forward(self, x):
        return self.module(x)


@pytest.mark.parametrize(
    "setting, value, match",
    [
        ("mixed_precision", "fp16", "mixed_precision='bf16' or 'no'"),
        ("scaler", object(), "mixed_precision='bf16' or 'no'"),
        ("num_processes", 2, "one process"),
        ("gradient_accumulation_steps", 4, "drawn and clipped as one"),
        ("distributed_type", "DEEPSPEED", "DEEPSPEED"),
    ],
)
def test_scaling_and_distribution_are_refused(setting, value, match):
    accelerator = Accelerator(cpu=True)

    class Other:
        """The same Accelerator with one setting of a machine that is not here."""

        def __getattr__(self, name):
            return value if name == setting else getattr(accelerator, name)

    with make_session(mlp()) as session, pytest.raises(ValueError, match=match):
        guard(Other(), session)


def test_a_wrapped_model_is_refused():
    with (
        make_session(Wrapper(mlp())) as session,
        pytest.raises(ValueError, match=r"inside a Wrapper.*unwrap_model"),
    ):
        guard(Accelerator(cpu=True), session)


# -- an Opacus-shaped engine in such a script ------------------------------------------------------


def test_an_engine_takes_no_prepared_optimizer():
    accelerator = Accelerator(cpu=True)
    model = mlp()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(
        ValueError, match="wrapped in AcceleratedOptimizer.*out of accelerator.prepare"
    ):
        PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(data(), 8),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_an_engine_stays_private_when_its_model_and_optimizer_are_prepared():
    accelerator, engine = Accelerator(cpu=True), PrivacyEngine()
    model = mlp()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data_loader=DataLoader(data(), 8),
        noise_multiplier=1e5,
        max_grad_norm=1.0,
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(losses(model, batch).mean())
        optimizer.step()
    assert engine.ledger.count == 5
    assert weights(model).norm() > 1e3
    before = weights(model)
    accelerator.backward(losses(model, data()[:8]).mean())
    with pytest.raises(RuntimeError, match="without a new batch"):
        optimizer.step()
    assert torch.equal(weights(model), before)
