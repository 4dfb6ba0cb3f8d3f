#!/usr/bin/env bash
# The information value of autoBinning weighs a class by its odds, whatever its size, and can be negative.
#
# Packages: autoBinning 0.1.7, numpy 2.4.6, pandas 2.3.3.
# Behaviour: The information value of a class is its odds of default times the logarithm of the odds
#   ratio. The definition has the difference of two shares, of all defaults and of all others, in place of
#   the odds. A class of three people counts as much as one of a thousand with the same odds, and a class
#   with few defaults subtracts. fit(sby='iv') splits where the sum is largest.
# Expected: (share of the defaults - share of the others) times the logarithm of the odds ratio, which is
#   never negative.
# Instead: compute the value with the formula below, for the classes that are compared.
# Source: Siddiqi, Credit Risk Scorecards (2006), chapter 6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==2.4.6' 'pandas==2.3.3'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'autoBinning==0.1.7'
cat > expected.txt <<'EXPECTED'
50 of 1000 default: autoBinning -0.104, by definition 1.114
500 of 1000 default: autoBinning 0.969, by definition 0.547
  all classes: autoBinning 0.865, by definition 1.661
99 of 1000 default: autoBinning -0.001, by definition 0.000
99 of 1001 default: autoBinning -0.001, by definition 0.000
2 of 3 default: autoBinning 5.785, by definition 0.027
  all classes: autoBinning 5.783, by definition 0.027
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from autoBinning.utils.forwardSplit import forwardSplit


def right(default, inside):
    bad, good = default[inside].sum() / default.sum(), (1 - default)[inside].sum() / (1 - default).sum()
    return (bad - good) * np.log(bad / good)


def show(classes):
    score = np.concatenate([np.full(bad + good, float(k)) for k, (bad, good) in enumerate(classes)])
    default = np.concatenate([np.r_[np.ones(bad), np.zeros(good)] for bad, good in classes])
    method = forwardSplit(score, default)
    for k, (bad, good) in enumerate(classes):
        print(f'{bad} of {bad + good} default: autoBinning {method.cal_iv_by_range((k, k + 1)):.3f}, '
              f'by definition {right(default, score == k):.3f}')
    total = sum(right(default, score == k) for k in range(len(classes)))
    print(f'  all classes: autoBinning {method.cal_iv_by_range(tuple(range(len(classes) + 1))):.3f}, '
          f'by definition {total:.3f}')


show([(50, 950), (500, 500)])
show([(99, 901), (99, 902), (2, 1)])
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
