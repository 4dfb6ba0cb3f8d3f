"""Settings from files and from the command line: whatever they hold, the answer is a run's settings
or one line.
"""

import functools
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpkfc.app import train
from dpkfc.app.assembly import learning_rate, make_augment, make_optimizer
from dpkfc.app.curvature_settings import Facts
from dpkfc.app.methods import METHODS
from dpkfc.app.plan_settings import make_plan, settle
from dpkfc.app.recipes import images
from dpkfc.app.recipes.catalogue import RECIPES, find_recipe, run_config
from dpkfc.app.run_config import SETTINGS
from dpkfc.app.run_folder import RunFolder
from dpkfc.app.settings_file import flatten, to_toml
from dpkfc.app.toml import ConfigError, read_toml
from dpkfc.privacy import accounting, cross_check
from dpkfc.privacy.calibration import check_target
from tests.audit.fuzzing import ODD, PICKLE, Mutator, Tally, no_pickle
from tests.audit.sizes import size
from tests.command_line import call

FIELDS = SETTINGS


@pytest.fixture(autouse=True)
def _light(monkeypatch, tmp_path):
    """No pickle, a folder of its own, ε from a formula (not the accountants are under test here),
    and no training.
    """
    no_pickle(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(accounting.EpsilonCurve, "epsilon", lambda self, count: 0.01 * count)
    monkeypatch.setattr("dpkfc.config.calibrate_noise_multiplier", _calibrate)
    monkeypatch.setattr(train, "_train", lambda *args, **kwargs: None)
    monkeypatch.setattr("dpkfc.app.commands.train._show_audit", lambda *_: None)
    monkeypatch.setattr("dpkfc.app.commands.train.announce", lambda result: None)
    monkeypatch.setattr(
        cross_check, "cross_check", lambda event, count, *_: {"pld": 0.1, "rdp": 0.1}
    )
    monkeypatch.setattr(train, "prepare", _prepare)
    yield


def _calibrate(
    epsilon,
    delta,
    make_event,
    count,
    *_,
    **__,
):
    check_target(epsilon, delta)
    make_event(noise := max(0.1, 0.1 * count**0.5 / epsilon))
    return noise


def _prepare(config, **_):
    """What `prepare` makes of settings, without data and model: plan, optimizer, augmentation,
    learning rate.
    """
    recipe = find_recipe(config.run.recipe)
    config = settle(config, 1437)
    make_augment(config, recipe.input_shape)
    plan = make_plan(config, Facts(recipe.input_shape, 1437, recipe.probe))
    learning_rate(config, 0, plan.steps)
    make_optimizer(config, _model())
    data = SimpleNamespace(digest="")
    return SimpleNamespace(config=config, plan=plan, recipe=recipe, data=data)


@functools.cache
def _model():
    return find_recipe("digits").model(0)


def _files():
    shipped = [path.read_bytes() for path in Path(images.__file__).parent.glob("*.toml")]
    replay = [
        to_toml(run_config({"recipe": "digits", "method": method, "public_data": "x"})).encode()
        for method in METHODS
    ]
    return shipped + replay


def test_damaged_config_files(tmp_path, evidence):
    """Read, checked, laid over the recipe's defaults, and made into a plan."""
    mutator, tally, path = Mutator([*_files(), PICKLE], 1), Tally(), tmp_path / "mine.toml"

    def use():
        written = flatten(read_toml(path), str(path))
        train.run(run_config({"recipe": "digits", **written, "out": "", "data_dir": ""}))

    for content in mutator.draw(size(120, 25_000)):
        path.write_bytes(content)
        tally.attempt(use, content)
    tally.check(evidence, "config files, bytes", 120)


def test_config_files_are_named(tmp_path, evidence):
    """What cannot be read as settings names the file."""
    mutator, tally, path = Mutator([*_files(), PICKLE], 2), Tally(), tmp_path / "mine.toml"
    contents = mutator.draw(size(100, 5_000))
    tally.read(path, contents, lambda: flatten(read_toml(path), str(path)))
    tally.check(evidence, "config files, names", 100)


def test_damaged_configs_of_run_folders(tmp_path, evidence):
    """A resume with a config.toml that was changed; the folder may hold a file where a folder is
    expected.
    """
    mutator, tally, folder = Mutator([*_files(), PICKLE], 3), Tally(), tmp_path / "run"
    (folder / "checkpoint").mkdir(parents=True)
    seed = (folder / "config.toml").write_bytes

    def use():
        RunFolder.open(folder)
        train.resume(folder)

    for content in mutator.draw(size(100, 5_000)):
        seed(content)
        tally.attempt(use, content)
    tally.check(evidence, "run folders, config", 100)


def _value(rng, field):
    """Now a value that fits its type, now anything."""
    kind, roll = str(field.type), rng.random()
    if field.metadata.get("choices", ()) and roll < 0.7:
        return rng.choice(field.metadata.get("choices", ()))
    if roll < 0.6:
        whole = [0, 1, 2, 3, 50, 100, 10**6, 10**12, 2**62]
        return {
            "int": lambda: rng.choice(whole),
            "float": lambda: rng.choice([0.0, 1e-9, 0.01, 0.5, 0.9, 1.0, 3.0, 1e9, 1e300, 5e-324]),
            "bool": lambda: rng.random() < 0.5,
            "str": lambda: rng.choice(["", "x", "linear conv", "cpu", "cuda", *RECIPES]),
        }[kind]()
    return rng.choice(ODD)


def test_settings_of_any_kind(evidence):
    """A few settings at once, each from its range, its edges or elsewhere."""
    rng, tally = random.Random(4), Tally()
    for _ in range(size(120, 15_000)):
        chosen = {
            name: _value(rng, FIELDS[name])
            for name in rng.sample(sorted(FIELDS), rng.choice((1, 2, 3, 8)))
        }
        chosen |= {"recipe": rng.choice((*RECIPES, "digits", "digits"))} | (
            {"out": ""} if rng.random() < 0.9 else {}
        )
        chosen["public_data"] = ""
        tally.attempt(lambda chosen=chosen: train.run(run_config(chosen)), chosen)
        shutil.rmtree("runs", ignore_errors=True)
    tally.check(evidence, "settings", 120)


# -- the command line ------------------------------------------------------------------------------

WORDS = [
    *"0 1 -1 2 0.5 1e-5 nan inf -inf 1e400 1_000 0x10 \u0661 None true x adam poisson".split(),
    *"fixed digits dp-kfc ../x ~ ~nobody/x %s {} [bold] [/bold] [red \U0001f98a \udcff".split(),
    *"--lr - -- = module:factory : os:getcwd a..b:c tests.audit.sizes:FULL".split(),
    *"3,8,8 0,0 1x8x8 -1,2".split(),
    "",
    " 1",
    "\n",
    "a\nb",
    "9" * 400,
    "9" * 5000,
    "x" * 5000,
]
COMMANDS = {
    ("train",): [
        *(f"--{name.replace('_', '-')}" for name in FIELDS),
        *"--config --resume --quiet --no-nesterov".split(),
    ],
    ("calibrate",): (
        "--epsilon --dataset-size --batch-size --epochs --steps --delta --sampler".split()
    ),
    ("epsilon",): (
        "--noise-multiplier -n -b --sample-rate --epochs --steps --delta --sampler".split()
    ),
    ("ledger", "verify"): ["--delta"],
    ("methods",): ["--help"],
    ("doctor",): (
        "--input-shape --seed --layer-rules --source --device --damping --max-rank".split()
    ),
}
GOOD = {
    ("train",): "--recipe digits".split(),
    ("calibrate",): "--epsilon 3 -n 1000 -b 100 --epochs 2".split(),
    ("epsilon",): "-s 1.0 -n 1000 -b 100 --steps 20".split(),
    ("ledger", "verify"): ["ledger.jsonl"],
    ("methods",): [],
    ("doctor",): ["nothing"],
}


def _judged(arguments):
    """A mistake is one line on stderr and exit code 2, and never a surprise of the program's
    own.
    """
    called = call(*arguments)
    code, out, err = called.exit_code, called.stdout, called.stderr
    lines = err.splitlines()
    one_each = all(line.startswith("dpkfc: ") for line in lines)
    if (
        code not in (0, 2)
        or "Traceback" in out + err
        or "DPKFC_DEBUG" in err
        or not one_each
        or (code and not lines)
    ):
        raise RuntimeError(f"{code}: {err[-300:]}")
    if code:
        raise ConfigError(lines[-1])


def test_the_command_line(evidence):
    """Flags with values that are too large, no numbers, half characters, markup, other flags;
    unknown files and modules.
    """
    rng, tally = random.Random(6), Tally()
    commands = [*COMMANDS, ("train",), ("train",)]
    for _ in range(size(40, 2_500)):
        command = rng.choice(commands)
        arguments = [*command, *(GOOD[command] if rng.random() < 0.8 else [])]
        for _ in range(rng.choice((1, 1, 2, 3))):
            arguments += rng.choice(
                ([rng.choice(COMMANDS[command]), rng.choice(WORDS)], [rng.choice(WORDS)])
            )
        tally.attempt(lambda arguments=arguments: _judged(arguments), arguments)
    tally.check(evidence, "command line", 40)
