"""`python -m dpkfc` is the command line."""

from dpkfc.cli import app

app(prog_name="dpkfc")
