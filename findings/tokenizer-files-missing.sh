#!/usr/bin/env bash
# transformers makes a tokenizer without words where a model's folder has no tokenizer files.
#
# Packages: transformers 5.24.0, tokenizers 0.23.3, numpy 2.4.6.
# Behaviour: for a folder with the configuration of an encoder but no tokenizer files (a trained model
#   saved with model.save_pretrained alone), AutoTokenizer returns a tokenizer that holds only special
#   tokens. All words of BERT become [UNK]; RoBERTa and GPT-2 drop all text. Nothing is said, and
#   a model trains on it.
# Expected: an error that names the missing files, as for Llama.
# Instead: save the tokenizer beside the model, and compare len(tokenizer) with config.vocab_size.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'transformers==5.24.0' 'tokenizers==0.23.3' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
bert: 5 of 30522 tokens, reads ['[CLS] [UNK] [UNK] [SEP]', '[CLS] [UNK] [UNK] [SEP]']
deberta-v2: 7 of 128100 tokens, reads ['[CLS][UNK][UNK][SEP]', '[CLS][UNK][UNK][SEP]']
roberta: 5 of 50265 tokens, reads ['<s></s>', '<s></s>']
gpt2: 1 of 50257 tokens, reads ['', '']
llama: ValueError
EXPECTED
HF_HUB_OFFLINE=1 env/bin/python -W ignore - > seen.txt <<'PYTHON'
from transformers import (
    AutoTokenizer,
    BertConfig,
    DebertaV2Config,
    GPT2Config,
    LlamaConfig,
    RobertaConfig,
)

for kind in (BertConfig, DebertaV2Config, RobertaConfig, GPT2Config, LlamaConfig):
    config = kind()
    config.save_pretrained(kind.__name__)
    try:
        tokenizer = AutoTokenizer.from_pretrained(kind.__name__)
    except ValueError:
        print(f'{config.model_type}: ValueError')
        continue
    texts = [tokenizer.decode(tokenizer(text).input_ids) for text in ('no pain', 'bad fever')]
    print(f'{config.model_type}: {len(tokenizer)} of {config.vocab_size} tokens, reads {texts}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
