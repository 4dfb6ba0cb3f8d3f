#!/usr/bin/env bash
# medcalc-bench's explained glomerular filtration rate of men uses a constant of women.
#
# Packages: medcalc-bench 1.7.0, Python 3.11.
# Behaviour: ckd_epi_2021 and ckd_epi_2021_explanation of one module take the same input. For a man
#   with a creatinine of at most 0.9 mg/dL the second divides by 0.7, which belongs to women, in
#   place of 0.9, and says so in its explanation. The curve has a step at 0.9 mg/dL, where 1.0 has
#   hardly less than 0.9.
# Expected: 142 * min(Scr / κ, 1)^α * max(Scr / κ, 1)^-1.2 * 0.9938^age * 1.012 [female] with κ =
#   0.9 and α = -0.302 for men.
# Why it matters here: the explained answers are what language models are graded by in a benchmark
#   of calculators; a right answer counts as wrong.
# Instead: ckd_epi_2021, whose numbers agree with the equation.
# Source: Inker and others, New England Journal of Medicine 2021.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'medcalc-bench==1.7.0'
cat > expected.txt <<'EXPECTED'
Male, 0.6 mg/dL: value 117.6, with explanation 109.0, published 117.6
Male, 0.9 mg/dL: value 104.0, with explanation 96.4, published 104.0
Male, 1.0 mg/dL: value 91.7, with explanation 91.7, published 91.7
Male, 2.0 mg/dL: value 39.9, with explanation 39.9, published 39.9
Female, 0.6 mg/dL: value 109.3, with explanation 109.3, published 109.3
Female, 0.9 mg/dL: value 77.9, with explanation 77.9, published 77.9
Female, 1.0 mg/dL: value 68.6, with explanation 68.6, published 68.6
Female, 2.0 mg/dL: value 29.9, with explanation 29.9, published 29.9
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from medcalc.ckd_epi_2021_creatinine import ckd_epi_2021, ckd_epi_2021_explanation


def rate(creatinine, age, male):
    """Return the published rate."""
    kappa, alpha = (0.9, -0.302) if male else (0.7, -0.241)
    share = creatinine / kappa
    return 142 * min(share, 1) ** alpha * max(share, 1) ** -1.2 * 0.9938 ** age * (1 if male else 1.012)


for sex in ('Male', 'Female'):
    for creatinine in (0.6, 0.9, 1.0, 2.0):
        given = {'sex': sex, 'age': (50, 'years'), 'creatinine': (creatinine, 'mg/dL')}
        print(f'{sex}, {creatinine} mg/dL: value {ckd_epi_2021(dict(given)):.1f}, with explanation '
              f"{ckd_epi_2021_explanation(dict(given))['Answer']:.1f}, "
              f"published {rate(creatinine, 50, sex == 'Male'):.1f}")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
