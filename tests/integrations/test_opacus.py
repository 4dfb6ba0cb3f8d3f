"""What the engine guarantees and refuses when a script steps by itself."""

from __future__ import annotations

import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dpkfc.integrations.opacus import BatchMemoryManager, PrivacyEngine
from dpkfc.privacy.events import epsilon
from dpkfc.privacy.ledger import BudgetExhausted, LedgerError, verify
from tests.integrations.opacus_cases import B, N, cnn, data, kfac, loader, mlp, private, scaled, sgd, train, weights


def with_epsilon(engine: PrivacyEngine | None = None, model: nn.Module | None = None, **settings: object):
    engine, model = engine or PrivacyEngine(accountant="rdp"), model or mlp()
    chosen = {"data_loader": loader(), "target_epsilon": 5.0, "target_delta": 1e-3, "epochs": 2, "max_grad_norm": 1.0}
    return (engine, *engine.make_private_with_epsilon(module=model, optimizer=sgd(model), **(chosen | settings)))


def backward(model: nn.Module, batch) -> None:
    F.cross_entropy(model(batch[0]), batch[1]).backward()


# -- what is returned -------------------------------------------------------------------------------------------------


def test_model_and_optimizer_are_the_same_objects_and_the_loader_a_dataloader() -> None:
    model, optimizer, source = mlp(), None, loader()
    names = list(model.state_dict())
    optimizer = sgd(model)
    engine = PrivacyEngine()
    made = engine.make_private(
        module=model, optimizer=optimizer, data_loader=source, noise_multiplier=1.3, max_grad_norm=0.7
    )
    assert made[0] is model
    assert made[1] is optimizer
    assert isinstance(made[2], DataLoader)
    assert made[2].dataset is source.dataset
    assert len(made[2]) == len(source)
    assert list(model.state_dict()) == names
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm, optimizer.expected_batch_size) == (1.3, 0.7, B)
    assert all(not vars(p) for p in model.parameters())


def test_close_leaves_nothing_behind() -> None:
    engine, model, optimizer, batches = private(scaled())
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
        module=model, optimizer=optimizer, data_loader=loader(), noise_multiplier=1.0, max_grad_norm=1.0
    )


def test_a_whole_model_can_be_pickled_and_unpickled_without_the_engine() -> None:
    _, model, _, _ = private(noise_multiplier=1.0, test_mode_seed=None)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copy = torch.load(buffer, weights_only=False)
    backward(copy, data()[:4])
    assert torch.equal(weights(copy), weights(model))


# -- what is spent ----------------------------------------------------------------------------------------------------


def test_epsilon_is_that_of_the_releases_at_any_delta() -> None:
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


def test_an_engine_without_a_model_has_spent_nothing() -> None:
    engine = PrivacyEngine()
    assert engine.get_epsilon(1e-5) == 0.0
    assert len(engine.accountant) == 0
    assert engine.accountant.mechanism() == "pld"
    with pytest.raises(RuntimeError, match="make_private"):
        _ = engine.plan


def test_no_noise_is_an_infinite_epsilon() -> None:
    engine, model, optimizer, batches = private()
    train(model, optimizer, batches, 1)
    assert engine.get_epsilon(1e-5) == math.inf


def test_the_budget_ends_the_run_and_a_step_beyond_it_changes_nothing() -> None:
    engine, model, optimizer, batches = with_epsilon()
    for _ in range(2):
        assert train(model, optimizer, batches) == N // B
    assert 4.9 < engine.get_epsilon(1e-3) <= 5.0
    before, state = weights(model), {k: v["momentum_buffer"].clone() for k, v in optimizer.state.items()}
    for attempt in range(2):
        with pytest.raises(BudgetExhausted, match="all 10 releases"):
            train(model, optimizer, batches) if attempt else optimizer.step()
        assert torch.equal(weights(model), before)
        assert all(torch.equal(state[p], optimizer.state[p]["momentum_buffer"]) for p in state)
        assert all(p.grad is None for p in model.parameters())
    assert engine.ledger.count == 10


