#!/usr/bin/env bash
# cyclopts rounds a number with decimals that is given for an integer parameter.
#
# Packages: cyclopts 5.5.2.
# Behaviour: a parameter annotated int takes 3.7 and passes 4, without an error or a warning; 2.5
#   becomes 2. A slip is not seen, although `1e2` is refused.
# Expected: an error for a text that is not a whole number, as typer, click and argparse give it.
# Instead: give such parameters a converter of your own that refuses other texts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'cyclopts==5.5.2'
cat > expected.txt <<'EXPECTED'
3.7 -> 4
2.5 -> 2
EXPECTED
env/bin/python - > seen.txt <<'PYTHON'
import cyclopts

app = cyclopts.App()


@app.default
def train(*, steps: int):
    return steps


for text in ('3.7', '2.5'):
    print(text, '->', app(['--steps', text], exit_on_error=False, result_action='return_value'))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
