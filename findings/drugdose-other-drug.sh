#!/usr/bin/env bash
# drugdose answers a question about a drug that it does not know with another one's dose.
#
# Packages: drugdose 0.1.2.
# Behaviour: get_drug takes a name that contains the name of a drug of its table for that drug:
#   apomorphine, for Parkinson's disease, is dosed as morphine, esketamine as ketamine, which is half as
#   strong, prednisolone as methylprednisolone. The result has no warning; only its display name differs.
# Expected: DrugNotFoundError, as for other drugs that are not in the table.
# Instead: compare DoseResult.drug_name with the name that was asked for.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'drugdose==0.1.2'
cat > expected.txt <<'EXPECTED'
morphine, in the table True: Morphine Sulfate IV: 7.00 mg → 7.00 mL; warnings about the name: 0
apomorphine, in the table False: Morphine Sulfate IV: 7.00 mg → 7.00 mL; warnings about the name: 0
esketamine, in the table False: Ketamine IV: 140.00 mg → 14.00 mL; warnings about the name: 0
prednisolone, in the table False: Methylprednisolone Sodium Succinate IV: 125.00 mg → 2.00 mL; warnings about the name: 0
levalbuterol, in the table False: Albuterol (Salbutamol) INH: 5.00 mg → 1.00 mL; warnings about the name: 0
remifentanil, in the table False: DrugNotFoundError
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from drugdose import DrugDoseError, Patient, calculate_dose, get_all_drugs

patient = Patient(weight_kg=70, age_years=60, sex='M')
for name, route in (('morphine', 'IV'), ('apomorphine', 'IV'), ('esketamine', 'IV'), ('prednisolone', 'IV'),
                    ('levalbuterol', 'INH'), ('remifentanil', 'IV')):
    try:
        dose = calculate_dose(name, patient, route)
        said = [warning for warning in dose.warnings if name in warning.lower()]
        answer = f'{dose.summary()}; warnings about the name: {len(said)}'
    except DrugDoseError as error:
        answer = type(error).__name__
    print(f'{name}, in the table {name in get_all_drugs()}: {answer}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
