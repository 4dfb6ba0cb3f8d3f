"""Where the time of a private step goes, beside the same phases of a step without privacy.

    python benchmarks/phases.py                  # models without a download; then the table
    python benchmarks/phases.py --only mlp

Functions of the library are timed from outside while whole steps run, each without what it calls
among the others. All contenders take one step a round in shuffled order; figures are medians over
rounds.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from common import (
    RESULTS,
    machine,
    make_parser,
    markdown,
    measure_models,
)
from rounds import take_rounds

OUTPUT = RESULTS / "phases.json"
MODELS = ("mnist-cnn", "mlp", "encoder-256", "wrn-16-4")
NAMES = ("plain", "dp_sgd", "dp_kfc_inputs")
PHASES = ("forward", "backward", "norms", "sums", "noise", "ledger", "optimizer", "the rest")


class Clock:
    """Time by phase, each without the phases inside it."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._open: list[tuple[str, float]] = []

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time counts for a phase."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return function(*args, **kwargs)

        return call

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        if self._open:
            outer, since = self._open[-1]
            self.spent[outer] += begun - since
        self._open.append((name, begun))
        try:
            yield
        finally:
            end = time.perf_counter()
            _, since = self._open.pop()
            self.spent[name] += end - since
            if self._open:
                self._open[-1] = (self._open[-1][0], end)

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        spent, self.spent = dict(self.spent), defaultdict(float)
        return spent


@contextmanager
def listen(clock: Clock) -> Iterator[None]:
    """The functions of a step, timed."""
    import torch

    from dpkfc import session
    from dpkfc.gradients import clipped_summer, tape
    from dpkfc.linalg import blocks
    from dpkfc.privacy import mechanism
    from dpkfc.privacy.ledger import Ledger
    from models import Case

    block_types = [
        kind
        for kind in vars(blocks).values()
        if isinstance(kind, type) and "weighted_sum" in vars(kind)
    ]
    places: list[tuple[Any, str, str]] = [
        (Case, "losses", "forward"),
        (tape.Tape, "gradients", "backward"),
        (torch.Tensor, "backward", "backward"),
        (clipped_summer, "per_example_norms", "norms"),
        *[(kind, "weighted_sum", "sums") for kind in block_types],
        (mechanism, "gaussian_release", "noise"),
        (Ledger, "charge", "ledger"),
        (session.Session, "_apply", "optimizer"),
        (torch.optim.SGD, "step", "optimizer"),
    ]
    with ExitStack() as stack:
        for owner, name, phase in places:
            stack.enter_context(
                mock.patch.object(owner, name, clock.timed(phase, getattr(owner, name)))
            )
        yield


def measure(case: Any, rounds: int, warmup: int) -> dict[str, dict[str, float]]:
    """Contender to phase to milliseconds, and `step` for the whole."""
    from contenders import CONTENDERS, setting_for

    clock = Clock()

    def take(contender: Any) -> dict[str, float]:
        clock.take()
        with clock.phase("the rest"):
            contender.step()
        return clock.take()

    with tempfile.TemporaryDirectory() as folder, listen(clock):
        setting = setting_for(case, Path(folder))
        live = {name: CONTENDERS[name](setting) for name in NAMES}
        seen = take_rounds(live, rounds, take, warmup)
    found: dict[str, dict[str, float]] = {}
    for name, by_round in seen.items():
        steps = list(by_round.values())
        whole = [sum(spent.values()) for spent in steps]
        found[name] = {"step": _median_ms(whole)}
        for phase in PHASES:
            found[name][phase] = _median_ms([spent.get(phase, 0.0) for spent in steps])
    return found


def _median_ms(seconds: Sequence[float]) -> float:
    return round(1e3 * statistics.median(seconds), 2)


def table(results: dict[str, Any]) -> str:
    """A row for every model and contender."""
    titles = {"plain": "plain SGD", "dp_sgd": "DP-SGD", "dp_kfc_inputs": "DP-KFC"}
    rows = []
    for entry in results["models"].values():
        for name in NAMES:
            spent = entry["contenders"][name]
            rows.append(
                [
                    entry["title"],
                    titles[name],
                    f"{spent['step']:,.1f}",
                    *(f"{spent[p]:,.1f}" for p in PHASES),
                ]
            )
    return markdown(["model", "", "step, ms", *PHASES], rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=25)

    def contenders(_: str, case: Any, options: Any) -> dict[str, Any]:
        found = measure(case, options.rounds, warmup=1 if options.smoke else 4)
        return {"contenders": found}

    results = measure_models(parser, argv, MODELS, OUTPUT, contenders)
    print(table(results), machine(results), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
