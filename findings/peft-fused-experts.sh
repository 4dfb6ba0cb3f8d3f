#!/usr/bin/env bash
# One list of target modules adapts the experts of one model with LoRA, a part of them in another,
# and none in a third, and peft says nothing.
#
# Packages: peft 0.21.2, transformers 5.24.0, torch 2.13.0 (CPU build), numpy 2.4.6.
# Behaviour: transformers 5 holds the experts of a layer in two tensors, gate_up_proj and down_proj,
#   whatever the model's checkpoint calls them. peft translates the names of the checkpoint: w1, w2
#   and w3 for Mixtral, gate_proj, up_proj and down_proj for Qwen3-MoE. Names of another model, or of
#   the tensors themselves, match a part of the experts or none. Where both are found, the first
#   tensor gets twice the rank that was asked for. If an attention layer matches too, there is
#   no error: the experts stay frozen.
# Expected: the same part trains whichever of the names is used, or an error; rank 2 where r = 2.
# Instead: target_parameters=[...] with the names of the tensors, and count what is trainable.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'torch==2.13.0' 'transformers==5.24.0' 'peft==0.21.2' 'numpy==2.4.6'
cat > expected.txt <<'EXPECTED'
Mixtral, gate_proj up_proj down_proj: rank 0 and 0
Mixtral, w1 w2 w3: rank 4 and 2
Mixtral, gate_up_proj down_proj: rank 0 and 0
Mixtral, target_parameters: rank 2 and 2
Qwen3-MoE, gate_proj up_proj down_proj: rank 4 and 2
Qwen3-MoE, w1 w2 w3: rank 0 and 0
Qwen3-MoE, gate_up_proj down_proj: rank 0 and 2
Qwen3-MoE, target_parameters: rank 2 and 2
EXPECTED
env/bin/python -W ignore - > seen.txt 2> messages.txt <<'PYTHON'
from peft import LoraConfig, get_peft_model
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

EXPERTS, WIDTH, INNER = 4, 16, 32
sizes = dict(vocab_size=32, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=1,
             num_attention_heads=2, num_key_value_heads=2)
models = {
    'Mixtral': lambda: MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=EXPERTS)),
    'Qwen3-MoE': lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(
        **sizes, head_dim=8, num_experts=EXPERTS, moe_intermediate_size=INNER)),
}
names = ('gate_proj up_proj down_proj', 'w1 w2 w3', 'gate_up_proj down_proj')
tensors = ['mlp.experts.gate_up_proj', 'mlp.experts.down_proj']
for title, make in models.items():
    choices = {name: {'target_modules': ['q_proj', *name.split()]} for name in names}
    choices['target_parameters'] = {'target_modules': ['q_proj'], 'target_parameters': tensors}
    for choice, settings in choices.items():
        adapted = get_peft_model(make(), LoraConfig(r=2, **settings))
        # gate_up_proj reads the hidden state, down_proj what lies within an expert.
        rank = {WIDTH: 0, INNER: 0}
        for name, p in adapted.named_parameters():
            if 'experts' in name and 'lora_A' in name:
                rank[p.shape[1]] = p.shape[0] // EXPERTS
        print(f'{title}, {choice}: rank {rank[WIDTH]} and {rank[INNER]}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
