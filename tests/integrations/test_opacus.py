"""What the engine returns, spends and hands to the optimizer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from dpkfc.integrations.opacus import PrivacyEngine
from dpkfc.privacy import Budget
from dpkfc.privacy.accounting import epsilon
from dpkfc.privacy.ledger import BudgetExhausted, verify
from dpkfc.privacy.ledger_lines import LedgerError
from dpkfc.weights import digest_for_files
from dpkfc.weights_record import read_weights_record
from tests.integrations.opacus_cases import (
    B,
    N,
    backward,
    cnn,
    data,
    loader,
    make_private,
    make_scaled,
    mlp,
    private,
    sgd,
    train,
)
from tests.mutation_cases import weights

# -- what is returned ------------------------------------------------------------------------------


def test_model_and_optimizer_are_the_same_objects_and_the_loader_a_dataloader():
    model, optimizer, source = mlp(), None, loader()
    names = list(model.state_dict())
    optimizer = sgd(model)
    engine = PrivacyEngine()
    made = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=source,
        noise_multiplier=1.3,
        max_grad_norm=0.7,
    )
    assert made[0] is model
    assert made[1] is optimizer
    assert isinstance(made[2], DataLoader)
    assert made[2].dataset is source.dataset
    assert len(made[2]) == len(source)
    assert list(model.state_dict()) == names
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm, optimizer.expected_batch_size) == (
        1.3,
        0.7,
        B,
    )
    assert all(not vars(p) for p in model.parameters())


def test_close_leaves_nothing_behind():
    engine, model, optimizer, batches = private(make_scaled())
    train(model, optimizer, batches, steps=2)
    engine.close()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not hasattr(optimizer, "noise_multiplier")
    assert len(engine.accountant) == 2
    with pytest.raises(RuntimeError, match="closed"):
        next(iter(batches))
    PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )


# -- what is spent ---------------------------------------------------------------------------------


def test_epsilon_is_that_of_the_releases_at_any_delta():
    engine, model, optimizer, batches = private(
        engine=PrivacyEngine(accountant="rdp"), noise_multiplier=1.0, test_mode_seed=None
    )
    assert engine.get_epsilon(1e-5) == 0.0
    for passes in (1, 2):
        train(model, optimizer, batches)
        for delta in (1e-5, 1e-3):
            expected = epsilon(engine.plan.event, passes * N // B, delta, "rdp")
            assert engine.get_epsilon(delta) == expected
            assert engine.accountant.get_epsilon(delta=delta) == expected
    assert engine.plan.event.sampling_probability == B / N
    assert engine.ledger.max_releases is None
    with pytest.raises(ValueError, match=r"delta must be in \(0, 1\)"):
        engine.get_epsilon(0.0)
    with pytest.raises(ValueError, match="got '1e-5'"):
        engine.get_epsilon("1e-5")


def test_an_engine_without_a_model_has_spent_nothing():
    engine = PrivacyEngine()
    assert engine.get_epsilon(1e-5) == 0.0
    assert len(engine.accountant) == 0
    assert engine.accountant.mechanism() == "pld"
    with pytest.raises(RuntimeError, match="make_private"):
        _ = engine.plan


def test_the_budget_ends_the_run_and_a_step_beyond_it_changes_nothing():
    engine, model, optimizer, batches = make_private()
    for _ in range(2):
        assert train(model, optimizer, batches) == N // B
    assert 4.9 < engine.get_epsilon(1e-3) <= 5.0
    before, state = (
        weights(model),
        {k: v["momentum_buffer"].clone() for k, v in optimizer.state.items()},
    )
    for attempt in range(2):
        with pytest.raises(BudgetExhausted, match="all 10 releases"):
            train(model, optimizer, batches) if attempt else optimizer.step()
        assert torch.equal(weights(model), before)
        assert all(torch.equal(state[p], optimizer.state[p]["momentum_buffer"]) for p in state)
        assert all(p.grad is None for p in model.parameters())
    assert engine.ledger.count == 10


def test_a_ledger_file_is_continued_by_the_next_run(tmp_path):
    path = tmp_path / "ledger.jsonl"
    engine, model, optimizer, batches = make_private(ledger_path=path)
    train(model, optimizer, batches)
    engine.close()
    spent = engine.get_epsilon(1e-3)
    assert len(verify(path).releases) == N // B
    with pytest.raises(
        LedgerError, match="holds 5 releases of an earlier run: load its checkpoint"
    ):
        make_private(ledger_path=path)
    engine, model, optimizer, batches = make_private(ledger_path=path, resume=True)
    assert engine.get_epsilon(1e-3) == spent
    train(model, optimizer, batches)
    with pytest.raises(BudgetExhausted):
        train(model, optimizer, batches)
    engine.close()
    model = mlp()
    with pytest.raises(BudgetExhausted, match="all 10 releases .* are spent in .* resume=True"):
        make_private(model=model, ledger_path=path)
    assert not model._forward_pre_hooks
    with pytest.raises(LedgerError, match="belongs to the plan"):
        make_private(model=model, ledger_path=path, max_grad_norm=0.5)
    assert not model._forward_pre_hooks


# -- what reaches the optimizer --------------------------------------------------------------------


def test_an_empty_batch_is_a_noise_step_that_is_charged():
    """Invariant 6, whether or not the script runs the model on it."""
    for run_the_model in (True, False):
        engine, model, optimizer, batches = private(
            cnn(), noise_multiplier=1.0, data_loader=DataLoader(data(shape=(1, 8, 8)), batch_size=1)
        )
        seen = 0
        for x, y in batches:
            if len(x) == 0:
                assert x.shape == (0, 1, 8, 8)
                assert x.dtype == torch.float64
                assert y.dtype == torch.int64
                before, count = weights(model), engine.ledger.count
                if run_the_model:
                    backward(model, (x, y))
                optimizer.step()
                assert engine.ledger.count == count + 1
                assert not torch.equal(weights(model), before)
                seen += 1
            else:
                backward(model, (x, y))
                optimizer.step()
        assert seen > 3


@pytest.mark.parametrize("build", [mlp, make_scaled])
def test_only_a_release_reaches_the_optimizer(build):
    """The optimizer sees release / B; the raw gradient of a module without a rule is taken away."""
    model = build()
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _, model, optimizer, batches = private(
        model, optimizer=optimizer, noise_multiplier=3.0, test_mode_seed=3
    )
    optimizer.register_step_pre_hook(
        lambda o, a, k: seen.append([p.grad.clone() for p in model.parameters()])
    )
    reference = build()
    x, y = next(iter(batches))
    backward(reference, (x, y))
    backward(model, (x, y))
    optimizer.step()
    for p, q, g in zip(model.parameters(), reference.parameters(), seen[0], strict=True):
        assert torch.equal(p.grad, g)
        assert (g - q.grad).abs().min() > 0
    flat = torch.cat([g.flatten() for g in seen[0]])
    assert 0.6 * 3 / B < flat.std() < 1.6 * 3 / B


def test_gradients_from_before_make_private_are_dropped():
    model = mlp()
    backward(model, data()[:8])
    private(model)
    assert all(p.grad is None for p in model.parameters())


def test_zero_grad_may_stand_anywhere():
    results = []
    for place in (
        "before the forward pass",
        "before the backward pass",
        "after the step",
        "nowhere",
    ):
        _, model, optimizer, batches = private(make_scaled())
        for x, y in batches:
            if place == "before the forward pass":
                optimizer.zero_grad(set_to_none=False)
            loss = F.cross_entropy(model(x), y)
            if place == "before the backward pass":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if place == "after the step":
                model.zero_grad(set_to_none=False)
        results.append(weights(model))
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("build", [mlp, make_scaled])
def test_anomaly_mode_does_not_end_a_run_at_a_nan_example(build):
    """The error told that some record has a NaN, and the releases before it."""
    rows = data()
    rows.tensors[0][3] = float("nan")
    with torch.autograd.set_detect_anomaly(True):
        _, model, optimizer, batches = private(build(), data_loader=DataLoader(rows, batch_size=N))
        for x, y in batches:
            with torch.autograd.set_detect_anomaly(True):
                nn.functional.cross_entropy(model(x), y).backward()
            assert torch.is_anomaly_enabled()
            optimizer.step()
    assert torch.isfinite(weights(model)).all()


# -- all runs on the same people -------------------------------------------------------------------


def make_engine(budget):
    return PrivacyEngine(accountant="rdp", budget=budget)


def test_an_engine_charges_its_whole_plan_and_records_its_weights(tmp_path):
    ward = Budget(tmp_path / "ward.toml", epsilon=50.0, delta=1e-3)
    path = tmp_path / "ledger.jsonl"
    engine, model, optimizer, batches = make_private(make_engine(ward), ledger_path=path)
    assert not ward.charges
    train(model, optimizer, batches)
    assert len(ward.charges) == 1 and ward.charges[0].releases == 10
    engine.close()
    record = read_weights_record(path)
    assert (
        record is not None
        and record.releases == 5
        and record.describes(digest_for_files(model.state_dict()))
    )
    engine, other, *_ = make_private(make_engine(ward), ledger_path=path, resume=True)
    assert len(ward.charges) == 1
    with pytest.raises(LedgerError, match="does not hold the weights of"):
        engine._private.check_weights()
    other.load_state_dict(model.state_dict())
    engine._private.check_weights()
    engine.close()
    assert read_weights_record(path) == record


def test_a_charged_ledger_is_not_opened_without_its_limit(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ward = Budget(tmp_path / "ward.toml", epsilon=50.0, delta=1e-3)
    settings = {"epochs": 1, "target_delta": 1e-5, "ledger_path": path}
    engine, *parts = make_private(make_engine(ward), **settings)
    train(*parts, steps=1)
    noise = engine.plan.noise_multiplier
    engine.close()
    unlimited = {"noise_multiplier": noise, "test_mode_seed": None}
    with pytest.raises(LedgerError, match="begun for 5 releases, this run is for unlimited"):
        private(engine=PrivacyEngine(accountant="rdp"), **unlimited, ledger_path=path, resume=True)
    free = tmp_path / "free.jsonl"
    private(engine=PrivacyEngine(accountant="rdp"), **unlimited, ledger_path=free)[0].close()
    with pytest.raises(LedgerError, match="begun for unlimited releases, this run is for 5"):
        make_private(make_engine(ward), **settings | {"ledger_path": free}, resume=True)
    assert len(ward.charges) == 1


@pytest.mark.parametrize("mixes", ["model", "loss"])
def test_a_model_that_public_rows_refuse_charges_no_budget(tmp_path, mixes):
    ward = Budget(tmp_path / "ward.toml", epsilon=50.0, delta=1e-3)
    model = mlp()
    if mixes == "model":
        model.register_forward_hook(lambda module, args, output: output - output.mean(0))
    engine, *parts = make_private(make_engine(ward), model)
    with engine, pytest.raises(ValueError, match="examples|batch"):
        train(*parts, criterion=lambda output, y: F.cross_entropy(output, y).square())
    assert engine.ledger.count == 0
    # A script's loss is seen on private rows alone, and a script may choose it by them.
    assert len(ward.charges) == (mixes == "loss")


def test_an_optimizer_that_makes_no_step_charges_no_budget(tmp_path):
    ward, model = Budget(tmp_path / "ward.toml", epsilon=50.0, delta=1e-3), mlp()
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    with pytest.raises(ValueError, match="Adam cannot make a step"):
        make_engine(ward).make_private_with_epsilon(
            module=model,
            optimizer=optimizer,
            data_loader=loader(),
            target_epsilon=5.0,
            target_delta=1e-3,
            epochs=2,
            max_grad_norm=1.0,
        )
    assert not ward.charges


def test_an_engine_that_does_not_fit_leaves_nothing_behind(tmp_path):
    ward = Budget(tmp_path / "ward.toml", epsilon=0.01, delta=1e-3)
    model = mlp()
    with pytest.raises(BudgetExhausted, match=r"ward\.toml has ε"):
        make_private(make_engine(ward), model, ledger_path=tmp_path / "ledger.jsonl")
    assert not model._forward_pre_hooks
    assert {path.name for path in tmp_path.iterdir()} == {"ward.toml", "ward.toml.lock"}
