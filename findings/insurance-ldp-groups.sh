#!/usr/bin/env bash
# The group models of insurance-fairness-ldp weigh each reported group by its share twice, so they do
# not return the costs of the groups.
#
# Packages: insurance-fairness-ldp 0.1.1, numpy 2.4.6, scikit-learn 1.9.0.
# Behaviour: the weights of a record are the inverse of the randomised response times the share of the
#   reported group, over the share of the true one. The records of a group are as many as its share
#   already, so the share counts twice. A group of 10 % with a cost of 300 gets a model that predicts
#   -60. group_loss_corrected multiplies by the same weights: a loss of 1 for everybody is reported
#   as other than 1 for each group.
# Expected: the cost of each group, as debiased_group_means of the same package returns it from the
#   same reports, and a loss of 1. The weights without the share give both.
# Why it matters here: the premium is the mean over these models, and a mean of wrong ones.
# Instead: the weights CorrectionMatrix.T_inv() over the shares, as below.
# Source: Zhang, Liu and Shi, arXiv:2504.11775; Patrini et al. (2017) for the correction.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'insurance-fairness-ldp==0.1.1' 'numpy==2.4.6' 'scikit-learn==1.9.0'
cat > expected.txt <<'EXPECTED'
group A: cost 100, model 106, debiased_group_means 100, weights without the share 100; loss of 1 reported as 1.06
group B: cost 200, model 219, debiased_group_means 200, weights without the share 200; loss of 1 reported as 0.86
group C: cost 300, model -60, debiased_group_means 300, weights without the share 300; loss of 1 reported as -0.95
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from insurance_fairness_ldp import (
    CorrectionMatrix, KaryRandomisedResponse, LDPDiscriminationFreePrice, debiased_group_means,
    group_loss_corrected,
)
from sklearn.linear_model import LinearRegression

groups, shares, costs = ['A', 'B', 'C'], [0.6, 0.3, 0.1], {'A': 100.0, 'B': 200.0, 'C': 300.0}
random = np.random.default_rng(0)
people = 400_000
group = random.choice(groups, people, p=shares)
cost = np.array([costs[name] for name in group])
reports = KaryRandomisedResponse(epsilon=2.0, categories=groups)
told = reports.privatise(group, random_state=1)
model = LDPDiscriminationFreePrice(base_estimator=LinearRegression(), mechanism=reports)
model.fit(np.ones((people, 1)), told, cost)
matrix = CorrectionMatrix.from_mechanism(reports)
means = debiased_group_means(cost, told, groups, matrix.T_inv())
loss = group_loss_corrected(
    np.zeros(people), np.ones(people), told, groups, matrix.Pi_inv(model.reference_dist_)
)
index = np.searchsorted(groups, told)
for number, name in enumerate(groups):
    weight = matrix.T_inv()[number, index]
    print(f'group {name}: cost {costs[name]:.0f}, model {model.predict_group([[1.0]], name)[0]:.0f},',
          f'debiased_group_means {means[name]:.0f},',
          f'weights without the share {(weight * cost).sum() / weight.sum():.0f};',
          f'loss of 1 reported as {loss[name]:.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
