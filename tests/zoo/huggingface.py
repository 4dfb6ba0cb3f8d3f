"""Tiny models of transformers and peft with random weights; both packages are imported when a model
is built.
"""

import torch
import torch.nn.functional as F

from tests.models import classify, predict_next
from tests.zoo.registry import add_architecture, generator_of, normal

T, V = 6, 23
FLOAT32_INSIDE = 2e-5
# Parameters that the losses here never use; noise alone would reach them.
UNUSED = ("embeddings.mask_token", "masked_spec_embed", "bert.pooler.weight", "bert.pooler.bias")

# -- batches ---------------------------------------------------------------------------------------


def plain_tokens(n):
    """Token ids without padding and a label."""
    g = generator_of(n)
    return {
        "input_ids": torch.randint(3, V, (n, T), generator=g),
        "labels": torch.randint(0, 3, (n,), generator=g),
    }


def padded_tokens(n):
    """Right-padded token ids with their mask and a label."""
    batch = plain_tokens(n)
    lengths = torch.randint(2, T + 1, (n,), generator=generator_of(n + 50))
    mask = (torch.arange(T) < lengths[:, None]).long()
    return {
        "input_ids": batch["input_ids"] * mask,
        "attention_mask": mask,
        "labels": batch["labels"],
    }


def plain_text(n):
    """Token ids that are their own labels."""
    ids = plain_tokens(n)["input_ids"]
    return {"input_ids": ids, "labels": ids}


def padded_text(n):
    """Right-padded token ids whose labels leave padding out."""
    batch = padded_tokens(n)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return {**batch, "labels": labels}


def left_padded_text(n):
    """Left-padded token ids whose labels leave padding out."""
    return {name: x.flip(1) for name, x in padded_text(n).items()}


def translations(n):
    """Source and target token ids."""
    batch = padded_tokens(n)
    target = torch.randint(3, V, (n, 4), generator=generator_of(n + 70))
    first = torch.full((n, 1), 2)
    batch["decoder_input_ids"] = torch.cat([first, target[:, :-1]], 1)
    return {**batch, "labels": target}


def pictures(n, size=8, channels=3):
    """Small images and a label."""
    g = generator_of(n)
    return {
        "pixel_values": normal(n, channels, size, size, generator=g),
        "labels": torch.randint(0, 3, (n,), generator=g),
    }


def spectrograms(n):
    """Log-mel features of 8 frames and target token ids."""
    g = generator_of(n)
    ids = torch.randint(3, V, (n, 4), generator=g)
    return {
        "input_features": normal(n, 4, 8, generator=g),
        "decoder_input_ids": ids,
        "labels": ids.flip(1),
    }


def waveforms(n):
    """Raw audio of 64 samples and a label."""
    g = generator_of(n)
    return {
        "input_values": normal(n, 64, generator=g),
        "labels": torch.randint(0, 3, (n,), generator=g),
    }


# -- losses ----------------------------------------------------------------------------------------


def _inputs(batch):
    return {name: x for name, x in batch.items() if name != "labels"}


def loss_of_tokens(model, batch):
    """Mean cross-entropy over each example's own labelled positions."""
    logits, labels = model(**_inputs(batch)).logits, batch["labels"]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return losses.sum(1) / (labels != -100).sum(1).clamp(min=1)


def loss_of_pooled(model, batch):
    """Cross-entropy of the first three pooled features."""
    return F.cross_entropy(
        model(**_inputs(batch)).pooler_output[:, :3], batch["labels"], reduction="none"
    )


# -- models ----------------------------------------------------------------------------------------


def build(model, config, settings, attention):
    """Make a function that builds a model of transformers in evaluation mode, without dropout."""

    def make():
        import transformers

        more = {"attn_implementation": attention} if attention else {}
        values = getattr(transformers, config)(**settings, **more)
        values.use_cache = False
        result = getattr(transformers, model)(values).double()
        for name, p in result.named_parameters():
            p.data.add_(torch.randn_like(p) * 0.1)
            if name.endswith(UNUSED):
                p.requires_grad_(False)
        return result.eval()

    return make


def add(name, model, config, settings, batch, loss_fn, attention=None, **options):
    """Register a model of transformers."""
    options = {"requires": "transformers", **options}
    add_architecture(
        name, "transformers", build(model, config, settings, attention), batch, loss_fn, **options
    )


_BERT = {
    "vocab_size": V,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 10,
    "max_position_embeddings": 12,
    "num_labels": 3,
    "pad_token_id": 0,
}
_LLAMA = {
    "vocab_size": V,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 10,
    "max_position_embeddings": 12,
    "pad_token_id": 0,
    "head_dim": 4,
}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_BART = {
    "vocab_size": V,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 10,
    "decoder_ffn_dim": 10,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "scale_embedding": True,
    **_ENDS,
}
_VIT = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 10,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 3,
}
_T5 = {
    "vocab_size": V,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 10,
    "num_layers": 2,
    "num_heads": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 8,
}

