"""Write weights, a release or a batch from outside the session: noticed before the next release."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from dpkfc.integrations.opacus import PrivacyEngine
from tests.integrations import opacus_cases
from tests.sessions import cross_entropy, open_session

N, STEPS = 20, 3
X, Y = torch.randn(N, 4, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 2


def session_of(model, optimizer=None):
    settings = {"expected_batch_size": 5, "steps": STEPS, "test_mode_seed": None}
    return open_session(model, (X, Y), optimizer=optimizer, verify=False, **settings)


def step(session):
    session.step(next(session.batches()), cross_entropy)


def step_on_plain_gradients(session):
    cross_entropy(session.model, (X, Y)).mean().backward()
    session.optimizer.step()


def load_other_weights(session):
    session.model.load_state_dict(nn.Linear(4, 2).state_dict())


def write_one_entry(session):
    with torch.no_grad():
        session.model.weight[0, 0] += 1


def replace_data(session):
    session.model.weight.data = X[:2].clone()


def write_data(session):
    session.model.weight.data.neg_()


def write_array(session):
    session.model.weight.detach().numpy()[:] = X[:2].flip(0).numpy()


def write_vector(session):
    nn.utils.vector_to_parameters(X.flatten()[:10].clone(), session.model.parameters())


def average_with_past(session):
    average = AveragedModel(session.model, use_buffers=True)
    average.module.weight.data.add_(1)
    for p, mean in zip(session.model.parameters(), average.parameters(), strict=True):
        p.data.copy_(mean)


def write_frozen(session):
    session.model.prototypes.data = X[:3].clone()


WAYS = [step_on_plain_gradients, load_other_weights, write_one_entry, replace_data, write_data]
WAYS += [write_array, write_vector, average_with_past]


@pytest.mark.parametrize("write", WAYS)
def test_weights_that_were_written_between_two_releases_end_the_run_before_the_next(
    write, tmp_path
):
    with session_of(nn.Linear(4, 2)) as session:
        write(session)  # before the first release any weights may begin
        step(session)
        write(session)
        batch = next(session.batches())
        with pytest.raises(
            RuntimeError, match="parameter 'weight' was written between two releases"
        ) as caught:
            session.step(batch, cross_entropy)
        assert len(str(caught.value)) <= 160 and session.steps_done == 1
        with pytest.raises(RuntimeError, match="written between two releases"):
            session.save(tmp_path / "checkpoint")
        session.accept_weights()
        session.step(batch, cross_entropy)
        assert session.steps_done == 2


def test_a_frozen_parameter_is_guarded_and_equal_values_are_no_change():
    model = nn.Linear(4, 2)
    model.prototypes = nn.Parameter(torch.randn(3, 4), requires_grad=False)
    optimizer = torch.optim.SGD([model.weight, model.bias], 0.1)
    with session_of(model, optimizer) as session:
        step(session)
        model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()})
        step(session)
        session.accept_weights()
        assert not session.unprotected_figures
        write_frozen(session)
        with pytest.raises(RuntimeError, match="'prototypes' was written between two releases"):
            step(session)


class RenormedInForward(nn.Linear):
    """As EEG models do it: a write that torch does not count, here from the second step on."""

    writes = False

    def forward(self, x):
        if self.writes:
            self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=1e-3)
        return super().forward(x)


@pytest.mark.parametrize("releases", [0, 1])
def test_a_forward_pass_that_writes_unseen_by_torch_is_noticed_before_a_release(releases):
    model = RenormedInForward(4, 2)
    with session_of(model) as session:
        for _ in range(releases):
            step(session)
        model.writes = True
        with pytest.raises(RuntimeError, match="forward pass writes to the parameter 'weight'"):
            step(session)
        assert session.steps_done == releases


def make_engine(model=None, optimizer=None):
    engine, model, optimizer, loader = opacus_cases.private(
        model or nn.Linear(4, 2),
        PrivacyEngine(accountant="rdp"),
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(X, Y), batch_size=5),
        noise_multiplier=2.0,
        test_mode_seed=None,
    )

    def run():
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            break

    return engine, model, run


def make_session(model=None, optimizer=None):
    session = session_of(model or nn.Linear(4, 2), optimizer)
    return session, session.model, lambda: step(session)


@pytest.mark.parametrize("make", [make_session, make_engine])
def test_accepted_weights_are_named_on_the_card(make, tmp_path):
    said = {"title": "t", "chosen_by": "fixed", "not_private": {}}
    host, model, run = make()
    with host:
        host.accept_weights()  # before the first release any weights may begin
        run()
        assert not host.write_card(tmp_path / "first", **said)["not_private"]
        for _ in range(2):
            model.weight.data.mul_(0.5)
            with pytest.raises(RuntimeError, match="was written between two releases"):
                run()
            with pytest.raises(RuntimeError, match="is not as the last release left it"):
                host.write_card(tmp_path / "card", **said)
            host.accept_weights()
            run()
        model.weight.data.mul_(0.5)
        host.accept_weights()
        card = host.write_card(tmp_path / "card", **said)
    (reason,) = card["not_private"].values()
    assert reason.startswith("accepted by accept_weights() after release 1, 2, 3: ε covers them")
    assert reason in (tmp_path / "card" / "privacy_card.md").read_text("utf-8")


def test_a_restored_run_remembers_what_was_accepted(tmp_path):
    with session_of(nn.Linear(4, 2)) as session:
        step(session)
        write_data(session)
        session.accept_weights()
        session.save(tmp_path / "checkpoint")
        said = session.unprotected_figures
        session.restore(tmp_path / "checkpoint")
        step(session)
        assert session.unprotected_figures == said and said


def test_evaluation_and_an_average_beside_the_model_write_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 2))
    average = AveragedModel(model)
    with session_of(model) as session:
        for batch in session.batches():
            session.step(batch, cross_entropy)
            average.update_parameters(model)
            with torch.no_grad():
                model.eval()(X)
            cross_entropy(model.train(), (X, Y)).mean().backward()
            model.zero_grad()
        assert session.steps_done == STEPS


def test_a_checkpoint_is_a_door_of_the_session(tmp_path):
    with session_of(nn.Linear(4, 2)) as session:
        step(session)
        session.save(tmp_path / "checkpoint")
        write_one_entry(session)
        session.restore(tmp_path / "checkpoint")
        step(session)
        assert session.steps_done == 2


def change_each(change):
    """Return a hook of an optimizer that changes each of its parameters."""

    def hook(optimizer, *_):
        for group in optimizer.param_groups:
            for p in group["params"]:
                change(p)

    return hook


WRITE_WEIGHTS = change_each(lambda p: p.data.mul_(0.5))


@pytest.mark.parametrize(
    "change",
    [
        lambda p: setattr(p, "grad", torch.ones_like(p)),
        lambda p: p.grad.add_(1.0),
        lambda p: p.grad.data.mul_(2.0),
    ],
)
def test_a_pre_hook_that_changes_the_release_is_refused_before_a_weight_is_written(change):
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with session_of(model, optimizer) as session:
        optimizer.register_step_pre_hook(change_each(change))
        with pytest.raises(
            RuntimeError, match="pre-hook replaced the release in the gradient of 'weight'"
        ):
            step(session)
    assert torch.equal(model.weight, before) and len(optimizer._optimizer_step_pre_hooks) == 1


@pytest.mark.parametrize("is_global", [False, True])
def test_a_pre_hook_that_writes_a_weight_is_refused(is_global):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    register = register_optimizer_step_pre_hook if is_global else optimizer.register_step_pre_hook
    handle = register(WRITE_WEIGHTS)
    try:
        with session_of(model, optimizer) as session:
            with pytest.raises(RuntimeError, match="pre-hook replaced the parameter 'weight'"):
                step(session)
    finally:
        handle.remove()


@pytest.mark.parametrize("make", [make_session, make_engine])
def test_weights_that_a_post_hook_writes_are_noticed_before_the_next_release(make):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_post_hook(WRITE_WEIGHTS)
    host, _, run = make(model, optimizer)
    with host:
        run()
        with pytest.raises(RuntimeError, match="'weight' was written between two releases"):
            run()


def test_a_pre_hook_that_reads_the_release_is_welcome():
    model, seen = nn.Linear(4, 2), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.clone()))
    with session_of(model, optimizer) as session:
        step(session)
        step(session)
    assert len(seen) == 2 and len(optimizer._optimizer_step_pre_hooks) == 1


def test_a_drawn_batch_cannot_be_overwritten():
    with session_of(nn.Linear(4, 2)) as session:
        batch = next(session.batches())
        for array in (batch.indices, batch.rows):
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 0
    units = [str(i // 2) for i in range(N)]
    settings = {"unit": "patient", "max_records_per_unit": 2, "units": units}
    with open_session(nn.Linear(4, 2), (X, Y), size=N // 2, **settings) as session:
        batch = next(session.batches())
        with pytest.raises(ValueError, match="read-only"):
            batch.records[:] = 0
        session.step(batch, cross_entropy)
