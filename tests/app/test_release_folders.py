"""A folder with weights, ledger and card of any host passes every check, and a forged one none."""

import json
import shutil
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dpkfc.app.audit_folder import audit_folder
from dpkfc.app.commands.card import fill_card
from dpkfc.app.prepare import prepare
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.settings_file import read_choices, to_toml
from dpkfc.app.toml import ConfigError
from dpkfc.checkpoint import CheckpointError
from dpkfc.postprocess.weight_average import WeightEMA
from dpkfc.privacy.ledger import verify
from dpkfc.report.card import session_card
from dpkfc.report.card_files import to_markdown, write_card_files
from dpkfc.report.officer import Declared
from dpkfc.report.verify import verify_ledger
from dpkfc.report.written_card import CardError
from dpkfc.weights import ReleasedWeights
from tests.app.finished import call, read_card
from tests.app.hosts import HOSTS, SAID, open_session, train, train_engine, train_server


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory):
    folders = {}

    def make(host):
        if host not in folders:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                folders[host] = HOSTS[host](tmp_path_factory.mktemp("host"))
        return folders[host]

    return make


def change_card(change):
    """Change a card and all its pages, as a careful forger does."""

    def forge(folder):
        card = read_card(folder)
        change(card)
        write_card_files(folder, card)

    return forge


def change_text(name, old, new):
    def forge(folder):
        text = (folder / name).read_text("utf-8")
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1), "utf-8")

    return forge


def swap_weights(folder):
    path = folder / "model.safetensors"
    save_file({name: x * 2 for name, x in load_file(path).items()}, path)


def cut_ledger(folder):
    lines = (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "ledger.jsonl").write_bytes(b"".join(lines[:-1]))
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)


def take_other_card(folder):
    with open_session() as session:
        train(session).write_card(folder / "other", **SAID)
    for name in ("privacy_card.json", "privacy_card.md", "card.json"):
        shutil.copy(folder / "other" / name, folder / name)
    shutil.rmtree(folder / "other")


FORGERIES = {
    "weights": swap_weights,
    "ledger cut": cut_ledger,
    "card of another run": take_other_card,
    "smaller ε": change_card(lambda card: card["guarantee"].update(epsilon=0.01)),
    "smaller noise": change_card(lambda card: card["mechanism"].update(noise_multiplier=90.0)),
    "harmless attack": change_card(lambda card: card["meaning"].update(right_at_even_odds=0.501)),
    "harmless group": change_card(lambda card: card["meaning"]["groups"]["10"].update(epsilon=0.1)),
    "begun earlier": change_card(lambda card: card["dates"].update(begun="2001-01-01T00:00:00")),
    "page": change_text("privacy_card.md", "Guessing gives 50 %", "Guessing gives 70 %"),
    "record": change_text("card.json", '"Machine learning model"', '"Summary statistics"'),
}


@pytest.mark.quick("dpkfc train", "session", "federated", "opacus")
@pytest.mark.parametrize("host", HOSTS)
def test_an_honest_folder_passes(make_folder, host, tmp_path):
    folder = Path(shutil.copytree(make_folder(host), tmp_path / "run"))
    answers = verify_ledger(folder / "ledger.jsonl")
    assert answers["privacy card"] == "states what the ledger shows"
    assert answers["weights"] == "equal to the card's (SHA-256)"
    assert answers["pages of the card"] == "say what the card says"
    card = read_card(folder)
    if host != "dpkfc train":
        assert card["declared"]["owner"] == "Ward 3"
        verdict = audit_folder(folder, ["step"])
        assert verdict.passed and [finding.check for finding in verdict.findings][1] == "card"
        assert verify_ledger(folder / "ledger.jsonl")["pages of the card"].startswith("say")
        assert "no check failed" in (folder / "privacy_card.md").read_text("utf-8")
    done = call("report", folder, "--out", tmp_path / "page.html")
    assert done.exit_code == 0 and card["title"] in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.quick("session-*", "*-weights", "*-smaller noise")
