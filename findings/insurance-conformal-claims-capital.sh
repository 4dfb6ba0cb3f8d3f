#!/usr/bin/env bash
# The solvency capital of insurance-conformal-claims is the largest bound of one policy: a thousand policies whose
# claims add up to a million have a capital of 3,651, like ten policies.
#
# Packages: insurance-conformal-claims 0.1.0, numpy 2.4.6, pandas 3.1.1, scipy 1.17.1.
# Behaviour: SCRReport.solvency_capital_requirement returns the maximum of the policies' upper bounds. Its
#   description calls it "the aggregate claim amount that will not be exceeded with probability 1-alpha". It does
#   not grow with the number of policies, and the claims of a year exceed it always. aggregate_reserve, the
#   sum of the bounds, is two to four times the quantile of the sum.
# Expected: the 99.5 % quantile of the sum of all claims of a year, as Article 101 of Solvency II asks for.
# Why it matters here: the number is reported to a supervisor.
# Instead: simulate or bound the sum of the claims.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'insurance-conformal-claims==0.1.0' 'numpy==2.4.6' 'pandas==3.1.1' 'scipy==1.17.1'
cat > expected.txt <<'EXPECTED'
10 policies: capital 3,651; sum of the claims of a year 10,026, its 99.5 % quantile 16,923; years above the capital 100%
100 policies: capital 3,651; sum of the claims of a year 100,161, its 99.5 % quantile 119,506; years above the capital 100%
1000 policies: capital 3,651; sum of the claims of a year 999,959, its 99.5 % quantile 1,054,971; years above the capital 100%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from insurance_conformal_claims import HongConformal, SCRReport

for policies in (10, 100, 1000):
    random = np.random.default_rng(0)
    features, claims = random.normal(size=(2000, 2)), random.gamma(2, 500, 2000)
    report = SCRReport(HongConformal().fit(features, claims))
    portfolio = random.normal(size=(policies, 2))
    capital = report.solvency_capital_requirement(portfolio, alpha=0.005)
    years = random.gamma(2, 500, (2000, policies)).sum(axis=1)
    print(f'{policies} policies: capital {capital:,.0f}; sum of the claims of a year {years.mean():,.0f}, its 99.5 % '
          f'quantile {np.quantile(years, 0.995):,.0f}; years above the capital {np.mean(years > capital):.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
