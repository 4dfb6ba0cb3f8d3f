"""What one worker of a study does: cells, one after the other, and what became of each as plain values."""

from __future__ import annotations

import errno
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dpkfc.allocator import keep_freed_memory
from dpkfc.checkpoint import CheckpointError
from dpkfc.privacy.ledger import LedgerError
from dpkfc.report.run_folder import RunFolderError
from dpkfc.studies.cell import Ended, Run

__all__ = ["work"]

_MACHINE = (OSError, MemoryError, CheckpointError, LedgerError, RunFolderError)  # what no setting of a cell brings about
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # of a disk that takes nothing more


def work(pipe: Connection, folder: Path, data_dir: str) -> None:
    """Run what comes through a pipe, until it closes. While a cell trains, a signal ends it between two steps.

    Answers: ("judged", number, accuracy) wants to hear whether the cell goes on; ("done", row, ended), ("failed", reason),
    ("lost", reason) and ("full", reason), the last two the machine's doing, and ("interrupted",) are the end of one.

    Args:
        pipe: to the study.
        folder: run folders are made in `runs` below it, and public examples kept in `public`.
        data_dir: folder of the data sets; empty as for `dpkfc train`.
    """
    import logging
    import warnings

    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    keep_freed_memory()
    logging.getLogger("dpkfc").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # what a plan has to warn of stands in the row
    while True:
        try:
            run, watched = pipe.recv()
            pipe.send(_outcome(run, watched, pipe, folder, data_dir))
        except (EOFError, OSError):
            return  # the study has ended


def _outcome(run: Run, watched: bool, pipe: Connection, folder: Path, data_dir: str) -> tuple[Any, ...]:
    def report(number: int, accuracy: float) -> bool:
        pipe.send(("judged", number, accuracy))
        return bool(pipe.recv())

    try:
        row = run.measuring()(
            run, folder / "runs", data_dir=data_dir, public=folder / "public", report=report if watched else None
        )
        return "done", row, False
    except Ended as ended:
        return ("done", ended.row, True) if ended.asked else ("interrupted",)
    except (EOFError, BrokenPipeError, ConnectionError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        told = text if isinstance(error, (ValueError, CheckpointError, LedgerError)) else f"{type(error).__name__}: {text}"
        if not isinstance(error, _MACHINE):
            return "failed", told
        return "full" if _is_full(error) else "lost", told


def _is_full(error: BaseException | None) -> bool:
    """Whether a disk that takes nothing more is behind an error, whatever was made of it on the way."""
    while error is not None:
        if getattr(error, "errno", None) in _FULL or any(os.strerror(number) in str(error) for number in _FULL):
            return True
        error = error.__cause__ or error.__context__
    return False