@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("host", HOSTS)
def test_a_forged_folder_is_found(make_folder, host, forgery, tmp_path):
    folder = Path(shutil.copytree(make_folder(host), tmp_path / "run"))
    FORGERIES[forgery](folder)
    with pytest.raises(CardError):
        verify_ledger(folder / "ledger.jsonl")
    if host != "dpkfc train":
        assert not audit_folder(folder, ["step"]).passed
        assert "AUDIT FAILED" in (folder / "privacy_card.md").read_text("utf-8")


# -- page one --------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
def test_page_one_has_forty_lines_and_no_code(make_folder, host):
    page, _, annex = (
        (make_folder(host) / "privacy_card.md").read_text("utf-8").partition("# Annex\n")
    )
    assert len(page.strip().splitlines()) <= 40 and "`" not in page
    for part in (
        "| Owner |",
        "| Purpose |",
        "| Data subjects |",
        "| Contact |",
        "| Training began | 20",
        "What is protected, and what is not",
        "at even odds",
        "At 1 % false alarms",
        "for 2,",
        "for 10",
        "Total over several runs",
        "**Certified:** yes",
        "**Audit:** none was made",
        "SHA-256",
        "Signed",
    ):
        assert part in page, part
    assert "### Provenance" in annex and "### Glossary" in annex


def test_a_total_over_runs_is_on_page_one():
    with open_session() as session:
        card = session_card(
            train(session), **SAID, total={"epsilon": 2.5, "delta": 1e-3, "runs": ["a", "b"]}
        )
        page = to_markdown(card).partition("# Annex")[0]
        assert "**Total over several runs:** ε = 2.5000, δ = 0.001 for a, b." in page
        for total in ({"epsilon": 0.001, "delta": 1e-3}, {"epsilon": 2.5, "delta": 1e-12}):
            with pytest.raises(ValueError, match="this run alone has") as error:
                session_card(session, **SAID, total=total | {"runs": ["a"]})
            assert len(str(error.value)) <= 160


@pytest.mark.parametrize("value", ["two\nlines", 3, "x" * 201, "\u202e"])
def test_a_field_that_a_page_cannot_show_is_refused(value):
    with pytest.raises(ValueError, match="owner of a card"):
        Declared(owner=value)


def test_the_command_fills_in_fields_and_shows_page_one(make_folder, tmp_path):
    folder = Path(shutil.copytree(make_folder("session"), tmp_path / "run"))
    done = call("card", folder, "--contact", "dpo@example.org | us")
    assert done.exit_code == 0 and "dpo@example.org \\| us" in done.output
    assert "# Annex" not in done.output and "Ward 3" in done.output
    verify_ledger(folder / "ledger.jsonl")
    assert call("card", folder, "--owner", "a\nb").exit_code == 2
    swap_weights(folder)
    assert call("card", folder).exit_code == 2
    empty = call("card", tmp_path)
    assert empty.exit_code == 2 and "holds no privacy_card.json" in empty.stderr
    for words in (["card"], ["certify"], ["export", "--format", "registry"]):
        absent = call(*words, tmp_path / "absent")
        assert absent.exit_code == 2 and "absent does not exist; give the folder" in absent.stderr


def test_a_damaged_card_is_one_error(make_folder, tmp_path):
    folder = Path(shutil.copytree(make_folder("session"), tmp_path / "run"))
    path = folder / "privacy_card.json"
    whole = json.loads(path.read_text("utf-8"))
    for section in whole:
        for value in (None, "x", [1], -3.5, {}):
            path.write_text(json.dumps(whole | {section: value}), "utf-8")
            # A value that nothing depends on may be replaced.
            with suppress(CardError, ValueError):
                fill_card(folder, {})
    for section, field in (("guarantee", "unit"), ("mechanism", "clipping")):
        damaged = json.loads(json.dumps(whole))
        del damaged[section][field]
        path.write_text(json.dumps(damaged), "utf-8")
        with pytest.raises(CardError, match=r"damaged|differ|not as"):
            fill_card(folder, {})
    path.write_text(json.dumps(whole | {"format": 7}), "utf-8")
    with pytest.raises(CardError, match="a newer dpkfc wrote"):
        fill_card(folder, {})


def test_an_attack_needs_the_settings_of_a_run(make_folder):
    done = call("audit", make_folder("session"), "--kind", "one-run")
    assert done.exit_code == 2 and "has no settings" in done.stderr


