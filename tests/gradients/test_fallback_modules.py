"""Modules without a rule: attention, encoders and whatever a user may write, against a loop in
float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from dpkfc import PrivacyConfig, Session
from tests.gradients.loop import assert_equals_a_loop, examples, taped

# as many positions as examples: a mask [T, T] must not be taken for one row an example
N, T, D = (
    4,
    4,
    4,
)


def loss_fn(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(*batch).flatten(1).sin().sum(1)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# -- attention -------------------------------------------------------------------------------------


class Attending(nn.Module):
    """Attention behind a linear layer, with all that it can be called with."""

    def __init__(
        self, weights: bool = False, masks: tuple[str, ...] = (), causal: bool = False, **options
    ) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(D, 2, **{"batch_first": True, **options})
        self.first, self.weights, self.masks, self.causal = nn.Linear(3, D), weights, masks, causal
        mask = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
        self.register_buffer(
            "mask", torch.where(mask, -torch.inf, 0.25).double() if "float" in masks else mask
        )

    def forward(
        self, x: Tensor, key: Tensor, value: Tensor, padding: Tensor, heads: Tensor
    ) -> Tensor:
        x = self.first(x)
        key, value = (key, value) if self.inner.kdim != D else (x, x)
        if not self.inner.batch_first:
            x, key, value = x.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        options = {"key_padding_mask": padding} if "padding" in self.masks else {}
        if "square" in self.masks:
            options["attn_mask"] = self.mask
        if "heads" in self.masks:
            options["attn_mask"] = heads.flatten(0, 1)
        out, weights = self.inner(
            x, key, value, need_weights=self.weights, is_causal=self.causal, **options
        )
        out = out if self.inner.batch_first else out.transpose(0, 1)
        return (
            out.flatten(1)
            if weights is None
            else torch.cat([out.flatten(1), weights.flatten(1)], 1)
        )


def attention_batch() -> tuple[Tensor, ...]:
    padding = torch.arange(T) >= torch.tensor([2, 4, 3, 1]).unsqueeze(1)
    return randn(N, T, 3), randn(N, T, 5), randn(N, T, 6), padding, randn(N, 2, T, T)


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "time first"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": True},
        {"bias": False},
        {"masks": ("padding",)},
        {"masks": ("square",)},
        {"masks": ("square", "float", "padding"), "weights": True},
        {"masks": ("square",), "causal": True},
        {"masks": ("heads",)},
        {"kdim": 5, "vdim": 6},
        {"add_bias_kv": True, "add_zero_attn": True},
    ],
    ids=str,
)
def test_attention(options: dict, batch_first: bool, mode: bool) -> None:
    model = Attending(batch_first=batch_first, **options).double().train(mode)
    for p in model.inner.parameters():
        nn.init.normal_(p)
    batch = attention_batch()
    assert_equals_a_loop(model, loss_fn, batch, examples(batch, N))


def test_attention_whose_batch_is_not_where_it_says() -> None:
    model = nn.MultiheadAttention(D, 2).double()
    x = randn(3, 5, D)
    with pytest.raises(ValueError, match="MultiheadAttention hides the batch axis"):
        taped(model, lambda m, b: m(b, b, b)[0].sum((1, 2)), x, 3)
    with pytest.raises(ValueError, match="hides the batch axis"):
        taped(model, lambda m, b: m(b, b, b)[0].sum(1), x[:, 0], 3)


class Encoding(nn.Module):
    """torch's own encoder, with the padding mask that texts need."""

    def __init__(self, **options) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 2, 6, batch_first=True, **{"dropout": 0.0, **options})
        self.table, self.inner = nn.Embedding(7, D), nn.TransformerEncoder(layer, 2)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
        mask = torch.zeros_like(mask).masked_fill(mask != 0, -1e9)
        x = self.inner(self.table(ids), mask=mask, src_key_padding_mask=padding * -1e9)
        return x.masked_fill(padding.unsqueeze(2) > 0, 0.0).mean(1)


@pytest.mark.parametrize("frozen", [(), ("self_attn",), ("table", "self_attn", "linear")], ids=str)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_encoders_in_both_modes(training: bool, norm_first: bool, frozen: tuple[str, ...]) -> None:
    """In eval mode torch has a fused path through the encoder that calls none of its children."""
    model = Encoding(norm_first=norm_first).double().train(training)
    for name, p in model.named_parameters():
        p.requires_grad_(not any(part in name for part in frozen))
    padding = (torch.arange(T) >= torch.tensor([2, 4, 3, 1]).unsqueeze(1)).double()
    batch = (torch.randint(0, 7, (N, T)), padding)
    assert_equals_a_loop(model, loss_fn, batch, examples(batch, N))


