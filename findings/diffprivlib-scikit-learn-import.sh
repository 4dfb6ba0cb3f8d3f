#!/usr/bin/env bash
# diffprivlib installs with a scikit-learn with which its models cannot be imported.
#
# Packages: diffprivlib 0.6.6, scikit-learn 1.9.1.
# Behaviour: diffprivlib asks for scikit-learn from 1.4.0 on, without an upper bound, and pip takes
#   the newest one. `import diffprivlib.models` then fails, because a name of a private module of
#   scikit-learn is gone.
# Expected: an upper bound in the requirements, or models that import.
# Instead: install 'scikit-learn==1.5.2' beside it, in an environment of its own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'diffprivlib==0.6.6' 'scikit-learn==1.9.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
No broken requirements found.
scikit-learn>=1.4.0
ImportError cannot import name 'DOUBLE' from 'sklearn.tree._tree'
EXPECTED
env/bin/python -m pip check --disable-pip-version-check > seen.txt
env/bin/python -W ignore - >> seen.txt <<'PYTHON'
from importlib.metadata import requires

print(*(line for line in requires('diffprivlib') if line.startswith('scikit-learn')))
try:
    import diffprivlib.models
except ImportError as error:
    print(type(error).__name__, str(error).partition(' (')[0])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
