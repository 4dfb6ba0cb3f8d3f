"""Flower is imported late, after its switches are set: said by a process that has not imported
it.
"""

import os
import sys


def imported_late():
    import dpkfc.federated.flower as f

    assert "flwr" not in sys.modules and "ray" not in sys.modules
    f.encode_record({})
    assert "flwr" in sys.modules
    print({name: os.environ[name] for name in f.SWITCHES})
