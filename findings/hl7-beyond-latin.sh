#!/usr/bin/env bash
# hl7 escapes characters beyond Latin-1 so that its own reader returns other characters: "≥" becomes "e
# with a quotation mark.
#
# Packages: hl7 0.4.5.
# Behaviour: escape() writes a character that is not ASCII as \X..\ with the number of its code point,
#   and unescape() reads the digits in pairs as single characters. "≥39" is sent as \X2265\39 and read as
#   "e39 with a quotation mark, "≤" as "d, and of "Łukasz" two control characters stay. A tabulator is
#   sent as "\X 9\", which has a blank for a digit. "µ" and "ü" are right.
# Expected: what was escaped, or an error. HL7 gives \X..\ for bytes, in the character set of MSH-18.
# Why it matters here: limits of detection and names are in the notes that models are trained on.
# Instead: escape only the separators, and send the text in UTF-8 with MSH-18 UNICODE UTF-8.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'hl7==0.4.5'
cat > expected.txt <<'EXPECTED'
'CRP ≥ 39' sent as CRP \X2265\ 39, read as 'CRP "e 39' CHANGED
'CRP ≤ 39' sent as CRP \X2264\ 39, read as 'CRP "d 39' CHANGED
'Łukasz' sent as \X141\ukasz, read as '\x14\x01ukasz' CHANGED
'东京' sent as \X4e1c\\X4eac\, read as 'N\x1cN¬' CHANGED
'dose\t5' sent as dose\X 9\5, read as 'dose\t5' 
'5 µmol' sent as 5 \Xb5\mol, read as '5 µmol' 
'Müller' sent as M\Xfc\ller, read as 'Müller' 
'a & b' sent as a \T\ b, read as 'a & b' 
EXPECTED
PYTHONIOENCODING=utf-8 env/bin/python -W ignore - > seen.txt <<'PYTHON'
import hl7

message = hl7.parse('MSH|^~\\&|A|B|C|D|20200101||ORU^R01|1|P|2.5.1\r')
for text in ('CRP ≥ 39', 'CRP ≤ 39', 'Łukasz', '东京', 'dose\t5', '5 µmol', 'Müller', 'a & b'):
    sent = message.escape(text)
    read = message.unescape(sent)
    print(f'{text!r} sent as {sent}, read as {read!r}', '' if read == text else 'CHANGED')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
