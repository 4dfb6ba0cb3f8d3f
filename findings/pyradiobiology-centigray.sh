#!/usr/bin/env bash
# pyradiobiology accepts doses in centigray and converts them with a fraction of 2 in place of 200: 5000 cGy in fractions of
# 200 are 8278 cGy in fractions of 200, and a complication of 3 % becomes one of 89 %.
#
# Packages: pyradiobiology 1.0.33, numpy 2.4.6.
# Behaviour: the dose in fractions of 2 Gy, EQD2, is the biologically effective dose divided by 1 + 2 / (alpha/beta). The 2
#   is written as a number. DoseUnit.CGY is one of the units, all quantities must have the same one, which is checked, and
#   alpha/beta is then 300 where it was 3.
# Expected: 200 for centigray, so that the unit changes nothing.
# Why it matters here: treatment planning systems give dose-volume histograms in cGy. Every model of the package for tumour
#   control and complications starts with this conversion.
# Instead: divide doses and alpha/beta by 100.
# Source: EQD2 = D * (d + alpha/beta) / (2 Gy + alpha/beta), which is D for fractions of d = 2 Gy.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.4.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'pyradiobiology==1.0.33'
cat > expected.txt <<'EXPECTED'
50 Gy in 25, alpha/beta 3: EQD2 by hand 50.0 Gy, in Gy 50.0, in cGy 8278; complications 2.8% in Gy, 88.8% in cGy
50 Gy in 20, alpha/beta 3: EQD2 by hand 55.0 Gy, in Gy 55.0, in cGy 9106; complications 7.7% in Gy, 97.8% in cGy
66 Gy in 33, alpha/beta 10: EQD2 by hand 66.0 Gy, in Gy 66.0, in cGy 7904; complications 35.2% in Gy, 80.5% in cGy
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from pyradiobiology import LKB, Dose, DoseBag, DoseType, DoseUnit, LinearQuadratic

for total, fractions, ratio in ((50, 25, 3), (50, 20, 3), (66, 33, 10)):
    right = total * (total / fractions + ratio) / (2 + ratio)
    seen = []
    for unit, factor in ((DoseUnit.GY, 1), (DoseUnit.CGY, 100)):
        model = LinearQuadratic(ab_ratio=Dose(ratio * factor, unit), nfx=fractions)
        seen.append(model.eqd_two(DoseBag.create([total * factor], unit)).data[0])
        tissue = LKB(Dose(70 * factor, unit, DoseType.EQD2), m=0.15, n=1.0)
        dose = DoseBag.create([total * factor], unit)
        seen.append(tissue.response_from_pysical_dose(dose, [1.0], Dose(ratio * factor, unit), fractions))
    print(f'{total} Gy in {fractions}, alpha/beta {ratio}: EQD2 by hand {right:.1f} Gy, in Gy {seen[0]:.1f}, in cGy {seen[2]:.0f};',
          f'complications {seen[1]:.1%} in Gy, {seen[3]:.1%} in cGy')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
