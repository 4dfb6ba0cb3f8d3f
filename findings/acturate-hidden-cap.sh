#!/usr/bin/env bash
# acturate cuts premiums at 10,000 where the model sets no maximum.
#
# Packages: acturate 0.1.0.
# Behaviour: a coverage of a model may have rates named "min" and "max". Where it has no "max", or one of null
#   or 0, the price is cut at 10,000, a constant of the class that the documentation does not name: vehicles
#   of 250,000 and of 900,000 have the same price. With a "max" of 50,000 the prices are right.
# Expected: base times factors where the model sets no maximum.
# Instead: give every coverage a "max" that no price reaches.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'acturate==0.1.0'
cat > expected.txt <<'EXPECTED'
insured for 150000: 7500.00 without a maximum, 7500.00 with one of 50000; by hand 7500.00
insured for 200000: 10000.00 without a maximum, 10000.00 with one of 50000; by hand 10000.00
insured for 250000: 10000.00 without a maximum, 12500.00 with one of 50000; by hand 12500.00
insured for 900000: 10000.00 without a maximum, 45000.00 with one of 50000; by hand 45000.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from acturate.rating_engine.model import Model

rate, factor = 0.04, 1.25
cover = {'base': {'type': 'operation', 'operator': '*', 'first_value': {'type': 'fixed', 'value': rate},
                  'second_value': {'type': 'input', 'value': 'insured'}},
         'use': {'type': 'fixed', 'value': factor}}
model = Model()
model.load_model_from_dict({'open': cover, 'limited': {**cover, 'max': {'type': 'fixed', 'value': 50000.0}}})
for insured in (150000, 200000, 250000, 900000):
    seen = model.price({'insured': insured})
    print(f'insured for {insured}: {seen["open"]:.2f} without a maximum, {seen["limited"]:.2f} with one of 50000;',
          f'by hand {insured * rate * factor:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
