#!/usr/bin/env bash
# A byte-pair encoding of tokenizers drops characters that it did not meet in training, numbers and signs
# with them.
#
# Packages: tokenizers 0.23.3.
# Behaviour: models.BPE() has no unknown token by default. A character that was not in the texts of the
#   training is left out of the encoding without a trace: "39" and "≥" vanish, and texts that differ by
#   them have equal tokens. The other three models of the package raise an error that names the missing
#   unknown token.
# Expected: the same error, or a token that says that something stood there.
# Why it matters here: a vocabulary of one hospital's notes meets the signs and digits of another.
# Instead: unk_token and special_tokens, or the byte-level pre-tokenizer with its whole alphabet.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'tokenizers==0.23.3'
cat > expected.txt <<'EXPECTED'
BPE: temperature ≥ 39 -> ['temperature']
BPE: temperature 36 -> ['temperature']
BPE: potassium 2.1 -> ['potassium']
Unigram: temperature ≥ 39 -> Encountered an unknown token but `unk_id` is missing
Unigram: temperature 36 -> Encountered an unknown token but `unk_id` is missing
Unigram: potassium 2.1 -> Encountered an unknown token but `unk_id` is missing
WordLevel: temperature ≥ 39 -> WordLevel error: Missing [UNK] token from the vocabulary
WordLevel: temperature 36 -> WordLevel error: Missing [UNK] token from the vocabulary
WordLevel: potassium 2.1 -> WordLevel error: Missing [UNK] token from the vocabulary
WordPiece: temperature ≥ 39 -> WordPiece error: Missing [UNK] token from the vocabulary
WordPiece: temperature 36 -> WordPiece error: Missing [UNK] token from the vocabulary
WordPiece: potassium 2.1 -> WordPiece error: Missing [UNK] token from the vocabulary
EXPECTED
env/bin/python -W ignore - > seen.txt <<'PYTHON'
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

notes = ['the patient had a high temperature', 'potassium was low', 'no pain, no cough'] * 20
for model, trainer in (
    (models.BPE(), trainers.BpeTrainer(vocab_size=300, show_progress=False)),
    (models.Unigram(), trainers.UnigramTrainer(vocab_size=60, show_progress=False)),
    (models.WordLevel(), trainers.WordLevelTrainer(show_progress=False)),
    (models.WordPiece(), trainers.WordPieceTrainer(vocab_size=300, show_progress=False)),
):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(notes, trainer)
    for text in ('temperature ≥ 39', 'temperature 36', 'potassium 2.1'):
        try:
            print(f'{type(model).__name__}: {text} -> {tokenizer.encode(text).tokens}')
        except Exception as error:
            print(f'{type(model).__name__}: {text} -> {error}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