# Encoders of text.
for _attention in ("eager", "sdpa"):
    add(
        f"bert_{_attention}",
        "BertForSequenceClassification",
        "BertConfig",
        _BERT,
        padded_tokens,
        classify,
        _attention,
    )
add(
    "bert_masked_language_model",
    "BertForMaskedLM",
    "BertConfig",
    _BERT,
    padded_text,
    loss_of_tokens,
)
add(
    "albert",
    "AlbertForSequenceClassification",
    "AlbertConfig",
    _BERT | {"embedding_size": 4},
    padded_tokens,
    classify,
)
add(
    "deberta_v2",
    "DebertaV2ForSequenceClassification",
    "DebertaV2Config",
    _BERT
    | {
        "relative_attention": True,
        "position_biased_input": False,
        "pos_att_type": ["p2c", "c2p"],
        "type_vocab_size": 0,
        "position_buckets": 4,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
    },
    padded_tokens,
    classify,
)
add(
    "roformer",
    "RoFormerForSequenceClassification",
    "RoFormerConfig",
    _BERT | {"embedding_size": 8},
    padded_tokens,
    classify,
)

# Decoders.
_GPT2 = {"vocab_size": V, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 12, **_ENDS}
for _attention in ("eager", "sdpa"):
    add(
        f"gpt2_{_attention}",
        "GPT2LMHeadModel",
        "GPT2Config",
        _GPT2,
        padded_text,
        predict_next,
        _attention,
    )
    add(
        f"llama_{_attention}",
        "LlamaForCausalLM",
        "LlamaConfig",
        _LLAMA | _ENDS,
        padded_text,
        predict_next,
        _attention,
        tolerance=FLOAT32_INSIDE,
    )
add(
    "gpt2_left_padded",
    "GPT2LMHeadModel",
    "GPT2Config",
    _GPT2,
    left_padded_text,
    predict_next,
    "eager",
)
_CAUSAL = {
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {"query_pre_attn_scalar": 4, "sliding_window": 4},
    ),
}
# With a window and padding some positions of Gemma 2 see nothing and become NaN.
_WITHOUT_PADDING = ("gemma2",)
for _name, (_model, _config, _more) in _CAUSAL.items():
    add(
        _name,
        _model,
        _config,
        _LLAMA | _ENDS | {"tie_word_embeddings": True} | _more,
        plain_text if _name in _WITHOUT_PADDING else padded_text,
        predict_next,
        tolerance=FLOAT32_INSIDE,
    )
for _way in ("eager", "batched_mm"):
    add(
        f"mixtral_{_way}",
        "MixtralForCausalLM",
        "MixtralConfig",
        _LLAMA
        | _ENDS
        | {"num_local_experts": 3, "num_experts_per_tok": 2, "experts_implementation": _way},
        padded_text,
        predict_next,
        tolerance=FLOAT32_INSIDE,
    )
add(
    "mamba",
    "MambaForCausalLM",
    "MambaConfig",
    {
        "vocab_size": V,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "state_size": 3,
        "expand": 1,
        "conv_kernel": 2,
        "time_step_rank": 2,
        "pad_token_id": 0,
        **_ENDS,
    },
    plain_text,
    predict_next,
    tolerance=FLOAT32_INSIDE,
)

# Encoders with decoders.
for _attention in ("eager", "sdpa"):
    add(
        f"bart_{_attention}",
        "BartForConditionalGeneration",
        "BartConfig",
        _BART,
        translations,
        loss_of_tokens,
        _attention,
    )
add(
    "t5",
    "T5ForConditionalGeneration",
    "T5Config",
    _T5,
    translations,
    loss_of_tokens,
    tolerance=FLOAT32_INSIDE,
)
add(
    "whisper",
    "WhisperForConditionalGeneration",
    "WhisperConfig",
    {
        "vocab_size": V,
        "num_mel_bins": 4,
        "d_model": 8,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 10,
        "decoder_ffn_dim": 10,
        "max_source_positions": 4,
        "max_target_positions": 8,
        "pad_token_id": 0,
        "decoder_start_token_id": 2,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
        **_ENDS,
    },
    spectrograms,
    loss_of_tokens,
)

# Vision.
for _attention in ("eager", "sdpa"):
    add(
        f"vit_{_attention}",
        "ViTForImageClassification",
        "ViTConfig",
        _VIT,
        pictures,
        classify,
        _attention,
    )
