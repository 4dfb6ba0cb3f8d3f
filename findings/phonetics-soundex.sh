#!/usr/bin/env bash
# Two packages give names other Soundex codes than the standard, and one other NYSIIS codes.
#
# Packages: phonetics 1.0.5, pyphonetics 0.5.3, jellyfish 1.3.0 (which follows the standard).
# Behaviour: a Soundex code is a letter and three digits. phonetics writes vowels as 0 and does not
#   stop after three digits. pyphonetics compares the first letter with the second code in the wrong
#   place, so a name whose first two letters have one digit (Pfister, Lloyd, Schmidt) keeps it. The
#   NYSIIS codes of phonetics are two letters, so that Robert and Rubin, or Lee and Lloyd, are one.
# Expected: the codes of the National Archives, which each national table of names has.
# Why it matters here: records of one person are linked by these codes, and the unit that ε protects
#   is the person who comes out. Two spellings that are not linked are two units.
# Instead: jellyfish.soundex and jellyfish.nysiis.
# Source: National Archives, Soundex System; its examples are used here.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'phonetics==1.0.5' 'pyphonetics==0.5.3' 'jellyfish==1.3.0'
cat > expected.txt <<'EXPECTED'
Washington: W252; jellyfish W252, phonetics W02052305, pyphonetics W252
Lee: L000; jellyfish L000, phonetics L000, pyphonetics L000
Gutierrez: G362; jellyfish G362, phonetics G030602, pyphonetics G362
Pfister: P236; jellyfish P236, phonetics P102306, pyphonetics P123
Jackson: J250; jellyfish J250, phonetics J0205, pyphonetics J250
Tymczak: T522; jellyfish T522, phonetics T05202, pyphonetics T522
Ashcraft: A261; jellyfish A261, phonetics A2026013, pyphonetics A261
Lloyd Loyd have one code: jellyfish True, phonetics False, pyphonetics False
Schmidt Smith have one code: jellyfish True, phonetics False, pyphonetics False
Robert Rupert have one code: jellyfish True, phonetics True, pyphonetics True
Robert Rubin NYSIIS: jellyfish RABAD RABAN, phonetics RA RA
Lee Lloyd NYSIIS: jellyfish LY LAYD, phonetics LA LA
Gutierrez Gates NYSIIS: jellyfish GATAR GAT, phonetics GA GA
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import jellyfish
import phonetics
import pyphonetics

archives = {  # examples of the National Archives
    'Washington': 'W252', 'Lee': 'L000', 'Gutierrez': 'G362', 'Pfister': 'P236', 'Jackson': 'J250',
    'Tymczak': 'T522', 'Ashcraft': 'A261',
}
soundex = {
    'jellyfish': jellyfish.soundex,
    'phonetics': phonetics.soundex,
    'pyphonetics': pyphonetics.Soundex().phonetics,
}
for name, code in archives.items():
    print(f'{name}: {code};', ', '.join(f'{key} {function(name)}' for key, function in soundex.items()))
for pair in (('Lloyd', 'Loyd'), ('Schmidt', 'Smith'), ('Robert', 'Rupert')):
    equal = {key: len({function(name) for name in pair}) == 1 for key, function in soundex.items()}
    print(*pair, 'have one code:', ', '.join(f'{key} {value}' for key, value in equal.items()))
for pair in (('Robert', 'Rubin'), ('Lee', 'Lloyd'), ('Gutierrez', 'Gates')):
    print(*pair, 'NYSIIS:', ', '.join(
        f'{key} {" ".join(function(name) for name in pair)}'
        for key, function in (('jellyfish', jellyfish.nysiis), ('phonetics', phonetics.nysiis))))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
