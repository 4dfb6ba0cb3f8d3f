#!/usr/bin/env bash
# The noise dose of smartqhse-hse-calculators has the criterion of OSHA with the exchange rate of
# ACGIH: three times too little.
#
# Packages: smartqhse-hse-calculators 0.1.0.
# Behaviour: calculate_noise_dose documents an exchange rate of 5 dB for OSHA and of 3 dB for ACGIH and
#   the European directive. The criterion is 90 dB(A) for eight hours in both cases, where it is 85 for
#   ACGIH, and 87 is the limit of the directive. With 3 dB each dose is 0.31 of the right one: 88 dB(A)
#   for a whole day is a dose of 63 % and does not exceed the limit, where it is 200 %.
# Expected: a dose of 100 % for 85 dB(A) and eight hours by ACGIH.
# Instead: multiply the dose by 2 ** (5 / 3).
# Source: ACGIH, Threshold Limit Values, audible sound; Directive 2003/10/EC, article 3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'smartqhse-hse-calculators==0.1.0'
cat > expected.txt <<'EXPECTED'
85 dB(A) for 8 hours, 3 dB: dose 32 %, limit exceeded False; with the criterion of 85 dB: 100 %
88 dB(A) for 8 hours, 3 dB: dose 63 %, limit exceeded False; with the criterion of 85 dB: 200 %
88 dB(A) for 4 hours, 3 dB: dose 32 %, limit exceeded False; with the criterion of 85 dB: 100 %
91 dB(A) for 2 hours, 3 dB: dose 32 %, limit exceeded False; with the criterion of 85 dB: 100 %
89.9 dB(A) for 8 hours, 3 dB: dose 98 %, limit exceeded False; with the criterion of 85 dB: 310 %
a day of 4 hours at 88 and 2 at 91: dose 63 %, with 85 dB 200 %
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from smartqhse_hse_calculators import calculate_noise_dose, calculate_noise_exposure

for level, hours in ((85, 8), (88, 8), (88, 4), (91, 2), (89.9, 8)):
    seen = calculate_noise_dose(leq=level, hours=hours, exchange_rate=3)
    right = 100 * hours / (8 / 2 ** ((level - 85) / 3))
    print(f"{level} dB(A) for {hours} hours, 3 dB: dose {seen['dose']:.0f} %, limit exceeded {seen['permissible_exceeded']};",
          f'with the criterion of 85 dB: {right:.0f} %')
day = calculate_noise_exposure(segments=[{'leq': 88, 'hours': 4}, {'leq': 91, 'hours': 2}], exchange_rate=3)
print(f"a day of 4 hours at 88 and 2 at 91: dose {day['dose']:.0f} %, with 85 dB 200 %")
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
