"""What the proof of the batch axis costs: of a step, of the first step, and where it fails.

    python benchmarks/tracking.py                       # every model below; then the table
    python benchmarks/tracking.py --only mnist-cnn

Tracking is the time of a forward pass under a tracker less the time of the same pass without it,
both in one round. The first step holds the check on public rows. "One at a time" is the step of a
session whose passes are not proved. Figures are medians over rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from common import RESULTS, markdown, measure_models, models_parser

OUTPUT = RESULTS / "tracking.json"
MODELS = ("mnist-cnn", "encoder-256", "encoder-512", "wrn-16-4", "bert-base")


def session_for(case: Any, steps: int) -> Any:
    """Open a session that draws the batch of a case in every step."""
    import torch

    from dpkfc import PrivacyConfig, Session

    torch.manual_seed(0)
    model = case.build()
    data = case.data(4 * case.batch_size)
    config = PrivacyConfig(
        expected_batch_size=case.batch_size,
        steps=steps,
        max_physical_batch_size=case.micro_batch,
        sampler="fixed",
    )
    plan = config.with_noise(1.0, 1e-5, len(data[0]))
    parameters = [p for p in model.parameters() if p.requires_grad]
    return Session(plan, model, torch.optim.SGD(parameters, 1e-3), data)


def steps_of(case: Any, session: Any, count: int) -> list[float]:
    """Return the seconds of some steps."""
    seconds = []
    for batch in session.batches():
        begun = time.perf_counter()
        session.step(batch, lambda model, pair: case.losses(model, *pair))
        seconds.append(time.perf_counter() - begun)
        if len(seconds) == count:
            break
    return seconds


def tracking_seconds(case: Any, model: Any, rounds: int) -> float:
    """Return the median of what a tracker adds to one forward pass of a micro-batch."""
    from dpkfc.gradients.one_pass import batch_tracker
    from dpkfc.tracking.modes import follow

    batch = case.data(case.micro_batch or case.batch_size)
    parameters = list(model.parameters())
    added = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        case.losses(model, *batch)
        plain = time.perf_counter() - begun
        tracker = batch_tracker(model, batch, len(batch[0]))
        tracker.cover(parameters)
        begun = time.perf_counter()
        with follow(tracker):
            case.losses(model, *batch)
        added.append(time.perf_counter() - begun - plain)
    return statistics.median(added[1:])


def measure(_: str, case: Any, options: Namespace) -> dict[str, float]:
    """Return milliseconds and ratios of one model."""
    from dpkfc.tracking.states import Unknown

    rounds = options.rounds
    session = session_for(case, 4 * rounds + 8)
    first, *steady = steps_of(case, session, rounds + 1)
    step = statistics.median(steady)
    passes = -(-case.batch_size // (case.micro_batch or case.batch_size))
    added = tracking_seconds(case, session.model, rounds) * passes
    session._gradient_mode.unproved_operation = Unknown(
        "benchmark", "examples are differentiated one at a time"
    )
    alone = statistics.median(steps_of(case, session, 2))
    return {
        "step_ms": round(1e3 * step, 2),
        "tracking_ms": round(1e3 * added, 2),
        "tracking_share": round(added / step, 4),
        "first_step": round(first / step, 2),
        "one_at_a_time": round(alone / step, 2),
    }


def table(results: dict[str, Any]) -> str:
    """Return a row for every model."""
    rows = [
        [
            f"{entry['title']}, batch {entry['batch_size']}",
            f"{entry['step_ms']:,.1f}",
            f"{100 * entry['tracking_share']:.1f} %",
            f"{entry['first_step']:.1f}",
            f"{entry['one_at_a_time']:.1f}",
        ]
        for entry in results["models"].values()
    ]
    return markdown(
        ["model", "step, ms", "tracking", "first step ÷ step", "one at a time ÷ step"], rows
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the models that were asked for."""
    options = models_parser(__doc__).parse_args(argv)
    return measure_models(options, MODELS, OUTPUT, measure, table)


if __name__ == "__main__":
    sys.exit(main())
