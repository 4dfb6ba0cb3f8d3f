"""Ports for processes that find each other by number, where a file cannot bring them together."""

from __future__ import annotations

import itertools
import os
import re
import socket

# below 32768, from where systems take the port of any connection that asks for none
LOWEST, PORTS = (
    20_000,
    12_000,
)
_asked = itertools.count()


def free_port() -> int:
    """A port that nobody listens on, another one at every call.

    Between this call and the use of the port nobody is given it by the system, and test processes
    that run side by side look in other places: where one begins depends on its id and on its number
    among the workers of pytest-xdist.

    Raises:
        OSError: none is free.
    """
    worker = int("0" + re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")))
    start = 7919 * os.getpid() + 1009 * worker
    for _ in range(PORTS):
        port = LOWEST + (start + next(_asked)) % PORTS
        if _is_free(port):
            return port
    raise OSError(f"no port from {LOWEST} to {LOWEST + PORTS - 1} is free")


def _is_free(port: int) -> bool:
    """On every address of this machine; a port whose last connection has only just ended does not
    count as free.
    """
    with socket.socket() as one:
        try:
            one.bind(("", port))
        except OSError:
            return False
        return True
