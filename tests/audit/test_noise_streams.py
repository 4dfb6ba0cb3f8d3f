"""The noise: from the cipher, through the mechanism, and out of whole sessions, new, resumed,
forked and side by side.

Every law is tested on both sides, and every test is shown the wrong laws that it must reject. The
streams of test mode are fixed; those of the operating system are judged at 1e-10 a test, about 130
tests a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from dpkfc import PrivacyConfig, Session
from dpkfc.privacy.grid import grid_of
from dpkfc.privacy.mechanism import gaussian_release, rounded_release
from dpkfc.privacy.rng import NoiseStream
from tests.audit.laws import against, alarms, noise_battery
from tests.audit.sizes import FULL, size
from tests.ports import free_port

STEPS, LAYERS = 40, (18_000, 6_000, 1_000)
D = sum(LAYERS)
NUMBERS = STEPS * D
PLANTED: dict[str, tuple[str, Callable[[np.random.Generator, np.ndarray], np.ndarray]]] = {
    "98 % of the scale": ("variance", lambda g, z: 0.98 * z),
    "102 % of the scale": ("variance", lambda g, z: 1.02 * z),
    "a mean of 1 %": ("mean", lambda g, z: z + 0.01),
    "uniform numbers": ("Kolmogorov-Smirnov", lambda g, z: g.uniform(-(3**0.5), 3**0.5, z.shape)),
    "20 degrees of freedom": (
        "fourth moment",
        lambda g, z: g.standard_t(20, z.shape) * (18 / 20) ** 0.5,
    ),
    "tails cut at 4": ("beyond 4", lambda g, z: np.clip(z, -4, 4)),
    "a draw repeated": ("equal numbers", lambda g, z: np.vstack([z[:-1], z[:1]])),
    "a draw repeated with its sign turned": (
        "any two releases",
        lambda g, z: np.vstack([z[:-1], -z[:1]]),
    ),
    "a tenth of the last draw again": (
        "following releases",
        lambda g, z: (z + 0.1 * np.roll(z, 1, 0)) / 1.01**0.5,
    ),
    "halves that go together": ("lags within a release", lambda g, z: _mixed_halves(z)),
    "one part for two layers": (
        "layers",
        lambda g, z: np.hstack([z[:, : LAYERS[0]], z[:, : D - LAYERS[0]]]),
    ),
    "float16": ("equal numbers", lambda g, z: z.astype(np.float16)),
    "twelve uniform numbers": (
        "fourth moment",
        lambda g, z: g.uniform(-0.5, 0.5, (12, *z.shape)).sum(0),
    ),
}


def _mixed_halves(z: np.ndarray) -> np.ndarray:
    half = 4000  # the second 4000 numbers of a row carry 5 % of the first
    z = z.copy()
    z[:, half : 2 * half] = 0.05 * z[:, :half] + (1 - 0.05**2) ** 0.5 * z[:, half : 2 * half]
    return z


def stream_table(stream: NoiseStream, dtype: str = "float64", steps: int = STEPS) -> np.ndarray:
    return np.stack([stream.normal(D, step, dtype) for step in range(steps)])


@pytest.fixture(scope="module")
def fixed() -> np.ndarray:
    return stream_table(NoiseStream.repeatable(2026))


def worst(values: dict[str, float]) -> dict[str, float | str]:
    name = min(values, key=values.__getitem__)
    return {"least_p": values[name], "at": name, "tests": len(values)}


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_law_is_rejected(name: str, fixed: np.ndarray, evidence) -> None:
    test, plant = PLANTED[name]
    values = noise_battery(plant(np.random.default_rng(5), fixed), LAYERS)
    assert test in alarms(values), values
    evidence(
        "noise",
        f"planted: {name}",
        rejected_by=sorted(alarms(values)),
        p=values[test],
        numbers=NUMBERS,
    )


@pytest.mark.parametrize("seed", range(size(2, 20)))
def test_the_stream_is_standard_normal_and_independent(seed: int, evidence) -> None:
    values = noise_battery(stream_table(NoiseStream.repeatable(seed)), LAYERS)
    assert min(values.values()) > 1e-6, values
    evidence("noise", f"repeatable stream {seed}", numbers=NUMBERS, **worst(values))


def test_a_secret_stream_is_too_also_in_float32(evidence) -> None:
    for dtype in ("float64", "float32"):
        values = noise_battery(stream_table(NoiseStream.secure(), dtype, size(STEPS, 400)), LAYERS)
        if dtype == "float32":
            del values["equal numbers"]  # there are only so many of them
        assert not alarms(values), values
        evidence("noise", f"secret stream, {dtype}", numbers=size(STEPS, 400) * D, **worst(values))


def test_streams_of_two_keys_and_of_steps_share_nothing(fixed: np.ndarray, evidence) -> None:
    other = stream_table(NoiseStream.repeatable(2027))
    values = against(fixed, other)
    assert min(values.values()) > 1e-6, values
    assert not alarms(
        against(stream_table(NoiseStream.secure()), stream_table(NoiseStream.secure()))
    )
    shifted = np.roll(fixed.ravel(), 12_345)
    assert {"correlation at any shift", "equal numbers"} <= alarms(against(fixed, shifted))
    assert "correlation" in alarms(against(fixed, fixed + 3 * other))
    evidence("noise", "two keys", **worst(values))


def test_a_forked_child_draws_its_own_noise(evidence) -> None:
    stream = NoiseStream.secure()
    stream.normal(10, 0)
    count = 100_000
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        with os.fdopen(write, "wb") as pipe:
            pipe.write(stream.normal(count, 1, "float64").tobytes())
        os._exit(0)
    os.close(write)
    ours = stream.normal(count, 1, "float64")
    with os.fdopen(read, "rb") as pipe:
        theirs = np.frombuffer(pipe.read(), dtype=np.float64)
    os.waitpid(child, 0)
    values = {**noise_battery(theirs[None]), **against(ours, theirs)}
    assert not alarms(values), values
    evidence("noise", "forked process", numbers=count, **worst(values))


@pytest.mark.parametrize("noise", ["gaussian", "rounded"])
def test_the_mechanism_adds_noise_of_the_planned_scale(noise: str, evidence) -> None:
    """On sums that are far from zero: what is added does not depend on them."""
    stddev, divisor, stream = 2.7, 64.0, NoiseStream.repeatable(7)
    rows = []
    for step in range(STEPS):
        sums = {
            str(i): torch.full((n,), 3.0 * i, dtype=torch.float64) for i, n in enumerate(LAYERS)
        }
        draw = lambda n, dtype, step=step: torch.from_numpy(stream.normal(n, step, "float64"))  # noqa: E731
        if noise == "rounded":
            noisy = rounded_release(sums, stddev, divisor, draw, grid_of(1.0, D, stddev))
        else:
            noisy = gaussian_release(sums, stddev, divisor, draw)
        rows.append(np.concatenate([(noisy[k] * divisor - sums[k]).numpy() / stddev for k in sums]))
    values = noise_battery(np.stack(rows), LAYERS)
    if noise == "rounded":
        del values["equal numbers"]  # of a grid
    else:
        values["equal numbers"] = 1.0  # what is left after a subtraction has fewer bits
    assert min(values.values()) > 1e-6, values
    evidence("noise", f"mechanism, {noise}", numbers=NUMBERS, **worst(values))


# -- whole sessions --------------------------------------------------------------------------------


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).sum(1)


def run(
    folder: Path | None, steps: int, *, stop: int = 0, resume: bool = False, **settings: object
) -> np.ndarray:
    """Standardised releases `[steps, d]` of a session whose examples have no gradient; about a
    third of its batches are empty.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 180, bias=False), nn.Linear(180, 40, bias=False)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handed: list[np.ndarray] = []
    optimizer.register_step_pre_hook(
        lambda *_: handed.append(
            np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
        )
    )
    data = (torch.zeros(30, 100, dtype=torch.float64), torch.zeros(30, 40, dtype=torch.float64))
    config = PrivacyConfig(expected_batch_size=1, steps=steps, max_grad_norm=0.5, **settings)
    plan = config.with_noise(6.0, 1e-5, 30)
    ledger = None if folder is None else folder / "ledger.jsonl"
    with Session(plan, model, optimizer, data, ledger_path=ledger, verify=False) as session:
        if resume:
            session.restore(folder / "checkpoint")
        for batch in session.batches():
            session.step(batch, loss_fn)
            if session.steps_done == stop:
                session.save(folder / "checkpoint")
                break
        assert session.epsilon < np.inf
    return np.stack(handed) * plan.expected_batch_size / plan.stddev