def test_a_ledger_file_is_continued_by_the_next_run(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    engine, model, optimizer, batches = with_epsilon(ledger_path=path)
    train(model, optimizer, batches)
    engine.close()
    spent = engine.get_epsilon(1e-3)
    assert len(verify(path).releases) == N // B
    engine, model, optimizer, batches = with_epsilon(ledger_path=path)
    assert engine.get_epsilon(1e-3) == spent
    train(model, optimizer, batches)
    with pytest.raises(BudgetExhausted):
        train(model, optimizer, batches)
    engine.close()
    model = mlp()
    with pytest.raises(LedgerError, match="belongs to the plan"):
        with_epsilon(model=model, ledger_path=path, max_grad_norm=0.5)
    assert not model._forward_pre_hooks


def test_the_noise_has_the_stated_scale() -> None:
    """Two-sided over all entries of some empty batches: sigma is accepted, 2/3 and 3/2 of it are not."""
    model = nn.Sequential(nn.Linear(6, 200), nn.ReLU(), nn.Linear(200, 3)).double()
    start = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    _, model, optimizer, batches = private(
        model, optimizer=optimizer, noise_multiplier=2.0, max_grad_norm=0.5, data_loader=loader(4000, batch_size=1)
    )
    steps = 0
    for x, y in batches:
        if len(x) == 0:
            backward(model, (x, y))
            before = weights(model)
            optimizer.step()
            ratio = float((weights(model) - before).std()) / (2.0 * 0.5 / 1)
            assert 0.94 < ratio < 1.06
            steps += 1
        else:
            backward(model, (x, y))
            optimizer.step()
        if steps == 3:
            break
    assert steps == 3
    assert not torch.equal(weights(model), start)


# -- what reaches the optimizer ---------------------------------------------------------------------------------------


def test_an_empty_batch_is_a_noise_step_that_is_charged() -> None:
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


@pytest.mark.parametrize("build", [mlp, scaled])
def test_only_a_release_reaches_the_optimizer(build) -> None:
    """The optimizer sees release / B; the raw gradient of a module without a rule is taken away."""
    model = build()
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _, model, optimizer, batches = private(model, optimizer=optimizer, noise_multiplier=3.0, test_mode_seed=3)
    optimizer.register_step_pre_hook(lambda o, a, k: seen.append([p.grad.clone() for p in model.parameters()]))
    reference = build()
    x, y = next(iter(batches))
    backward(reference, (x, y))
    backward(model, (x, y))
    optimizer.step()
    for p, q, g in zip(model.parameters(), reference.parameters(), seen[0], strict=True):
        assert p.grad is None
        assert (g - q.grad).abs().min() > 0
    flat = torch.cat([g.flatten() for g in seen[0]])
    assert 0.6 * 3 / B < flat.std() < 1.6 * 3 / B


def test_raw_gradients_are_gone_after_an_error() -> None:
    engine, model, optimizer, batches = private(scaled())
    batch = next(iter(batches))
    backward(model, batch)
    assert model.gain.grad is not None
    backward(model, batch)
    before = weights(model)
    with pytest.raises(RuntimeError, match="2 forward passes were differentiated"):
        optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(weights(model), before)
    assert engine.ledger.count == 0


def test_gradients_from_before_make_private_are_dropped() -> None:
    model = mlp()
    backward(model, data()[:8])
    private(model)
    assert all(p.grad is None for p in model.parameters())


def test_the_preconditioner_is_refreshed_when_it_is_due() -> None:
    engine, model, optimizer, batches = private(preconditioner=kfac(every=3))
    built = []
    for batch in batches:
        backward(model, batch)
        optimizer.step()
        built.append(engine._private.preconditioner.step)
    assert built == [0, 0, 0, 3, 3]


def test_schedulers_and_other_optimizers_work_on_what_is_returned() -> None:
    model = mlp()
    _, model, optimizer, batches = private(
        model, optimizer=torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.1)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for batch in batches:
        before = weights(model)
        backward(model, batch)
        optimizer.step()
        scheduler.step()
        assert not torch.equal(weights(model), before)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 6)


def test_zero_grad_may_stand_anywhere() -> None:
    results = []
    for place in ("before the forward pass", "before the backward pass", "after the step", "nowhere"):
        _, model, optimizer, batches = private(scaled())
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


