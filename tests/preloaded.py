"""What most processes of tests import, slowest first: `tests.forked` has one process do so, and forks it.

Not Flower: a test shows that it is imported late.
"""

from __future__ import annotations

from contextlib import suppress

import matplotlib.pyplot  # noqa: F401
import pyarrow.parquet  # noqa: F401
import torch._dynamo  # noqa: F401  an optimizer imports it when it is made
import torch.distributed.fsdp
import torch.distributed.launcher.api  # noqa: F401

import dpkfc.cli
import dpkfc.recipes.finish
import dpkfc.recipes.train
import dpkfc.session  # noqa: F401

with suppress(ImportError):
    import opacus  # noqa: F401
with suppress(ImportError):
    import sklearn.datasets  # noqa: F401
