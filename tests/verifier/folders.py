"""Prepare folders of runs for the verifier: good ones, and the same with one forgery each."""

import datetime
import hashlib
import json
import re
import shutil

import torch
from torch import nn

from dpkfc import PrivacyConfig, Session
from dpkfc.app.certificate import certify
from dpkfc.federated import FederatedConfig, TrustedServer, federate
from dpkfc.privacy.extra_releases import ExtraRelease, charge_extra
from dpkfc.privacy.ledger_lines import encode_line
from dpkfc.report.card_files import write_card_files, write_weights_and_card
from dpkfc.report.federated_card import build_federated_card
from tests.federated.worlds import CLIENTS, RECORDS, datasets, head, loss_fn
from tests.sessions import cross_entropy

FIELDS = {"controller": "City Hospital", "legal_basis": "consent", "retention": "2030"}


def train(folder, steps=4, *, size=8, extra=False, **settings):
    """Train a small model, and write its folder."""
    folder.mkdir(parents=True)
    model = nn.Linear(4, 2)
    data = torch.randn(40, 4), torch.randint(2, (40,))
    kind = ExtraRelease(purpose="bounds", noise_multiplier=20.0, norm=1.0)
    config = PrivacyConfig(
        expected_batch_size=size, steps=steps, extra_releases=(kind,) if extra else (), **settings
    )
    plan = config.calibrate(3.0, 1e-3, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(plan, model, optimizer, data, ledger_path=folder / "ledger.jsonl") as session:
        if extra:
            charge_extra(session.ledger, kind, 0)
        for batch in session.batches():
            session.step(batch, cross_entropy)
    session.write_card(folder, title="a model", chosen_by="tests", not_private={})
    return folder


def train_clients(folder):
    """Train over clients, and write the folder of the server."""
    config = FederatedConfig(
        clients=CLIENTS, rounds=2, expected_records=RECORDS, privacy=TrustedServer()
    )
    run = federate(config.calibrate(2.0, 1e-3), head(), loss_fn, datasets())
    card = build_federated_card(run.server, run.records, title="x", chosen_by="nobody")
    write_weights_and_card(folder, run.server.released_state(), run.server.ledger, card)
    return folder


def stamp_of(digest):
    """Return what a time-stamping authority answers, without a signature."""

    def der(tag, *parts):
        content = b"".join(parts)
        size = len(content).to_bytes(2, "big")
        return bytes([tag, 0x82]) + size + content

    name = {"sha256": "608648016503040201", "info": "2a864886f70d0109100104"}
    oid = {key: der(0x06, bytes.fromhex(value)) for key, value in name.items()}
    time = datetime.datetime(2026, 11, 28, 19, 30).strftime("%Y%m%d%H%M%SZ").encode()
    imprint = der(0x30, der(0x30, oid["sha256"]), der(0x04, digest))
    info = der(0x30, der(0x02, b"\1"), imprint, der(0x02, b"\7"), der(0x18, time))
    signed = der(0x30, der(0x02, b"\3"), der(0x30, oid["info"], der(0xA0, der(0x04, info))))
    return der(0x30, der(0x30, der(0x02, b"\0")), der(0x30, der(0xA0, signed)))


def head_of(folder):
    last = (folder / "ledger.jsonl").read_text().splitlines()[-1]
    return str(json.loads(last)["hash"])


def chain(folder, lines):
    """Write a ledger whose numbers and hashes fit, whatever its lines say."""
    text, head = b"", ""
    for number, content in enumerate(lines):
        content.pop("hash", None)
        if number:
            content |= {"release": number, "prev": head}
        line, head = encode_line(content)
        text += line
    (folder / "ledger.jsonl").write_bytes(text)


def read_lines(folder):
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def edit_card(folder, change):
    card = json.loads((folder / "privacy_card.json").read_text())
    change(card)
    write_card_files(folder, card)


def halve_noise(card):
    """Halve the noise of the plan, and give the card the hash of that plan."""
    card["plan"]["noise_multiplier"] /= 2
    text = json.dumps(card["plan"], sort_keys=True, separators=(",", ":"))
    card["plan_hash"] = hashlib.sha256(text.encode()).hexdigest()


def good_folders(place):
    """Return six folders whose files all belong together."""
    plain = train(place / "plain")
    certified = train(place / "certified")
    certify(certified, certified / "certificate.pdf", FIELDS)
    stamped = train(place / "stamped")
    (stamped / "ledger-4.tsr").write_bytes(stamp_of(bytes.fromhex(head_of(stamped))))
    return {
        "plain": plain,
        "certified": certified,
        "stamped": stamped,
        # A table is trained so: everybody in every step.
        "with a release beside the steps": train(place / "extra", size=40, extra=True),
        "cut batches": train(place / "cut", sampler="truncated_poisson", max_batch_size=12),
        "federated": train_clients(place / "federated"),
    }


def forged_folders(place, good):
    """Return six forged folders, each with a part of the sentence that says so."""

    def copy(name, of):
        return shutil.copytree(good[of], place / name)

    swapped = copy("swapped", "plain")
    shutil.copy(good["certified"] / "model.safetensors", swapped)
    cut = copy("shortened", "plain")
    lines = read_lines(cut)
    chain(cut, lines[:2] + lines[3:])
    edited = copy("edited", "plain")
    edit_card(edited, lambda card: card["guarantee"].update(epsilon=0.5))
    halved = copy("halved", "plain")
    edit_card(halved, halve_noise)
    other = copy("other", "plain")
    shutil.copy(good["certified"] / "certificate.json", other)
    late = copy("late", "plain")
    shutil.copy(good["stamped"] / "ledger-4.tsr", late)
    return {
        "weights swapped": (swapped, "does not hold the weights that the card was written for"),
        "ledger cut and renumbered": (cut, "was written after 4 releases with another head"),
        "card edited": (edited, "states ε = 0.5, and the releases cost"),
        "noise halved in the plan": (halved, "states another plan than the ledger"),
        "another run's certificate": (other, "is the certificate of another run"),
        "a time stamp of another head": (late, "is the time stamp of another head"),
    }


def sentence_of(output):
    """Return the reason in the first line that the verifier prints."""
    return re.sub(r"^.*?: DOES NOT HOLD; ", "", output.splitlines()[0])
