"""How large a check is: small inside `make test`, whole in `make assurance` (DPKFC_ASSURANCE=1)."""

import os

FULL = os.environ.get("DPKFC_ASSURANCE") == "1"


def size(quick, full):
    """The value for this run."""
    return full if FULL else quick
