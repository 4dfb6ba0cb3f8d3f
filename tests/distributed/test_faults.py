"""A process that dies stops the run with the ledger intact, and torchrun starts it again from the
last checkpoint.
"""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from dpkfc.checkpoint import CheckpointError
from dpkfc.distributed.context import RankLost
from dpkfc.privacy.ledger import verify
from tests.distributed.cases import Case
from tests.distributed.group import run, start
from tests.distributed.train import CASE, die, main, train
from tests.models import limited
from tests.test_session import N, loss_fn, net, session, weights

NOWHERE = "-1:0:nowhere"


def _die_in_second_step(rank, folder):
    """Of three processes the last dies in the second step, before it has added its part."""
    start(rank, 3, folder / "store")

    def loss(model, batch):
        if rank == 2 and s.steps_done == 1:
            die(folder)
        return loss_fn(model, batch)

    model = net()
    with session(Case().plan(), model, ledger_path=folder / "ledger.jsonl", verify=False) as s:
        before = None
        try:
            for batch in s.batches():
                before = [p.detach().clone() for p in model.parameters()]
                s.step(batch, loss)
        except RankLost as error:
            same = all(
                torch.equal(a, b) for a, b in zip(before or [], model.parameters(), strict=True)
            )
            return {
                "error": str(error),
                "charged": s.ledger.count,
                "unmoved": same,
                "no gradient": _clean(model),
            }
    return {}


def _clean(model):
    return all(p.grad is None for p in model.parameters())


def test_a_process_that_dies_stops_all_others_and_spends_nothing_more(tmp_path):
    *living, dead = run(_die_in_second_step, 3, folder=tmp_path)
    assert dead is None
    for found in living:
        assert "another process died" in found["error"] and len(found["error"]) <= 160
        assert "restore the checkpoint" in found["error"]
        assert (found["charged"], found["unmoved"], found["no gradient"]) == (1, True, True)
    assert len(verify(tmp_path / "ledger.jsonl").releases) == 1


def _fail_on_one(rank, folder):
    """What both processes say of a hook on the first one's gradients, and of a release there that
    fails after its charge.
    """
    start(rank, 2, folder / "store")
    found, model = list[Any](), net()
    with session(Case().plan(), model, ledger_path=folder / "hook.jsonl", verify=False) as s:
        handle = model[0].weight.register_hook(lambda g: g) if rank == 0 else None
        try:
            s.step(next(s.batches()), loss_fn)
        except (ValueError, RuntimeError) as error:
            found += [str(error), s.ledger.count]
        if handle is not None:
            handle.remove()

    def fails(*_):
        raise MemoryError("no room for noise")

    with session(Case().plan(), net(), ledger_path=folder / "failed.jsonl", verify=False) as s:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("dpkfc.privacy.mechanism.gaussian_release", fails)
            try:
                s.step(next(s.batches()), loss_fn)
            except MemoryError as error:
                found += [str(error), s.ledger.count]
        for batch in s.batches():
            s.step(batch, loss_fn)
        return [*found, s.ledger.count]


def test_what_one_process_sees_before_or_behind_an_exchange_is_told_to_all(tmp_path):
    steps = Case().plan().steps
    for hook, before, failed, behind, last in run(_fail_on_one, 2, folder=tmp_path):
        assert "parameter '0.weight' has a hook on its gradient" in hook
        assert ("no room for noise" in failed, before, behind, last) == (True, 0, 1, steps)
    assert len(verify(tmp_path / "failed.jsonl").releases) == steps


def _overfill_one(rank, folder):
    """What both processes do where a step does not fit on the second one: with "auto", with a
    number, with the whole batch.
    """
    start(rank, 2, folder / "store")
    found = list[list[Any]]()
    for size in ("auto", 6, None):
        model = limited(3 if rank else N)
        settings = {"expected_batch_size": 20, "steps": 3, "max_physical_batch_size": size}
        ledger = folder / f"ledger-{size}.jsonl"
        with session(Case(settings).plan(), model, ledger_path=ledger, verify=False) as s:
            before = weights(model)
            try:
                for batch in s.batches():
                    s.step(batch, loss_fn)
                found.append(
                    [weights(model), s.ledger.count, max(model[2].seen), len(model[2].failed)]
                )
            except RuntimeError as error:
                found.append(
                    [str(error), s.ledger.count, torch.equal(before, weights(model)), _clean(model)]
                )
    return found


