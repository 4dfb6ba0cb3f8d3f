"""Worry: a LoRA run that trains nothing. Every adapter is covered, gets an exact gradient, and
moves in the first step.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkfc.config import PrivacyConfig
from dpkfc.curvature import KFAC, TokenNoise
from dpkfc.session import Session

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

N, T, V = 12, 6, 40


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=V,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return _adapted(transformers.GPT2LMHeadModel(config), ["c_attn"], "CAUSAL_LM")


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return _adapted(transformers.LlamaForCausalLM(config), ["q_proj", "v_proj"], "CAUSAL_LM")


def _adapted(model: nn.Module, targets: list[str], task: str) -> nn.Module:
    settings = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, task_type=task)
    return peft.get_peft_model(model, settings).double()


def _loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    (ids,) = batch
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def _plan(**settings):
    settings = {"expected_batch_size": 6, "steps": 4, "test_mode_seed": 3} | settings
    return PrivacyConfig(**settings).with_noise(0.5, 1e-3, N)


def _session(model: nn.Module, **settings) -> tuple[Session, torch.optim.Optimizer]:
    ids = torch.randint(V, (N, T), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return Session(_plan(**settings), model, optimizer, (ids,)), optimizer


PROBE = TokenNoise(vocab_size=V, length=T, min_length=T)


@pytest.mark.quick("id-_llama")
@pytest.mark.filterwarnings("ignore:epsilon is not a guarantee")
@pytest.mark.parametrize("build", [_gpt2, _llama])
@pytest.mark.parametrize(
    "settings",
    [{}, {"preconditioner": KFAC(sides="both", probe=PROBE, probe_size=8, every=2)}],
    ids=["id", "kfac"],
)
def test_every_adapter_is_covered_and_moves_and_nothing_else_does(build, settings: dict):
    torch.manual_seed(0)
    model = build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    session, _ = _session(model, **settings)
    covered = {full for layer in session.layers for full in layer.parameters.values()}
    assert covered == {name for name, p in model.named_parameters() if p.requires_grad}
    for batch in session.batches():
        session.step(batch, _loss)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != p.requires_grad, name
        assert torch.isfinite(p).all()


@pytest.mark.filterwarnings("ignore:epsilon is not a guarantee")
def test_an_optimizer_of_the_model_before_it_was_adapted_is_refused():
    model = _gpt2()
    stranger = nn.Linear(2, 2).double()
    with pytest.raises(ValueError, match="optimizer does not hold trainable parameter .*lora"):
        Session(
            _plan(),
            model,
            torch.optim.SGD(stranger.parameters(), 0.1),
            (torch.zeros(N, T, dtype=torch.long),),
        )


@pytest.mark.filterwarnings("ignore:epsilon is not a guarantee")
def test_weights_that_are_replaced_after_the_session_was_built_are_an_error():
    model = _gpt2()
    session, _ = _session(model)
    batches = session.batches()
    session.step(next(batches), _loss)
    layer = session.layers[0].module
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    with pytest.raises((RuntimeError, ValueError), match="weight"):
        session.step(next(batches), _loss)
    assert session.steps_done == 1


@pytest.mark.filterwarnings("ignore:epsilon is not a guarantee")
def test_the_adapters_save_and_load_as_ever(tmp_path):
    torch.manual_seed(0)
    model = _gpt2()
    session, _ = _session(model)
    for batch in session.batches():
        session.step(batch, _loss)
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    fresh = _gpt2().get_base_model()
    base = {
        k.replace(".base_layer", ""): v for k, v in fresh.state_dict().items() if "lora_" not in k
    }
    plain = transformers.GPT2LMHeadModel(fresh.config).double()
    plain.load_state_dict(base)
    again = peft.PeftModel.from_pretrained(plain, tmp_path)
    ids = torch.arange(T).unsqueeze(0)
    assert torch.allclose(again(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