@pytest.mark.parametrize("build", [mlp, scaled])
def test_under_autocast_norms_and_sums_are_wide(build) -> None:
    results = []
    for enabled in (False, True):
        model = build().float()
        source = DataLoader(data(dtype=torch.float32), batch_size=B)
        _, model, optimizer, batches = private(model, data_loader=source)
        for x, y in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        results.append(weights(model))
    start = weights(build().float())
    assert (results[0] - results[1]).norm() < 0.05 * (results[0] - start).norm()


def test_a_nan_example_contributes_nothing() -> None:
    source = data()
    source.tensors[0][::2] = math.nan
    _, model, optimizer, batches = private(data_loader=DataLoader(source, batch_size=B), verify=False)
    train(model, optimizer, batches)
    assert torch.isfinite(weights(model)).all()


def test_in_place_activations_and_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)).double()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    _, model, optimizer, batches = private(model)
    train(model, optimizer, batches)
    assert torch.equal(model[0].weight, before)


# -- the order of things ----------------------------------------------------------------------------------------------


def test_leaving_the_loop_or_an_exception_never_leaks_into_the_next_release() -> None:
    """Invariant 8: after a break the run goes on as one that never saw the broken part."""
    _, model, optimizer, batches = private()
    for batch in batches:
        backward(model, batch)
        break
    with pytest.raises(ZeroDivisionError):
        for batch in batches:
            backward(model, batch)
            _ = 1 / 0
    before = weights(model)
    batch = next(iter(batches))
    reference = mlp()
    reference.load_state_dict(model.state_dict())
    backward(model, batch)
    optimizer.step()
    rows = []
    for x, y in zip(*batch, strict=True):
        loss = F.cross_entropy(reference(x[None]), y[None])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(reference.parameters()))]))
    flat = torch.stack(rows)
    clipped = flat * (1 / flat.norm(dim=1, keepdim=True)).clamp(max=1)
    torch.testing.assert_close(before - weights(model), 0.1 * clipped.sum(0) / B, rtol=1e-6, atol=1e-9)


def misuse_no_backward(model, optimizer, batches):
    next(iter(batches))
    optimizer.step()


def misuse_eval_mode(model, optimizer, batches):
    model.eval()
    backward(model, next(iter(batches)))
    optimizer.step()


def misuse_two_steps(model, optimizer, batches):
    batch = next(iter(batches))
    backward(model, batch)
    optimizer.step()
    backward(model, batch)
    optimizer.step()


def misuse_no_batch(model, optimizer, batches):
    backward(model, data()[:8])
    optimizer.step()


def misuse_other_batch(model, optimizer, batches):
    batch = next(iter(batches))
    backward(model, [x[:-1] for x in batch])
    optimizer.step()


def misuse_same_graph_twice(model, optimizer, batches):
    x, y = next(iter(batches))
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def misuse_skipped_batch(model, optimizer, batches):
    for _ in batches:
        continue


def misuse_accumulation(model, optimizer, batches):
    for i, batch in enumerate(batches):
        backward(model, batch)
        if i % 2:
            optimizer.step()


def misuse_closure(model, optimizer, batches):
    batch = next(iter(batches))
    optimizer.step(lambda: backward(model, batch))


def misuse_old_pass(model, optimizer, batches):
    old = iter(batches)
    backward(model, next(old))
    optimizer.step()
    backward(model, next(iter(batches)))
    optimizer.step()
    next(old)


def misuse_backward_of_an_earlier_batch(model, optimizer, batches):
    x, y = next(iter(batches))
    loss = F.cross_entropy(model(x), y)
    next(iter(batches))
    loss.backward()
    optimizer.step()


def misuse_weight_penalty(model, optimizer, batches):
    x, y = next(iter(batches))
    (F.cross_entropy(model(x), y) + model[0].weight.square().sum()).backward()
    optimizer.step()


def misuse_changed_noise(model, optimizer, batches):
    optimizer.noise_multiplier = 0.1
    backward(model, next(iter(batches)))
    optimizer.step()


def misuse_frozen_later(model, optimizer, batches):
    model[0].weight.requires_grad_(False)
    backward(model, next(iter(batches)))
    optimizer.step()


