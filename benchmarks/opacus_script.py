"""A script in the style of Opacus, run with Opacus and with this project.

    python benchmarks/opacus_script.py             # results/opacus_script.json
    python benchmarks/opacus_script.py --smoke     # two rounds; writes only to --output

Model, loss and loop come from Opacus' own MNIST example. Only the import of `PrivacyEngine`
differs. Contenders take turns, one step each a round: from the loader's batch to
the changed weights. Both engines draw Poisson batches, plain SGD takes batches of a fixed size.
A `Session` with captured graphs, which takes another loop, shows what captures could give a script.
Figures are medians over rounds, of processor time. Opacus comes with `pip install -e ".[opacus]"`.
"""

from __future__ import annotations

import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from common import RESULTS, judged, markdown, measure_once
from rounds import compare_steps

OUTPUT = RESULTS / "opacus_script.json"
GOALS = {64: 0.8, 256: 0.6}
NAMES = ("plain", "opacus", "dpkfc", "session", "captured")
WARMUP, ROUNDS = 3, 40


def make_step(name: str, batch_size: int) -> Callable[[], None]:
    """Return a function that makes the next step of a script with one of the engines."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    size = 40 * batch_size
    data = TensorDataset(torch.randn(size, 1, 28, 28), torch.randint(10, (size,)))
    loader: Any = DataLoader(data, batch_size=batch_size, shuffle=True)
    if name in ("session", "captured"):
        return _session_step(model, optimizer, data, batch_size, captures=name == "captured")
    if name != "plain":
        engine = _engine(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, optimizer, loader = engine.make_private(
                module=model,
                optimizer=optimizer,
                data_loader=loader,
                noise_multiplier=1.0,
                max_grad_norm=1.0,
            )

    def steps() -> Iterator[None]:
        while True:
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                yield

    run = steps()
    return lambda: next(run)


def _session_step(
    model: Any, optimizer: Any, data: Any, batch_size: int, *, captures: bool
) -> Callable[[], None]:
    """Return a function that makes the next step of a session."""
    import torch.nn.functional as F

    from dpkfc.config import PrivacyConfig
    from dpkfc.session import Session

    config = PrivacyConfig(expected_batch_size=batch_size, steps=10**6, max_grad_norm=1.0)
    plan = config.with_noise(1.0, 1e-6, len(data))
    session = Session(plan, model, optimizer, data, capture_graphs=captures)
    batches = session.batches()

    def losses(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    return lambda: session.step(next(batches), losses) and None


def _engine(name: str) -> Any:
    if name == "dpkfc":
        from dpkfc.integrations.opacus import PrivacyEngine

        return PrivacyEngine()
    try:
        from opacus import PrivacyEngine as Peer
    except ImportError as error:
        raise SystemExit('Opacus is missing: pip install -e ".[opacus]"') from error
    return Peer()


def measure(options: Namespace) -> dict[str, Any]:
    """Return the figures by batch size."""
    rounds = 2 if options.smoke else ROUNDS
    return {"sizes": {str(size): measure_size(size, rounds) for size in GOALS}}


def measure_size(batch_size: int, rounds: int) -> dict[str, Any]:
    """Return the figures of all contenders at one batch size."""
    from contenders import Contender

    live = {name: Contender(step=make_step(name, batch_size)) for name in NAMES}
    pairs = {"opacus": ("dpkfc", "opacus"), "plain": ("dpkfc", "plain")}
    pairs |= {"session": ("session", "opacus"), "captured": ("captured", "opacus")}
    return compare_steps(live, rounds, WARMUP, pairs)


def table(results: dict[str, Any]) -> str:
    """Return a row for each batch size."""
    rows = []
    for size, found in results["sizes"].items():
        ms, ratios = found["ms"], found["ratios"]
        of_peer = ratios["opacus"]
        rows.append(
            [
                size,
                *(f"{ms[name]:,.1f}" for name in NAMES),
                judged(of_peer["ratio"], GOALS[int(size)], of_peer["quartiles"]),
                *(
                    judged(ratios[name]["ratio"], None, ratios[name]["quartiles"])
                    for name in ("plain", "session", "captured")
                ),
            ]
        )
    head = ["expected batch", "plain SGD, ms", "Opacus hooks, ms", "the script here, ms"]
    head += ["a session, ms", "captured, ms", "÷ Opacus (goal)", "÷ plain SGD"]
    return markdown([*head, "session ÷ Opacus", "captured ÷ Opacus"], rows)


if __name__ == "__main__":
    sys.exit(measure_once(__doc__, None, OUTPUT, measure, table, threads=1))
