"""Flower as the engine: its records hold messages and nothing else, and its apps run the same
rounds on a grid of our own.

What starts Flower's own processes is slow.
"""

import logging
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dpkfc.federated.flower import (
    SWITCHES,
    Unreachable,
    client_app,
    decode_record,
    disable_telemetry,
    encode_record,
    server_app,
    simulate,
)
from dpkfc.federated.remote_rounds import TooFewClients
from tests import forked
from tests.federated.engines import APP
from tests.federated.late import imported_late
from tests.federated.worlds import CLIENTS, vector

disable_telemetry()
flwr = pytest.importorskip("flwr.app", reason="needs flwr")

QUICK = {"wait": 0.2, "timeout": 1.0}


@pytest.fixture(autouse=True)
def _task(monkeypatch):
    """What Flower's own processes set before they call an app."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Grid:
    """Flower's grid, with ClientApps in this process; what Flower would carry goes through its own
    serialisation.
    """

    def __init__(self, app, folder, nodes=CLIENTS):
        self.app, self.folder = app, folder
        self.config = {100 + i: {"partition-id": i, "folder": str(folder)} for i in range(nodes)}
        self.replies = []

    def get_node_ids(self):
        return list(self.config)

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            context = SimpleNamespace(node_config=self.config[node], run_config={})
            replies.append(self.app(message, context))
            replies[-1].metadata._src_node_id = node
        self.replies += replies
        return replies


def context(**settings):
    return SimpleNamespace(run_config=settings, node_config={}, state=None)


def messages():
    return {
        "kind": "sum",
        "round": 3,
        "contract": "a" * 64,
        "client": 1,
        "sum/a.weight": torch.randn(3, 4).T,
        "sum/b": torch.randn(2, 0, dtype=torch.float64),
        "sum/c": torch.tensor(2**62 + 1),
        "sum/d": torch.zeros((), dtype=torch.bool),
    }


def test_a_message_survives_its_way_to_the_bit():
    sent = messages()
    found = decode_record(encode_record(sent))
    assert list(found) == [
        "kind",
        "round",
        "contract",
        "client",
        "sum/a.weight",
        "sum/b",
        "sum/c",
        "sum/d",
    ]
    for name, value in sent.items():
        if torch.is_tensor(value):
            assert found[name].dtype == value.dtype and torch.equal(found[name], value)
        else:
            assert found[name] == value and type(found[name]) is type(value)


@pytest.mark.parametrize(
    "value", [0.5, True, None, b"x", [1], np.zeros(2), torch.zeros(2, dtype=torch.bfloat16)]
)
def test_only_tensors_integers_and_texts_are_sent(value):
    with pytest.raises(ValueError, match=r"not sent; 'x' is one"):
        encode_record({"x": value})


def wrong_records():
    good = encode_record(messages())
    array = flwr.Array(np.zeros(3, np.float32))
    arrays = {
        "another format": flwr.Array("float32", (3,), "pickle", array.data),
        "cut": flwr.Array("float32", (3,), "numpy.ndarray", array.data[:-1]),
        "complex": flwr.Array(np.zeros(2, np.complex64)),
        "columns first": flwr.Array(np.asfortranarray(np.zeros((2, 3)))),
        "objects": flwr.Array(
            "object", (1,), "numpy.ndarray", array.data.replace(b"'<f4'", b"'|O' ")
        ),
        "huge": flwr.Array(
            "float32",
            (3,),
            "numpy.ndarray",
            array.data.replace(b"(3,), }         ", b"(3000000000,), }"),
        ),
        "no shape": flwr.Array(
            "float32", (3,), "numpy.ndarray", array.data.replace(b"(3,), }", b"(((((((")
        ),
    }
    yield "metrics", flwr.RecordDict({**good, "metrics": flwr.MetricRecord({"loss": 0.5})})
    yield "nothing", flwr.RecordDict({})
    yield "float", flwr.RecordDict({**good, "plain": flwr.ConfigRecord({"loss": 0.5})})
    yield "truth", flwr.RecordDict({**good, "plain": flwr.ConfigRecord({"ill": True})})
    yield "long", flwr.RecordDict({**good, "plain": flwr.ConfigRecord({"reason": "x" * 257})})
    yield "twice", flwr.RecordDict({**good, "tensors": flwr.ArrayRecord({"kind": array})})
    for name, found in arrays.items():
        yield name, flwr.RecordDict({**good, "tensors": flwr.ArrayRecord({"sum/a": found})})


@pytest.mark.parametrize(
    "name, record", list(wrong_records()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_other_records_are_no_message(name, record):
    with pytest.raises(ValueError):
        decode_record(record)


@pytest.mark.parametrize("case", ["masked", "kfac"])
def test_the_apps_run_on_a_grid(tmp_path, case):
    settings = {"case": case, **QUICK}
    runs, rounds = [], []
    grid = Grid(client_app(APP, settings), tmp_path / "clients")
    made = server_app(
        APP, settings, on_round=lambda r, run: rounds.append(r.survivors), done=runs.append
    )
    made(grid, context(folder=str(tmp_path / "server")))
    assert rounds == [CLIENTS] * 4 and (tmp_path / "server" / "finished.txt").exists()
    assert not runs[0].server.rejected and runs[0].server.ledger.count == 4
    for reply in grid.replies:
        assert set(reply.content) == {"plain", "tensors"}
        assert set(reply.content["plain"]) <= {"kind", "round", "contract", "client", "reason"}
    sizes = {
        len(r.content["tensors"]["sum/weight"].data)
        for r in grid.replies
        if "sum/weight" in r.content["tensors"]
    }
    assert len(sizes) == 1


def test_run_config_replaces_the_settings_of_both_sides(tmp_path):
    app, runs = client_app(APP, QUICK), []
    grid = Grid(app, tmp_path / "clients")
    with pytest.raises(TooFewClients, match="4 with another plan, model or frozen weights"):
        server_app(APP, QUICK)(grid, context(folder=str(tmp_path / "a"), noise=2.0))
    inner = grid.app
    grid.app = lambda message, c: inner(
        message, SimpleNamespace(**{**vars(c), "run_config": {"noise": 2.0}})
    )
    server_app(APP, QUICK, done=runs.append)(grid, context(folder=str(tmp_path / "b"), noise=2.0))
    assert runs[0].server.plan.noise_multiplier == 2.0
    with pytest.raises(ValueError, match="unknown setting 'epsilom'"):
        server_app(APP, QUICK)(grid, context(epsilom=1.0))


def test_a_client_that_fails_answers_with_the_constant_reason(tmp_path, caplog):
    app = client_app(APP, QUICK)
    request = flwr.Message(encode_record({"kind": "round", "round": 2}), 7, "train")
    without = SimpleNamespace(node_config={}, run_config={})
    with caplog.at_level(logging.ERROR, "dpkfc"):
        answer = app(request, without)
    assert not answer.has_error()
    found = decode_record(answer.content)
    assert found == {
        "kind": "error",
        "round": -1,
        "contract": "",
        "client": -1,
        "reason": "client-failed",
    }
    assert "partition-id" in caplog.text
    junk = flwr.Message(flwr.RecordDict({"metrics": flwr.MetricRecord({"loss": 0.5})}), 7, "train")
    answer = app(
        junk,
        SimpleNamespace(node_config={"partition-id": 1, "folder": str(tmp_path)}, run_config={}),
    )
    assert decode_record(answer.content)["reason"] == "client-failed"


def test_what_flower_reports_of_a_client_is_not_read(tmp_path):
    grid = Grid(client_app(APP, QUICK), tmp_path / "clients")
    inner = grid.send_and_receive

    def fail(messages, *, timeout=None):
        messages = list(messages)
        replies = inner(messages, timeout=timeout)
        if "sum/weight" in replies[0].content["tensors"]:
            replies[0] = flwr.Message(
                flwr.Error(2, "bad label 7 for record 812"), reply_to=messages[0]
            )
        return replies

    grid.send_and_receive, runs = fail, []
    server_app(APP, QUICK, done=runs.append)(grid, context(folder=str(tmp_path / "server")))
    assert [r.survivors for r in runs[0].records] == [CLIENTS - 1] * 4 and not runs[
        0
    ].server.rejected


def test_a_superlink_that_is_gone_is_one_line(tmp_path):
    grid = Grid(client_app(APP, QUICK), tmp_path / "clients")
    grid.get_node_ids = lambda: (_ for _ in ()).throw(ConnectionError("refused"))
    with pytest.raises(
        Unreachable,
        match=r"the SuperLink does not answer \(ConnectionError\); ledger and checkpoint",
    ):
        server_app(APP, QUICK)(grid, context(folder=str(tmp_path / "server")))


def test_telemetry_is_off_before_flower_is_imported_unless_switched_on():
    clean = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    for given in ({}, {"FLWR_TELEMETRY_ENABLED": "1"}):
        done = forked.call(imported_late, env={**clean, **given})
        assert (done.returncode, done.stdout.strip()) == (0, str({**SWITCHES, **given})), (
            done.stderr
        )


def test_a_python_that_ray_cannot_start_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/data of wards/bin/python")
    with pytest.raises(ValueError, match=r"path of Python has a space: /data of wards/bin/python"):
        simulate(APP, folder=tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(len(sys.executable.split()) > 1, reason="Ray needs a path without a space")
def test_the_simulation_runs_the_same_rounds(tmp_path):
    pytest.importorskip("ray", reason="needs flwr[simulation]")
    run = simulate(APP, {"case": "shares", "noise": 0.0}, folder=tmp_path / "flower", processes=2)
    here = APP.run_here({"case": "shares", "noise": 0.0}, folder=tmp_path / "here")
    assert [r.survivors for r in run.records] == [CLIENTS] * 4 and not run.server.rejected
    assert torch.allclose(vector(run.server.parameters), vector(here.server.parameters), atol=1e-12)
