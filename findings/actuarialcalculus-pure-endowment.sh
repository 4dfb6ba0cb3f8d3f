#!/usr/bin/env bash
# actuarialCalculus multiplies interest and mortality in its pure endowment.
#
# Packages: actuarialCalculus 0.0.2, numpy 2.4.6, pandas 2.3.3.
# Behaviour: the pure endowment of Insurance.Continuous.Exponential (PureDotal) is exp(-n · mu ·
#   delta), and its term insurance has exp(-n (mu + delta)). With 3 % interest and 1 % mortality a
#   payment of 1 to those who live in twenty years costs 0.994, where 0.449 is right. An endowment
#   insurance of 1 (MixedDotal), which pays 1 within twenty years at the latest, costs 1.13, and all
#   premiums that use them are too high.
# Expected: exp(-n (mu + delta)), so that the endowment is 1 - delta times the annuity of the
#   package.
# Instead: numpy.exp(-n * (mu + delta)), added to Temporary(n).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'actuarialCalculus==0.0.2' 'numpy==2.4.6' 'pandas==2.3.3'
cat > expected.txt <<'EXPECTED'
1 years: pure endowment 1.000, by hand 0.961; endowment insurance 1.010, by hand 0.971, 1 - delta · annuity 0.971
10 years: pure endowment 0.997, by hand 0.670; endowment insurance 1.079, by hand 0.753, 1 - delta · annuity 0.753
20 years: pure endowment 0.994, by hand 0.449; endowment insurance 1.132, by hand 0.587, 1 - delta · annuity 0.587
40 years: pure endowment 0.988, by hand 0.202; endowment insurance 1.188, by hand 0.401, 1 - delta · annuity 0.401
premium of the insurance of 20 years: 0.0822 a year, by hand 0.0426
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math

from actuarialCalculus.Calculations import Anuities, Insurance, Premium

delta, mu = 0.03, 0.01
insurance = Insurance.Continuous.Exponential(delta, mu)
annuity = Anuities.Continuous.Exponential(delta, mu)
premium = Premium.Continuous.Exponential(delta, mu)
for years in (1, 10, 20, 40):
    alive = math.exp(-years * mu)
    discount = math.exp(-years * delta)
    term = mu / (mu + delta) * (1 - alive * discount)
    print(f'{years} years: pure endowment {insurance.PureDotal(years):.3f}, by hand {alive * discount:.3f};',
          f'endowment insurance {insurance.MixedDotal(years):.3f}, by hand {term + alive * discount:.3f},',
          f'1 - delta · annuity {1 - delta * annuity.Temporary(years):.3f}')
right = (1 - delta * annuity.Temporary(20)) / annuity.Temporary(20)
print(f'premium of the insurance of 20 years: {premium.MixedDotal(20):.4f} a year, by hand {right:.4f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
