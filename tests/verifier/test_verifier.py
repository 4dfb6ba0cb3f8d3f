"""`dpkfc-verify` finds what does not belong together, without torch and dp-accounting."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from dpkfc.app.certificate import _annex
from dpkfc.app.commands.certify import certify
from dpkfc.privacy.ledger import Ledger
from dpkfc.privacy.ledger_lines import encode_line
from dpkfc.report.card_files import write_card_files
from dpkfc.report.officer import registry_record
from dpkfc.report.witness import keep_stamp, witness_line
from dpkfc_verify.__main__ import main
from dpkfc_verify.run import FAILS, HOLDS, OPEN, verify_run
from tests.command_line import call
from tests.documents import ROOT
from tests.verifier.folders import (
    chain,
    edit_card,
    forged_folders,
    good_folders,
    head_of,
    read_lines,
    sentence_of,
    stamp_of,
    train,
)
from tests.wheels import install_wheel

GOOD = ["plain", "certified", "stamped", "with a release beside the steps", "cut batches"]
GOOD += ["federated"]
FORGED = ["weights swapped", "ledger cut and renumbered", "card edited", "noise halved in the plan"]
FORGED += ["another run's certificate", "a time stamp of another head"]
# Imports of other packages fail, as they do where NumPy and SciPy alone are installed.
ALONE = """
import importlib.abc, sys
known = {"numpy", "scipy", "dpkfc_verify"}

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in known and top not in sys.stdlib_module_names and not top.startswith("_"):
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Refuse())
from dpkfc_verify.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return good_folders(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def forged(tmp_path_factory, good):
    return forged_folders(tmp_path_factory.mktemp("forged"), good)


@pytest.fixture
def copied(tmp_path, good):
    return shutil.copytree(good["certified"], tmp_path / "run")


@pytest.mark.parametrize("name", GOOD)
def test_a_folder_whose_files_belong_together_holds(good, name):
    report = verify_run(good[name])
    assert report.verdict == HOLDS and not report.reason, report.findings
    assert FAILS not in [finding["verdict"] for finding in report.findings]


def test_attack_rates_are_rounded_up_as_on_the_page(good):
    (rates,) = [f for f in verify_run(good["certified"]).findings if f["check"] == "attack rates"]
    page = (good["certified"] / "privacy_card.md").read_text("utf-8")
    for share in re.findall(r"[\d.]+ %", rates["text"]):
        assert f"**{share}**" in page


@pytest.mark.parametrize("name", FORGED)
def test_a_forgery_is_one_sentence(forged, capsys, name):
    folder, expected = forged[name]
    assert main([str(folder)]) == 1
    sentence = sentence_of(capsys.readouterr().out)
    assert expected in sentence and len(sentence) < 200


def test_it_runs_where_numpy_and_scipy_alone_can_be_imported(good):
    folders = [str(good[name]) for name in ("certified", "cut batches")]
    words = [sys.executable, "-c", ALONE, *folders, "--json"]
    path = {"PYTHONPATH": str(ROOT / "verifier")}
    done = subprocess.run(words, capture_output=True, text=True, env=path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(done.stdout)
    assert [run["verdict"] for run in content["runs"]] == [HOLDS, HOLDS]
    assert content["total"].endswith("at δ = 0.001 for all 2 runs together")


@pytest.mark.slow
def test_it_runs_in_a_fresh_environment(good, tmp_path):
    """The environment has the distribution of the verifier, NumPy and SciPy, and nothing else."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "verifier", source, ignore=shutil.ignore_patterns("*.egg-info"))
    scripts, _ = install_wheel(source, tmp_path, lambda name: name.startswith(("numpy", "scipy")))
    words = [scripts / "dpkfc-verify", good["certified"]]
    done = subprocess.run(words, capture_output=True, text=True, env={}, check=False)
    assert done.returncode == 0 and ": HOLDS" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda c: c["plan"].update(noise_multiplier=0.1), "another noise multiplier"),
        (lambda c: c["plan"].update(sensitivity=9.0), "another sensitivity"),
        (lambda c: c["plan"].update(steps=9), "not the one whose hash the ledger"),
        (lambda c: c["mechanism"].update(stddev=9.0), "another stddev"),
        (lambda c: c["guarantee"].update(delta=1e-9), "another delta"),
        (lambda c: c["guarantee"].update(unit="one hospital"), "another unit"),
        (lambda c: c["guarantee"].update(certified=1), "another certified"),
        (
            lambda c: c["guarantee"].update(target_epsilon=0.1),
            "guarantee of the card states ε = 0.1",
        ),
        (lambda c: c["guarantee"].update(neighbours_differ_in="one hospital"), "other neighbours"),
        (
            lambda c: c["guarantee"].update(neighbours_differ_in="one example replaced by another"),
            "not one example added or removed",
        ),
        (lambda c: c["assumed_public"]["number of examples N"].update(value=9), "another dataset"),
        (lambda c: c["meaning"].update(right_at_even_odds=0.51), "states 51.00% right at even"),
        (lambda c: c["meaning"]["groups"]["5"].update(epsilon=5.0), "for 5 units, states ε = 5"),
        (lambda c: c.update(total={"epsilon": 0.1, "delta": 1e-5, "runs": ["x"]}), "total of"),
        (lambda c: c["mechanism"].pop("stddev"), "does not state stddev"),
        (lambda c: c["guarantee"].pop("unit"), "does not state unit"),
        (lambda c: c.pop("mechanism"), "damaged or changed (KeyError"),
    ],
)
def test_each_statement_of_a_card_is_compared(copied, change, expected):
    (copied / "certificate.json").unlink()
    path = copied / "privacy_card.json"
    card = json.loads(path.read_text())
    change(card)
    path.write_text(json.dumps(card))
    report = verify_run(copied)
    assert report.verdict == FAILS
    wrong = [finding["text"] for finding in report.findings if finding["verdict"] == FAILS]
    assert any(expected in text for text in wrong)


def test_a_page_that_names_another_unit_is_found(copied):
    path = copied / "privacy_card.md"
    path.write_text(path.read_text("utf-8").replace("for one example", "for one person"), "utf-8")
    assert "privacy_card.md lacks what the card states" in verify_run(copied).reason


def test_noise_and_event_of_a_line_must_agree(copied):
    lines = read_lines(copied)
    lines[1]["stddev"] /= 2
    chain(copied, lines)
    assert "line 2 has noise of" in verify_run(copied).reason


def test_more_releases_than_were_planned_are_found(copied):
    lines = read_lines(copied)
    lines[0]["steps"] = 1
    chain(copied, lines)
    assert "releases for steps; 1 were planned" in verify_run(copied).reason


def test_a_page_that_says_something_else_is_found(copied):
    (copied / "certificate.json").unlink()
    page = copied / "privacy_card.md"
    text = page.read_text("utf-8")
    for said, forged in (
        ("| ε spent | ", "| ε spent | 0."),
        ("**(ε = ", "**(ε = 0."),
        ("right at most **", "right at most **1"),
    ):
        page.write_text(text.replace(said, forged), "utf-8")
        assert verify_run(copied).reason.startswith("page of the card: privacy_card.md lacks")


def test_a_page_whose_card_was_deleted_is_not_judged(copied):
    for name in ("certificate.json", "privacy_card.json"):
        (copied / name).unlink()
    report = verify_run(copied)
    assert report.verdict == OPEN and "privacy_card.md has no" in report.reason
    (copied / "privacy_card.md").unlink()
    assert verify_run(copied).verdict == HOLDS


def test_a_head_that_somebody_kept_shows_a_ledger_cut_at_its_end(copied):
    kept = 4, head_of(copied)
    assert verify_run(copied, head=kept).verdict == HOLDS
    for name in ("privacy_card.json", "privacy_card.md", "certificate.json", "ledger.weights.json"):
        (copied / name).unlink()
    chain(copied, read_lines(copied)[:-1])
    assert verify_run(copied).verdict == HOLDS
    assert "head that was kept" in verify_run(copied, head=kept).reason
    assert f" releases 3 head {head_of(copied)}" in witness_line(copied)


# -- input that cannot be judged -------------------------------------------------------------------


def test_a_folder_without_a_ledger_is_one_clear_answer(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "CANNOT BE CHECKED; ledger: there is no ledger" in capsys.readouterr().out


def test_a_card_that_was_filled_in_after_its_certificate_says_what_to_do(copied):
    assert call("card", copied, "--purpose", "another one").exit_code == 0
    report = verify_run(copied)
    assert report.verdict == FAILS and "dpkfc certify writes it anew" in report.reason
    assert call("ledger", "verify", copied).exit_code == 0


def test_a_total_with_a_folder_that_is_missing_says_so(good, tmp_path, capsys):
    assert main([str(good["certified"]), str(tmp_path / "none")]) == 2
    assert "a ledger cannot be read, see above" in capsys.readouterr().out


def test_a_total_with_a_copy_cannot_be_checked(copied, tmp_path, capsys):
    copy = shutil.copytree(copied, tmp_path / "other")
    assert main([str(copied), str(copy)]) == 2
    said = capsys.readouterr().out
    assert f"total: cannot be checked: {copied} is a copy of {copy}; leave it out" in said


def test_a_certificate_of_a_later_version_is_not_judged(copied):
    path = copied / "certificate.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"certificate": 2}))
    report = verify_run(copied)
    assert report.verdict == OPEN and "has version 2, and this program reads 1" in report.reason


def test_a_run_without_a_guarantee_does_not_hold(tmp_path):
    for certified, rng, expected in ((True, "repeatable", "NOT PRIVATE"), (False, "secure", "UNC")):
        folder = tmp_path / expected
        folder.mkdir()
        with Ledger.open(folder / "ledger.jsonl", "a" * 64, {"certified": certified, "rng": rng}):
            pass
        report = verify_run(folder)
        assert report.verdict == FAILS and report.reason.startswith(f"guarantee: {expected}")


def test_a_total_with_a_run_without_noise_cannot_be_checked(copied, tmp_path, capsys):
    bare = shutil.copytree(copied, tmp_path / "bare")
    lines = read_lines(bare)
    lines[0]["created"] = "another day"
    for line in lines[1:]:
        line["noise_multiplier"] = line["stddev"] = line["event"]["event"]["noise_multiplier"] = 0.0
    chain(bare, lines)
    assert main([str(copied), str(bare)]) == 1
    assert "total: cannot be checked: ε is infinite" in capsys.readouterr().out


def test_batches_of_a_fixed_size_are_said_to_be_beyond_the_integral(tmp_path):
    folder = shutil.copytree(good_fixed(tmp_path), tmp_path / "copy")
    report = verify_run(folder)
    assert report.verdict == OPEN and "SampledWithoutReplacementDpEvent" in report.reason


def good_fixed(place):
    from tests.verifier.folders import train

    return train(place / "fixed", sampler="fixed")


@pytest.mark.slow
def test_a_million_releases_are_read_and_accounted_for(tmp_path):
    event = {"type": "GaussianDpEvent", "noise_multiplier": 300.0}
    event = {"type": "PoissonSampledDpEvent", "sampling_probability": 0.01, "event": event}
    header = {"format": 1, "plan_hash": "a" * 64, "certified": True, "rng": "secure"}
    line, head = encode_line(header)
    with (tmp_path / "ledger.jsonl").open("wb") as file:
        file.write(line)
        for step in range(1_000_000):
            content = {"release": step + 1, "step": step, "event": event}
            content |= {"noise_multiplier": 300.0, "stddev": 300.0, "sensitivity": 1.0}
            line, head = encode_line(content | {"prev": head})
            file.write(line)
    report = verify_run(tmp_path)
    assert report.verdict == HOLDS and report.epsilon is not None and 0.1 < report.epsilon < 0.2


# -- time stamps -----------------------------------------------------------------------------------


def openssl(*words):
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_a_stamp_of_a_local_authority_is_checked_without_network(copied, tmp_path):
    pytest.importorskip("rfc3161_client")
    settings = tmp_path / "tsa.cnf"
    (tmp_path / "serial").write_text("01\n")
    settings.write_text(
        "[req]\ndistinguished_name=dn\n[dn]\n"
        "[root]\nbasicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign\n"
        "subjectKeyIdentifier=hash\n"
        "[leaf]\nbasicConstraints=CA:FALSE\nkeyUsage=critical,digitalSignature\n"
        "extendedKeyUsage=critical,timeStamping\nsubjectKeyIdentifier=hash\n"
        "authorityKeyIdentifier=keyid\n"
        f"[tsa]\ndefault_tsa=here\n[here]\nserial={tmp_path}/serial\ncrypto_device=builtin\n"
        f"signer_cert={tmp_path}/leaf.pem\nsigner_key={tmp_path}/leaf.key\ncerts={tmp_path}/root.pem\n"
        "signer_digest=sha256\ndefault_policy=1.2.3.4\ndigests=sha256\naccuracy=secs:1\n"
        "ess_cert_id_alg=sha256\n"
    )
    request = ("req", "-new", "-newkey", "rsa:2048", "-nodes", "-config", settings)
    for name in ("root", "stranger"):
        files = ("-keyout", tmp_path / f"{name}.key", "-out", tmp_path / f"{name}.pem")
        openssl(*request, "-x509", "-subj", f"/CN={name}", "-extensions", "root", *files)
    leaf = ("-keyout", tmp_path / "leaf.key", "-out", tmp_path / "leaf.csr")
    openssl(*request, "-subj", "/CN=leaf", *leaf)
    signer = ("-CA", tmp_path / "root.pem", "-CAkey", tmp_path / "root.key", "-CAcreateserial")
    extension = ("-extfile", settings, "-extensions", "leaf")
    files = ("-in", tmp_path / "leaf.csr", "-out", tmp_path / "leaf.pem")
    openssl("x509", "-req", *files, *signer, *extension)
    query, answer = tmp_path / "head.tsq", tmp_path / "head.tsr"
    openssl("ts", "-query", "-digest", head_of(copied), "-sha256", "-cert", "-out", query)
    files = ("-queryfile", query, "-out", answer)
    openssl("ts", "-reply", "-config", settings, "-section", "here", *files)

    root = tmp_path / "root.pem"
    assert "4 releases at 20" in keep_stamp(copied, answer, root)
    report = verify_run(copied, root=root)
    assert report.verdict == HOLDS
    last = report.findings[-1]
    assert last["check"] == "time stamp ledger-4.tsr" and last["verdict"] == HOLDS
    assert "signed under root.pem" in last["text"]
    assert (
        "is not signed under stranger" in verify_run(copied, root=tmp_path / "stranger.pem").reason
    )
    content = bytearray((copied / "ledger-4.tsr").read_bytes())
    content[-1] ^= 1
    (copied / "ledger-4.tsr").write_bytes(content)
    assert "is not signed under root.pem" in verify_run(copied, root=root).reason


def test_what_is_not_a_stamp_is_named(copied, tmp_path):
    path = tmp_path / "x.tsr"
    for content in (b"", b"hello", stamp_of(b"short"), stamp_of(bytes(32))[:40]):
        (copied / "x.tsr").write_bytes(content)
        assert "x.tsr" in verify_run(copied).reason
    path.write_bytes(stamp_of(bytes(32)))
    with pytest.raises(ValueError, match="of another head"):
        keep_stamp(copied, path)


def test_a_reader_that_ends_early_does_not_change_the_verdict(copied):
    command = [sys.executable, "-m", "dpkfc_verify", str(copied)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert not process.stderr.read() and process.wait() == 0


# -- certificates ----------------------------------------------------------------------------------


def test_the_commands_certify_a_run_and_give_its_head_away(copied, tmp_path):
    out = tmp_path / "signed.pdf"
    done = call("certify", copied, "--out", out, "--controller", "Ward 3", "--retention", "2030")
    assert not done.exit_code and out.read_bytes().startswith(b"%PDF"), done.output
    content = json.loads(out.with_suffix(".json").read_text())
    assert content["declared"]["controller"] == "Ward 3" and content["fingerprint"] in done.stdout
    assert verify_run(copied, out.with_suffix(".json")).verdict == HOLDS
    assert call("ledger", "witness", copied).stdout.strip() == witness_line(copied)
    done = call("ledger", "witness", copied, "--stamp", tmp_path / "none.tsr")
    assert done.exit_code == 2 and "none.tsr does not exist" in done.stderr
    done = call("export", copied, "--format", "onnx", "--sector", "Finance")
    assert done.exit_code == 2 and "--sector is for --format registry alone" in done.stderr


def test_annex_and_registry_count_releases_beside_the_steps(tmp_path, monkeypatch):
    pages = []
    monkeypatch.setattr("dpkfc.app.certificate._rows", lambda rows, _: pages.append(dict(rows)))
    monkeypatch.setattr("dpkfc.app.certificate._paragraph", lambda *words, **style: None)
    folder = train(tmp_path / "extra", size=40, extra=True)
    card = json.loads((folder / "privacy_card.json").read_text("utf-8"))
    ledger = {"releases": 5, "id": "", "head": ""}
    _annex({"ledger": ledger, "plan_hash": "", "card": "", "weights": card["weights"]}, card)
    assert pages[0]["releases"] == "5, of which 1 for bounds, σ = 20"
    how = registry_record(card)["deployment"]["implementation"]["mechanisms"]
    assert "sampler: poisson, rate 1.0; " in how and ", of 1 for bounds 20.0; sensitivity" in how
    edit_card(folder, lambda c: c["mechanism"]["extra_releases"][0].update(noise_multiplier=99.0))
    assert "another noise multiplier for bounds than the ledger: 99.0" in verify_run(folder).reason


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda stated: stated.clear(), "the card has 0 kinds of releases beside the steps"),
        (lambda stated: stated[0].update(releases=2), "another releases for bounds"),
        (lambda stated: stated[0].update(epsilon_alone=0.01), "for bounds alone, states ε = 0.01"),
    ],
)
def test_a_list_of_releases_beside_the_steps_that_was_changed_is_found(
    good, tmp_path, change, expected
):
    folder = shutil.copytree(good["with a release beside the steps"], tmp_path / "run")
    edit_card(folder, lambda card: change(card["mechanism"]["extra_releases"]))
    assert expected in verify_run(folder).reason


def test_a_certificate_beside_the_card_replaces_neither_card_nor_report(copied, tmp_path):
    """`--out RUN/card.pdf` would put its JSON in the place of the record for the registry."""
    (tmp_path / "report.pdf").write_bytes(b"%PDF of somebody else")
    for out in (copied / "card.pdf", copied / "privacy_card.pdf", tmp_path / "report.pdf"):
        kept = {
            path: path.read_bytes() for path in (out, out.with_suffix(".json")) if path.exists()
        }
        done = call("certify", copied, "--out", out)
        assert done.exit_code == 2 and "exists and would be lost; choose another" in done.stderr
        assert all(path.read_bytes() == content for path, content in kept.items())
    for _ in range(2):
        assert call("certify", copied).exit_code == 0


def test_a_certificate_is_refused_where_there_is_nothing_to_sign(copied, tmp_path):
    with pytest.raises(ValueError, match="must be one line"):
        certify(copied, controller="two\nlines")
    with pytest.raises(ValueError, match="a certificate is a PDF"):
        certify(copied, out=tmp_path / "x.doc")
    edit_card(copied, lambda card: card.update(stamp="UNCERTIFIED"))
    card = json.loads((copied / "privacy_card.json").read_text())
    card["audit"] = {"ledger": {"check": "ledger", "passed": False}}
    write_card_files(copied, card)
    with pytest.raises(ValueError, match="no guarantee to certify"):
        certify(copied)


def change_ledger(change):
    """Return a fault that gives a ledger other bytes."""

    def write(folder):
        path = folder / "ledger.jsonl"
        path.write_bytes(change(path.read_bytes()))

    return write


def change_card(section, value):
    """Return a fault that gives a section of a card another value, None removes it."""

    def write(folder):
        path = folder / "privacy_card.json"
        card = json.loads(path.read_text()) | {section: value}
        path.write_text(json.dumps({k: v for k, v in card.items() if v is not None}))

    return write


BAD_FOLDERS = {
    "last line cut short": (change_ledger(lambda text: text[:-30]), "line 5 of the ledger"),
    "last line missing": (
        change_ledger(lambda text: b"".join(text.splitlines(True)[:-1])),
        "lines were removed or replaced",
    ),
    "foreign line": (change_ledger(lambda text: text + b"hello\n"), "line 6 of the ledger"),
    "foreign JSON": (change_ledger(lambda text: text + b'{"a": 1}\n'), "line 6 of the ledger"),
    "foreign first line": (change_ledger(lambda text: b"[]\n" + text), "line 1 of the ledger"),
    "empty ledger": (change_ledger(lambda text: b""), "ledger.jsonl is empty"),
    "no ledger": (lambda folder: (folder / "ledger.jsonl").unlink(), "does not exist; give a run"),
    "no card": (lambda folder: (folder / "privacy_card.json").unlink(), "holds no privacy_card"),
    "card without a title": (change_card("title", None), "is damaged (KeyError"),
    "card with a number for owners": (change_card("declared", 5), "is damaged (KeyError"),
    "card of another plan": (change_card("plan_hash", "f" * 64), "states another plan than"),
    "card without a meaning": (change_card("meaning", None), "states another meaning of ε"),
    "later card": (change_card("format", 99), "a newer dpkfc wrote"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_damaged_folder_gets_no_certificate_and_no_entry(case, good, tmp_path):
    damage, said = BAD_FOLDERS[case]
    folder = shutil.copytree(good["plain"], tmp_path / "run")
    damage(folder)
    before = {path.name for path in folder.iterdir()}
    for words in (["certify"], ["export", "--format", "registry"]):
        done = call(*words, folder)
        assert done.exit_code == 2 and said in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert len(done.stderr.replace(str(folder), "runs/first")) <= 180
    assert {path.name for path in folder.iterdir()} == before


def test_a_certificate_needs_the_weights_that_it_names(good, tmp_path):
    folder = shutil.copytree(good["plain"], tmp_path / "run")
    (folder / "model.safetensors").unlink()
    done = call("certify", folder)
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1
    assert "were not compared: model.safetensors is not next to the card" in done.stderr
    assert not [*folder.glob("certificate.*")]


def test_what_cannot_be_written_or_read_is_one_line(copied, good, tmp_path):
    (tmp_path / "file").touch()
    for words, name in ((["certify"], "c.pdf"), (["export", "--format", "registry"], "e.yaml")):
        done = call(*words, copied, "--out", tmp_path / "file" / name)
        assert done.exit_code == 2 and f"{name} cannot be written (File exists)" in done.stderr
        done = call(*words, copied / "ledger.jsonl")
        assert done.exit_code == 2 and "is not a folder; give the folder of a run" in done.stderr
        # A federated run has a certificate and an entry of its own.
        assert not call(*words, good["federated"], "--out", tmp_path / name).exit_code


def test_a_name_that_no_system_takes_is_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["x" * 5000])
    assert "cannot be read: File name too long" in capsys.readouterr().err
