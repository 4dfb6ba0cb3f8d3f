"""`python -m dpkfc` is the command line."""

from __future__ import annotations

from dpkfc.cli import main

main()
