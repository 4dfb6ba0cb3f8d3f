"""Both sides of the app.

`APP` is the very value that `dpkfc demo-federated` runs in one process and in simulation.
"""

from __future__ import annotations

from dpkfc.app.federated_demo import APP
from dpkfc.federated.flower import client_app, server_app

server = server_app(APP)
client = client_app(APP)
