#!/usr/bin/env bash
# actuarialpy finds no internal rate of return for money that doubles within a year.
#
# Packages: actuarialpy 0.46.3, pandas 2.3.3, numpy 2.4.6.
# Behaviour: internal_rate_of_return looks for a change of the sign of the net present value between
#   points of a grid. Where the value is exactly 0 at a point, neither side is a change of sign. The
#   rate of 100 % is such a point: 100 that become 200 raise "no sign change in NPV over the search
#   range", where 199.9 have 99.9 % and 200.1 have 100.1 %.
# Expected: 1.0.
# Instead: look at net_present_value(1.0, cashflows) first, which is 0 then.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'actuarialpy==0.46.3' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
[-100, 199.9]: 0.9990; net present value at 100 % -0.05
[-100, 200]: ValueError: no sign change in NPV over the search range; IRR not found.; net present value at 100 % 0.00
[-100, 200.1]: 1.0010; net present value at 100 % 0.05
[-100, 150, 100]: ValueError: no sign change in NPV over the search range; IRR not found.; net present value at 100 % 0.00
[-300, 0, 0, 2400]: ValueError: no sign change in NPV over the search range; IRR not found.; net present value at 100 % 0.00
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from actuarialpy.financial import internal_rate_of_return, net_present_value

for flows in ([-100, 199.9], [-100, 200], [-100, 200.1], [-100, 150, 100], [-300, 0, 0, 2400]):
    try:
        seen = f'{internal_rate_of_return(flows):.4f}'
    except ValueError as error:
        seen = f'ValueError: {error}'
    print(f'{flows}: {seen}; net present value at 100 % {net_present_value(1.0, flows):.2f}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
