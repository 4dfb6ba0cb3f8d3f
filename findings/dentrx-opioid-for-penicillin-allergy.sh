#!/usr/bin/env bash
# dentrx offers nothing but opioids for toothache to an adult in the United States who is allergic to penicillin: the rule
# with ibuprofen, naproxen and acetaminophen asks for "no allergy to penicillin".
#
# Packages: dentrx 0.1.0.
# Behaviour: a rule that contradicts what is known about the patient is left out. The first-line rule for pain has the
#   trigger penicillin_allergy: none, although none of its drugs is a penicillin. With an allergy one rule is left, "Opioid
#   (reserve, short course)", whose own text says "first line insufficient", and nothing asks for more input.
# Expected: the same rule for pain, with or without an allergy to an antibiotic.
# Why it matters here: about one adult in ten has this allergy in the record. The guideline that is cited puts opioids last.
# Instead: ask for analgesia without the allergy.
# Source: the rules of the package itself, which for children and in the United Kingdom have no such condition; an allergy
#   to penicillin is not a contraindication of ibuprofen or acetaminophen.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'dentrx==0.1.0'
cat > expected.txt <<'EXPECTED'
US, adult, allergy to penicillin none: Ibuprofen; Naproxen sodium; Ibuprofen + acetaminophen; Acetaminophen; Opioid
US, adult, allergy to penicillin non_severe: Opioid
US, adult, allergy to penicillin severe: Opioid
US, child, allergy to penicillin none: Ibuprofen; Acetaminophen; Alternating ibuprofen and acetaminophen
US, child, allergy to penicillin non_severe: Ibuprofen; Acetaminophen; Alternating ibuprofen and acetaminophen
US, child, allergy to penicillin severe: Ibuprofen; Acetaminophen; Alternating ibuprofen and acetaminophen
UK, adult, allergy to penicillin none: Ibuprofen; Paracetamol; Ibuprofen + paracetamol
UK, adult, allergy to penicillin non_severe: Ibuprofen; Paracetamol; Ibuprofen + paracetamol
UK, adult, allergy to penicillin severe: Ibuprofen; Paracetamol; Ibuprofen + paracetamol
rule with the condition: {'penicillin_allergy': 'none'} drugs: ['acetaminophen', 'ibuprofen', 'naproxen sodium']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from dentrx import load_rules, recommend

for jurisdiction, population in (('US', 'adult'), ('US', 'child'), ('UK', 'adult')):
    for allergy in ('none', 'non_severe', 'severe'):
        answer = recommend('analgesia', jurisdiction, population, {'penicillin_allergy': allergy})
        options = [option['label'] for result in answer['results'] for option in result['recommendation'].get('options', [])]
        print(f'{jurisdiction}, {population}, allergy to penicillin {allergy}: {"; ".join(option.split(" (")[0] for option in options)}')
rule = next(rule for rule in load_rules() if rule['pillar'] == 'analgesia' and rule['scenario'].get('triggers'))
print('rule with the condition:', rule['scenario']['triggers'], 'drugs:',
      sorted({part['drug'] for option in rule['recommendation']['options'] for part in option['components']}))
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
