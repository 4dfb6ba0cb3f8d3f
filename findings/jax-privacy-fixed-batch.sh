#!/usr/bin/env bash
# jax-privacy calibrates noise for Poisson sampling only: with fixed batches the ε is several times
# the target.
#
# Packages: jax-privacy 2.0.0, numpy 2.4.6.
# Behaviour: DpParams has a sampling_method, POISSON or FIXED_BATCH_SIZE, and compute_epsilon follows
#   it. calibrate_noise_multiplier, calibrate_num_updates and calibrate_batch_size have no such
#   parameter, and their documents do not name the sampling. The noise that is found for ε = 1 with
#   256 of 60,000 records and 1,000 steps has ε = 7.4 for batches of fixed size.
# Expected: the parameter, or a sentence about it.
# Instead: compute ε once more with the sampling method of the loader, and search the noise by that.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'jax-privacy==2.0.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
calibrated for 1.0: POISSON 0.99
calibrated for 1.0: FIXED_BATCH_SIZE 7.40
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from jax_privacy.accounting import accountants, analysis, calibrate

accountant = analysis.DpsgdTrainingAccountant(accountants.RdpAccountantConfig())
noise = calibrate.calibrate_noise_multiplier(
    target_epsilon=1.0, accountant=accountant, batch_sizes=256, num_updates=1000,
    num_samples=60_000, target_delta=1e-5,
)
for method in analysis.SamplingMethod:
    if method.name in ('POISSON', 'FIXED_BATCH_SIZE'):
        settings = analysis.DpParams(
            noise_multipliers=noise, batch_size=256, num_samples=60_000, delta=1e-5,
            sampling_method=method,
        )
        print(f'calibrated for 1.0: {method.name} {accountant.compute_epsilon(1000, settings):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
