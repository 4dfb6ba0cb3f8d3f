#!/usr/bin/env bash
# tmval scales the second bond of an immunised portfolio by the weight of the first.
#
# Packages: tmval 0.0.12, numpy 1.23.5, scipy 1.10.1, python-dateutil 2.9.0.post0.
# Behaviour: reddingtonize returns two bonds that are to match a payment in present value and duration. The
#   face of the second bond, from which its coupons follow, is multiplied by the factor of the first bond,
#   its redemption by its own factor. With coupons, the present value and the duration miss the payment.
# Expected: two bonds worth the payment with its duration, as the weights by hand give.
# Instead: scale the face of the second bond by hand, price by price.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'tmval==0.0.12' 'numpy==1.23.5' 'scipy==1.10.1' 'python-dateutil==2.9.0.post0'
cat > expected.txt <<'EXPECTED'
payment of 100000 after 7 years: worth 71068.13
bonds of reddingtonize: worth 85784.89, duration 7.3265; face 43147.80 43147.80 ; redemption 43147.80 23465.96
by hand: face 43147.80 23465.96, worth 71068.13, duration 7.0000
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from tmval.bond import Bond
from tmval.portfolio import macaulay_duration, reddingtonize

rate, due, amount = 0.05, 7, 100000
bonds = [Bond(face=1000, red=1000, alpha=0.06, cfreq=1, term=term, gr=rate) for term in (4, 20)]
value = amount / (1 + rate) ** due
seen = reddingtonize(fv=amount, t=due, gr=rate, portfolio=bonds)
print(f'payment of {amount} after {due} years: worth {value:.2f}')
print(f'bonds of reddingtonize: worth {sum(bond.price for bond in seen):.2f}, duration {macaulay_duration(seen):.4f};',
      'face', *[f'{bond.face:.2f}' for bond in seen], '; redemption', *[f'{bond.red:.2f}' for bond in seen])


def measure(face, term):
    flows = [(year, 0.06 * face + (face if year == term else 0)) for year in range(1, term + 1)]
    price = sum(flow / (1 + rate) ** year for year, flow in flows)
    return price, sum(year * flow / (1 + rate) ** year for year, flow in flows) / price


(short, first), (long, second) = measure(1000, 4), measure(1000, 20)
part = (second - due) / (second - first)
faces = 1000 * part * value / short, 1000 * (1 - part) * value / long
checks = measure(faces[0], 4), measure(faces[1], 20)
print(f'by hand: face {faces[0]:.2f} {faces[1]:.2f}, worth {sum(price for price, _ in checks):.2f}, duration',
      f'{sum(price * length for price, length in checks) / value:.4f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