def test_verification_of_an_encoder_with_boolean_padding() -> None:
    """The check runs in eval mode, where torch would use nested tensors for padding."""
    layer = nn.TransformerEncoderLayer(D, 2, 6, batch_first=True, dropout=0.0)
    model = nn.ModuleDict(
        {"inner": nn.TransformerEncoder(layer, 2), "head": nn.Linear(D, 2)}
    ).double()
    padding = torch.arange(T) >= torch.tensor([3, 4]).unsqueeze(1)

    def padded(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = m["inner"](batch[0], src_key_padding_mask=batch[1])
        return m["head"](x[:, 0]).square().sum(1)

    batch = (randn(2, T, D), padding)
    assert_equals_a_loop(model, padded, batch, examples(batch, 2))


# -- modules a user may write ----------------------------------------------------------------------


class TwoOutputs(nn.Module):
    """Returns what it makes its second output of, and its first one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = (x * self.gain).tanh()
        return {
            "state": y,
            "pooled": (y * self.gain).sum(1),
            "again": y,
            "count": torch.tensor(len(x)),
        }


class OfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(3, 3), TwoOutputs()

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(self.first(x))
        return torch.cat(
            [out["state"], F.relu(out["pooled"], inplace=True).unsqueeze(1), out["again"] ** 2], 1
        )


def test_an_output_made_of_another_output() -> None:
    batch = (randn(N, 3),)
    assert_equals_a_loop(OfTwo().double(), loss_fn, batch, examples(batch, N))


class Scales(nn.Module):
    """Per-example and shared arguments, by position and by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, positions: Tensor, *, mask: Tensor, table: Tensor) -> Tensor:
        return (x + positions) * self.gain * mask.unsqueeze(-1) + (self.gain * table).sum(0)


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scales()
        self.register_buffer("positions", torch.randn(N, 3).double())
        self.register_buffer("table", torch.randn(N, 3).double())

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.inner(x, self.positions, mask=mask, table=self.table)


def test_shared_arguments_as_long_as_the_batch() -> None:
    batch = (randn(N, N, 3), randn(N, N))
    assert_equals_a_loop(Sharing().double(), loss_fn, batch, examples(batch, N))


class Branching(nn.Module):
    """What no vectorised call can run: a branch on the data, and an operation outside torch."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        if float(x[0, 0].detach()) > 10:
            return x
        return x * self.gain * float(x.detach().numpy().shape[1])


def test_a_module_that_reads_values_is_run_example_by_example() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Branching()).double()
    batch = (randn(N, 3),)
    assert_equals_a_loop(model, loss_fn, batch, examples(batch, N))


class Double(torch.autograd.Function):
    """A function of the user's own, in the form that torch.func refuses."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return 2 * g


