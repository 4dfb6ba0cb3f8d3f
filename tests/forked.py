"""Processes that start at once: forked from one that has imported torch and this package, which
takes seconds each time.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from dp_accounting.rdp import rdp_privacy_accountant

from dpkfc.privacy import accounting, dp_accountants

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])


@dataclass(frozen=True)
class Done:
    """How a process has ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def start(work: Callable[..., Any], *args: Any) -> Any:
    """A process that does this work, a function of a module; ε takes the effort that it takes here,
    and known values are known there.
    """
    effort = (dp_accountants._INTERVAL, rdp_privacy_accountant.DEFAULT_RDP_ORDERS)
    process = CONTEXT.Process(target=_work, args=(*effort, dict(accounting._values), work, args))
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path)):
        process.start()  # the first one starts the process that forks them all
    return process


def _work(
    interval: float,
    orders: list[float],
    values: Mapping[Any, float],
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    dp_accountants._INTERVAL = interval
    rdp_privacy_accountant.DEFAULT_RDP_ORDERS = orders
    accounting._values.update(values)
    work(*args)


def call(
    work: Callable[..., Any],
    *args: Any,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 500,
) -> Done:
    """As `subprocess.run`, with a function of a module instead of a command.

    Args:
        work: returns where a program would end well; whatever it raises ends it as it would end a
            program.
        args: its arguments.
        cwd: the working directory; that of this process by default.
        env: the whole environment; that of this process by default.
        timeout: seconds until it is killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("stdout", "stderr")]
        process = start(
            _report_result,
            *map(str, paths),
            str(cwd or Path.cwd()),
            dict(os.environ if env is None else env),
            work,
            args,
        )
        process.join(timeout)
        process.kill()
        process.join()
        return Done(process.exitcode, *(path.read_text("utf-8") for path in paths))


def _report_result(
    stdout: str,
    stderr: str,
    cwd: str,
    env: dict[str, str],
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    for stream, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    work(*args)


def script(path: Path, *arguments: object, **options: Any) -> Done:
    """As `python path arguments`."""
    return call(_script, str(path), *map(str, arguments), **options)


def _script(path: str, *arguments: str) -> None:
    sys.argv[:] = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
