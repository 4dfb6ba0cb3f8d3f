#!/usr/bin/env bash
# The practical price of a bond at another yield is the price at its own yield in tmval.
#
# Packages: tmval 0.0.12, numpy 1.23.5, scipy 1.10.1, python-dateutil 2.9.0.post0.
# Behaviour: Bond.dirty takes gr, "the valuation yield, if pricing a bond at a different yield". With
#   tprac='practical' it computes the value of the coupons at that yield and does not use it: the price is
#   the one at the bond's own yield for every gr. The theoretical price follows gr.
# Expected: the value at the last coupon at the yield given, with simple interest at it from there.
# Instead: make a Bond with the other yield and take its practical price.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'tmval==0.0.12' 'numpy==1.23.5' 'scipy==1.10.1' 'python-dateutil==2.9.0.post0'
cat > expected.txt <<'EXPECTED'
yield 3%: practical 1052.91, theoretical 1101.01; by hand 1101.13 and 1101.01; practical of a bond with that yield 1101.13
yield 5%: practical 1052.91, theoretical 1052.60; by hand 1052.91 and 1052.60; practical of a bond with that yield 1052.91
yield 8%: practical 1052.91, theoretical 985.67; by hand 986.40 and 985.67; practical of a bond with that yield 986.40
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from tmval.bond import Bond

face, coupon, term, time = 1000, 0.06, 5, 2.5
bond = Bond(face=face, red=face, alpha=coupon, cfreq=1, term=term, gr=0.05)
for rate in (0.03, 0.05, 0.08):
    other = Bond(face=face, red=face, alpha=coupon, cfreq=1, term=term, gr=rate)
    left = term - int(time)
    value = sum(face * coupon / (1 + rate) ** year for year in range(1, left + 1)) + face / (1 + rate) ** left
    print(f'yield {rate:.0%}: practical {bond.dirty(t=time, tprac="practical", gr=rate):.2f},',
          f'theoretical {bond.dirty(t=time, gr=rate):.2f}; by hand',
          f'{value * (1 + rate * (time - int(time))):.2f} and {value * (1 + rate) ** (time - int(time)):.2f};',
          f'practical of a bond with that yield {other.dirty(t=time, tprac="practical"):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
