#!/usr/bin/env bash
# sample-size-calculator finds no difference between means of 200 and 250, whatever the sample.
#
# Packages: sample-size-calculator 1.0.0, statsmodels 0.14.4, scipy 1.13.1, matplotlib 3.11.2, numpy
#   1.26.4.
# Behaviour: analyze_test_results says that it takes means or proportions. It asks for no standard
#   deviation and makes one as for a proportion, p (1 - p), whose root of a negative number is nan
#   for means above 1. All three verdicts are then False and nothing is raised. Means between 0 and
#   1, such as a serum value in mg/dL, get the spread of a yes or no.
# Expected: an error that a standard deviation is needed.
# Why it matters here: "not significant" is the answer that a comparison with a private table hopes
#   for.
# Instead: scipy.stats.ttest_ind_from_stats, or proportions_ztest of statsmodels for proportions.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==1.26.4' 'pandas==2.2.3' 'scipy==1.13.1' 'statsmodels==0.14.4' 'matplotlib==3.11.2'
env/bin/python -m pip install -q -q --disable-pip-version-check --no-deps 'sample-size-calculator==1.0.0'
cat > expected.txt <<'EXPECTED'
means with their true standard deviations
  200.0 and 250.0 of 1000000 each: p-value nan, significant False; by the t-test 0, significant True
  0.9 and 0.95 of 200 each: p-value 0.057, significant False; by the t-test 8.6e-07, significant True
  0.02 and 0.05 of 200 each: p-value 0.1, significant False; by the t-test 0.55, significant False
proportions of 0.2 and 0.25: p-value 0.0001, by statsmodels 0.0002
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from sample_size_calculator import analyze_test_results
from scipy.stats import ttest_ind_from_stats
from statsmodels.stats.proportion import proportions_ztest

print('means with their true standard deviations')
for people, first, second, spread in ((1000000, 200.0, 250.0, 30.0), (200, 0.9, 0.95, 0.1), (200, 0.02, 0.05, 0.5)):
    seen = analyze_test_results(people, first, second)
    right = ttest_ind_from_stats(first, spread, people, second, spread, people).pvalue
    print(f"  {first} and {second} of {people} each: p-value {seen['p_value']:.2g}, significant "
          f"{bool(seen['overall_significant'])}; by the t-test {right:.2g}, significant {bool(right < 0.05)}")
seen = analyze_test_results(2000, 0.2, 0.25)
print(f"proportions of 0.2 and 0.25: p-value {seen['p_value']:.1g}, "
      f'by statsmodels {proportions_ztest([400, 500], [2000, 2000])[1]:.1g}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