def test_a_step_that_does_not_fit_on_one_process(tmp_path):
    """ "auto" makes it smaller there alone, and the release is that of one process; a given size is
    refused on all.
    """
    plan, whole = Case({"expected_batch_size": 20, "steps": 3}).plan(), net()
    with session(plan, whole) as s:
        for batch in s.batches():
            s.step(batch, loss_fn)
    (roomy, *refused), (small, *others) = run(_overfill_one, 2, folder=tmp_path)
    assert roomy[:2] == small[:2] and roomy[1] == 3
    assert roomy[2] > 3 >= small[2] and roomy[3] == 0 < small[3]
    torch.testing.assert_close(
        torch.tensor(roomy[0], dtype=torch.float64), weights(whole), rtol=1e-10, atol=1e-11
    )
    assert len(verify(tmp_path / "ledger-auto.jsonl").releases) == 3
    for of in (refused, others):
        sizes = ("a micro-batch of 6 examples", "the whole logical batch")
        for (message, charged, unmoved, clean), size in zip(of, sizes, strict=True):
            assert (
                f"{size} does not fit into memory" in message and "nothing was released" in message
            )
            assert (charged, unmoved, clean) == (0, True, True)
    assert all("another process failed, rank 1" in message for message, *_ in refused)
    assert (
        not verify(tmp_path / "ledger-6.jsonl").releases
        and not verify(tmp_path / "ledger-None.jsonl").releases
    )


def _train(rank, folder, fault, store):
    start(rank, 2, folder / store)
    try:
        train(folder, fault)
    except RankLost:
        return False
    dist.destroy_process_group()
    return True


def _weights(folder):
    return [load_file(folder / f"weights-{rank}.safetensors")["weights"] for rank in range(2)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The weights of a run that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    CASE.plan().check_accounting()  # remembered, and told to the processes
    assert run(_train, 2, NOWHERE, "store", folder=folder) == [True, True]
    return _weights(folder)[0]


def _run_torchrun(rank, folder, fault):
    """torchrun behind its command line (which test_document.py calls), with workers that need not
    import torch again.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
        "1"  # or those started again find the addresses of the dead
    )
    where = {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "run_id": "one",
        "local_addr": "localhost",
    }
    config = LaunchConfig(1, 1, nproc_per_node=2, max_restarts=1, start_method="fork", **where)
    elastic_launch(config, main)(str(folder), fault)
    return True


@pytest.mark.slow
def test_torchrun_goes_on_from_the_last_checkpoint(tmp_path, straight):
    """Rank 1 is killed in its third step, before the charge: the run ends as if nothing had
    happened, dropout included.
    """
    assert run(_run_torchrun, 1, "1:2:loss", folder=tmp_path) == [True]
    assert (tmp_path / "died").exists()
    assert all(torch.equal(found, straight) for found in _weights(tmp_path))
    assert [release["step"] for release in verify(tmp_path / "ledger.jsonl").releases] == [
        0,
        1,
        2,
        3,
        4,
    ]


@pytest.mark.slow
def test_a_release_that_was_charged_and_lost_stays_charged(tmp_path, straight):
    """Rank 0 dies between the charge and the release: its step is repeated, and the run has one
    step less.
    """
    assert run(_train, 2, "0:2:release", "first", folder=tmp_path) == [None, False]
    assert len(verify(tmp_path / "ledger.jsonl").releases) == 3
    (tmp_path / "result-1.json").unlink()
    assert run(_train, 2, NOWHERE, "second", folder=tmp_path) == [True, True]
    assert [release["step"] for release in verify(tmp_path / "ledger.jsonl").releases] == [
        0,
        1,
        2,
        2,
        3,
    ]
    one, two = _weights(tmp_path)
    assert torch.equal(one, two) and not torch.equal(one, straight)


@pytest.mark.slow
def test_another_number_of_processes_is_refused_unless_it_is_meant(tmp_path, straight):
    """One process goes on with the checkpoint of two, and makes the releases that two would have
    made.
    """
    folder = tmp_path / "run"
    folder.mkdir()
    assert run(_train, 2, NOWHERE, "store", folder=folder) == [True, True]
    with CASE.open(folder / "ledger.jsonl", resume=True)[0] as s:
        with pytest.raises(
            CheckpointError,
            match=r"by 2 processes, this run has 1.*--nproc-per-node=2.*any_world_size=True",
        ):
            s.restore(folder / "checkpoint")
        assert s.steps_done == 5
        s.restore(folder / "checkpoint", any_world_size=True)
    assert torch.equal(weights(s.model), straight)
