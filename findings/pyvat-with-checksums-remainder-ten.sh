#!/usr/bin/env bash
# pyvat-with-checksums accepts tax numbers that have no check digit.
#
# Packages: pyvat-with-checksums 0.1.0, python-stdnum 2.2.
# Behaviour: the check digits of Finland, Poland and the Netherlands are remainders by 11. Numbers whose remainder
#   has two digits are not issued. check_vat takes 0 for it, and so accepts one number in ten that is not one:
#   a wrong digit can turn a valid number into one of these.
# Expected: no number for these remainders, as python-stdnum has it.
# Instead: check with python-stdnum.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'pyvat-with-checksums==0.1.0' 'python-stdnum==2.2'
cat > expected.txt <<'EXPECTED'
FI, other remainders: 100% accepted, python-stdnum 100%
FI, remainder 10: 100% accepted, python-stdnum 0%
PL, other remainders: 100% accepted, python-stdnum 100%
PL, remainder 10: 100% accepted, python-stdnum 0%
NL, other remainders: 100% accepted, python-stdnum 100%
NL, remainder 10: 100% accepted, python-stdnum 0%
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import random
from importlib import import_module

from pyvat_with_checksums import check_vat

rules = {'FI': ('fi.alv', (7, 9, 10, 5, 8, 4, 2), -1, ''), 'PL': ('pl.nip', (6, 5, 7, 2, 3, 4, 5, 6, 7), 1, ''),
         'NL': ('nl.bsn', (9, 8, 7, 6, 5, 4, 3, 2), 1, 'B12')}
random.seed(5)
for land, (module, weights, sign, tail) in rules.items():
    other = import_module('stdnum.' + module)
    counts = {}
    for _ in range(3000):
        digits = [random.randint(1, 9) for _ in weights]
        check = sign * sum(weight * digit for weight, digit in zip(weights, digits)) % 11
        number = ''.join(map(str, digits)) + str(check % 10)
        key = 'remainder 10' if check == 10 else 'other remainders'
        tally = counts.setdefault(key, [0, 0, 0])
        tally[0] += 1
        tally[1] += check_vat(land + number + tail).is_valid
        tally[2] += other.is_valid(number)
    for key, (total, seen, hand) in sorted(counts.items()):
        print(f'{land}, {key}: {seen / total:.0%} accepted, python-stdnum {hand / total:.0%}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
