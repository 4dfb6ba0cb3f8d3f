#!/usr/bin/env bash
# aqipy-atmotech tells everybody that no response is required where the air quality health index of
# Hong Kong is serious.
#
# Packages: aqipy-atmotech 0.1.5.
# Behaviour: aqhi_hk has a text for each index from 1 to 11. It looks them up by the index in the table
#   of the added risks, where 8 is in the fifth class and 11 in the sixth. From 7 on people with a
#   heart or lung disease should reduce their exertion, from 8 on everybody should, and at 11 they
#   should avoid it; for all of these it returns "No response action is required" or "is normally
#   required", beside the right level.
# Expected: the text of the index, which the module holds.
# Instead: HK_AQHI_GENERAL[index - 1] and HK_AQHI_RISK[index - 1].
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'aqipy-atmotech==0.1.5'
cat > expected.txt <<'EXPECTED'
index 7, high
  everybody: No response action is required.
    its own text for 7: No response action is required.
  with a heart or lung disease: No response action is normally required. Ind
    its own text for 7: People with existing heart or respiratory illnesses are advised to reduce outdoor physical exer
index 9, very high
  everybody: No response action is required.
    its own text for 9: The general public is advised to reduce outdoor physical exertion, and to r
  with a heart or lung disease: No response action is normally required. Ind
    its own text for 9: People with existing heart or respiratory illnesses are advised to reduce to the minimum outdoo
index 10, very high
  everybody: No response action is required.
    its own text for 10: The general public is advised to reduce outdoor physical exertion, and to r
  with a heart or lung disease: No response action is normally required. Ind
    its own text for 10: People with existing heart or respiratory illnesses are advised to reduce to the minimum outdoo
index 11, serious
  everybody: No response action is required.
    its own text for 11: The general public is advised to reduce to the minimum outdoor physical exe
  with a heart or lung disease: No response action is normally required. Ind
    its own text for 11: People with existing heart or respiratory illnesses are advised to avoid outdoor physical exert
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from aqipy import aqhi_hk

for ozone in (0.075, 0.1, 0.12, 0.15):
    arguments = ozone, 0.04, 0.004, 20, 30
    index, everybody, ill = aqhi_hk.get_aqhi(*arguments)
    level = aqhi_hk.get_aqhi(*arguments, with_level=True)[1]['level']
    print(f'index {index}, {level}')
    print(f'  everybody: {everybody[:42]}')
    print(f'    its own text for {index}: {aqhi_hk.HK_AQHI_GENERAL[index - 1][:75]}')
    print(f'  with a heart or lung disease: {ill[:44]}')
    print(f'    its own text for {index}: {aqhi_hk.HK_AQHI_RISK[index - 1][:95]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
