#!/usr/bin/env bash
# After a Flower simulation, programs that the process starts import its packages, not their own.
#
# Packages: flwr 1.42.0 with its extra "simulation" (ray 2.55.1).
# Behaviour: run_simulation writes the whole sys.path of the process into its PYTHONPATH, for the
#   workers of Ray, and leaves it there. Whatever the process starts later inherits it: a Python of
#   another environment imports packages that are not installed there, before its own, and its pip
#   takes them for installed.
# Expected: the environment of the workers alone is changed (Ray's runtime_env, which Flower sets as
#   well), or it is restored at the end.
# Instead: keep os.environ before the simulation and restore PYTHONPATH behind it; or start other
#   programs with python -E or -I.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
python3 -m venv other
env/bin/python -m pip install -q -q --disable-pip-version-check \
    'flwr[simulation]==1.42.0' 'ray==2.55.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
before: PYTHONPATH is not set; another environment imports flwr: no
after: PYTHONPATH is set; another environment imports flwr: yes
EXPECTED
cat > run.py <<'PYTHON'
import logging
import os
import subprocess

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

logging.disable(logging.CRITICAL)
server, client = ServerApp(), ClientApp()


@server.main()
def main(grid, context):
    """A server that asks for nothing."""


def report(when):
    state = 'set' if 'PYTHONPATH' in os.environ else 'not set'
    words = ['other/bin/python', '-c', 'import flwr']
    found = subprocess.run(words, capture_output=True, check=False).returncode == 0
    answer = 'yes' if found else 'no'
    print(f'{when}: PYTHONPATH is {state}; another environment imports flwr: {answer}', flush=True)


report('before')
run_simulation(server, client, num_supernodes=2)
report('after')
PYTHON
env -u PYTHONPATH env/bin/python -W ignore run.py 2> /dev/null | grep -E '^(before|after):' > seen.txt
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
