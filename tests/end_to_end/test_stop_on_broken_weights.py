"""Hold NaN or infinity in the weights: the run stops before it spends more."""

import math

import pytest
import torch
from torch import nn

from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.model_checks import check_finite
from tests.integrations import opacus_cases
from tests.sessions import open_session
from tests.test_session import data, kfac, net, train

NAN, INF = math.nan, math.inf


def train_until_error(model, dataset, rate=0.1, *, verify=True, **settings):
    """A session whose steps end in an error about finite numbers."""
    settings = {"expected_batch_size": 20, "steps": 5, **settings}
    session = open_session(model, dataset, lr=rate, verify=verify, **settings)
    with session, pytest.raises(ValueError, match="NaN or infin"):
        train(session)
    return session


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("verify", [True, False])
def test_weights_that_are_not_finite_spend_nothing(value, verify):
    model = net()
    with torch.no_grad():
        next(model.parameters()).view(-1)[-1] = value
    assert train_until_error(model, data(), verify=verify).steps_done == 0


@pytest.mark.parametrize("preconditioner", [None, kfac()], ids=["identity", "kfac"])
def test_a_run_that_has_diverged_spends_no_more(preconditioner):
    session = train_until_error(
        net(dtype=torch.float32),
        data(dtype=torch.float32),
        3e38,
        max_grad_norm=1e3,
        preconditioner=preconditioner,
    )
    assert 0 < session.steps_done < 5


def test_a_script_in_the_style_of_opacus_spends_nothing_either():
    x, y = (z.float() if z.is_floating_point() else z for z in data())
    model = nn.Linear(x.shape[1], 4)
    with torch.no_grad():
        model.weight[0, 0] = NAN
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=10)
    engine, *script = opacus_cases.private(model, data_loader=loader, noise_multiplier=1.0)
    with engine, pytest.raises(ValueError, match="'weight' holds NaN"):
        opacus_cases.train(*script)
    assert engine.ledger.count == 0


def test_every_kind_of_tensor_is_looked_at():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).to(dtype)
        check_finite(find_layers(model))
        with torch.no_grad():
            model[1].bias[1] = INF
        with pytest.raises(ValueError, match=r"'1\.bias' holds NaN or infinity"):
            check_finite(find_layers(model))
    check_finite([])


def test_the_command_says_so_and_leaves_the_folder(tmp_path):
    from dpkfc.app.recipes.catalogue import run_config
    from dpkfc.app.train import run

    settings = {
        "recipe": "digits",
        "method": "dp-sgd",
        "optimizer": "sgd",
        "steps": 4,
        "accountant": "rdp",
    }
    settings |= {"lr": 3e38, "max_grad_norm": 1e4}
    with pytest.raises(ValueError, match="smaller learning rate"):
        run(run_config({**settings, "out": str(tmp_path / "run")}))
    assert (tmp_path / "run" / "ledger.jsonl").is_file()
    assert not (tmp_path / "run" / "model.safetensors").exists()
