#!/usr/bin/env bash
# EfficientMetrics stores predicted labels in as few bits as the true labels need, so that others become right
# ones: a model that predicts code 257 for each patient with code 1 has an accuracy of 1.
#
# Packages: efficientmetrics 0.1.0, numpy 1.26.4.
# Behaviour: the classes are the ones of the true labels where none are given, and both arrays are converted
#   to int8 if the largest of them is 127 or less. A predicted code that does not occur in the test table then
#   loses its upper bits: 257 counts as 1, 300 as 44, and 128 as -128. Nothing warns.
# Expected: a predicted code that is not among the true ones is wrong.
# Why it matters here: a model knows all codes of a register, and the table of one hospital has a few of them.
# Instead: np.where(np.isin(found, truth), found, -1), as in the second form.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check 'numpy==1.26.4'
env/bin/python -m pip install -q -q --no-compile --disable-pip-version-check --no-deps 'efficientmetrics==0.1.0'
cat > expected.txt <<'EXPECTED'
all right, as it is: accuracy 1.00, macro F1 1.00; share of right codes 1.00
all right, others replaced: accuracy 1.00, macro F1 1.00; share of right codes 1.00
all wrong by 256, as it is: accuracy 1.00, macro F1 1.00; share of right codes 0.00
all wrong by 256, others replaced: accuracy 0.00, macro F1 0.00; share of right codes 0.00
half wrong by 512, as it is: accuracy 1.00, macro F1 1.00; share of right codes 0.50
half wrong by 512, others replaced: accuracy 0.50, macro F1 0.67; share of right codes 0.50
all wrong by 100, as it is: accuracy 0.00, macro F1 0.00; share of right codes 0.00
all wrong by 100, others replaced: accuracy 0.00, macro F1 0.00; share of right codes 0.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from efficientmetrics import EfficientMetrics

codes = np.arange(400) % 4  # the hospital has the codes 0 to 3 of a register with 1000
models = {'all right': codes, 'all wrong by 256': codes + 256, 'half wrong by 512': codes + 512 * (np.arange(400) < 200),
          'all wrong by 100': codes + 100}
for name, found in models.items():
    for form, given in (('as it is', found), ('others replaced', np.where(np.isin(found, codes), found, -1))):
        metrics = EfficientMetrics(codes, given)
        metrics.calculate_confusion_matrix()
        metrics.classification_report()
        print(f'{name}, {form}: accuracy {metrics.accuracy:.2f}, macro F1 {metrics.f1_macro:.2f}; '
              f'share of right codes {np.mean(found == codes):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
