"""Checkpoints from elsewhere: damaged, made by hand, or with a pickle among their files. Nothing of
a refused one is loaded.
"""

import hashlib
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dpkfc.checkpoint import CheckpointError
from dpkfc.config import PrivacyConfig
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.noise_probes import FeatureNoise
from dpkfc.postprocess import DiSK, WeightEMA
from dpkfc.session import Session
from tests.audit.crash_subjects import EXAMPLES, _data, _loss, _net
from tests.audit.fuzzing import PICKLE, Mutator, Tally, no_pickle
from tests.audit.sizes import size

FILES = (
    "manifest.json",
    "model.safetensors",
    "preconditioner.safetensors",
    "filters.safetensors",
    "state.safetensors",
)


def _session(ledger, optimizer="SGD"):
    plan = PrivacyConfig(
        expected_batch_size=8,
        steps=6,
        test_mode_seed=3,
        preconditioner=KFAC(sides="both", probe=FeatureNoise(6), probe_size=16, every=2),
        postprocess=(DiSK(0.7, momentum_allowed=True),),
        weight_average=WeightEMA(0.9),
    ).with_noise(1.0, 1e-3, EXAMPLES)
    model = _net()
    options = {"lr": 0.1, "momentum": 0.9} if optimizer == "SGD" else {"lr": 0.1}
    return Session(
        plan,
        model,
        getattr(torch.optim, optimizer)(model.parameters(), **options),
        _data(),
        ledger_path=ledger,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of two steps with a checkpoint."""
    root = tmp_path_factory.mktemp("saved")
    with _session(root / "ledger.jsonl") as session:
        for batch in session.batches():
            session.step(batch, _loss)
            if session.steps_done == 2:
                break
        session.save(root / "checkpoint", extra={"note": [1, (2, 3)], 4: torch.zeros(2)})
    return root


@pytest.fixture
def session(saved, monkeypatch):
    no_pickle(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    with _session(saved / "ledger.jsonl") as session:
        yield session


@pytest.fixture
def damaged(saved, tmp_path):
    """The checkpoint with other files in the place of some of its own."""
    whole = {
        name: (saved / "checkpoint" / name).read_bytes()
        for name in FILES
        if (saved / "checkpoint" / name).exists()
    }
    folder = tmp_path / "checkpoint"
    shutil.copytree(saved / "checkpoint", folder)
    last = []

    def restore_files(files):
        for name in last:
            (folder / name).unlink(missing_ok=True)
            if name in whole:
                (folder / name).write_bytes(whole[name])
        for name, content in files.items():
            (folder / name).write_bytes(content)
        last[:] = files
        return folder

    return restore_files


def _seal(manifest):
    """The manifest with a digest that fits, as a program would forge it."""
    if isinstance(manifest, dict):
        manifest = {name: value for name, value in manifest.items() if name != "digest"}
        text = json.dumps(manifest, sort_keys=True)
        manifest["digest"] = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps(manifest).encode()


def test_damaged_checkpoints(session, damaged, saved, evidence):
    """A changed byte anywhere in it is noticed; only the layout of manifest.json may differ."""
    whole = {path.name: path.read_bytes() for path in (saved / "checkpoint").iterdir()}
    tally = Tally()
    for number, name in enumerate(sorted(whole)):
        mutator = Mutator([whole[name], PICKLE], number)
        for _ in range(size(40, 2_500)):
            if (content := mutator.bytes()) == whole[name]:
                continue
            folder, taken = damaged({name: content}), tally.taken
            tally.attempt(lambda folder=folder: session.restore(folder), content, str(folder))
            if tally.taken > taken:
                assert name == "manifest.json"
                assert json.loads(content) == json.loads(whole[name])
    tally.check(evidence, "checkpoints, bytes", 100)


def test_forged_manifests(session, damaged, saved, evidence):
    """Hashes that fit, with steps that are text, states that are lists, groups that lie outside of
    the folder.
    """
    whole = json.loads((saved / "checkpoint" / "manifest.json").read_text())
    mutator, tally = Mutator([b""], 7), Tally()
    for _ in range(size(60, 12_000)):
        changed = json.loads(json.dumps(whole))
        for _ in range(mutator.rng.choice((1, 1, 2))):
            changed = mutator.json(changed)
        if mutator.rng.random() < 0.05 and isinstance(changed, dict):
            changed["sha256"] = {mutator.rng.choice(("../x", "/tmp", "", "a/b", "x\0y")): "0"}
        try:
            content = _seal(changed)
        except (RecursionError, ValueError):
            continue
        folder = damaged({"manifest.json": content})
        tally.attempt(
            lambda folder=folder: session.restore(folder), content, str(folder), "checkpoint"
        )
    tally.check(evidence, "checkpoints, forged manifests", 50)


def test_forged_tensors(session, damaged, saved, evidence):
    """Whole files with fitting hashes that hold other names, shapes or types, or a preconditioner
    of another kind.
    """
    whole = json.loads((saved / "checkpoint" / "manifest.json").read_text())
    groups = {
        name: load_file(saved / "checkpoint" / f"{name}.safetensors") for name in whole["sha256"]
    }
    mutator, tally, out = Mutator([b""], 8), Tally(), saved / "forged.safetensors"
    rng = mutator.rng
    for _ in range(size(60, 8_000)):
        name = rng.choice(sorted(groups))
        tensors = {key: tensor.clone() for key, tensor in groups[name].items()}
        key = rng.choice(sorted(tensors))
        match rng.randrange(6):
            case 0:
                del tensors[key]
            case 1:
                tensors[
                    rng.choice(
                        ("x", "0.weight", "0.", "9.x", "average.", "before.x", "updates", "meta")
                    )
                ] = tensors.pop(key)
            case 2:
                tensors[key] = torch.zeros(
                    rng.choice(((), (0,), (1,), (3, 8), (2, 2, 2))), dtype=tensors[key].dtype
                )
            case 3:
                tensors[key] = tensors[key].to(
                    rng.choice((torch.int64, torch.float16, torch.bool, torch.uint8))
                )
            case 4 if tensors[key].dtype == torch.uint8:
                text = Mutator([bytes(tensors[key].tolist())], rng.randrange(10**6)).bytes() or b"x"
                tensors[key] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            case _:
                tensors[f"{key}{rng.choice(('', '.more'))}"] = torch.full_like(
                    tensors[key], 1
                ).flatten()
        save_file(tensors, out)
        content = out.read_bytes()
        hashes = {**whole["sha256"], name: hashlib.sha256(content).hexdigest()}
        manifest = _seal({**whole, "sha256": hashes})
        folder = damaged({"manifest.json": manifest, f"{name}.safetensors": content})
        tally.attempt(
            lambda folder=folder: session.restore(folder),
            (name, key, sorted(tensors)),
            str(folder),
            "checkpoint",
        )
    tally.check(evidence, "checkpoints, forged tensors", 60)


def test_a_pickle_in_a_checkpoint_is_never_loaded(session, damaged, saved):
    for name in (*FILES, "optimizer.pt", "data.pkl"):
        folder = damaged({name: PICKLE})
        if name in {path.name for path in (saved / "checkpoint").iterdir()}:
            with pytest.raises(CheckpointError):
                session.restore(folder)
        else:
            assert session.restore(folder)[4].tolist() == [0, 0]


@pytest.mark.parametrize(
    "mine, other, message",
    [("SGD", "Adam", "'step'"), ("Adam", "SGD", "it has no 'dampening' for SGD")],
)
def test_the_state_of_another_optimizer_is_refused_before_a_release(mine, other, message, tmp_path):
    """It used to be found by the step, after the release was charged."""
    with _session(tmp_path / "ledger.jsonl", mine) as session:
        session.step(next(session.batches()), _loss)
        session.save(tmp_path / "checkpoint")
    with _session(tmp_path / "ledger.jsonl", other) as session:
        before = session.optimizer.state_dict()["param_groups"]
        weights = {name: tensor.clone() for name, tensor in session.model.state_dict().items()}
        with pytest.raises(CheckpointError, match=f"belongs to another optimizer.*{message}"):
            session.restore(tmp_path / "checkpoint")
        assert session.optimizer.state_dict()["param_groups"] == before
        assert all(
            weights[name].equal(tensor) for name, tensor in session.model.state_dict().items()
        )
