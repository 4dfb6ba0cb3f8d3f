#!/usr/bin/env bash
# In estnin, a + 1 changes a: the next identity number and the number that it was computed from are the same
# object, -a turns a man into a woman, and a comparison with the next number changes the person.
#
# Packages: estnin 1.0.1.
# Behaviour: addition, subtraction and negation change the object on their left and return it.
# Expected: a new number, as for int, str and date, and as iterating over a number makes one. The examples of the
#   documentation compare with literals, where nobody sees the change.
# Why it matters here: a list of people is overwritten by looking at it.
# Instead: estnin(a) + 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'estnin==1.0.1'
cat > expected.txt <<'EXPECTED'
a = 37001011233, b = a + 1: a 37001011244, b 37001011244, a is b True
-a: 47001011234, then a: 47001011234, a man False
neighbours: [True] then [37001011244, 37001011244]
asked again: [False] then [37001011255, 37001011244]
a + 1 == a: True
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from estnin import estnin

person = estnin(37001011233)
following = person + 1
print(f'a = 37001011233, b = a + 1: a {person}, b {following}, a is b {person is following}')
person = estnin(37001011233)
print(f'-a: {-person}, then a: {person}, a man {person.is_male}')
family = [estnin(37001011233), estnin(37001011244)]
print('neighbours:', [first + 1 == second for first, second in zip(family, family[1:])], 'then', family)
print('asked again:', [first + 1 == second for first, second in zip(family, family[1:])], 'then', family)
print('a + 1 == a:', person + 1 == person)
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
