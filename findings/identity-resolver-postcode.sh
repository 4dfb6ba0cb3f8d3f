#!/usr/bin/env bash
# identity-resolver makes one person of two who share a postcode and nothing else that both have.
#
# Packages: identity-resolver 0.1.0, numpy 2.2.6.
# Behaviour: the score of a pair is the mean over the fields that both records have. Records are
#   compared within a postcode, so the postcode always agrees. A record with an e-mail address and
#   one with a telephone number have only the postcode in common: their score is 1, more than that of
#   two records of one person with a letter exchanged in the name. The merged record has the address
#   of one and the number of the other, and a third record links them to a whole street.
# Expected: agreement on a field that thousands share is weak evidence, whatever is missing; an exact
#   postcode has a weight of 0.1 in the documented weights.
# Why it matters here: linkage decides whose records are one patient.
# Instead: probabilistic_threshold above 1, which turns the comparison off, or a filter on
#   matched_fields.
# Source: Fellegi and Sunter, A Theory for Record Linkage (1969).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'numpy==2.2.6'
env/bin/python -m pip install -q -q --disable-pip-version-check 'identity-resolver==0.1.0'
cat > expected.txt <<'EXPECTED'
two strangers: 2 records, 1 persons; scores [1.0], of ['zip_code']
forty strangers: 40 records, 1 persons; scores [1.0], of ['zip_code']
one person, a letter exchanged: 2 records, 1 persons; scores [0.9963], of ['first_name', 'last_name', 'address_line1', 'zip_code']
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from identity_resolver import IdentityResolver, Record

people = {
    'two strangers': [Record('1', 'clinic', email='ann@example.org', zip_code='10115'),
                      Record('2', 'pharmacy', phone='2025550143', zip_code='10115')],
    'forty strangers': [Record(f'{i}', 'clinic', zip_code='10115', **{('email', 'phone')[i % 2]: (
        f'p{i}@example.org', f'20255501{i:02}')[i % 2]}) for i in range(40)],
    'one person, a letter exchanged': [
        Record('1', 'clinic', first_name='Anna', last_name='Berg', address_line1='1 Elm Street', zip_code='10115'),
        Record('2', 'pharmacy', first_name='Anne', last_name='Berg', address_line1='1 Elm Street', zip_code='10115')],
}
for title, records in people.items():
    result = IdentityResolver().resolve(records)
    scores = {match.score for match in result.probabilistic_matches}
    print(f'{title}: {len(records)} records, {result.total_clusters} persons; scores {sorted(scores)},',
          f'of {result.probabilistic_matches[0].matched_fields}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
