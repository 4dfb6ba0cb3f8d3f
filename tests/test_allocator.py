"""Freed memory stays with the process where it is asked to, and only there."""

import os
import resource
import sys

import pytest
import torch

from dpkfc import allocator, keep_freed_memory
from tests import forked

GLIBC = pytest.mark.skipif(
    not sys.platform.startswith("linux") or "CS_GNU_LIBC_VERSION" not in os.confstr_names,
    reason="needs glibc",
)


def _faults():
    """Pages the system has handed out while 40 MB were asked for and freed a dozen times."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(12):
        torch.ones(10_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _compare():
    given_back = _faults()
    assert keep_freed_memory()
    _faults()
    assert _faults() < given_back / 4
    assert keep_freed_memory(), "a second call says the same"


@GLIBC
def test_pages_are_asked_for_once():
    environment = {
        name: value
        for name, value in os.environ.items()
        if "MALLOC" not in name and name != "GLIBC_TUNABLES"
    }
    done = forked.call(_compare, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "65536"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=65536")],
)
def test_settings_of_the_environment_stand(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert not keep_freed_memory()


def test_elsewhere_nothing_happens(monkeypatch):
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())  # no glibc below
    assert not keep_freed_memory()
