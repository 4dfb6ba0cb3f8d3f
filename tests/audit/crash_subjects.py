"""What the crash driver trains: sessions of several methods, and `dpkfc train`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dpkfc.app import train
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.config import PrivacyConfig
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.noise_probes import FeatureNoise
from dpkfc.postprocess import DiSK, WeightEMA
from dpkfc.session import Session

STEPS, SAVE_EVERY, EXAMPLES = 24, 3, 40


@dataclass(frozen=True)
class Subject:
    """Something that trains in a folder, from where an earlier process left off."""

    name: str
    steps: int
    train: Callable[[Path], None]
    bit_for_bit: bool = True


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3)).double()


def _data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (EXAMPLES,), generator=generator)


def _loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def _plan(seed, **settings):
    config = PrivacyConfig(expected_batch_size=8, steps=STEPS, test_mode_seed=seed, **settings)
    return config.with_noise(1.0, 1e-3, EXAMPLES)


def _session_subject(name, plan, optimizer):
    def begin(folder):
        folder.mkdir(parents=True, exist_ok=True)
        model = _net()
        saved = folder / "checkpoint"
        is_there = saved.exists() or saved.with_name("checkpoint.old").exists()
        with Session(
            plan,
            model,
            optimizer(model.parameters()),
            _data(),
            ledger_path=folder / "ledger.jsonl",
            resume=is_there,
        ) as session:
            if is_there:
                session.restore(saved)
            else:
                session.save(saved)
            for batch in session.batches():
                session.step(batch, _loss)
                if (batch.step + 1) % SAVE_EVERY == 0:
                    session.save(saved)
            session.save(saved)

    return Subject(name, plan.steps, begin, bit_for_bit=plan.test_mode)


def _recipe_subject(name, **changed):
    settings = {
        "recipe": "digits",
        "steps": 12,
        "expected_batch_size": 24,
        "accountant": "rdp",
        "epsilon": 0.5,
    }
    settings |= {"probe_size": 16, "every": 2, "evaluate_every": 3, "method": "dp-kfc", **changed}

    def begin(folder):
        if (folder / "config.toml").exists():
            train.resume(folder)
        else:
            train.run(run_config({**settings, "out": str(folder)}))

    return Subject(name, int(settings["steps"]), begin, bit_for_bit=bool(changed.get("test_mode")))


def _sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


SUBJECTS = {
    "DP-SGD": lambda: _session_subject("DP-SGD", _plan(3), _sgd),
    "DP-KFC, Adam, average": lambda: _session_subject(
        "DP-KFC, Adam, average",
        _plan(
            4,
            preconditioner=KFAC(sides="both", probe=FeatureNoise(6), probe_size=32, every=5),
            weight_average=WeightEMA(0.9),
        ),
        lambda p: torch.optim.Adam(p, 0.01),
    ),
    "DiSK": lambda: _session_subject(
        "DiSK", _plan(5, postprocess=(DiSK(0.7),)), lambda p: torch.optim.SGD(p, 0.1)
    ),
    "secure noise": lambda: _session_subject("secure noise", _plan(None), _sgd),
    "dpkfc train": lambda: _recipe_subject("dpkfc train", test_mode=True),
    "dpkfc train, secure noise": lambda: _recipe_subject("dpkfc train, secure noise"),
}
