"""FSDP2: a session on a divided model makes the weights of one process, and takes no division that
it does not know.
"""

import re
import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from dpkfc.convex import moments_release
from dpkfc.curvature import AdaDPS
from dpkfc.curvature.second_moments import SecondMoments
from dpkfc.distributed.context import RankLost
from dpkfc.distributed.fsdp import to_local
from dpkfc.postprocess import DiSK, WeightEMA
from dpkfc.privacy.ledger import verify
from tests.distributed.fsdp import RUNS, Run, Scale, adam, ids, shard, transformer, weights
from tests.distributed.group import run, start
from tests.distributed.test_refusals import Drifting
from tests.test_session import data, kfac, loss_fn, net

# Parameters, moments of Adam, the point before, an average and a metric: all that a checkpoint
# holds.
SAVED = Run(
    {
        "steps": 4,
        "preconditioner": kfac(probe_size=12),
        "postprocess": (DiSK(),),
        "weight_average": WeightEMA(0.9),
    },
    optimizer=adam,
)


# Over three processes no table divides evenly, and over four one process holds nothing of a head of
# three classes.
MORE = {
    3: ("Adam", "shares that are empty", "views", "tied"),
    4: ("SGD with momentum", "shares that are empty", "DP-KFC, average of the weights"),
}


def _state(run, folder, *, divided, upto, restore=False, save=False):
    """Weights and averaged weights after so many steps in all."""
    with run.open(divided=divided, ledger=folder / "ledger.jsonl") as s:
        if restore:
            assert s.restore(folder / "checkpoint", any_world_size=True) == {"epoch": 1}
        for batch in s.batches():
            s.step(batch, loss_fn)
            if s.steps_done == upto:
                break
        if save:
            s.save(folder / "checkpoint", extra={"epoch": 1})
        with s.averaged_weights():
            averaged = weights(s.model)
        return torch.cat([weights(s.model), averaged]).tolist()


def _checkpoints(rank, folder):
    """A run that stops after two steps and goes on, divided and not, and one without a break."""
    for name in ("straight", "divided", "alone"):
        (folder / name).mkdir(exist_ok=True)
    found = {"straight": _state(SAVED, folder / "straight", divided=True, upto=4)}
    _state(SAVED, folder / "divided", divided=True, upto=2, save=True)
    dist.barrier()
    if rank == 0:
        shutil.copytree(folder / "divided", folder / "to-one", dirs_exist_ok=True)
    found["divided"] = _state(SAVED, folder / "divided", divided=True, upto=4, restore=True)
    found["from one"] = _state(SAVED, folder / "of-one", divided=True, upto=4, restore=True)
    return found


def _mix_losses(model, batch):
    losses = loss_fn(model, batch)
    return losses + losses.mean()


def _use_embedding_twice(model, batch):
    return nn.functional.cross_entropy(
        model(batch[0]) * model.words.weight.sum(), batch[1], reduction="none"
    )


def _mix_at_random(model, batch):
    part, partner = torch.rand(()), torch.randperm(len(batch[0]))
    return loss_fn(model, (part * batch[0] + (1 - part) * batch[0][partner], batch[1]))


FAULTS = {
    "mixed at random": (
        RUNS["SGD with momentum"],
        _mix_at_random,
        "aten.index.Tensor mixes examples",
    ),
    "mixed": (RUNS["SGD with momentum"], _mix_losses, "aten.add.Tensor mixes examples"),
    "used elsewhere": (
        RUNS["tied"],
        _use_embedding_twice,
        "a parameter is used by its layer and outside of it; a model divided",
    ),
}


def _fault(case, loss):
    with case.open(divided=True) as s:
        try:
            s.step(next(s.batches()), loss)
        except ValueError as error:
            return f"{error} ({s.steps_done} steps)"
    return "taken"


class _Masked(Dataset[Any]):
    """Entries that are left out at random whenever a record is read."""

    def __init__(self):
        self.x, self.y = data()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        kept = torch.rand(()) < 0.2
        return self.x[i], self.y[i], kept


def _masked_loss(model, batch):
    """Most examples have no gradient."""
    return loss_fn(model, batch[:2]) * batch[2]


def _draw_as_it_reads(rank):
    """Steps that are done, where every process draws other numbers as it reads."""
    found = []
    for seed in range(4):
        with Run(dataset=_Masked, settings={"test_mode_seed": seed}).open(divided=True) as s:
            torch.manual_seed(10 * seed + rank)
            for batch in s.batches():
                s.step(batch, _masked_loss)
            found.append(s.steps_done)
    return found


def _read_nan(rank):
    """What is said of a NaN in rows that the second process holds."""
    with RUNS["SGD with momentum"].open(divided=True) as s:
        if rank == 1:
            with torch.no_grad():
                to_local(s.model[0].weight)[0] = torch.nan
        try:
            s.step(next(s.batches()), loss_fn)
        except (ValueError, RuntimeError) as error:
            return str(error)
    return "taken"


