#!/usr/bin/env bash
# TRL's SFTTrainer leaves out rows whose answer lies beyond max_length, without a warning, so the
# number of training rows depends on the texts.
#
# Packages: trl 1.16.0, transformers 5.24.0, datasets 5.2.0, torch 2.13.0 (CPU build), numpy 2.4.6.
# Behaviour: with truncation_mode="keep_start", the default, a row of prompt and completion whose
#   prompt fills max_length has no token to learn, and is removed from train_dataset. The only trace
#   is a progress bar, which counts the rows that were looked at and not those removed. Steps of an
#   epoch, and the sampling rate that an accountant reads from the data set, follow the number of
#   long texts, which is private.
# Expected: as many rows as were given, or a warning with the number that is missing.
# Instead: compare len(trainer.train_dataset) with your rows; truncation_mode="keep_end" keeps them
#   all, and is deprecated.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HF_HUB_OFFLINE=1 HF_HOME="$folder/cache" TRL_DISABLE_TELEMETRY=1
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'trl==1.16.0' 'transformers==5.24.0' 'datasets==5.2.0' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
max_length None, keep_start: 6 of 6 rows
max_length 8, keep_start: 3 of 6 rows
max_length 4, keep_start: 1 of 6 rows
max_length 4, keep_end: 6 of 6 rows
warnings about rows, examples or dropping: 0
EXPECTED
env/bin/python - > seen.txt 2> messages.txt <<'PYTHON'
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = ['<pad>', '</s>', '<unk>', 'note', 'ask', 'yes']
splitter = Tokenizer(models.WordLevel(dict(zip(words, range(6))), unk_token='<unk>'))
splitter.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=splitter, pad_token='<pad>', eos_token='</s>', unk_token='<unk>')
shape = LlamaConfig(vocab_size=6, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                    num_attention_heads=2)
rows = [{'prompt': 'note ' * length + 'ask', 'completion': ' yes'} for length in range(1, 12, 2)]
for limit, mode in ((None, 'keep_start'), (8, 'keep_start'), (4, 'keep_start'), (4, 'keep_end')):
    settings = SFTConfig('out', max_length=limit, truncation_mode=mode, report_to=[],
                         use_cpu=True, bf16=False)
    trainer = SFTTrainer(LlamaForCausalLM(shape), settings, train_dataset=Dataset.from_list(rows),
                         processing_class=tokenizer)
    print(f'max_length {limit}, {mode}: {len(trainer.train_dataset)} of {len(rows)} rows')
PYTHON
count=$(grep -i warn messages.txt | grep -i -c -e ' row' -e example -e drop || true)
echo "warnings about rows, examples or dropping: $count" >> seen.txt
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