# -- weights that no release produced --------------------------------------------------------------


def refused(session, folder):
    with pytest.raises(RuntimeError) as caught:
        session.write_card(folder, **SAID)
    with pytest.raises(RuntimeError):
        session_card(session, **SAID)
    assert not folder.exists()
    return str(caught.value)


def test_a_script_that_is_run_twice_writes_no_card(tmp_path):
    with open_session(tmp_path / "ledger.jsonl") as session:
        train(session)
    with open_session(tmp_path / "ledger.jsonl", resume=True) as again:
        train(again)
        assert "come from no release" in refused(again, tmp_path / "card")


@pytest.mark.parametrize("way", ["load", "data", "buffer", "optimizer"])
def test_weights_that_were_written_since_get_no_card(way, tmp_path):
    with open_session() as session:
        model = session.model
        model.register_buffer("scale", torch.ones(2))
        train(session)
        with torch.no_grad():
            if way == "load":
                model.load_state_dict({name: x + 1 for name, x in model.state_dict().items()})
            elif way == "data":
                model.weight.data.neg_()
            elif way == "buffer":
                model.scale.add_(1)
            else:
                model.weight.grad = torch.ones_like(model.weight)
                session.optimizer.step()
        assert "is not as the last release left it" in refused(session, tmp_path / "card")


def test_the_averaged_weights_are_delivered_and_the_model_keeps_its_own(tmp_path):
    with open_session(weight_average=WeightEMA(0.9)) as session:
        own = train(session).model.weight.detach().clone()
        session.write_card(tmp_path, **SAID)
        assert torch.equal(session.model.weight, own)
        session.write_card(tmp_path, **SAID)
    assert not torch.equal(load_file(tmp_path / "model.safetensors")["weight"], own)


def test_a_folder_of_another_run_is_left_alone(tmp_path):
    with open_session() as one, open_session(expected_batch_size=10) as other:
        train(one, 2).write_card(tmp_path, **SAID)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(CheckpointError, match="belongs to another run"):
            train(other).write_card(tmp_path, **SAID)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        train(one).write_card(tmp_path, **SAID)
    assert len(verify(tmp_path / "ledger.jsonl").releases) == 4


@pytest.mark.parametrize("host", ["session", "engine", "server"])
def test_a_hook_of_the_state_dict_adds_nothing_to_the_weights(host, tmp_path):
    if host == "session":
        trained = train(open_session())
    else:
        trained = train_engine(tmp_path)._private if host == "engine" else train_server().server
    model = trained.model
    model.register_buffer("own", torch.ones(2), persistent=False)
    for added in ("rows", "own"):
        handle = model.register_state_dict_post_hook(
            lambda m, state, prefix, local, added=added: state.update({added: torch.ones(2)})
        )
        with pytest.raises(
            RuntimeError, match=f"'{added}' of the state dict is neither a parameter"
        ):
            trained.released_state()
        handle.remove()
    assert set(trained.released_state()) == set(model.state_dict())


def test_tied_and_sparse_tensors_of_a_state_dict_are_known():
    inner = torch.nn.Linear(3, 3)
    model = torch.nn.ModuleDict({"one": inner, "two": inner})
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    known = ReleasedWeights(model)
    known.check_state(model.state_dict())
    wrapped = checkpoint_wrapper(torch.nn.Linear(3, 3))
    model = torch.nn.ModuleDict({"part": wrapped})
    assert "part.weight" in model.state_dict()
    ReleasedWeights(model).check_state(model.state_dict())


def test_the_fields_are_settings_of_their_own_section(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[run]\nrecipe = "digits"\n[card]\nowner = "Ward 3"\ncontact = "us"\n', "utf-8")
    config = run_config(read_choices(path, {"purpose": "predict readmission"}))
    assert config.card == Declared(owner="Ward 3", contact="us", purpose="predict readmission")
    assert '[card]\nowner = "Ward 3"' in to_toml(config)
    with pytest.raises(ConfigError, match="owner of a card must be one line"):
        run_config({"recipe": "digits", "owner": "two\nlines"})
    plain = run_config({"recipe": "digits"})
    assert prepare(plain).plan.hash == prepare(config).plan.hash