def _other_probe(preconditioner):
    """What is said where a probe returns something else on each process."""
    with Run({"preconditioner": preconditioner}).open(divided=True) as s:
        try:
            s.step(next(s.batches()), loss_fn)
        except RuntimeError as error:
            return f"{error} ({s.steps_done} steps)"
    return "taken"


PROBES = {
    "one": kfac(probe=Drifting(6)),
    "outputs": kfac(output_probe=Drifting(6)),
    "AdaDPS": AdaDPS(probe=Drifting(6)),
}


def _unequal_passes(rank):
    try:
        Run({"max_physical_batch_size": 2 + rank}).open(divided=True)
    except RuntimeError as error:
        return str(error)
    return "taken"


def _fail_on_one(rank, folder):
    """What the processes are told when one of them fails in the middle of a pass, and ends."""

    def loss(model, batch):
        if rank == 1:
            raise KeyError("boom")
        return loss_fn(model, batch)

    with RUNS["SGD with momentum"].open(
        divided=True, ledger=folder / "alone.jsonl", check=False
    ) as s:
        try:
            s.step(next(s.batches()), loss)
        except (KeyError, RankLost) as error:
            return f"{type(error).__name__}: {error}"
    return "taken"


def _outer(model, **options):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, **options)


def _shard_in_two_dimensions():
    from torch.distributed.device_mesh import init_device_mesh

    return _outer(net(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner")))


def _shard_over_one():
    from torch.distributed.device_mesh import DeviceMesh

    return _outer(net(), mesh=DeviceMesh("cpu", [dist.get_rank()]))


def _shard_by_columns():
    from torch.distributed.tensor import Shard

    return _outer(net(), shard_placement_fn=lambda p: Shard(p.dim() - 1))


def _shard_in_bfloat16():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return _outer(net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def _shard_by_hand():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = net()
    model[0].weight = nn.Parameter(
        distribute_tensor(model[0].weight.detach(), init_device_mesh("cpu", (2,)), [Shard(0)])
    )
    return model


def _module_without_a_rule():
    model = nn.Sequential(*net(), Scale(3)).double()
    _outer(model[-1])
    return _outer(model)


class _Asked(nn.Module):
    """A frozen query that is itself the input of a layer."""

    def __init__(self):
        super().__init__()
        self.query, self.ask = nn.Parameter(torch.ones(1, 6), requires_grad=False), nn.Linear(6, 3)

    def forward(self, x):
        return self.ask(self.query.expand(len(x), 6)) * x[:, :3]


def _tie_across_shards():
    model = transformer(tied=True)
    _outer(model.words), _outer(model.head)
    return _outer(model)


REFUSED = {
    "two dimensions": (
        Run(model=_shard_in_two_dimensions),
        r"parameter '0.weight' is divided over a mesh of shape \(2, 1\)",
    ),
    "a part of the group": (
        Run(model=_shard_over_one),
        r"parameter '0.weight' is divided over a mesh of shape \(1,\)",
    ),
    "columns": (
        Run(model=_shard_by_columns),
        r"parameter '0.weight' is divided as \(Shard\(dim=1\),\)",
    ),
    "mixed precision": (
        Run(model=_shard_in_bfloat16),
        r"parameter '0.weight' is computed with in torch.bfloat16",
    ),
    "by hand": (
        Run(model=_shard_by_hand),
        "parameter '0.weight' is a DTensor that no fully_shard gathers",
    ),
    "without a rule": (Run(model=_module_without_a_rule), r"the module '3' \(FSDPScale\)"),
    "tied across": (Run(model=_tie_across_shards, dataset=ids), "shared|tied"),
    "a parameter as input": (
        Run(model=lambda: _outer(_Asked().double())),
        "layer 'ask' is called with a parameter",
    ),
    "automatic": (
        Run({"max_physical_batch_size": "auto"}, lambda: shard(net())),
        "max_physical_batch_size as a number",
    ),
    "second moments": (
        Run(
            {"preconditioner": SecondMoments(), "extra_releases": (moments_release(1.0),)},
            lambda: shard(nn.Sequential(nn.Linear(6, 3, bias=False)).double()),
        ),
        "fully_shard does not go with SecondMoments",
    ),
}


def _refusal(case, folder, name):
    try:
        with case.open(divided=False, ledger=folder / f"{name}.jsonl") as s:
            s.step(next(s.batches()), loss_fn)
    except ValueError as error:
        return str(error)
    return "taken"


def _count_local_entries():
    """Entries of parameters, and of moments, that this process holds."""
    with RUNS["Adam"].open(divided=True) as s:
        s.step(next(s.batches()), loss_fn)
        moments = [x for state in s.optimizer.state.values() for x in state.values() if x.dim()]
        return [sum(to_local(x).numel() for x in of) for of in (s.model.parameters(), moments)]


def _worker(rank, folder):
    start(rank, 2, folder / "store")
    found = {
        "runs": {name: case.train(divided=True) for name, case in RUNS.items()},
        "checkpoints": _checkpoints(rank, folder),
        "held": _count_local_entries(),
        "at random": _draw_as_it_reads(rank),
        "not finite": _read_nan(rank),
        "unequal passes": _unequal_passes(rank),
        "other probe": {name: _other_probe(of) for name, of in PROBES.items()},
        "faults": {name: _fault(case, loss) for name, (case, loss, _) in FAULTS.items()},
        "refused": {name: _refusal(case, folder, name) for name, (case, _) in REFUSED.items()},
    }
    return found | {"alone": _fail_on_one(rank, folder)}  # and then this process ends


def _run_several(rank, folder):
    """The runs over more than two processes."""
    found = {}
    for world, names in MORE.items():
        if rank < world:
            start(rank, world, folder / f"store-{world}")
            found[str(world)] = {name: RUNS[name].train(divided=True) for name in names}
            dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the processes work; one undivided process has left a checkpoint there."""
    place = tmp_path_factory.mktemp("fsdp")
    (place / "of-one").mkdir()
    _state(SAVED, place / "of-one", divided=False, upto=2, save=True)
    return place


@pytest.fixture(scope="module")
def results(folder):
    """What both processes have found."""
    for case in RUNS.values():
        case.plan().check_accounting()  # remembered, and told to the processes
    return run(_worker, 2, folder=folder)


@pytest.fixture(scope="module")
def several():
    """What three and four processes have found."""
    for case in RUNS.values():
        case.plan().check_accounting()
    return run(_run_several, max(MORE))


def _close(found, expected):
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), expected, rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize(
    "world, name",
    [(2, name) for name in RUNS] + [(n, name) for n, of in MORE.items() for name in of],
)
def test_a_divided_run_equals_one_process(world, name, request):
    alone = RUNS[name].train(divided=False)
    if world == 2:
        found = [of["runs"][name] for of in request.getfixturevalue("results")]
    else:
        found = [of[str(world)][name] for of in request.getfixturevalue("several")[:world]]
    first, *others = found
    assert (
        len(found) == world and all(of == first for of in others) and first.keys() == alone.keys()
    )
    for kind, expected in alone.items():
        _close(first[kind], expected)


def test_parameters_and_moments_are_divided(results):
    whole = sum(p.numel() for p in net().parameters())
    (parameters, moments), (others, other_moments) = (of["held"] for of in results)
    assert parameters + others == whole and abs(parameters - others) < whole / 5
    assert (moments, other_moments) == (2 * parameters, 2 * others)


def test_a_checkpoint_goes_on_to_the_bit(folder, results):
    for of in results:
        assert of["checkpoints"]["divided"] == of["checkpoints"]["straight"]
    assert [
        release["step"] for release in verify(folder / "divided" / "ledger.jsonl").releases
    ] == [0, 1, 2, 3]


def test_a_checkpoint_passes_between_divided_and_undivided_runs(folder, results):
    expected = torch.tensor(results[0]["checkpoints"]["straight"], dtype=torch.float64)
    _close(results[0]["checkpoints"]["from one"], expected)
    _close(_state(SAVED, folder / "to-one", divided=False, upto=4, restore=True), expected)


@pytest.mark.parametrize("name", FAULTS)
def test_the_check_before_the_first_release_catches_a_fault_everywhere(name, results):
    for of in results:
        assert FAULTS[name][2] in of["faults"][name] and "(0 steps)" in of["faults"][name]


def test_what_is_drawn_on_reading_is_checked_alike_on_all_processes(
    results,
):
    assert [of["at random"] for of in results] == [[3] * 4] * 2


def test_a_nan_that_one_process_holds_is_told_to_all(results):
    assert all("parameter '0.weight' holds NaN" in of["not finite"] for of in results)


def test_settings_that_decide_the_number_of_passes_are_compared(
    results,
):
    for of in results:
        assert (
            "rank 1 has another max_physical_batch_size than rank 0 (3, not 2)"
            in of["unequal passes"]
        )


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_that_differs_is_named_and_no_processor_is_blamed(name, results):
    for of in results:
        assert "the probe returns other inputs on rank 1 than on rank 0" in of["other probe"][name]
        assert "(0 steps)" in of["other probe"][name]


@pytest.mark.parametrize("name", REFUSED)
def test_other_divisions_are_refused_by_name(name, folder, results):
    for of in results:
        assert re.search(REFUSED[name][1], of["refused"][name]), of["refused"][name]
    path = folder / f"{name}.jsonl"
    assert not path.exists() or not verify(path).releases


def test_a_process_that_fails_in_the_middle_of_a_pass_ends_the_others(folder, results):
    waiting, failed = (of["alone"] for of in results)
    assert failed == "KeyError: 'boom'"
    assert waiting.startswith("RankLost: another process died or did not answer")
    assert not verify(folder / "alone.jsonl").releases