def misuse_new_layer(model, optimizer, batches):
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    backward(model, next(iter(batches)))
    optimizer.step()


def misuse_input_overwritten(model, optimizer, batches):
    x, y = next(iter(batches))
    loss = F.cross_entropy(model(x), y)
    x.zero_()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("misuse", "match"),
    [
        (misuse_no_backward, "without a backward pass"),
        (misuse_eval_mode, r"call model.train\(\)"),
        (misuse_two_steps, "each batch of the private loader is released once"),
        (misuse_no_batch, "without a new batch"),
        (misuse_other_batch, r"run on \d+ examples but the private loader drew \d+"),
        (misuse_same_graph_twice, "differentiated twice"),
        (misuse_skipped_batch, "not followed by optimizer.step"),
        (misuse_accumulation, "BatchMemoryManager"),
        (misuse_closure, "closure"),
        (misuse_old_pass, "another pass over the private loader"),
        (misuse_backward_of_an_earlier_batch, "before this batch was drawn"),
        (misuse_weight_penalty, r"'0.weight' came from outside.*weight_decay"),
        (misuse_changed_noise, "optimizer.noise_multiplier was changed"),
        (misuse_frozen_later, "'0.weight' was replaced or frozen"),
        (misuse_new_layer, "'2.weight' was replaced"),
        (misuse_input_overwritten, "changed in place"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_misuse_is_one_error_and_releases_nothing_more(misuse, match: str) -> None:
    engine, model, optimizer, batches = private(data_loader=loader(batch_size=20))
    start = weights(model)
    with pytest.raises((RuntimeError, ValueError), match=match):
        misuse(model, optimizer, batches)
    released = {misuse_two_steps: 1, misuse_old_pass: 2}.get(misuse, 0)
    assert engine.ledger.count == released
    assert all(p.grad is None for p in model.parameters())
    if not released:
        assert torch.equal(weights(model), start)


def test_after_an_error_the_next_loop_is_clean() -> None:
    engine, model, optimizer, batches = private()
    with pytest.raises(RuntimeError):
        misuse_no_backward(model, optimizer, batches)
    assert train(model, optimizer, batches) == N // B
    assert engine.ledger.count == N // B


def test_what_is_not_training_is_not_recorded() -> None:
    """Evaluation passes, attacks in eval mode and a look at one batch go unnoticed."""
    engine, model, optimizer, batches = private()
    next(iter(batches))
    for batch in batches:
        backward(model, batch)
        optimizer.step()
        with torch.no_grad():
            model(batch[0])
        model(batch[0])
        model.eval()
        backward(model, batch)
        model.train()
    model.eval()
    assert sum(len(x) for x, _ in batches) > 0
    model.train()
    train(model, optimizer, batches, 2)
    assert engine.ledger.count == N // B + 2


# -- what is refused at the start -------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


class OwnLoader(DataLoader):
    pass


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"batch_first": False}, "leading axis"),
        ({"loss_reduction": "none"}, "'mean' or 'sum'"),
        ({"poisson_sampling": False}, "uncertified=True"),
        ({"uncertified": True}, "poisson_sampling=False"),
        ({"clipping": "per_layer"}, "choose one of flat"),
        ({"clipping": "adaptive"}, "choose one of flat"),
        ({"max_grad_norm": [1.0, 2.0]}, "one number"),
        ({"max_grad_norm": 0.0}, "positive"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_generator": torch.Generator()}, "test_mode_seed"),
        ({"grad_sample_mode": "functorch"}, "torch.func"),
        ({"grad_sample_mode": "ew"}, "leave it out"),
        ({"grad_sample_mode": "ghost_fsdp"}, "leave it out"),
        ({"wrap_model": False}, "close"),
        ({"rand_on_empty": True}, "size 0"),
        ({"criterion": nn.CrossEntropyLoss(reduction="sum")}, "make them equal"),
        ({"precondtioner": None}, "did you mean 'preconditioner'"),
        ({"target_unclipped_quantile": 0.5}, "unknown keyword"),
        ({"preconditioner": "kfac"}, "describe"),
        ({"module": nn.BatchNorm1d(6)}, "Three ways out"),
        ({"module": nn.DataParallel(mlp())}, "plain module"),
        ({"module": None}, "must be a torch module"),
        ({"optimizer": torch.optim.SGD(mlp().parameters(), 0.1)}, "does not hold trainable parameter '0.weight'"),
        ({"data_loader": data()}, "pass a torch DataLoader"),
        ({"data_loader": OwnLoader(data(), batch_size=B)}, "OwnLoader, whose own iteration"),
        ({"data_loader": DataLoader(Stream(), batch_size=B)}, "map-style"),
        ({"data_loader": DataLoader(data(), batch_size=None)}, "no batch_size"),
        (
            {"data_loader": DataLoader(data(), batch_sampler=BatchSampler(SequentialSampler(data()), B, False))},
            "batch sampler of its own",
        ),
        ({"data_loader": loader(shuffle=None, sampler=WeightedRandomSampler([1.0] * N, 128))}, "WeightedRandomSampler"),
        ({"data_loader": loader(shuffle=None, sampler=SubsetRandomSampler(range(4)))}, "Subset"),
        ({"data_loader": loader(shuffle=None, sampler=RandomSampler(data(), replacement=True))}, "RandomSampler"),
        ({"data_loader": loader(batch_size=N + 1)}, "more than the 40 examples"),
        ({"data_loader": loader(collate_fn=lambda rows: [object()])}, "leading axis"),
        ({"data_loader": loader(collate_fn=lambda rows: torch.zeros(3, len(rows)))}, r"shape \(3, 1\)"),
    ],
    ids=str,
)
def test_every_refusal_names_the_fix_and_changes_nothing(settings, match) -> None:
    model = settings.get("module", mlp())
    optimizer = settings.get("optimizer") or sgd(model if isinstance(model, nn.Module) else mlp())
    chosen = {"data_loader": loader(), "noise_multiplier": 1.0, "max_grad_norm": 1.0, **settings}
    chosen |= {"module": model, "optimizer": optimizer}
    with pytest.raises(ValueError, match=match):
        PrivacyEngine().make_private(**chosen)
    if isinstance(model, nn.Module):
        assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not hasattr(optimizer, "noise_multiplier")


