"""Help and small commands start without torch; `dpkfc card` fills in the registry's record.

`deployments-schema.yaml` is that of github.com/opendp/deployments-registry-data at commit 3e9c812,
under the MIT licence, unchanged.
"""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
import yaml
from torch import nn

from dpkfc import PrivacyConfig, Session
from dpkfc.app.commands.card import fill_card
from dpkfc.app.registry import export_entry
from dpkfc.report.officer import registry_record
from tests.sessions import cross_entropy

HELP = ("train", "tune", "try", "evaluate", "predict", "export", "report", "methods")
RUN = """
import contextlib, io, json, sys
import dpkfc
from dpkfc.cli import main

with_torch = {}
for words in [[], *json.loads(sys.argv[1])]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main(words or ["--help"])
    with_torch[" ".join(words)] = "torch" in sys.modules
print(json.dumps(with_torch))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a folder with ledger, card, weights and their digests."""
    folder = tmp_path_factory.mktemp("run")
    model = nn.Linear(4, 2)
    data = torch.randn(32, 4), torch.randint(2, (32,))
    config = PrivacyConfig(expected_batch_size=8, steps=2, accountant="rdp")
    plan = config.calibrate(3.0, 1e-5, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(plan, model, optimizer, data, ledger_path=folder / "ledger.jsonl")
    with session:
        for batch in session.batches():
            session.step(batch, cross_entropy)
    session.write_card(folder, title="t", chosen_by="tests", not_private={})
    return folder


def test_help_and_small_commands_do_not_import_torch(run, tmp_path):
    table = tmp_path / "patients.csv"
    table.write_text("age,smoker,died\n", "utf-8")
    commands = [
        ["--version"],
        *([name, "--help"] for name in HELP),
        ["calibrate", "-e", "1", "-n", "60000", "-b", "256", "--steps", "3"],
        ["epsilon", "-s", "1.1", "-n", "60000", "-b", "256", "--steps", "3"],
        ["ledger", "verify", str(run)],
        ["total", str(run)],
        ["card", str(run), "--data-subjects", "adults"],
        ["budget", str(tmp_path / "b.toml"), "--epsilon", "3", "--delta", "1e-5"],
        ["schema", str(table), "--target", "died", "--out", str(tmp_path / "s.toml")],
    ]
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(commands)],
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert not any(json.loads(done.stdout).values()), done.stdout


def test_the_record_for_the_registry_passes_its_schema_and_says_what_is_missing(run, tmp_path):
    """An owner's fields are asked for by the flags that fill them in."""
    schema = yaml.safe_load(Path(__file__).with_name("deployments-schema.yaml").read_text("utf-8"))
    check = jsonschema.Draft7Validator(schema, format_checker=jsonschema.FormatChecker())
    facts = {"owner": "Ward 3", "purpose": "Readmission", "contact": "a@b.example", "region": "EU"}
    for given in ({}, facts):
        fill_card(run, given)
        record = json.loads((run / "card.json").read_text("utf-8"))
        assert not [error.message for error in check.iter_errors(record)]
        text = json.dumps(record)
        assert ("--region TEXT" in text) == (not given)
        assert ("to be filled in" in text) == (not given)
    _check_entry(run, tmp_path, check)
    uncertified = json.loads((run / "privacy_card.json").read_text("utf-8"))
    uncertified["guarantee"]["certified"] = False
    assert not [*check.iter_errors(registry_record(uncertified))]


def _check_entry(run, place, check):
    """An entry passes the rules of the registry, and names what an owner has to state."""
    stated = {"sector": "Healthcare", "actors": "all see it", "justification": r"a\\b: policy"}
    for given, tier in (({}, 2), (stated, 3)):
        fill_card(run, {"data_subjects": "adults"} if given else {})
        path, missing = export_entry(run, place / "my_model.yaml", given)
        text = path.read_text("utf-8")
        entry = yaml.safe_load(text)
        assert not [error.message for error in check.iter_errors(entry)]
        assert entry["tier"] == tier and bool(missing) == (tier == 2)
        styles = {x.style for x in yaml.scan(text) if isinstance(x, yaml.ScalarToken)}
        assert styles <= {None, '"'} and "\\\\" not in text
        parameters = entry["deployment"]["privacy_loss"]["privacy_parameters"]
        assert all(isinstance(value, float) for value in parameters.values())
    with pytest.raises(ValueError, match="the registry takes names of"):
        export_entry(run, place / "My-Model.yaml", {})
    with pytest.raises(ValueError, match="sector 'Farming' is unknown"):
        export_entry(run, None, {"sector": "Farming"})
