"""Call the command line in this process, as a person does in a terminal."""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import dataclass
from unittest import mock

from dpkfc.cli import main


@dataclass
class Called:
    """What a command left behind: both streams, together as `output`, and what it raised."""

    exit_code: int
    stdout: str
    stderr: str
    output: str
    exception: BaseException | None


class _Both(io.StringIO):
    """A stream whose text goes to another one too."""

    def __init__(self, other: io.StringIO):
        super().__init__()
        self.other = other

    def write(self, text: str) -> int:
        self.other.write(text)
        return super().write(text)


def call(*words: object, env: dict[str, str] | None = None) -> Called:
    output = io.StringIO()
    out, err = _Both(output), _Both(output)
    code, raised = 0, None
    with (
        mock.patch.dict(os.environ, env or {}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main([str(word) for word in words])
        except SystemExit as end:
            code = int(end.code or 0)
        except Exception as error:
            code, raised = 1, error
    return Called(code, out.getvalue(), err.getvalue(), output.getvalue(), raised)