@pytest.mark.parametrize(
    ("settings", "match"), [({"accountant": "gdp"}, "upper bound"), ({"secure_mode": True}, "cipher")]
)
def test_refused_engines(settings, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        PrivacyEngine(**settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"epochs": 0}, "epochs must be positive"),
        ({"target_epsilon": -1.0}, "epsilon"),
        ({"target_delta": 2.0}, "delta"),
    ],
)
def test_refused_budgets(settings, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        with_epsilon(**settings)


def test_one_engine_one_model_and_no_model_twice() -> None:
    engine, model, optimizer, batches = private()
    settings = {"data_loader": loader(), "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    with pytest.raises(ValueError, match="one PrivacyEngine for each model"):
        engine.make_private(module=mlp(), optimizer=sgd(mlp()), **settings)
    with pytest.raises(ValueError, match="the module is private already"):
        PrivacyEngine().make_private(module=model, optimizer=sgd(model), **settings)
    settings["data_loader"] = batches
    other = mlp()
    with pytest.raises(ValueError, match="data_loader is private already"):
        PrivacyEngine().make_private(module=other, optimizer=sgd(other), **settings)
    assert train(model, optimizer, batches) == N // B


def test_lbfgs_and_foreign_parameters_are_refused() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="without a closure, got LBFGS"):
        private(model, optimizer=torch.optim.LBFGS(model.parameters()))
    both = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(2))], 0.1)
    with pytest.raises(ValueError, match=r"shape \(2,\) that is not in the model"):
        private(model, optimizer=both)


def test_checkpoints_point_to_the_ledger() -> None:
    engine = PrivacyEngine()
    for method in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(NotImplementedError, match="ledger_path"):
            method(path="x", module=mlp())


