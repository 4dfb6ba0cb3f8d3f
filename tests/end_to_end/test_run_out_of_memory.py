"""Let micro-batches become smaller until they fit: no step is charged twice or released in half."""

import random
import traceback
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from dpkfc import memory
from dpkfc.config import PrivacyConfig
from dpkfc.memory import MicroBatchSize, is_out_of_memory, peak_bytes
from dpkfc.rng_state import preserve_generators, seed_generators
from dpkfc.session import Session
from tests.models import limited
from tests.recording import Heard
from tests.test_session import N, data, kfac, loss_fn, net, plan, session, train, weights


@pytest.fixture(autouse=True)
def _no_estimate(monkeypatch):
    """These tests are about reports of the device; the estimate on a CPU has tests of its own."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 50)


@pytest.mark.quick("2-*-kfac", "7-*-identity")
@pytest.mark.parametrize("preconditioner", [None, kfac(probe_size=2)], ids=["identity", "kfac"])
@pytest.mark.parametrize(
    ("capacity", "kind"), [(2, torch.cuda.OutOfMemoryError), (3, RuntimeError), (7, MemoryError)]
)
def test_the_result_does_not_depend_on_what_fits(capacity, kind, preconditioner):
    whole, model = net(), limited(capacity, kind=kind)
    settings = {"expected_batch_size": 16, "preconditioner": preconditioner, "steps": 3}
    with session(plan(1.0, **settings), whole) as s:
        train(s)
    with session(plan(1.0, max_physical_batch_size="auto", **settings), model) as s:
        train(s)
        assert s.ledger.count == 3
    assert_close(weights(model), weights(whole), rtol=1e-10, atol=1e-11)
    assert max(model[2].seen) <= capacity


def test_running_out_in_the_middle_starts_the_whole_batch_again():
    """Nothing is released, nothing charged, and no clipped half of a batch is counted twice."""
    model, steps = limited(N), Heard()

    def count_and_fail(model, batch):
        if steps and len(batch[0]) > 1:  # the first micro-batch fits, the second does not
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        steps.append(len(batch[0]))
        return loss_fn(model, batch)

    p, whole = plan(1.0, max_physical_batch_size="auto", expected_batch_size=10, steps=1), net()
    with session(plan(1.0, expected_batch_size=10, steps=1), whole) as s:
        train(s)
    with session(p, model, verify=False) as s:
        s._size.bound, s._size._is_measured = 4, True
        record = s.step(next(s.batches()), count_and_fail)
        assert record.release == s.ledger.count == 1
    assert sorted(steps, reverse=True) == [4, *[1] * record.batch_size]
    assert_close(weights(model), weights(whole), rtol=1e-10, atol=1e-11)


def test_a_size_that_was_given_is_kept_and_named():
    model = limited(3)
    before = weights(model)
    with session(plan(1.0, max_physical_batch_size=5, expected_batch_size=20), model) as s:
        with pytest.raises(
            RuntimeError,
            match=r"micro-batch of 5 .* nothing was released.*max_physical_batch_size.*'auto'",
        ):
            train(s)
        assert s.ledger.count == 0
    with session(plan(1.0, expected_batch_size=20), model) as s:
        with pytest.raises(
            RuntimeError, match=r"the whole logical batch does not fit.*max_physical_batch_size"
        ):
            train(s)
        assert s.ledger.count == 0
    assert torch.equal(before, weights(model))
    assert all(p.grad is None for p in model.parameters())


def test_the_text_of_an_error_is_not_repeated():
    """It may hold values of a private record."""

    def attempt(bound):
        raise MemoryError("the record of Ada Lovelace")

    for size in (MicroBatchSize(4), MicroBatchSize(1, automatic=True)):
        with pytest.raises(RuntimeError, match=r"\(MemoryError\)") as found:
            size.fit(attempt, 8)
        assert "Ada" not in "".join(traceback.format_exception(found.value))


def test_other_errors_are_not_taken_for_memory():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ...")
    )
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    # An exception of user code, whose own text fails.
    assert not is_out_of_memory(KeyError(type("Bad", (), {"__repr__": lambda self: 1 / 0})()))
    assert not is_out_of_memory(type("Bad", (RuntimeError,), {"__str__": lambda self: 1 / 0})())
    assert not is_out_of_memory(ValueError("out of memory"))
    with session(plan(1.0, max_physical_batch_size="auto"), limited(N, kind=KeyError)) as s:
        train(s, 1)
    with session(
        plan(1.0, max_physical_batch_size="auto", expected_batch_size=30), limited(3, kind=KeyError)
    ) as s:
        with pytest.raises(ValueError, match="fails on their batch"):
            train(s)


def test_processes_of_one_host_share_its_memory(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 20)
    bounds = []
    for processes in ("1", "4"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        size = MicroBatchSize(automatic=True)
        size.measure(lambda n: torch.zeros(n, 1024), 10_000, torch.device("cpu"))
        assert size.bound is not None
        bounds.append(size.bound)
    assert bounds[0] == pytest.approx(4 * bounds[1], rel=0.1)


def test_on_a_cpu_the_size_is_bounded_before_memory_runs_out(monkeypatch):
    """A row of this model makes a few thousand bytes; the rest is arithmetic."""
    shapes = Heard()

    def note_size(model, batch):
        shapes.append(len(batch[0]))
        return loss_fn(model, batch)

    results = {}
    for free in (1 << 50, 16_000, 0):
        monkeypatch.setattr(memory, "available_bytes", lambda free=free: free)
        model = net()
        p = plan(1.0, max_physical_batch_size="auto", expected_batch_size=30, steps=2)
        with session(p, model, verify=False) as s:
            batches = s.batches()
            s.step(next(batches), note_size)
            shapes.clear()  # the first step has measured
            s.step(next(batches), note_size)
            results[free] = s._size.bound, max(shapes), weights(model)
    assert results[1 << 50][0] > N and results[1 << 50][1] > 20
    assert 4 < results[16_000][0] < N and results[16_000][1] <= results[16_000][0]
    assert results[0][0] == results[0][1] == 1
    for _, _, found in results.values():
        assert_close(found, results[0][2], rtol=1e-10, atol=1e-11)


def test_peak_bytes_counts_what_exists_at_one_time():
    held = torch.zeros(1000)

    def work():
        for _ in range(5):
            temporary = held + 1  # freed in every turn
            del temporary
        held.add_(1)  # not new
        return held.view(10, 100) * torch.ones(10, 100)

    assert peak_bytes(work) == 2 * 4000
    model = nn.Sequential(nn.Linear(100, 50), nn.Tanh(), nn.Linear(50, 3))
    few, many = (
        peak_bytes(lambda n=n: model(torch.ones(n, 100)).sum().backward()) for n in (10, 110)
    )
    assert 4 * 100 * 150 <= many - few <= 4 * 100 * 1000


@pytest.mark.parametrize("version", [1, 2])
def test_the_group_of_the_process_bounds_it_and_cached_files_do_not(tmp_path, version):
    top = tmp_path / "memory" if version == 1 else tmp_path
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]

    def group(path, most, now, cached):
        (top / path).mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, (most, now), strict=False):
            (top / path / name).write_text(f"{value}\n")
        (top / path / "memory.stat").write_text(f"anon 7\n{names[2]} {cached}\n")

    own = tmp_path / "cgroup"
    own.write_text("3:cpu:/else\n2:memory:/slurm/job\n" if version == 1 else "0::/slurm/job\n")
    assert memory._control_group(tmp_path, own) is None
    group("", 1 << 40 if version == 1 else "max", 0, 0)
    group("slurm", 1000, 900, 300)
    group("slurm/job", 700, 600, 0)
    group("else", 10, 10, 0)
    assert memory._control_group(tmp_path, own) == 100
    group("slurm/job", 700, 600, 590)
    assert memory._control_group(tmp_path, own) == 400  # of the group above
    (top / "slurm" / "memory.stat").unlink()
    assert memory._control_group(tmp_path, own) == 100
    assert memory._control_group(tmp_path, tmp_path / "none") == (1 << 40 if version == 1 else None)


def test_all_generators_start_again_after_a_failed_try():
    def attempt(bound):
        numbers = np.random.rand(), random.random(), torch.rand(()).item()
        if bound is None or bound > 4:
            raise MemoryError
        return numbers

    numbers = []
    for size in (MicroBatchSize(4, True), MicroBatchSize(None, True)):
        with preserve_generators():
            seed_generators(0)
            numbers.append(size.fit(attempt, 8))
    assert numbers[0] == numbers[1]


def test_workers_are_started_again_after_a_failed_try():
    class Mapped(torch.utils.data.Dataset):
        def __len__(self):
            return N

        def __getitem__(self, i):
            x, y = data()
            return x[i], y[i]

    whole, model = net(), limited(3)
    p = plan(1.0, expected_batch_size=16, steps=2)
    with session(p, whole) as s:
        train(s)
    auto = plan(1.0, expected_batch_size=16, steps=2, max_physical_batch_size="auto")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with Session(auto, model, optimizer, Mapped(), num_workers=1) as s:
        train(s)
    assert_close(weights(model), weights(whole), rtol=1e-10, atol=1e-11)


def test_no_text_of_an_error_reaches_the_log(caplog):
    """What the user's code says of a batch may hold values of private examples."""

    def work(rows):
        raise ValueError("SECRET 3.25")

    with caplog.at_level("DEBUG", "dpkfc"):
        MicroBatchSize(automatic=True).measure(work, 8, torch.device("cpu"))
    assert "ValueError" in caplog.text and "SECRET" not in caplog.text


