#!/usr/bin/env bash
# survivalpy takes people out of the risk set who are censored on the day of a death.
#
# Packages: SurvivalPy 1.0.2, lifelines 0.30.3, numpy 2.4.6, pandas 2.3.3, scipy 1.17.1, matplotlib
#   3.11.2.
# Behaviour: Analyzer subtracts everybody who was censored since the last death before it divides by
#   the people at risk, those with the same time as the death among them. By convention they are
#   still at risk at that time. Where times are whole months, ties are common: with 10 people, of
#   whom one dies and three are censored in month 6, the survival is 6 of 7 and not 9 of 10. The
#   same data with the censored times 0.001 later give the usual curve. Its log-rank test counts
#   them as at risk.
# Expected: the usual curve, as lifelines computes it.
# Instead: add a little to the censored times, less than the unit of time.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'SurvivalPy==1.0.2' 'lifelines==0.30.3' 'numpy==2.4.6' 'pandas==2.3.3' 'scipy==1.17.1' 'matplotlib==3.11.2'
cat > expected.txt <<'EXPECTED'
after month 6: survivalpy 0.857, with censoring 0.001 later 0.900, by hand 0.900, lifelines 0.900
after month 12: survivalpy 0.643, with censoring 0.001 later 0.750, by hand 0.750, lifelines 0.750
after month 18: survivalpy 0.429, with censoring 0.001 later 0.500, by hand 0.500, lifelines 0.500
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from lifelines import KaplanMeierFitter
from survivalpy.survival import Analyzer, Datum

people = [(6, 1), (6, 0), (6, 0), (6, 0), (12, 1), (12, 0), (12, 0), (18, 1), (24, 0), (24, 0)]

def compute(later):
    data = [Datum(time + later * (not died), not died) for time, died in people]
    return Analyzer(data).compute()

curve = KaplanMeierFitter().fit([time for time, _ in people], [died for _, died in people])
by_hand, at_risk = 1.0, 10
expected = {}
for month in (6, 12, 18):
    deaths = sum(died for time, died in people if time == month)
    by_hand *= 1 - deaths / at_risk
    at_risk -= sum(time == month for time, _ in people)
    expected[month] = by_hand
for month, together, later in zip((6, 12, 18), compute(0)[1:], compute(0.001)[1:]):
    print(f'after month {month}: survivalpy {together.cumulative:.3f}, with censoring 0.001 later {later.cumulative:.3f},',
          f'by hand {expected[month]:.3f}, lifelines {curve.predict(month):.3f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