add(
    "dinov2",
    "Dinov2ForImageClassification",
    "Dinov2Config",
    _VIT | {"mlp_ratio": 1},
    pictures,
    classify,
)
add(
    "beit",
    "BeitForImageClassification",
    "BeitConfig",
    _VIT | {"use_relative_position_bias": True, "use_mask_token": False},
    pictures,
    classify,
)
for _version, _more in (("", {}), ("v2", {"pretrained_window_sizes": [0, 0]})):
    add(
        f"swin{_version}",
        f"Swin{_version}ForImageClassification",
        f"Swin{_version}Config",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 4,
            "depths": [2, 1],
            "num_heads": [1, 2],
            "window_size": 4,
            "num_labels": 3,
            "drop_path_rate": 0.0,
            **_more,
        },
        lambda n: pictures(n, 16),
        classify,
    )
add(
    "convnext",
    "ConvNextForImageClassification",
    "ConvNextConfig",
    {
        "num_stages": 2,
        "hidden_sizes": [4, 8],
        "depths": [1, 1],
        "patch_size": 2,
        "num_labels": 3,
        "image_size": 8,
    },
    pictures,
    classify,
)
add(
    "clip_vision",
    "CLIPVisionModel",
    "CLIPVisionConfig",
    _VIT | {"projection_dim": 6},
    pictures,
    loss_of_pooled,
)


def loss_of_segments(model, batch):
    """Cross-entropy of the label at every place of a segmentation."""
    logits = model(pixel_values=batch["pixel_values"]).logits
    labels = batch["labels"][:, None, None].expand(-1, *logits.shape[2:])
    return F.cross_entropy(logits, labels, reduction="none").flatten(1).mean(1)


# Its head reads hidden states, which transformers collects by hooks of the first pass.
add(
    "segformer",
    "SegformerForSemanticSegmentation",
    "SegformerConfig",
    {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [2, 1],
        "hidden_sizes": [4, 8],
        "patch_sizes": [3, 3],
        "strides": [2, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [1, 1],
        "decoder_hidden_size": 6,
        "num_labels": 3,
    },
    lambda n: pictures(n, 16),
    loss_of_segments,
)


def loss_of_queries(model, batch):
    """Cross-entropy of the label under every learnt query of a detector, and the size of its
    boxes.
    """
    output = model(**_inputs(batch))
    labels = batch["labels"][:, None].expand(-1, output.logits.shape[1])
    losses = F.cross_entropy(output.logits.transpose(1, 2), labels, reduction="none")
    return losses.mean(1) + output.pred_boxes.square().flatten(1).sum(1)


def detector():
    """Build DETR on a small ResNet whose batch normalisation is frozen."""
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=4,
        hidden_sizes=[4, 8],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )
    settings = {
        name: _BART[name]
        for name in _BART
        if name.endswith(("_layers", "_heads", "_ffn_dim", "d_model"))
    }
    settings |= {
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "num_queries": 3,
        "num_labels": 3,
    }
    return build(
        "DetrForObjectDetection", "DetrConfig", settings | {"backbone_config": backbone}, None
    )()


add_architecture(
    "detr",
    "transformers",
    detector,
    lambda n: pictures(n, 16),
    loss_of_queries,
    requires="transformers",
)

# Audio and perceivers.
_WAV = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 10,
    "conv_dim": [4, 4],
    "conv_stride": [4, 2],
    "conv_kernel": [4, 2],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "num_labels": 3,
    "classifier_proj_size": 6,
    "vocab_size": V,
}
add(
    "wav2vec2",
    "Wav2Vec2ForSequenceClassification",
    "Wav2Vec2Config",
    _WAV,
    waveforms,
    classify,
)


def recordings(n):
    """Raw audio of 64 samples, padded, with its mask and a label."""
    lengths = torch.randint(40, 65, (n,), generator=generator_of(n + 50))
    return waveforms(n) | {"attention_mask": (torch.arange(64) < lengths[:, None]).long()}


def wav2vec2_in_training():
    """Build a model that masks spans of each recording at random places, drawn with NumPy."""
    masks = {"mask_time_prob": 0.3, "mask_time_length": 2, "mask_feature_prob": 0.3}
    settings = _WAV | masks | {"mask_feature_length": 2, "layerdrop": 0.5}
    model = build("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", settings, None)()
    return model.requires_grad_().train()


add_architecture(
    "wav2vec2_in_training",
    "transformers",
    wav2vec2_in_training,
    recordings,
    classify,
    is_random=True,
    requires="transformers",
)


