"""Models and losses that mix examples: each must be refused by name."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.registry import (
    MIXING,
    Network,
    add_architecture,
    classify,
    parameter,
    ragged,
    tensors,
    vectors,
    words,
)

VECTORS = vectors()


def _add(name, build, batch=VECTORS, loss_fn=classify, size=5, family="mixing models"):
    add_architecture(f"mixes_{name}", family, build, batch, loss_fn, kind=MIXING, size=size)


def _mlp(*inner):
    return nn.Sequential(nn.Linear(4, 6), *inner, nn.Tanh(), nn.Linear(6, 3))


def _inner(change):
    """Build a perceptron whose hidden layer `[n, 6]` goes through a function."""

    def build():
        return Network(
            lambda m, x: m.head(torch.tanh(change(m.body(x)))),
            body=nn.Linear(4, 6),
            head=nn.Linear(6, 3),
        )

    return build


# -- normalisation and statistics ------------------------------------------------------------------

_add("batch_norm", lambda: _mlp(nn.BatchNorm1d(6)))
_add(
    "functional_batch_norm",
    _inner(lambda h: F.batch_norm(h, None, None, training=True) if len(h) > 1 else h),
)
_add("batch_mean_subtracted", _inner(lambda h: h - h.mean(0)))


# -- axes confused ---------------------------------------------------------------------------------

_add("softmax_over_the_batch", _inner(lambda h: h.softmax(0)))
_add("rolled_over_the_batch", _inner(lambda h: h + 0.3 * h.roll(1, 0)))
_add("row_zero_added", _inner(lambda h: h + 0.2 * h[:1]))
_add("mixup_with_a_random_partner", _inner(lambda h: 0.7 * h + 0.3 * h[torch.randperm(len(h))]))
_add("branch_on_the_whole_batch", _inner(lambda h: h * 0.5 if float(h.max()) > 1.0 else h))
_add(
    "attention_with_the_axes_confused",
    lambda: Network(
        lambda m, x: m.head(m.layer(x).mean(1)),
        layer=nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0),
        head=nn.Linear(4, 3),
    ),
    tensors((3, 4)),
)
_add(
    "lstm_over_the_batch",
    lambda: Network(
        lambda m, x: m.head(m.layer(x)[0].mean(1)), layer=nn.LSTM(4, 4), head=nn.Linear(4, 3)
    ),
    tensors((3, 4)),
)
_add(
    "convolution_over_the_batch",
    lambda: Network(
        lambda m, x: m.head(m.conv(x.T.unsqueeze(0)).squeeze(0).T),
        conv=nn.Conv1d(4, 4, 3, padding=1),
        head=nn.Linear(4, 3),
    ),
)
_add(
    "state_carried_between_rows",
    lambda: Network(_carried, cell=nn.GRUCell(4, 4), head=nn.Linear(4, 3)),
)


def _carried(m, x):
    h, rows = x.new_zeros(1, 4), []
    for row in x.split(1):
        h = m.cell(row, h)
        rows.append(h)
    return m.head(torch.cat(rows))


def _shifted_frames(m, x):
    """A temporal shift over the folded axis: the last frame of one example reaches the next
    example.
    """
    n, t = x.shape[:2]
    h = m.body(x.flatten(0, 1))
    h = h + 0.5 * torch.cat([torch.zeros_like(h[:1]), h[:-1]])
    return m.head(h.view(n, t, -1).mean(1))


_add(
    "shift_over_frames_and_examples",
    lambda: Network(_shifted_frames, body=nn.Linear(4, 4), head=nn.Linear(4, 3)),
    tensors((3, 4)),
)


def _merged_windows(m, x):
    """Positions are folded and unfolded in another order."""
    n, t = x.shape[:2]
    h = torch.tanh(m.body(x.transpose(0, 1).reshape(n * t, -1)))
    return m.head(h.view(n, t, -1).mean(1))


_add(
    "axes_unfolded_in_another_order",
    lambda: Network(_merged_windows, body=nn.Linear(4, 4), head=nn.Linear(4, 3)),
    tensors((3, 4)),
)


def _half_mixed(x):
    half = len(x) // 2
    return torch.cat([x[:half], 0.6 * x[half : 2 * half] + 0.4 * x[:half], x[2 * half :]])


_add("second_half_with_the_first", _inner(_half_mixed))
_add(
    "rows_beyond_the_eighth",
    _inner(lambda h: torch.cat([h[:8], h[8:] + h[: len(h[8:])]]) if len(h) > 8 else h),
    size=12,
)
_add("sign_follows_the_size_of_the_batch", _inner(lambda h: -h if len(h) >= 40 else h), size=48)
_add("scale_follows_the_size_of_the_batch", _inner(lambda h: h / len(h)))
_add("position_of_the_row_in_the_batch", _inner(lambda h: h + 0.1 * torch.arange(len(h))[:, None]))


class _MixingBackwardLate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, g):
        return g if len(g) <= 8 else torch.cat([g[:8], g[8:] + 0.5 * g[: len(g[8:])]])


class _NormalisedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.view_as(h)

    @staticmethod
    def backward(ctx, g):
        return g / g.norm()


_add("rows_in_the_backward_pass_beyond_the_eighth", _inner(_MixingBackwardLate.apply), size=12)
_add("gradient_normalised_over_the_batch", _inner(_NormalisedBackward.apply))


def _hooked(change):
    def forward(m, x):
        h = m.body(x)
        h.register_hook(change)
        return m.head(torch.tanh(h))

    return lambda: Network(forward, body=nn.Linear(4, 6), head=nn.Linear(6, 3))


_add("gradients_in_a_tensor_hook", _hooked(lambda g: g - g.mean(0)))
_add("gradients_scaled_by_their_maximum", _hooked(lambda g: g / g.abs().max()))


def _forward_hook_model():
    model = _mlp()
    model[0].register_forward_hook(lambda module, args, output: output - output.mean(0))
    return model


_add("outputs_in_a_forward_hook", _forward_hook_model)


# -- experts ---------------------------------------------------------------------------------------


def _experts(forward):
    return lambda: Network(
        forward,
        gate=nn.Linear(4, 2),
        experts=nn.ModuleList(nn.Linear(4, 4) for _ in range(2)),
        head=nn.Linear(4, 3),
    )


def _capacity(m, x):
    """Each expert takes at most half of the batch; those who come later are passed on unchanged."""
    weights, chosen = m.gate(x).softmax(-1).max(-1)
    out = x.clone()
    for i, expert in enumerate(m.experts):
        rows = (chosen == i).nonzero().squeeze(1)[: max(1, len(x) // 4)]
        out = out.index_copy(0, rows, expert(x[rows]) * weights[rows, None])
    return m.head(out)


def _expert_choice(m, x):
    """Each expert chooses its rows of the batch."""
    scores = m.gate(x).softmax(-1)
    out = torch.zeros_like(x)
    for i, expert in enumerate(m.experts):
        weights, rows = scores[:, i].topk(max(1, len(x) // 2))
        out = out.index_add(0, rows, expert(x[rows]) * weights[:, None])
    return m.head(out)


_add("capacity_of_experts", _experts(_capacity))
_add("experts_that_choose_rows", _experts(_expert_choice))


# -- losses ----------------------------------------------------------------------------------------


def _plain(model, batch):
    return classify(model, batch)


def _info_nce(model, batch):
    x = batch[0]
    one, two = F.normalize(model(x), dim=1), F.normalize(model(x + 0.1), dim=1)
    return F.cross_entropy(one @ two.T / 0.5, torch.arange(len(x)), reduction="none")


def _mixup(model, batch):
    x, y = batch
    mixed = 0.7 * x + 0.3 * x.flip(0)
    return 0.7 * _plain(model, (mixed, y)) + 0.3 * _plain(model, (mixed, y.flip(0)))


def _cutmix_of_labels(model, batch):
    x, y = batch
    return 0.7 * _plain(model, (x, y)) + 0.3 * _plain(model, (x, y.roll(1)))


def _sorted(model, batch):
    losses = _plain(model, batch)
    weights = torch.linspace(0, 1, len(losses), dtype=losses.dtype)
    return losses.sort().values * weights


def _baseline(model, batch):
    """As in reinforcement learning: advantages are standardised over the batch."""
    x, y = batch
    rewards = x[:, 0]
    advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
    return advantages * _plain(model, batch)


def _over_valid_labels(model, batch):
    """Divided by the number of labels of the whole batch that count."""
    x, y = batch
    mask = (y > 0).to(x)
    return _plain(model, batch) * mask / mask.sum().clamp(min=1)


def _weighted_mean(model, batch):
    """A mean with class weights divides by the weights of the batch."""
    x, y = batch
    loss = F.cross_entropy(model(x), y, weight=torch.tensor([0.2, 1.0, 3.0], dtype=x.dtype))
    return loss.expand(len(x))


def _column_against_row(model, batch):
    """Outputs `[n, 1]` against targets `[n]` broadcast to `[n, n]`."""
    x, y = batch
    return (model(x)[:, :1] - y.to(x)).square().mean(1)


def _penalty_on_the_mean(model, batch):
    x, y = batch
    x = x.detach().requires_grad_(True)
    losses = _plain(model, (x, y))
    (slope,) = torch.autograd.grad(losses.mean(), x, create_graph=True)
    return losses + slope.square().sum(1)


def _penalty_on_the_norm_of_all(model, batch):
    x, y = batch
    x = x.detach().requires_grad_(True)
    losses = _plain(model, (x, y))
    (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    return losses + (slope.norm() - 1).square()


def _two_views_as_negatives(model, batch):
    x = batch[0]
    n = len(x)
    z = F.normalize(model(torch.cat([x, x + 0.1])), dim=1)
    scores = (z @ z.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    return F.cross_entropy(scores, torch.arange(2 * n).roll(n), reduction="none").view(2, n).sum(0)


def _late(model, batch):
    losses = _plain(model, batch)
    return (
        losses
        if len(losses) <= 34
        else torch.cat([losses[:34], losses[34:] + losses[: len(losses) - 34]])
    )


def _only_if_all_agree(model, batch):
    losses = _plain(model, batch)
    return losses * 2 if bool((batch[1] == batch[1][0]).all()) else losses


def _clipped_by_the_batch(model, batch):
    losses = _plain(model, batch)
    return losses.clamp(max=float(losses.mean()) * 1.02)


def _skipped_if_not_finite(model, batch):
    """A guard against overflow that scales the whole batch by its largest logit."""
    logits = model(batch[0])
    return F.cross_entropy(logits / logits.abs().max().detach(), batch[1], reduction="none")


for _loss in (
    _info_nce,
    _mixup,
    _cutmix_of_labels,
    _sorted,
    _baseline,
    _over_valid_labels,
    _weighted_mean,
    _column_against_row,
    _penalty_on_the_mean,
    _penalty_on_the_norm_of_all,
    _two_views_as_negatives,
    _clipped_by_the_batch,
    _skipped_if_not_finite,
):
    _add(f"loss{_loss.__name__}", _mlp, VECTORS, _loss, family="mixing losses")

_add("loss_beyond_the_34th_row", _mlp, VECTORS, _late, size=48, family="mixing losses")
_add(
    "loss_doubled_only_if_all_labels_agree",
    _mlp,
    vectors(classes=2),
    _only_if_all_agree,
    size=5,
    family="mixing losses",
)


# -- lengths ---------------------------------------------------------------------------------------


def _trimmed(m, x, lengths):
    """The mean runs over padding, whose length is that of the longest example."""
    return m.head(torch.tanh(m.inner(x[:, : int(lengths.max())])).mean(1))


_add(
    "mean_over_padding_of_the_longest",
    lambda: Network(_trimmed, inner=nn.Linear(4, 4), head=nn.Linear(4, 3)),
    ragged(),
)


def _token_mean(model, batch):
    """Each example's tokens over the number of tokens of the whole batch."""
    x, lengths, y = batch
    mask = (torch.arange(x.shape[1]) < lengths[:, None]).to(x)
    logits = model(x)
    losses = F.cross_entropy(
        logits.transpose(1, 2), y[:, None].expand(-1, x.shape[1]), reduction="none"
    )
    return (losses * mask).sum(1) / mask.sum()


_add(
    "loss_over_valid_tokens_of_the_batch",
    lambda: nn.Linear(4, 3),
    ragged(),
    _token_mean,
    family="mixing losses",
)


def _frequencies(m, ids):
    counts = torch.bincount(ids.flatten(), minlength=11).to(m.table.weight)
    return m.head((m.table(ids) / counts[ids].unsqueeze(-1)).sum(1))


def _unique_lookup(m, ids):
    """Sound in its values, but a bias runs over the unique ids of the batch."""
    unique, inverse = ids.unique(return_inverse=True)
    rows = m.table(unique)
    rows = rows - rows.mean(0)
    return m.head(rows[inverse].mean(1))


_add(
    "word_counts_of_the_batch",
    lambda: Network(_frequencies, table=nn.Embedding(11, 4), head=nn.Linear(4, 3)),
    words(),
)
_add(
    "unique_words_of_the_batch",
    lambda: Network(_unique_lookup, table=nn.Embedding(11, 4), head=nn.Linear(4, 3)),
    words(),
)
_add(
    "learnt_centre_moved_by_the_batch",
    lambda: Network(
        lambda m, x: m.head(x + m.shift * x.mean(0)), shift=parameter(4), head=nn.Linear(4, 3)
    ),
)