def test_validation() -> None:
    bad = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    engine, good = PrivacyEngine(), mlp()
    assert engine.is_compatible(module=good, optimizer=None, data_loader=None)
    assert not engine.is_compatible(module=bad, optimizer=None, data_loader=None)
    assert PrivacyEngine.get_compatible_module(good) is good
    engine.validate(module=good, optimizer=None, data_loader=None)
    with pytest.raises(ValueError, match="Three ways out"):
        PrivacyEngine.get_compatible_module(bad)


# -- what only running the model and the loss can show ----------------------------------------------------------------


class Centred(nn.Module):
    """Mixes examples without a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y - y.mean(0, keepdim=True)


class Counter(nn.Module):
    """Writes a statistic of its input into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.total += x.detach().sum()
        return self.inner(x)


def test_models_that_mix_examples_or_leave_layers_out_are_found_before_a_release() -> None:
    idle = nn.ModuleList([nn.Linear(6, 3)])
    used = mlp()
    used.register_module("idle", idle)
    used.forward = lambda x: used[2](used[1](used[0](x)))
    for model, match in ((Centred(), "mixes examples"), (Counter(), "buffer 'total'"), (used, "idle.0.weight")):
        engine, model, optimizer, batches = private(model.double())
        with pytest.raises(ValueError, match=match):
            train(model, optimizer, batches)
        assert engine.ledger.count == 0


@pytest.mark.parametrize(
    ("criterion", "declared", "match"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), "mean", "loss is a sum.*loss_reduction='sum'"),
        (nn.CrossEntropyLoss(), "sum", "loss is a mean.*loss_reduction='mean'"),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]).double()), "mean", "depends on the labels"),
        (nn.CrossEntropyLoss(ignore_index=0), "mean", "depends on the labels"),
        (nn.NLLLoss(reduction="sum"), "mean", "loss is a sum"),
    ],
)
def test_a_loss_with_another_reduction_is_found_before_a_release(criterion, declared: str, match: str) -> None:
    model = nn.Sequential(*mlp(), nn.LogSoftmax(1)) if isinstance(criterion, nn.NLLLoss) else mlp()
    engine, model, optimizer, batches = private(model, loss_reduction=declared, data_loader=loader(batch_size=20))
    with pytest.raises(ValueError, match=match):
        train(model, optimizer, batches, criterion=criterion)
    assert engine.ledger.count == 0


def mean_square(out, y):
    return F.mse_loss(out[:, 0], y.double())


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        mean_square,
        lambda out, y: 0.5 * F.cross_entropy(out, y),
        lambda out, y: (F.cross_entropy(out, y, reduction="none") * (1.0 + y)).mean(),
    ],
)
def test_honest_losses_pass(criterion) -> None:
    _, model, optimizer, batches = private()
    assert train(model, optimizer, batches, criterion=criterion) == N // B


def test_shuffled_batches_are_uncertified_and_cover_the_dataset() -> None:
    source = data()
    source.tensors[1][:] = torch.arange(N) % 3
    engine, model, optimizer, batches = private(
        data_loader=DataLoader(source, batch_size=B), poisson_sampling=False, uncertified=True, test_mode_seed=None
    )
    assert not engine.ledger.header["certified"]
    for _ in range(2):
        seen = []
        for x, y in batches:
            assert len(x) == B
            seen.append(x)
            backward(model, (x, y))
            optimizer.step()
        assert len(torch.unique(torch.cat(seen), dim=0)) == N
        train(model, optimizer, batches, 2)  # a pass that is broken off does not shift the next one


def test_a_subset_is_a_dataset_of_its_own() -> None:
    engine, model, optimizer, batches = private(data_loader=DataLoader(Subset(data(), range(20)), batch_size=5))
    assert engine.plan.dataset_size == 20
    assert train(model, optimizer, batches) == 4


def test_manager_refusals() -> None:
    _, model, optimizer, batches = private()
    for settings, match in (
        ({"data_loader": loader()}, "not private"),
        ({"optimizer": sgd(model)}, "another engine"),
        ({"max_physical_batch_size": 0}, ">= 1"),
        ({"max_physical_batch_size": 2.5}, "integer"),
    ):
        with pytest.raises(ValueError, match=match):
            BatchMemoryManager(
                **{"data_loader": batches, "max_physical_batch_size": 2, "optimizer": optimizer, **settings}
            )