def rwkv_in_training():
    """Build a model whose pass in evaluation mode, as on a probe, rescales its weights."""
    settings = {"vocab_size": V, "hidden_size": 8, "num_hidden_layers": 2, "rescale_every": 1}
    return build("RwkvForCausalLM", "RwkvConfig", settings | _ENDS, None)().train()


add_architecture(
    "rwkv_in_training",
    "transformers",
    rwkv_in_training,
    plain_text,
    predict_next,
    requires="transformers",
)


def perceiver():
    """Build Perceiver with learnt latents and a learnt query of its decoder."""
    settings = {
        "num_latents": 3,
        "d_latents": 8,
        "d_model": 8,
        "num_blocks": 1,
        "num_self_attends_per_block": 1,
        "num_self_attention_heads": 2,
        "num_cross_attention_heads": 2,
        "vocab_size": V,
        "max_position_embeddings": T,
        "num_labels": 3,
    }
    return build("PerceiverForSequenceClassification", "PerceiverConfig", settings, None)()


def perceiver_tokens(n):
    """Token ids under the name that Perceiver gives them."""
    batch = padded_tokens(n)
    return {
        "inputs": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "labels": batch["labels"],
    }


add_architecture(
    "perceiver", "transformers", perceiver, perceiver_tokens, classify, requires="transformers"
)

# -- peft ------------------------------------------------------------------------------------------


def adapt(base, config, **settings):
    """Make a function that wraps a model in an adapter of peft."""

    def make():
        import peft

        model = peft.get_peft_model(base(), getattr(peft, config)(**settings))
        for p in model.parameters():
            if p.requires_grad:
                p.data = p.data.double().add_(torch.randn_like(p, dtype=torch.float64) * 0.1)
        return model.eval()

    return make


def add_adapted(name, base, config, *data, **settings):
    """Register an adapted model."""
    make = adapt(base, config, **settings)
    add_architecture(name, "peft", make, *data, requires="peft")


_BASE_BERT = build("BertForSequenceClassification", "BertConfig", _BERT, "eager")
_BASE_GPT2 = build("GPT2LMHeadModel", "GPT2Config", _GPT2, "eager")
_BERT_DATA = (padded_tokens, classify)
_GPT2_DATA = (padded_text, predict_next)
_LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["query", "value"]}
add_adapted("lora_bert", _BASE_BERT, "LoraConfig", *_BERT_DATA, task_type="SEQ_CLS", **_LORA)
add_adapted(
    "dora_bert", _BASE_BERT, "LoraConfig", *_BERT_DATA, task_type="SEQ_CLS", use_dora=True, **_LORA
)
add_adapted(
    "lora_gpt2_conv1d",
    _BASE_GPT2,
    "LoraConfig",
    *_GPT2_DATA,
    r=2,
    target_modules=["c_attn"],
    fan_in_fan_out=True,
)
add_adapted(
    "lora_of_an_embedding", _BASE_GPT2, "LoraConfig", *_GPT2_DATA, r=2, target_modules=["wte"]
)
add_adapted(
    "ia3_bert",
    _BASE_BERT,
    "IA3Config",
    *_BERT_DATA,
    target_modules=["key", "value"],
    feedforward_modules=[],
)
add_adapted(
    "prompt_tuning_gpt2",
    _BASE_GPT2,
    "PromptTuningConfig",
    padded_text,
    lambda m, b: loss_after_prompt(m, b),
    task_type="CAUSAL_LM",
    num_virtual_tokens=2,
)
add_adapted(
    "p_tuning_lstm_bert",
    _BASE_BERT,
    "PromptEncoderConfig",
    *_BERT_DATA,
    task_type="SEQ_CLS",
    num_virtual_tokens=2,
    encoder_hidden_size=6,
    encoder_reparameterization_type="LSTM",
    encoder_num_layers=1,
    encoder_dropout=0.0,
)
add_adapted(
    "prefix_tuning_by_perceptron_gpt2",
    _BASE_GPT2,
    "PrefixTuningConfig",
    *_GPT2_DATA,
    task_type="CAUSAL_LM",
    num_virtual_tokens=2,
    prefix_projection=True,
    encoder_hidden_size=6,
)


def llama_adapter():
    """Build LLaMA-Adapter, whose module with raw parameters is given the model's cache."""
    import peft
    import transformers

    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA))
    config = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1)
    return peft.get_peft_model(base, config).train()


add_architecture("llama_adapter", "peft", llama_adapter, plain_text, predict_next, requires="peft")


def loss_after_prompt(model, batch):
    """Mean cross-entropy of the next token; logits of virtual tokens come first and are left
    out.
    """
    labels = batch["labels"]
    logits = model(**_inputs(batch)).logits[:, -T:]
    losses = F.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none"
    )
    return losses.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)