LOOKS = {
    "many outputs": (
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 20_000).requires_grad_(False)),
        2,
        3.0,
    ),
    "many rows": (
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 20_000).requires_grad_(False)),
        16,
        1.1,
    ),
    "many weights": (
        nn.Sequential(*(nn.Linear(200, 200) for _ in range(6))),
        2,
        2.2,
    ),  # one gradient more
}


@pytest.mark.quick("many weights")
@pytest.mark.parametrize("name", LOOKS)
def test_a_look_takes_no_more_memory_than_a_step(name):
    """Rows are repeated up to the expected batch, not to the most that are ever looked at, and
    gradients compared one by one.
    """
    model, size, most = LOOKS[name]
    x, peaks = torch.randn(40, model[0].in_features), list[int]()

    def logits(m, batch):
        return m(batch[0]).logsumexp(1)

    plan = PrivacyConfig(
        expected_batch_size=size, steps=2, max_grad_norm=1.0, sampler="fixed"
    ).calibrate(8.0, 1e-3, 40)
    for verify in (True, False):
        with Session(
            plan, model, torch.optim.SGD(model.parameters(), lr=0.0), (x,), verify=verify
        ) as s:
            peaks.append(max(peak_bytes(partial(s.step, batch, logits)) for batch in s.batches()))
    assert peaks[0] <= most * peaks[1]
