"""One cell in a worker process, and what became of it."""

from __future__ import annotations

import errno
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
import warnings
from dataclasses import dataclass
from typing import Literal

import torch

from dpkfc._errors import one_line
from dpkfc.allocator import keep_freed_memory
from dpkfc.app.run_folder import RunFolderError
from dpkfc.app.tuning.runs import Ended, Judge, Place, Row, Run
from dpkfc.checkpoint import CheckpointError
from dpkfc.privacy.ledger_lines import LedgerError

# Seconds that a stopped worker has to end.
PATIENCE = 10.0
# Errors that no setting of a cell brings about.
_MACHINE_ERRORS = (OSError, MemoryError, CheckpointError, LedgerError, RunFolderError)
# Errors of a disk that takes nothing more.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    Attributes:
        kind: done, ended by its judge, failed, lost to the machine, found the disk full, or
            stopped by a signal.
        row: of a cell that has finished.
        reason: why the row is missing.
    """

    kind: Literal["done", "ended", "failed", "lost", "full", "stopped"]
    row: Row | None = None
    reason: str = ""


def begin_work() -> None:
    """Prepare a worker process. A signal ends a cell between two steps, while it trains."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_study, daemon=True).start()
    torch.set_num_threads(1)
    keep_freed_memory()
    logging.getLogger("dpkfc").setLevel(logging.ERROR)
    # The warnings of a plan stand in the row.
    warnings.simplefilter("ignore")


def _end_with_study() -> None:
    """End this process when the study was killed, which an executor's workers do not notice."""
    study = multiprocessing.parent_process()
    if study is not None:
        study.join()
        # A cell that trains ends between two steps, and an idle worker at once.
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE)
        os._exit(1)


def run_one(run: Run, place: Place, judge: Judge | None, end: float = math.inf) -> Outcome:
    """Run a cell, and stop it at `end` as a signal would."""
    seconds = min(max(0.0, end - time.monotonic()), threading.TIMEOUT_MAX)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        return Outcome("done", run.find_measure()(run, place, judge))
    except Ended as ended:
        return Outcome("ended", ended.row) if ended.is_deliberate else Outcome("stopped")
    except Exception as error:
        text = one_line(error)
        if not isinstance(error, (ValueError, CheckpointError, LedgerError)):
            text = f"{type(error).__name__}: {text}"
        if not isinstance(error, _MACHINE_ERRORS):
            return Outcome("failed", reason=text)
        return Outcome("full" if _is_full(error) else "lost", reason=text)
    finally:
        timer.cancel()


def _is_full(error: BaseException | None) -> bool:
    """Return whether a full disk is behind an error, whatever was made of it on the way."""
    while error is not None:
        is_named = any(os.strerror(number) in str(error) for number in _DISK_ERRORS)
        if is_named or getattr(error, "errno", None) in _DISK_ERRORS:
            return True
        error = error.__cause__ or error.__context__
    return False
