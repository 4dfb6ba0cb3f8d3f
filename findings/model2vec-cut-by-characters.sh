#!/usr/bin/env bash
# model2vec cuts a text after characters, not tokens, so that words are lost long before the stated
# length.
#
# Packages: model2vec 0.10.0, tokenizers 0.22.2, numpy 2.4.6.
# Behaviour: max_length is documented as a number of tokens, 512 by default. encode first cuts each text
#   to max_length times the median length of the vocabulary's tokens, blanks included. Where the
#   vocabulary holds many short codes and the text long words, a letter of 200 tokens loses its second
#   half, and the word at the cut is cut too. Nothing is said.
# Expected: the first 512 tokens; this letter has fewer.
# Why it matters here: what stands last in a letter, the diagnosis, is missing in its vector.
# Instead: max_length=None, and a truncation of one's own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'model2vec==0.10.0' 'tokenizers==0.22.2' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
tokens 200 of at most 512 characters 3299 median length of a token 3
default: {'[UNK]': 0.0, 'acetylsalicylate': 0.506, 'hydrochlorothiazide': 0.494, 'methylprednisolone': 0.0, 'carcinoma': 0.0}
max_length=512: {'[UNK]': 0.0, 'acetylsalicylate': 0.506, 'hydrochlorothiazide': 0.494, 'methylprednisolone': 0.0, 'carcinoma': 0.0}
max_length=None: {'[UNK]': 0.0, 'acetylsalicylate': 0.25, 'hydrochlorothiazide': 0.25, 'methylprednisolone': 0.25, 'carcinoma': 0.25}
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import numpy as np
from model2vec import StaticModel
from tokenizers import Tokenizer, models, pre_tokenizers

drugs = ['acetylsalicylate', 'hydrochlorothiazide', 'methylprednisolone', 'carcinoma']
codes = [f'{letter}{number:02d}' for letter in 'ABCDEFGHIJ' for number in range(100)]
vocabulary = {word: index for index, word in enumerate(['[UNK]', *drugs, *codes])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token='[UNK]'))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
# each word has a dimension of its own: the vector of a text holds the shares of its words
model = StaticModel(np.eye(len(vocabulary), dtype='float32'), tokenizer, normalize=False)

letter = ' '.join(drugs[:2] * 50 + drugs[2:] * 50)
print('tokens', len(letter.split()), 'of at most', model.max_length, 'characters', len(letter),
      'median length of a token', model.median_token_length)
for name, vector in (('default', model.encode(letter)),
                     ('max_length=512', model.encode(letter, max_length=512)),
                     ('max_length=None', model.encode(letter, max_length=None))):
    shares = {word: round(float(vector[vocabulary[word]]), 3) for word in ['[UNK]', *drugs]}
    print(f'{name}: {shares}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
