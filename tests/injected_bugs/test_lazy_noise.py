"""Noise that waits has the law of DP-SGD's, and a planted fault in it is caught."""

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn.functional import pad

from dpkfc import lazy_noise
from dpkfc.config import PrivacyConfig
from dpkfc.lazy_noise import LazyNoise
from dpkfc.privacy.rng import NoiseStream
from dpkfc.session import Session
from tests.injected_bugs.leak import swap_function

ROWS, WIDTH, STEPS, BATCH, C, NOISE = 60, 96, 8, 8, 0.7, 1.3
# Row 0 is padding. Others are read by every record, by some, and by none.
READ = {"every step": range(1, 5), "some steps": range(5, 30), "no step": range(30, ROWS)}
FALSE_ALARM = 1e-7


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, padding_idx=0)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids):
        return self.head(self.table(ids).mean(1)).squeeze(1)


def train(seed, dtype):
    """Return the moves of the table between three readings, Σ lr² of each, and what else is wrong.

    All gradients are zero, so that the moves are noise.
    """
    config = PrivacyConfig(
        expected_batch_size=BATCH, steps=2 * STEPS, max_grad_norm=C, test_mode_seed=seed
    )
    numbers = []
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 30, (100, 8), generator=generator)
    ids[:, :4] = torch.arange(1, 5)
    ids[:, 7] = 0
    model = Bag().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    moves, squares, faults = [], [0.0, 0.0], []
    before = model.table.weight.detach().clone()
    with (
        Session(config.with_noise(NOISE, 1e-3, 100), model, optimizer, (ids,)) as session,
        session.lazy_noise(),
        pytest.MonkeyPatch.context() as m,
    ):
        swap_function(
            m,
            NoiseStream,
            "normal",
            lambda real, self, *args: (numbers.append(args[1]), real(self, *args))[1],
        )
        for batch in session.batches():
            rate = optimizer.param_groups[0]["lr"] = 0.5 * 0.8**batch.step
            session.step(batch, lambda model, batch: 0 * model(batch[0]))
            squares[batch.step // STEPS] += rate**2
            if not model.table.weight.isnan().all():
                faults.append("the table shows rows")
            if (batch.step + 1) % STEPS == 0:
                after = model.state_dict()["table.weight"].clone()
                moves.append(after - before)
                before = after
    if len({*numbers}) < len(numbers):
        faults.append("two draws have one number")
    return moves, squares, faults


def find_faults(seed=1, dtype=torch.float64):
    """Return what is wrong with the noise of a run."""
    try:
        moves, squares, faults = train(seed, dtype)
    except RuntimeError as error:
        return [str(error)]
    scale = NOISE * C / BATCH
    z = [move.double() / (scale * s**0.5) for move, s in zip(moves, squares, strict=True)]
    if z[0][0].any() or z[1][0].any():
        faults.append("padding moves")
    for name, rows in READ.items():
        for number, part in enumerate(x[rows.start : rows.stop] for x in z):
            n = part.numel()
            tail = stats.chi2(n).cdf(float(part.square().sum()))
            if min(tail, 1 - tail) < FALSE_ALARM:
                ratio = float(part.square().mean())
                faults.append(f"variance of rows read at {name}, part {number}: {ratio:.3f}")
            if stats.kstest(part.flatten().numpy(), "norm").pvalue < FALSE_ALARM:
                faults.append(f"law of rows read at {name}, part {number}")
    # Rows that no step reads have one draw before each reading.
    drawn = torch.cat([x[READ["no step"].start :] for x in z]).flatten().sort().values
    if dtype == torch.float64 and drawn.diff().min() < 1e-13:
        faults.append("numbers come twice")
    pairs = {
        "two readings": (z[0][1:], z[1][1:]),
        "two rows": (z[0][1:-1], z[0][2:]),
        "two columns": (z[0][1:, :-1], z[0][1:, 1:]),
    }
    for name, (one, other) in pairs.items():
        correlation = float((one * other).mean()) * one.numel() ** 0.5
        if abs(correlation) > 5.5:
            faults.append(f"{name} are correlated: {correlation:.1f} standard deviations")
    return faults


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_noise_that_waits_has_the_law_of_dp_sgd(dtype):
    assert find_faults(dtype=dtype) == []


# -- planted faults --------------------------------------------------------------------------------


def bring_up(change):
    """Rows get what they wait for by change(real, self, waiting, rows)."""

    def patch(m):
        swap_function(m, LazyNoise, "_bring_up", change)

    return patch


def skip_last_rows(real, self, waiting, rows):
    if self._in_passes or len(rows) < ROWS:
        real(self, waiting, rows)


def skip_read_rows(real, self, waiting, rows):
    if self._in_passes:
        waiting.last.index_fill_(0, rows, len(waiting.squares) - 1)
    else:
        real(self, waiting, rows)


def add_twice(real, self, waiting, rows):
    before = waiting.last.clone()
    real(self, waiting, rows)
    if self._in_passes:
        waiting.last.copy_(before)


def add(change):
    """Σ lr² of the steps grows by change(squares, rate)."""
    return lambda m: m.setattr(lazy_noise, "_add_step", change)


def forget_last(squares, rate):
    more = pad(squares + rate**2, (0, 1))
    more[-2] = 0.0
    return more


def draw(change):
    """The noise that was waited for is change(real, rows, stddev, noise, number)."""

    def patch(m):
        swap_function(m, lazy_noise, "add_waiting_noise", change)

    return patch


def draw_one_stream(real, rows, stddev, noise, number):
    z = real(rows.new_zeros(ROWS, WIDTH), torch.ones(ROWS), noise, 0)
    return rows + z[: len(rows)] * stddev.to(rows.dtype).unsqueeze(1)


def number_of_step(real, rows, stddev, noise, number):
    return real(rows, stddev, noise, number >> 25 & 0xFF)


def draw_one_row(real, rows, stddev, noise, number):
    z = real(torch.zeros_like(rows[:1]), torch.ones_like(stddev[:1]), noise, number)
    return rows + z * stddev.to(rows.dtype).unsqueeze(1)


def show_waiting(m):
    m.setattr(LazyNoise, "_cover", lambda *_: None)


FAULTS = {
    "a waiting row is released without its noise": bring_up(skip_last_rows),
    "a row that is read loses what it has waited for": bring_up(skip_read_rows),
    "what a row has waited for is added twice": bring_up(add_twice),
    "the last step before a reading is forgotten": add(forget_last),
    "the step in which a row was read is counted again": add(
        lambda squares, rate: pad(squares, (0, 1)) + rate**2
    ),
    "a schedule of rates is forgotten": add(lambda squares, rate: pad(squares + 0.25, (0, 1))),
    "rates are not squared": add(lambda squares, rate: pad(squares + rate, (0, 1))),
    "rates are added before they are squared": add(
        lambda squares, rate: pad((squares.sqrt() + rate).square(), (0, 1))
    ),
    "a stream is used twice": draw(draw_one_stream),
    "a stream is used by a step and by rows that have waited": draw(number_of_step),
    "all rows get one row of noise": draw(draw_one_row),
    "nine tenths of the noise": draw(
        lambda real, rows, stddev, noise, number: real(rows, 0.9 * stddev, noise, number)
    ),
    "rows that were read stay in the table": show_waiting,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name, monkeypatch):
    FAULTS[name](monkeypatch)
    assert find_faults()
