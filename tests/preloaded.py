"""What most processes of tests import, slowest first: `tests.forked` has one process do so, and
forks it.

Not Flower: a test shows that it is imported late.
"""

import gc
from contextlib import suppress
from importlib import import_module

gc.disable()

NEEDED = (
    "matplotlib.pyplot",
    "pyarrow.parquet",
    "torch._dynamo",  # an optimizer imports it when it is made
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "dpkfc.cli",
    "dpkfc.app.results",
    "dpkfc.app.train",
    "dpkfc.session",
    "dp_accounting",
)
OPTIONAL = ("opacus", "sklearn.datasets")

for name in NEEDED:
    import_module(name)
for name in OPTIONAL:
    with suppress(ImportError):
        import_module(name)

# A process that is forked need not search these modules for garbage.
gc.freeze()
gc.enable()
