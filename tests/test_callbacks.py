"""Callbacks see a session and can neither stop it, spend its budget nor learn more than asked."""

import logging

import pytest
import torch

from dpkfc import checkpoint, resume_checks
from dpkfc.callbacks import _REASON, Callback
from dpkfc.privacy.ledger import verify
from dpkfc.step_record import PRIVATE_FIGURES
from tests.test_session import kfac, loss_fn, net, plan, session, train, weights


class Recorder(Callback):
    """Keeps the names and values of all calls."""

    def __init__(self, private=False, fails_in="", error=OSError):
        self.private = private
        self.calls = []
        self._fails_in, self._error = fails_in, error

    def _note(self, name, value):
        self.calls.append((name, value))
        if name == self._fails_in:
            raise self._error(f"{name} has failed")

    def on_start(self, session):
        self._note("start", session.steps_done)

    def on_step(self, report):
        self._note("step", report)

    def on_refresh(self, state):
        self._note("refresh", state.step)

    def on_end(self, session):
        self._note("end", session.steps_done)

    @property
    def names(self):
        return [name for name, _ in self.calls]

    @property
    def reports(self):
        return [value for name, value in self.calls if name == "step"]


def test_every_call_comes_once_and_in_order():
    recorder = Recorder()
    with session(plan(1.0, preconditioner=kfac()), net(), callbacks=[recorder]) as s:
        assert recorder.calls == []
        train(s, 4)
        epsilon = s.epsilon
    expected = ["start", "refresh", "step", "step", "refresh", "step", "step", "end"]
    assert recorder.names == expected
    assert [v for n, v in recorder.calls if n == "refresh"] == [0, 2]
    last = recorder.reports[-1]
    assert (last.step, last.release, last.learning_rate) == (3, 4, 0.1)
    assert last.noise_multiplier == 1.0 and epsilon <= last.epsilon <= s.plan.epsilon()
    bounds = [report.epsilon for report in recorder.reports]
    assert bounds == sorted(bounds)


def test_only_a_callback_that_asks_sees_numbers_of_the_batch():
    public, private = Recorder(), Recorder(private=True)
    with session(plan(1.0), net(), callbacks=[public, private]) as s:
        records = [s.step(batch, loss_fn) for batch in s.batches()]
    for record, seen, whole in zip(records, public.reports, private.reports, strict=True):
        assert seen.private is None
        assert whole.private == {name: getattr(record, name) for name in PRIVATE_FIGURES}
        assert vars(seen) | {"private": whole.private} == vars(whole)


def test_a_card_remembers_who_was_given_private_numbers(tmp_path):
    settings = plan(1.0, test_mode_seed=None)
    here = {"ledger_path": tmp_path / "ledger.jsonl"}
    taker = Recorder(private=True)
    with session(settings, net(), callbacks=[taker], **here) as s:
        assert s.unprotected_figures == {}
        train(s, 2)
        taker.private = False
        first = s.unprotected_figures
        train(s, 1)
        assert [report.private is None for report in taker.reports] == [False, False, True]
        s.save(tmp_path / "checkpoint")
    assert list(first.values()) == [f"{_REASON} Recorder"]
    with session(settings, net(), **here) as s:
        s.restore(tmp_path / "checkpoint")
        assert s.unprotected_figures == first
    tensors, meta = checkpoint.read(tmp_path / "checkpoint")
    for takers in (["Recorder", 3], "Recorder"):
        checkpoint.write(tmp_path / "other", tensors, meta | {"takers": takers})
        with pytest.raises(checkpoint.CheckpointError, match="takers does not fit"):
            resume_checks.read_session(tmp_path / "other")


def test_public_reports_do_not_depend_on_the_data():
    """The same plan on other records, of other batch sizes and norms: the same reports."""
    seen = []
    for scale in (1.0, 100.0):
        recorder = Recorder()
        x, y = torch.randn(40, 6, dtype=torch.float64) * scale, torch.zeros(40, dtype=torch.long)
        settings = plan(1.0, test_mode_seed=int(scale))
        with session(settings, net(), dataset=(x, y), callbacks=[recorder]) as s:
            train(s)
        seen.append(recorder.reports)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("where", ["step", "refresh", "end"])
def test_a_callback_that_fails_is_left_out_and_the_run_goes_on(where, caplog, tmp_path):
    bad, good = Recorder(fails_in=where), Recorder()
    model, reference = net(), net()
    ledger = tmp_path / "ledger.jsonl"
    settings = plan(1.0, preconditioner=kfac())
    with caplog.at_level(logging.WARNING):
        s = session(settings, model, callbacks=[bad, good], ledger_path=ledger)
        with s:
            train(s, 3)
            s.save(tmp_path / "checkpoint")
            train(s)
    assert "the callback Recorder has failed; the run goes on without it" in caplog.text
    assert f"{where} has failed" in caplog.text
    assert good.names.count("step") == 6 and good.names[-1] == "end" and bad.names[-1] == "end"
    assert bad.names.count(where) == 1
    assert len(verify(ledger).releases) == 6
    with session(settings, reference) as s:
        train(s)
    assert torch.equal(weights(model), weights(reference))


def test_a_callback_that_cannot_start_ends_the_run_before_any_budget(tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    bad = Recorder(fails_in="start", error=ConnectionError)
    with session(plan(1.0), net(), callbacks=[bad], ledger_path=ledger) as s:
        for _ in range(2):
            with pytest.raises(ConnectionError, match="start has failed"):
                train(s)
        assert s.steps_done == 0
    assert bad.names == ["start", "start"] and not verify(ledger).releases


def test_an_interrupt_in_a_callback_leaves_a_run_that_goes_on(tmp_path):
    bad = Recorder(fails_in="step", error=KeyboardInterrupt)
    with session(plan(1.0), net(), callbacks=[bad], ledger_path=tmp_path / "ledger.jsonl") as s:
        with pytest.raises(KeyboardInterrupt):
            train(s)
        s.save(tmp_path / "checkpoint")
        assert s.steps_done == 1
        bad._fails_in = ""
        train(s)
        assert s.steps_done == 6


def test_a_restored_preconditioner_is_no_refresh(tmp_path):
    settings = plan(1.0, preconditioner=kfac(every=4))
    paths = {"ledger_path": tmp_path / "ledger.jsonl"}
    with session(settings, net(), **paths) as s:
        train(s, 2)
        s.save(tmp_path / "checkpoint")
    recorder = Recorder()
    with session(settings, net(), callbacks=[recorder], **paths) as s:
        s.restore(tmp_path / "checkpoint")
        train(s)
    assert recorder.names == ["start", "step", "step", "refresh", "step", "step", "end"]
    assert recorder.calls[0] == ("start", 2)


@pytest.mark.parametrize("wrong", [print, Recorder, object()])
def test_what_is_no_callback_is_refused(wrong):
    with pytest.raises(ValueError, match="derive it from dpkfc.Callback"):
        session(plan(1.0), net(), callbacks=[wrong])
