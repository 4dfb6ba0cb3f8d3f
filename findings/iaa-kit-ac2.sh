#!/usr/bin/env bash
# Gwet's AC2 of iaa-kit is Cohen's weighted kappa, which it is meant to replace, and its prevalence index is
# the difference of agreement and disagreement.
#
# Packages: iaa-kit 0.1.2, numpy 2.2.6.
# Behaviour: ac2(a, b) returns weighted_kappa(a, b). With two answers AC2 and AC1 are the same number by
#   definition; for two doctors who agree that 95 of 100 patients are healthy ac1 gives 0.95 and ac2 -0.02.
#   prevalence_index is 1 where half of the patients are ill and both doctors agree about everybody.
# Expected: AC2 = AC1 for two answers; |both say ill - both say healthy| / all, which is 0 for a half.
# Why it matters here: kappa is near 0 for rare diseases whatever the agreement, which is why AC2 is
#   asked for.
# Instead: irrCAC.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6' 'iaa-kit==0.1.2'
cat > expected.txt <<'EXPECTED'
both ill 0, both healthy 95, different 5: AC1 0.95, AC2 -0.02, weighted kappa -0.02; prevalence index 0.90, by its definition 0.95
both ill 5, both healthy 90, different 5: AC1 0.94, AC2 0.64, weighted kappa 0.64; prevalence index 0.90, by its definition 0.85
both ill 50, both healthy 50, different 0: AC1 1.00, AC2 1.00, weighted kappa 1.00; prevalence index 1.00, by its definition 0.00
both ill 45, both healthy 45, different 10: AC1 0.80, AC2 0.80, weighted kappa 0.80; prevalence index 0.80, by its definition 0.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from iaa_kit import ac1, ac2, prevalence_index, weighted_kappa

for ill, healthy, apart in ((0, 95, 5), (5, 90, 5), (50, 50, 0), (45, 45, 10)):
    first = [1] * ill + [0] * healthy + [index % 2 for index in range(apart)]
    second = [1] * ill + [0] * healthy + [1 - index % 2 for index in range(apart)]
    print(f'both ill {ill}, both healthy {healthy}, different {apart}: AC1 {ac1(first, second):.2f},',
          f'AC2 {ac2(first, second):.2f}, weighted kappa {weighted_kappa(first, second):.2f};',
          f'prevalence index {prevalence_index(first, second):.2f},',
          f'by its definition {abs(ill - healthy) / 100:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