@pytest.mark.parametrize(
    "settings",
    [{}, {"noise": "rounded"}, {"sampler": "fixed"}],
    ids=["gaussian", "rounded", "fixed size"],
)
def test_a_session_releases_noise_of_the_planned_law(settings: dict, evidence) -> None:
    z = run(None, size(40, 400), **settings)
    values = noise_battery(z, (18_000, 7_200))
    if settings.get("noise") == "rounded":
        del values["equal numbers"]
    assert not alarms(values), values
    evidence(
        "noise",
        f"session, {settings or 'gaussian'}",
        numbers=z.size,
        standard_deviation=float(z.std()),
        **worst(values),
    )


def test_a_resumed_session_goes_on_with_fresh_noise(tmp_path: Path, evidence) -> None:
    first = run(tmp_path, 40, stop=20)
    second = run(tmp_path, 40, resume=True)
    assert len(first) == len(second) == 20
    other = run(None, 20)
    values = {f"{name}, resumed": p for name, p in against(first, second).items()}
    values |= {f"{name}, another session": p for name, p in against(first, other).items()}
    values |= noise_battery(np.vstack([first, second, other]), (18_000, 7_200))
    assert not alarms(values), values
    evidence(
        "noise", "resumed session and another one", numbers=60 * first.shape[1], **worst(values)
    )


def _rank(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    np.save(Path(folder) / f"{rank}.npy", run(None, 20))
    dist.destroy_process_group()


@pytest.mark.skipif(not FULL, reason="two processes")
def test_two_ranks_share_one_noise_and_add_it_once(tmp_path: Path, evidence) -> None:
    mp.spawn(_rank, args=(free_port(), str(tmp_path)), nprocs=2, join=True)
    one, two = (np.load(tmp_path / f"{rank}.npy") for rank in range(2))
    assert np.array_equal(one, two)
    values = noise_battery(one, (18_000, 7_200))
    assert not alarms(values), values
    evidence(
        "noise", "two ranks", numbers=one.size, standard_deviation=float(one.std()), **worst(values)
    )


def test_a_session_in_test_mode_repeats_itself_and_is_caught() -> None:
    """What a restored noise stream would do, seen by the same tests."""
    with pytest.warns(UserWarning, match="epsilon is not a guarantee"):
        one, two = (run(None, 4, test_mode_seed=3) for _ in range(2))
    assert {"correlation", "equal numbers"} <= alarms(against(one, two))
