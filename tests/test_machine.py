"""A machine that lacks something gets one line about it."""

import shutil
import tempfile
from collections import namedtuple
from types import SimpleNamespace

import pytest

from tests import machine
from tests.conftest import pytest_configure, pytest_runtest_logreport

Usage = namedtuple("Usage", "total used free")


def leave(free, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, free))


def test_nothing_is_missing_here():
    assert machine.find_missing() == ""


def test_a_folder_that_cannot_be_written_ends_the_run(monkeypatch, tmp_path):
    # Rights do not bind the superuser, a file in the place of the folder does.
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(pytest.exit.Exception, match="no folder for temporary files .*TMPDIR"):
        pytest_configure(SimpleNamespace())


def test_a_small_disk_ends_the_run_before_it_begins(monkeypatch):
    leave(5 << 20, monkeypatch)
    with pytest.raises(pytest.exit.Exception, match=r"has 5 MiB left and the tests need 1024"):
        pytest_configure(SimpleNamespace())


def test_a_disk_that_fills_up_ends_the_run(monkeypatch):
    failure = SimpleNamespace(failed=True)
    pytest_runtest_logreport(failure)
    leave(1 << 20, monkeypatch)
    pytest_runtest_logreport(SimpleNamespace(failed=False))
    with pytest.raises(pytest.exit.Exception, match="the disk of .* is full"):
        pytest_runtest_logreport(failure)


def test_a_processor_that_was_not_tried_is_named(monkeypatch):
    capability = "torch.backends.cpu.get_cpu_capability"
    monkeypatch.setattr(capability, lambda: "AVX2")
    assert machine.untried_processor() == ""
    monkeypatch.setattr(capability, lambda: "DEFAULT")
    assert "DEFAULT in the place of AVX2" in machine.untried_processor()
