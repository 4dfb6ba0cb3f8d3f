"""Features of torch that a per-example engine may trip over: hooks, scripts, checkpoints,
functional calls, containers.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tests.zoo.registry import (
    UNCLEAR,
    Network,
    classify,
    generator_of,
    mlp,
    normal,
    parameter,
    register,
    tensors,
    vectors,
)

VECTORS = vectors()
SEQUENCE = tensors((4, 4))


# -- functional calls, scripts, transforms ---------------------------------------------------------


register_mechanics = register("mechanics", VECTORS, classify)


@register_mechanics
def functional_call_with_scaled_weights():
    def forward(m, x):
        scaled = {name: p * m.scale for name, p in m.inner.named_parameters()}
        return functional_call(m.inner, scaled, (x,)) + m.inner(x)

    return Network(forward, inner=mlp(), scale=nn.Parameter(torch.tensor(0.7)))


@register_mechanics
def functional_call_stateless_copies():
    """Members of an ensemble share one module and own stacked weights."""

    def forward(m, x):
        outputs = [
            functional_call(m.base, {"weight": m.w[i], "bias": m.b[i]}, (x,)) for i in range(2)
        ]
        return torch.stack(outputs).mean(0)

    model = Network(forward, base=nn.Linear(4, 3), w=parameter(2, 3, 4), b=parameter(2, 3))
    model.base.requires_grad_(False)
    return model


@register_mechanics
def vmap_over_examples():
    def forward(m, x):
        return torch.vmap(lambda row: m.w @ torch.tanh(row) + m.b)(x)

    return Network(forward, w=parameter(3, 4), b=parameter(3))


@torch.jit.script
def _fused_gate(x: Tensor, bias: Tensor) -> Tensor:
    h = x + bias
    return h * torch.sigmoid(1.702 * h)


@register_mechanics
def scripted_function():
    def forward(m, x):
        return m.head(
            _fused_gate(F.linear(x, m.up.weight), m.up.bias) + _fused_gate(m.up(x), m.bias)
        )

    return Network(forward, up=nn.Linear(4, 5), bias=parameter(5), head=nn.Linear(5, 3))


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.T @ x


@register_mechanics
def own_autograd_function_with_a_weight():
    def forward(m, x):
        return m.head(torch.tanh(_LinearFunction.apply(x, m.w)))

    return Network(forward, w=parameter(5, 4), head=nn.Linear(5, 3))


@register_mechanics
def checkpoint_without_reentry():
    def forward(m, x):
        return m.head(checkpoint(m.body, x, use_reentrant=False))

    return Network(
        forward,
        body=nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5)),
        head=nn.Linear(5, 3),
    )


register_unclear = register("mechanics", VECTORS, classify, kind=UNCLEAR)


@register_unclear
def checkpoint_with_reentry():
    def forward(m, x):
        h = m.stem(x)
        return m.head(checkpoint(m.body, h, use_reentrant=True))

    return Network(
        forward,
        stem=nn.Linear(4, 4),
        body=nn.Sequential(nn.Linear(4, 5), nn.Tanh()),
        head=nn.Linear(5, 3),
    )


# -- hooks -----------------------------------------------------------------------------------------


@register_mechanics
def forward_hook_that_changes_the_output():
    model = mlp()
    model[0].register_forward_hook(lambda module, args, output: output * 0.5 + 1.0)
    return model


@register_unclear
def backward_hook_that_only_watches():
    model = mlp()
    model[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    return model


@register_unclear
def tensor_hook_that_clamps_each_entry():
    def forward(m, x):
        h = m.up(x)
        h.register_hook(lambda g: g.clamp(-0.05, 0.05))
        return m.head(torch.tanh(h))

    return Network(forward, up=nn.Linear(4, 5), head=nn.Linear(5, 3))


class _Own(nn.Module):
    """A module without a rule, which runs again for each example."""

    def __init__(self):
        super().__init__()
        self.w = parameter(5, 4)

    def forward(self, x, scale=1.0):
        h = torch.tanh(F.linear(x, self.w) * scale)
        return h, 2 * h


def _hooked(*hooks):
    model = Network(lambda m, x: m.head(m.own(x)), own=_Own(), head=nn.Linear(5, 3))
    for add_hook in hooks:
        add_hook(model)
    return model


@register_mechanics
def forward_hook_that_uses_another_layer():
    model = _hooked(lambda m: m.own.register_forward_hook(lambda own, x, h: h[1] + m.side(x[0])))
    model.side = nn.Linear(4, 5)
    return model


@register_mechanics
def mask_left_by_another_layers_hook():
    class Masked(_Own):
        def forward(self, x):
            return super().forward(x * self.mask)[0]

    def forward(m, x):
        return m.head(m.own(m.front(x)))

    model = Network(forward, own=Masked(), front=nn.Linear(4, 4), head=nn.Linear(5, 3))
    model.front.register_forward_hook(
        lambda front, args, h: setattr(model.own, "mask", (h > 0).double())
    )
    return model


@register("mechanics", VECTORS, classify, is_random=True)
def own_module_that_draws_with_numpy():
    class Masked(_Own):
        def forward(self, x):
            return super().forward(x * torch.from_numpy(np.random.rand(*x.shape) < 0.5))[0]

    return Network(lambda m, x: m.head(m.own(x)), own=Masked(), head=nn.Linear(5, 3))


@register("mechanics", VECTORS, classify, is_random=True)
def layer_that_python_skips_at_random():
    def forward(m, x):
        return m.head(m.up(x) if random.random() < 0.5 else torch.tanh(x))

    return Network(forward, up=nn.Linear(4, 4), head=nn.Linear(4, 3))


@register_mechanics
def weight_computed_by_a_pre_hook():
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.raw = parameter(5, 4)
            self.register_forward_pre_hook(self.compute)

        @staticmethod
        def compute(module, _):
            module.weight = F.normalize(module.raw, dim=1)

        def forward(self, x):
            return F.linear(x, self.weight)

    return nn.Sequential(Normalised(), nn.Tanh(), nn.Linear(5, 3))


def _encode_loss(model, batch):
    x, y = batch
    return F.cross_entropy(model.head(torch.tanh(model.body(x))), y, reduction="none")


@register("mechanics", VECTORS, _encode_loss)
def loss_that_calls_the_parts():
    return Network(lambda m, x: m.head(m.body(x)), body=nn.Linear(4, 5), head=nn.Linear(5, 3))


@register_mechanics
def length_of_the_batch_read_in_python():
    def forward(m, x):
        h = m.up(x)
        if h.shape[0] == 0:
            return h[:, :3]
        return m.head(torch.cat([h[i : i + 1] * 2 for i in range(len(h))]))

    return Network(forward, up=nn.Linear(4, 5), head=nn.Linear(5, 3))


@register_mechanics
def rows_flipped_and_flipped_back():
    def forward(m, x):
        return m.head(torch.tanh(m.up(x.flip(0))).flip(0))

    return Network(forward, up=nn.Linear(4, 5), head=nn.Linear(5, 3))


@register_mechanics
def rows_routed_by_a_mask():
    """Two branches, each on its own rows of the batch."""

    def forward(m, x):
        mask = x[:, 0] > 0
        out = x.new_zeros(len(x), 3)
        out[mask] = m.one(x[mask])
        out[~mask] = m.two(x[~mask])
        return out

    return Network(forward, one=nn.Linear(4, 3), two=nn.Linear(4, 3))


@register_mechanics
def branch_on_a_private_value():
    """Python control flow reads the rows, but both branches give the same result."""

    def forward(m, x):
        h = m.up(x)
        if bool((h > 0).all()):
            return m.head(h)
        return m.head(F.relu(h))

    return Network(forward, up=nn.Linear(4, 5), head=nn.Linear(5, 3))


@register_mechanics
def batch_unsqueezed_in_front():
    """The batch is the second axis of everything inside: `[1, n, d]`."""

    def forward(m, x):
        h = torch.tanh(m.norm(m.up(x.unsqueeze(0))))
        return m.head(h).squeeze(0)

    return Network(forward, up=nn.Linear(4, 5), norm=nn.LayerNorm(5), head=nn.Linear(5, 3))


@register("mechanics", SEQUENCE, classify)
def batch_as_the_last_axis():
    def forward(m, x):
        x = x.permute(2, 1, 0)
        h = torch.tanh(torch.tensordot(m.w, x, dims=1))
        h = h - h.mean(1, keepdim=True)
        return m.head(h.amax(1).t())

    return Network(forward, w=parameter(5, 4), head=nn.Linear(5, 3))


# -- batches of other kinds ------------------------------------------------------------------------


def _dictionary(n):
    g = generator_of(n)
    return {
        "features": normal(n, 4, generator=g),
        "ids": torch.randint(0, 7, (n, 3), generator=g),
        "labels": torch.randint(0, 3, (n,), generator=g),
    }


def _by_name(model, batch):
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    return F.cross_entropy(model(**inputs), batch["labels"], reduction="none")


@register("containers", _dictionary, _by_name)
def batch_of_a_dict():
    def forward(m, features, ids):
        return m.head(torch.cat([torch.tanh(m.dense(features)), m.embed(ids).mean(1)], 1))

    return Network(forward, dense=nn.Linear(4, 3), embed=nn.Embedding(7, 3), head=nn.Linear(6, 3))


def _nested(n):
    g = generator_of(n)
    return {
        "x": [normal(n, 2, generator=g), {"more": normal(n, 3, 2, generator=g)}],
        "y": (torch.randint(0, 3, (n,), generator=g), torch.rand(n, generator=g)),
    }


def _nested_loss(model, batch):
    labels, weights = batch["y"]
    return weights * F.cross_entropy(model(batch["x"]), labels, reduction="none")


@register("containers", _nested, _nested_loss, inputs=lambda batch: batch["x"])
def nested_batch_with_weights():
    def forward(m, x):
        first, rest = x
        return m.head(torch.cat([m.one(first), m.two(rest["more"]).sum(1)], 1))

    return Network(forward, one=nn.Linear(2, 3), two=nn.Linear(2, 3), head=nn.Linear(6, 3))


class Output(NamedTuple):
    """What a model returns in the place of a tensor."""

    logits: Tensor
    hidden: tuple[Tensor, ...]
    extra: dict[str, Tensor]


def _output_loss(model, batch):
    x, y = batch
    output = model(x)
    first = F.cross_entropy(output.logits, y, reduction="none")
    return first + 0.1 * output.hidden[0].square().mean(1) + output.extra["gate"].squeeze(-1)


@register("containers", VECTORS, _output_loss)
def model_that_returns_a_named_tuple():
    def forward(m, x):
        h = torch.tanh(m.body(x))
        return Output(m.head(h), (h,), {"gate": m.gate(h).sigmoid()})

    return Network(forward, body=nn.Linear(4, 5), head=nn.Linear(5, 3), gate=nn.Linear(5, 1))


def _keyword_only(function):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, *, hidden, options):
            return {"hidden": function(self.linear(hidden) * options["scale"])}

    def forward(m, x):
        return m.head(m.inner(hidden=x, options={"scale": 0.5})["hidden"])

    return Network(forward, inner=Inner(), head=nn.Linear(4, 3))


@register("containers", VECTORS, classify)
def children_called_by_keyword():
    return _keyword_only(torch.tanh)


def _numbers(n):
    g = generator_of(n)
    return normal(n, generator=g), normal(n, generator=g)


def _line_loss(model, batch):
    x, y = batch
    return (model(x) - y).square()


@register("containers", _numbers, _line_loss)
def one_number_an_example():
    return Network(
        lambda m, x: m.slope * x + m.offset,
        slope=nn.Parameter(torch.tensor(0.3)),
        offset=nn.Parameter(torch.zeros(1)),
    )
