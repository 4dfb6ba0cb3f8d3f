#!/usr/bin/env bash
# The Damerau-Levenshtein distance of hermetrics replaces the letters between two exchanged ones for
# nothing: axb and bya, which have no letter in the same place, are two edits apart in place of three.
#
# Packages: hermetrics 0.1.13.
# Behaviour: letters that stand between two exchanged ones have to be deleted and inserted, so that the
#   prices of both are added. The source has this sum as a comment and takes the larger of the two, so that
#   the letters between are replaced for nothing. The distance is smaller than the number of edits, and
#   breaks the triangle inequality.
# Expected: the number of deletions, insertions, replacements and exchanges of neighbours, as a search
#   through all edits finds it here.
# Why it matters here: names and numbers that differ in every letter look alike to a record linkage.
# Instead: OSA of the same package, which allows an exchange of neighbours only.
# Source: Lowrance and Wagner, An extension of the string-to-string correction problem, 1975.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'hermetrics==0.1.13'
cat > expected.txt <<'EXPECTED'
ab ba: 1, similarity 0.50; shortest way 1
ca abc: 2, similarity 0.33; shortest way 2
axb bya: 2, similarity 0.33; shortest way 3
1x2 2y1: 2, similarity 0.33; shortest way 3
axxb byya: 3, similarity 0.25; shortest way 4
words of two and three letters a, b and c: 12 of 1296 distances too small
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from itertools import product

from hermetrics.damerau_levenshtein import DamerauLevenshtein

metric = DamerauLevenshtein()


def edit(text, letters):
    for place in range(len(text) + 1):
        head, tail = text[:place], text[place:]
        yield from (head + letter + tail for letter in letters)
        if tail:
            yield head + tail[1:]
            yield from (head + letter + tail[1:] for letter in letters)
        if len(tail) > 1:
            yield head + tail[1] + tail[0] + tail[2:]


def search(source, target):
    seen, edge, steps = {source}, {source}, 0
    while target not in seen:
        edge = {text for old in edge for text in edit(old, sorted(set(source + target)))} - seen
        edge = {text for text in edge if len(text) <= max(len(source), len(target)) + 1}
        seen, steps = seen | edge, steps + 1
    return steps


for source, target in (('ab', 'ba'), ('ca', 'abc'), ('axb', 'bya'), ('1x2', '2y1'), ('axxb', 'byya')):
    print(f'{source} {target}: {metric.distance(source, target)}, similarity '
          f'{metric.similarity(source, target):.2f}; shortest way {search(source, target)}')
words = [''.join(letters) for length in (2, 3) for letters in product('abc', repeat=length)]
pairs = [(one, other) for one in words for other in words]
wrong = sum(metric.distance(*pair) != search(*pair) for pair in pairs)
print(f'words of two and three letters a, b and c: {wrong} of {len(pairs)} distances too small')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
