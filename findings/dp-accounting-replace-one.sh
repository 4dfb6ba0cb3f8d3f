#!/usr/bin/env bash
# Two accountants of dp-accounting mean different sensitivities by one Gaussian event: with REPLACE_ONE
# the Rényi accountant reports less than half the ε of the other one.
#
# Packages: dp-accounting 0.6.0, scipy 1.17.1, numpy 2.4.6.
# Behaviour: replacing one value of norm C moves a sum by up to 2 C. For GaussianDpEvent, whose noise
#   is stated relative to C, PLDAccountant counts the 2 C with REPLACE_ONE; RdpAccountant computes
#   the same ε for all neighbouring relations, and says nothing.
# Expected: nearly the same ε from both accountants, or an UnsupportedEventError.
# Instead: PLDAccountant, or half the noise multiplier in the events of RdpAccountant.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'dp-accounting==0.6.0' 'scipy==1.17.1' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
noise 1.0 (s / C), ADD_OR_REMOVE_ONE: RDP 19.1, PLD 17.9
noise 1.0 (s / C), REPLACE_ONE: RDP 19.1, PLD 46.2
noise 0.5 (s / C), ADD_OR_REMOVE_ONE: RDP 48.8, PLD 46.2
EXPECTED
env/bin/python - > seen.txt <<'PYTHON'
from dp_accounting import GaussianDpEvent, NeighboringRelation, pld, rdp

for noise, relation in (
    (1.0, NeighboringRelation.ADD_OR_REMOVE_ONE),
    (1.0, NeighboringRelation.REPLACE_ONE),
    (0.5, NeighboringRelation.ADD_OR_REMOVE_ONE),
):
    epsilons = []
    for kind in (rdp.RdpAccountant, pld.PLDAccountant):
        accountant = kind(neighboring_relation=relation)
        accountant.compose(GaussianDpEvent(noise), 10)
        epsilons.append(accountant.get_epsilon(1e-5))
    name = f'noise {noise} (s / C), {relation.name}'
    print(f'{name}: RDP {epsilons[0]:.1f}, PLD {epsilons[1]:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