class Custom(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Double.apply(super().forward(x))


def test_an_autograd_function_of_the_user() -> None:
    batch = (randn(N, 3),)
    assert_equals_a_loop(nn.Sequential(Custom(3, 3)).double(), loss_fn, batch, examples(batch, N))


class Standardised(nn.Conv2d):
    """Weight standardisation, as in normaliser-free residual networks."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, w / (w.std((1, 2, 3), keepdim=True) + 1e-5), self.bias)


def test_convolutions_with_their_own_forward() -> None:
    model = nn.Sequential(
        Standardised(2, 3, 3, padding=1), nn.Tanh(), Standardised(3, 2, 2, groups=1)
    ).double()
    batch = (randn(3, 2, 4, 4),)
    assert_equals_a_loop(model, loss_fn, batch, examples(batch, 3))


class Pairwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(3, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x.flip(1))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (Pairwise, (N, 3)),
        (nn.PReLU, (N, 3)),
        (lambda: nn.PReLU(3), (N, 3, 5)),
        (lambda: nn.ConvTranspose1d(3, 2, 3, stride=2), (N, 3, 5)),
        (lambda: nn.EmbeddingBag(6, 3, mode="mean"), None),
        (lambda: nn.EmbeddingBag(6, 3, mode="max"), None),
        (lambda: nn.EmbeddingBag(6, 3, mode="sum", sparse=True), None),
    ],
    ids=[
        "bilinear",
        "prelu",
        "prelu by channel",
        "transposed convolution",
        "bag mean",
        "bag maximum",
        "bag sparse",
    ],
)
def test_modules_of_torch_without_a_rule(module, shape: tuple[int, ...] | None) -> None:
    x = torch.randint(0, 6, (N, 5)) if shape is None else randn(*shape)
    assert_equals_a_loop(nn.Sequential(module().double()), loss_fn, (x,), examples((x,), N))


def test_bags_of_ids_with_offsets_are_refused() -> None:
    """One list of ids for the whole batch: no argument says which of them are whose until it is
    read.
    """
    model = nn.EmbeddingBag(6, 3).double()
    ids, offsets = torch.randint(0, 6, (9,)), torch.tensor([0, 2, 3, 7])
    with pytest.raises(ValueError, match="offsets count from the beginning of the batch"):
        taped(model, loss_fn, (ids, offsets), N)


@pytest.mark.parametrize("is_before", [True, False])
def test_hooks_of_all_modules_leave_each_example_its_gradient(is_before: bool) -> None:
    """They see outputs before the tape does, so that no pass of several examples is proved."""

    def change(module: nn.Module, args: Any, *output: Tensor) -> Any:
        if not isinstance(module, nn.Linear):
            return None
        return 0.5 * output[0].sin() if output else (args[0].exp(),)

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    plan = PrivacyConfig(expected_batch_size=4, steps=1, sampler="fixed", max_grad_norm=0.1)
    hooks = nn.modules.module
    add_hook = hooks.register_module_forward_pre_hook if is_before else None
    handle = (add_hook or hooks.register_module_forward_hook)(change)
    try:
        x = torch.randn(6, 3)
        expected = []
        for row in x:
            model.zero_grad()
            loss_fn(model, (row[None],)).sum().backward()
            g = torch.cat([p.grad.flatten() for p in model.parameters()])
            expected.append(g * min(1.0, 0.1 / float(g.norm())))
        before = parameters_to_vector(model.parameters()).detach()
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        with Session(plan.with_noise(0, 1e-3, 6), model, optimizer, (x,)) as session:
            for batch in session.batches():
                session.step(batch, loss_fn)
                rows = [int(i) for i in batch.rows]
    finally:
        handle.remove()
    change_of_weights = 4 * (before - parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(change_of_weights, sum(expected[i] for i in rows), atol=1e-6, rtol=0)


def test_under_autocast_inputs_are_narrower_than_the_parameters() -> None:
    model = nn.Sequential(
        nn.Linear(3, D), nn.TransformerEncoderLayer(D, 2, 6, dropout=0.0, batch_first=True)
    )
    x = torch.randn(3, 5, 3)

    def cast(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (m(*batch)[..., 0].float() - 2).square().sum(1)

    def plain(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return (m(*batch)[..., 0] - 2).square().sum(1)

    found, expected = taped(model, cast, (x,), 3), taped(model, plain, (x,), 3)
    for one, other in zip(found, expected, strict=True):
        for name, gradient in other.items():
            assert float((one[name] - gradient).norm()) <= 0.1 * float(gradient.norm()) + 0.05, name


# -- refusals --------------------------------------------------------------------------------------


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.gain, 0.5, self.training)


def test_randomness_that_no_module_declares_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Noisy()).double()
    with pytest.raises(
        ValueError, match="Noisy hides the batch axis: it holds parameters and draws random numbers"
    ):
        taped(model, loss_fn, (randn(N, 3),), N)
    batch = (randn(N, 3),)
    assert_equals_a_loop(model.eval(), loss_fn, batch, examples(batch, N))


class Read(nn.Module):
    """Uses its parameter in a way that cannot be followed, with another module behind."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.gain, self.inner = nn.Parameter(torch.randn(D)), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x @ torch.diag(self.gain))


def test_dropout_inside_is_refused_by_name_and_without_effect_accepted() -> None:
    model = nn.Sequential(nn.Linear(3, D), Read(nn.Dropout(0.1))).double()
    batch = (randn(N, T, 3),)
    with pytest.raises(
        ValueError, match="Read hides the batch axis: it holds parameters and draws random numbers"
    ):
        taped(model, loss_fn, batch, N)
    model[1].inner.p = 0.0  # what the message says
    assert_equals_a_loop(model, loss_fn, batch, examples(batch, N))


class Centred(nn.Module):
    """Owns a parameter and mixes the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) * self.gain


def test_a_module_that_mixes_examples_is_refused_without_verification_too() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Centred()).double()
    with pytest.raises(ValueError, match="mean.dim hides the batch axis"):
        taped(model, loss_fn, (randn(N, 3),), N)


class Remembering(nn.Module):
    """Stores what it computes and counts its calls, as some attention modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(D, D))
        self.doubled: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.doubled = 2 * self.weight
        self.calls += 1
        return torch.einsum("ni,ij->nj", x, self.doubled).tanh()


def test_a_repeated_pass_leaves_no_trace_on_a_module() -> None:
    model = nn.Sequential(Remembering(), nn.Linear(D, 2, dtype=torch.float64))
    batch = (randn(N, D),)
    taped(model, loss_fn, batch, N)
    inner = model[0]
    assert inner.calls == 1
    torch.testing.assert_close(inner.doubled, 2 * inner.weight)
