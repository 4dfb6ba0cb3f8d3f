"""The demo's app, unchanged, on a SuperLink and SuperNodes: separate processes on loopback, with
TLS. About two minutes.
"""

import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dpkfc.federated.flower import SWITCHES
from dpkfc.privacy.ledger import verify
from tests.ports import free_port

pytest.importorskip("flwr", reason="needs flwr")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
CLIENTS, ROUNDS = 3, 2
TLS = ("--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key")


def certificates(folder):
    """An authority of our own and one certificate of it for loopback."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def name(text):
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def make_certificate(subject, issuer, key, signer, *extensions):
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
        )
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=2))
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    usage = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    sign = x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **usage)
    root = name("a test authority")
    identity = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    ca = make_certificate(
        root,
        root,
        authority,
        authority,
        (x509.BasicConstraints(True, None), True),
        (sign, True),
        (identity, False),
    )
    names = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    own = make_certificate(
        name("localhost"), root, server, authority, (names, False), (issuer, False)
    )
    (folder / "ca.crt").write_bytes(ca)
    (folder / "server.crt").write_bytes(own)
    key = server.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.key").write_bytes(key)


class Federation:
    """A SuperLink and its SuperNodes, each a group of processes of its own, ended by its id."""

    def __init__(self, folder, clients=CLIENTS):
        self.folder = folder
        self.link, *self.ports = (free_port() for _ in range(clients + 1))
        self.env = {
            **os.environ,
            **SWITCHES,
            "FLWR_HOME": str(folder / "flwr"),
            "OMP_NUM_THREADS": "1",
        }
        self.env["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        self.started = []
        certificates(folder)
        (folder / "flwr").mkdir()
        connection = f'[superlink.loopback]\naddress = "127.0.0.1:{self.link}"\n'
        connection += f'root-certificates = "{folder / "ca.crt"}"\n'
        (folder / "flwr" / "config.toml").write_text(connection, "utf-8")

    def start(self, name, *arguments):
        log = (self.folder / f"{name}.log").open("wb")
        process = subprocess.Popen(
            [str(BIN / arguments[0]), *arguments[1:]],
            cwd=self.folder,
            env=self.env,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def superlink(self):
        found = self.start(
            "superlink",
            "flower-superlink",
            *TLS,
            "--port",
            str(self.link),
            "--disable-runtime-dependency-installation",
        )
        while found.poll() is None:
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", self.link)) == 0:
                    return found
            time.sleep(0.2)
        raise AssertionError(self.logs())

    def supernode(self, number):
        node = f'partition-id={number} folder="{self.folder / "clients"}"'
        return self.start(
            f"node-{number}",
            "flower-supernode",
            *TLS,
            "--root-certificates",
            "ca.crt",
            "--superlink",
            f"127.0.0.1:{self.link}",
            "--port",
            str(self.ports[number]),
            "--node-config",
            node,
        )

    def run(self, seconds, /, **settings):
        words = [str(BIN / "flwr"), *self.command(settings)]
        done = subprocess.run(
            words, env=self.env, capture_output=True, text=True, timeout=seconds, check=False
        )
        return done.stdout + done.stderr

    @staticmethod
    def command(settings):
        given = " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
        return [
            "run",
            str(ROOT / "examples" / "federated"),
            "loopback",
            "--stream",
            "--run-config",
            given,
        ]

    def logs(self):
        return "\n".join(
            f"== {p.name}\n{p.read_text('utf-8', 'replace')[-3000:]}"
            for p in self.folder.glob("*.log")
        )

    def end(self):
        for process in self.started:
            for sent in (signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    os.killpg(process.pid, sent)
                    try:
                        process.wait(10)
                    except subprocess.TimeoutExpired:
                        continue
        for process in self.started:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # what it left behind
            except ProcessLookupError:
                continue


def test_the_app_of_the_demo_runs_between_processes_with_tls(tmp_path):
    federation = Federation(tmp_path)
    try:
        output = federation.run(500)
        assert (
            "Connection to the SuperLink is unavailable" in output and "Traceback" not in output
        ), output
        federation.superlink()
        folder = tmp_path / "server"
        output = federation.run(500, clients=CLIENTS, folder=str(tmp_path / "nobody"), wait=1.0)
        assert "0 of 3 clients are there after 1 s and a round needs 3" in output.replace(
            "\n", " "
        ), output
        for number in range(CLIENTS):
            federation.supernode(number)
        output = federation.run(
            900,
            method="dp-kfc",
            clients=CLIENTS,
            rounds=ROUNDS,
            folder=str(folder),
            wait=500.0,
            timeout=500.0,
        )
        assert (folder / "privacy_card.json").exists(), output + federation.logs()
    finally:
        federation.end()
    card = json.loads((folder / "privacy_card.json").read_text("utf-8"))
    assert card["guarantee"]["epsilon"] <= 3.0 and card["rounds"] == {
        "sent": 2,
        "dropped": 0,
        "rejected_messages": {},
    }
    assert len(verify(folder / "ledger.jsonl").releases) == ROUNDS
    assert bool(torch.isfinite(load_file(folder / "model.safetensors")["weight"]).all())
    for number in range(CLIENTS):
        (ledger,) = (tmp_path / "clients" / f"client-{number}").glob("*/ledger.jsonl")
        assert len(verify(ledger).releases) == ROUNDS
    assert not list((tmp_path / "clients").glob("*/last_error.txt"))
