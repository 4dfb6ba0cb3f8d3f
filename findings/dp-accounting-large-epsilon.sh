#!/usr/bin/env bash
# dp-accounting's privacy loss distribution gives an ε that is too large, or infinite, above 709.
#
# Packages: dp-accounting 0.6.0, scipy 1.17.1, numpy 2.4.6.
# Behaviour: for Gaussian releases with σ = 0.8474 at δ = 1e-5, 800 of them have the ε of the closed
#   form; 820 have infinity, with a warning of an overflow, and 933 have 0.94 too much. The sum of
#   exp(-loss) is below the smallest double there. Each ε that we saw was too large, none too small.
# Expected: the closed form's ε, to the width of the grid (0.01), at each number of releases.
# Instead: for plain Gaussian releases solve the closed form (Balle and Wang, 2018, theorem 8); an ε
#   of several hundred protects nobody, but it is compared in tests and plotted in sweeps.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'dp-accounting==0.6.0' 'scipy==1.17.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
800 releases: 698.45 closed form 698.45
820 releases: inf closed form 714.14
933 releases: 803.37 closed form 802.43
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import math

from dp_accounting.pld import privacy_loss_distribution
from scipy.optimize import brentq
from scipy.stats import norm


def solve(mu, delta):
    def excess(epsilon):
        upper = math.exp(norm.logcdf(mu / 2 - epsilon / mu))
        return upper - math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu)) - delta

    return brentq(excess, 0, mu * mu / 2 + 9 * mu)


for releases in (800, 820, 933):
    noise = 0.8474 / math.sqrt(releases)  # that many releases are one with this noise
    pld = privacy_loss_distribution.from_gaussian_mechanism(
        noise, value_discretization_interval=1e-2
    )
    epsilon = pld.get_epsilon_for_delta(1e-5)
    print(f'{releases} releases: {epsilon:.2f} closed form {solve(1 / noise, 1e-5):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
