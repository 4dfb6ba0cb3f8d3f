#!/usr/bin/env bash
# After find_spec("pip"), which imports nothing, a program cannot compile a model any more: torch's compiler
# ends with an AssertionError of setuptools.
#
# Packages: torch 2.13.0, setuptools 84.2.1, numpy 2.4.6, on Python 3.10 or 3.11.
# Behaviour: to compile for a CPU, torch imports setuptools. The import finder of setuptools watches for pip:
#   the first look-up of a module of this name, which imports nothing, makes the finder leave the module
#   distutils to Python for the rest of the process. The import of setuptools then asserts that distutils is
#   its own copy. In the other order, setuptools first, nothing fails.
# Expected: a look-up changes nothing.
# Why it matters here: tests that are skipped where pip is missing decide, when they are collected, whether
#   other tests compile; a training script that checks its environment first runs uncompiled.
# Instead: ask importlib.metadata for the distribution, which looks up no module.
set -euo pipefail
python3 -c 'import sys; sys.exit(sys.version_info >= (3, 12))' || { echo "needs Python 3.10 or 3.11" >&2; exit 2; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'setuptools==84.2.1' 'numpy==2.4.6'
cat > look.py <<'PYTHON'
import importlib.metadata
import importlib.util
import sys

LOOKS = {
    'nothing': lambda: None,
    'find_spec("pip")': lambda: importlib.util.find_spec('pip'),
    'find_spec("wheel")': lambda: importlib.util.find_spec('wheel'),
    'distribution("pip")': lambda: importlib.metadata.distribution('pip'),
}
first = sys.argv[1]
LOOKS[first]()
has_imported = 'pip' in sys.modules
try:
    import torch.utils.cpp_extension
    end = 'the compiler is there'
except AssertionError as error:
    end = 'AssertionError: ' + str(error).rpartition('lib/')[2].partition('/')[2]
print(f'{first}, pip imported: {has_imported}: {end}')
PYTHON
cat > expected.txt <<'EXPECTED'
nothing, pip imported: False: the compiler is there
find_spec("pip"), pip imported: False: AssertionError: distutils/core.py
find_spec("wheel"), pip imported: False: the compiler is there
distribution("pip"), pip imported: False: the compiler is there
EXPECTED
for first in 'nothing' 'find_spec("pip")' 'find_spec("wheel")' 'distribution("pip")'; do
    env/bin/python -W ignore look.py "$first"
done > seen.txt
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
