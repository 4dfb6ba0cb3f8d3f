"""What is refused when a model is made private, before anything has been changed."""

import re

import pytest
import torch
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

from dpkfc.distributed.context import DistributedContext
from dpkfc.integrations.opacus import PrivacyEngine
from tests.integrations.opacus_cases import (
    B,
    N,
    data,
    loader,
    make_private,
    mlp,
    private,
    sgd,
    train,
)

# -- what is refused at the start ------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


class OwnLoader(DataLoader):
    pass


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"batch_first": False}, "leading axis"),
        ({"loss_reduction": "none"}, "'mean' or 'sum'"),
        ({"poisson_sampling": False}, "uncertified=True"),
        (
            {"clipping": "per_layer", "max_grad_norm": [1.0, 1.0]},
            "max_grad_norm must be one number",
        ),
        ({"clipping": "adaptive"}, "clipping='automatic', which needs no bound"),
        ({"max_grad_norm": [1.0, 2.0]}, "one number"),
        ({"noise_multiplier": None}, "noise_multiplier must be finite and >= 0, got None"),
        ({"epochs": 3}, r"give it to make_private_with_epsilon\(\.\.\.\)"),
        ({"steps": 10}, r"write epochs=steps / len\(data_loader\)"),
        ({"data_loader": DataLoader([], batch_size=B)}, "dataset_size must be an integer >= 1"),
        ({"noise_generator": torch.Generator()}, "test_mode_seed"),
        ({"grad_sample_mode": "ghost_fsdp"}, "leave it out"),
        ({"rand_on_empty": True}, r"write: if len\(y\) == 0: optimizer.step\(\); continue"),
        ({"criterion": nn.CrossEntropyLoss(reduction="sum")}, "make them equal"),
        ({"precondtioner": None}, "did you mean 'preconditioner'"),
        ({"target_unclipped_quantile": 0.5}, "docs/how-to-opacus.md#from-opacus"),
        ({"noise": "correlated"}, r"take a Session: PrivacyConfig\(noise=\)"),
        ({"bands": 3}, r"PrivacyConfig\(noise='correlated', bands=\)"),
        ({"unit": "patient"}, r"take a Session: PrivacyConfig\(unit="),
        ({"max_physical_batch_size": 4}, r"BatchMemoryManager\("),
        ({"nosie": 1}, "unknown keyword 'nosie'"),
        ({"criterion": nn.functional.mse_loss}, "criterion must be a torch module"),
        ({"module": nn.BatchNorm1d(6)}, "replace it by nn.GroupNorm"),
        ({"module": nn.DataParallel(mlp())}, "plain module"),
        ({"module": None}, "must be a torch module"),
        ({"data_loader": data()}, "pass a torch DataLoader"),
        ({"data_loader": OwnLoader(data(), batch_size=B)}, "OwnLoader, whose own iteration"),
        ({"data_loader": DataLoader(Stream(), batch_size=B)}, "map-style"),
        ({"data_loader": DataLoader(data(), batch_size=None)}, "no batch_size"),
        (
            {
                "data_loader": DataLoader(
                    data(), batch_sampler=BatchSampler(SequentialSampler(data()), B, False)
                )
            },
            "batch sampler of its own",
        ),
        (
            {"data_loader": loader(shuffle=None, sampler=WeightedRandomSampler([1.0] * N, 128))},
            "WeightedRandomSampler.*weight the losses",
        ),
        (
            {"data_loader": DataLoader(Subset(data(), [*range(N), 1]), batch_size=B)},
            "more than once.*Units need a Session",
        ),
        ({"data_loader": loader(shuffle=None, sampler=SubsetRandomSampler(range(4)))}, "Subset"),
        (
            {"data_loader": loader(shuffle=None, sampler=RandomSampler(data(), replacement=True))},
            "RandomSampler",
        ),
        ({"data_loader": loader(collate_fn=lambda rows: [object()])}, "leading axis"),
        (
            {"data_loader": loader(collate_fn=lambda rows: torch.zeros(3, len(rows)))},
            r"shape \(3, 1\)",
        ),
    ],
)
def test_every_refusal_names_the_fix_and_changes_nothing(settings, match):
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
    "settings, match",
    [
        ({"accountant": "gdp"}, "upper bound"),
        ({"secure_mode": True}, "cipher.*take a Session .*'rounded'"),
        ({"sample_rate": 0.1, "noise_multiplier": 1.0}, r"not sample_rate=; .*make_private\("),
    ],
)
def test_refused_engines(settings, match):
    with pytest.raises(ValueError, match=match):
        PrivacyEngine(**settings)


def test_an_engine_of_the_first_opacus_is_told_where_its_model_goes():
    with pytest.raises(ValueError, match=r"not Linear; .* go to make_private\(module="):
        PrivacyEngine(nn.Linear(2, 1), batch_size=8, sample_size=40, noise_multiplier=1.0)


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"epochs": 0}, "epochs must be positive"),
        ({"target_epsilon": "3"}, "epsilon must be positive and finite, got '3'"),
        ({"target_epsilon": 1e9}, r"choose a smaller epsilon, up to \d+, or give the noise"),
        ({"noise_multiplier": 1.0}, "the target .* decides the noise"),
    ],
)
def test_refused_budgets(settings, match):
    with pytest.raises(ValueError, match=match):
        make_private(**settings)


def test_a_delta_of_one_over_n_is_refused_with_two_fixes_that_work():
    with pytest.raises(ValueError) as caught:
        make_private(target_delta=1 / N)
    found = re.search(
        "^delta = 0.025 is not below 1 / N .*; take for example delta = (.*), or uncertified=True$",
        str(caught.value),
    )
    assert make_private(target_delta=float(found[1]))[0].plan.certified
    with pytest.warns(UserWarning, match="is not below 1 / N"):
        engine, *_ = make_private(target_delta=1 / N, uncertified=True)
    assert "UNCERTIFIED: delta" in engine.plan.caveats[0]
    assert make_private(uncertified=True)[0].plan.certified


def test_one_engine_one_model_and_no_model_twice():
    engine, model, optimizer, batches = private()
    settings = {"data_loader": loader(), "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    with pytest.raises(ValueError, match="one PrivacyEngine for each model"):
        engine.make_private(module=mlp(), optimizer=sgd(mlp()), **settings)
    with pytest.raises(ValueError, match="the module is private already"):
        PrivacyEngine().make_private(module=model, optimizer=sgd(model), **settings)
    assert train(model, optimizer, batches) == N // B


def test_lbfgs_and_foreign_parameters_are_refused():
    model = mlp()
    with pytest.raises(ValueError, match="LBFGS steps with a closure"):
        private(model, optimizer=torch.optim.LBFGS(model.parameters()))
    both = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(2))], 0.1)
    with pytest.raises(ValueError, match=r"shape \(2,\) that is not in the model"):
        private(model, optimizer=both)


def test_processes_that_would_each_train_on_all_data_are_refused(
    monkeypatch,
):
    monkeypatch.setattr(DistributedContext, "current", classmethod(lambda cls: cls(0, 3)))
    with pytest.raises(ValueError, match=r"3 processes.*spend 3 times the budget.*dpkfc\.Session"):
        private()
    monkeypatch.undo()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="spend 2 times the budget"):
        private()
