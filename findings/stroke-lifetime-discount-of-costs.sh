#!/usr/bin/env bash
# stroke-lifetime discounts the costs with the rate for the QALYs: the rate for the costs, which it documents, changes
# nothing.
#
# Packages: stroke-lifetime 3.0.2, numpy 2.2.6.
# Behaviour: main_calculations hands discount_factor_QALYs_perc to the discount of all four kinds of costs.
#   discount_factor_costs_perc is in the parameters and is read nowhere. Both are 3.5 % by default.
# Expected: undiscounted costs with a rate of 0 for the costs, and the same costs whatever the rate of the QALYs is.
# Why it matters here: different rates, such as 1.5 % for health and 3.5 % or 4 % for costs, are the rule in some countries
#   and a usual sensitivity analysis. The total changes with the wrong rate.
# Instead: compute costs and QALYs in two calls with the rate of each.
# Source: the names of the two parameters, of which the docstring lists both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'stroke-lifetime==3.0.2'
cat > expected.txt <<'EXPECTED'
discount of QALYs 3.5 %, of costs 3.5 %: cost 29,837, QALYs 4.84
discount of QALYs 3.5 %, of costs 0.0 %: cost 29,837, QALYs 4.84
discount of QALYs 3.5 %, of costs 10.0 %: cost 29,837, QALYs 4.84
discount of QALYs 0.0 %, of costs 3.5 %: cost 32,586, QALYs 5.46
discount of QALYs 1.5 %, of costs 3.5 %: cost 31,339, QALYs 5.18
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from stroke_lifetime.fixed_params import get_fixed_params
from stroke_lifetime.main_calculations import main_calculations


def cost(qalys, costs):
    parameters = get_fixed_params('mRS') | {'discount_factor_QALYs_perc': qalys, 'discount_factor_costs_perc': costs}
    result = main_calculations(65, 0, 'Female', 3, parameters, 'mRS')
    return f'cost {result["total_discounted_cost"]:,.0f}, QALYs {result["qalys_total"]:.2f}'


for qalys, costs in ((3.5, 3.5), (3.5, 0.0), (3.5, 10.0), (0.0, 3.5), (1.5, 3.5)):
    print(f'discount of QALYs {qalys} %, of costs {costs} %: {cost(qalys, costs)}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
