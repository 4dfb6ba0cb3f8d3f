#!/usr/bin/env bash
# The weight of evidence of mlencoders is 0, no information, for a region in which everybody defaulted and
# for one in which nobody did.
#
# Packages: mlencoders 1.3.2, category_encoders 2.11.2, pandas 2.3.3, numpy 2.4.6, scikit-learn 1.7.2.
# Behaviour: a category without defaults, or with nothing else, is treated like one with too few people, and
#   gets 0, the value of a category with the mean rate. With one person of 1000 on the other side it is
#   6.9 or -6.9, so the encoded column is not monotone in the rate of defaults.
# Expected: a large value of the right sign, as with a half added to each count.
# Why it matters here: rare categories are pure by chance, and large ones lose the best predictor.
# Instead: category_encoders.WOEEncoder, whose regularization adds to the counts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'mlencoders==1.3.2' 'category_encoders==2.11.2' 'pandas==2.3.3' 'numpy==2.4.6' 'scikit-learn==1.7.2'
cat > expected.txt <<'EXPECTED'
region a, 1000 of 1000 default: mlencoders 0.0, category_encoders 6.9
region b, 999 of 1000 default: mlencoders 6.9, category_encoders 6.2
region c, 990 of 1000 default: mlencoders 4.6, category_encoders 4.5
region d, 500 of 1000 default: mlencoders 0.0, category_encoders 0.0
region e, 10 of 1000 default: mlencoders -4.6, category_encoders -4.5
region f, 1 of 1000 default: mlencoders -6.9, category_encoders -6.2
region g, 0 of 1000 default: mlencoders 0.0, category_encoders -6.9
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import pandas as pd
from category_encoders import WOEEncoder
from mlencoders.weight_of_evidence_encoder import WeightOfEvidenceEncoder

DEFAULTS = {'a': 1000, 'b': 999, 'c': 990, 'd': 500, 'e': 10, 'f': 1, 'g': 0}
region = pd.DataFrame({'region': [name for name in DEFAULTS for _ in range(1000)]})
defaulted = pd.Series([int(person < count) for count in DEFAULTS.values() for person in range(1000)])
encoder = WeightOfEvidenceEncoder(cols=['region'])
seen = encoder.fit_transform(region, defaulted)['region']
other = WOEEncoder(cols=['region']).fit(region, defaulted).transform(region)['region']
for index, (name, count) in enumerate(DEFAULTS.items()):
    print(f'region {name}, {count} of 1000 default: mlencoders {seen[index * 1000]:.1f}, '
          f'category_encoders {other[index * 1000]:.1f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
