#!/usr/bin/env bash
# hypnofunk counts the onset of REM sleep from another start than all other onsets, and by default gives a
# patient who lies awake for the last three hours a sleep efficiency of 95 %.
#
# Packages: hypnofunk 0.4.0, pandas 2.3.3, numpy 2.4.6.
# Behaviour: R_onset is counted from the onset of sleep and the other onsets from the start, so REM sleep
#   comes before the stage that it follows. The percentages of stages are said to be of the sleep period
#   and are of the total sleep. hypnoman removes the wake at the end but for five minutes and calls the
#   rest the total recording time, so early waking has no effect on the efficiency.
# Expected: "Stage onset times (minutes from start)" for all stages, percentages as documented, and total
#   sleep over the time from lights out to lights on: 62 %.
# Why it matters here: early waking is a symptom; by these columns the nights look alike.
# Instead: R_onset + SOL, and trim_wake=False.
# Source: the package's documentation; American Academy of Sleep Medicine, Manual for the scoring of
#   sleep, parameters to be reported: sleep efficiency is TST / TRT, lights out to lights on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'hypnofunk==0.4.0' 'pandas==2.3.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
up at once, trim_wake=True: recording 323 min, efficiency 97 %, awake after onset 1 min
up at once, trim_wake=False: recording 323 min, efficiency 97 %, awake after onset 1 min
awake for three hours, trim_wake=True: recording 328 min, efficiency 95 %, awake after onset 6 min
awake for three hours, trim_wake=False: recording 503 min, efficiency 62 %, awake after onset 181 min
awake for the first 60 minutes, onsets: N1 60, N2 62, R 17
documented: True True
awake for 60 minutes within: N2 64 %, of the sleep period 54 %
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from hypnofunk.core import hypnoman

night = ['W'] * 20 + ['N1'] * 4 + ['N2'] * 300 + ['W'] * 2 + ['R'] * 220 + ['N2'] * 100
late = ['W'] * 120 + ['N1'] * 4 + ['N2'] * 30 + ['R'] * 100 + ['N2'] * 400
for name, stages in (('up at once', night), ('awake for three hours', night + ['W'] * 360)):
    for trim in (True, False):
        seen = hypnoman(stages, trim_wake=trim).iloc[0]
        print(f'{name}, trim_wake={trim}: recording {seen.TRT:.0f} min, efficiency',
              f'{seen.Sleep_efficiency:.0f} %, awake after onset {seen.WASO:.0f} min')
seen = hypnoman(late).iloc[0]
print(f'awake for the first 60 minutes, onsets: N1 {seen.N1_onset:.0f}, N2 {seen.N2_onset:.0f},',
      f'R {seen.R_onset:.0f}')
print('documented:', 'minutes from start' in open(hypnoman.__code__.co_filename).read(),
      'relative to Sleep Period Time' in hypnoman.__doc__)
broken = night[:200] + ['W'] * 120 + night[200:]
print(f'awake for 60 minutes within: N2 {hypnoman(broken).N2_percentage[0]:.0f} %,',
      f'of the sleep period {100 * broken.count("N2") / (len(broken) - 20):.0f} %')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
