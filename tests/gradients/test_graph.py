"""Passes over captured graphs: equal to single examples, captured anew or refused."""

import logging
import subprocess
import sys
import tempfile
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset, default_collate

from dpkfc import KFAC, PinkNoise, PrivacyConfig, Session
from dpkfc.gradients.clip import Clip
from dpkfc.gradients.clipped_summer import ClippedSummer
from dpkfc.gradients.discovery import find_layers
from dpkfc.gradients.state import StateChangedError
from dpkfc.graph import capture
from dpkfc.graph.compilation import find_compiler_fault
from dpkfc.graph.passes import GraphPasses
from dpkfc.postprocess import DiSK
from tests.sessions import cross_entropy, open_session
from tests.zoo.brute_force import clipped_sum, gradients_of_each, norm_of, relative_error


@pytest.fixture(autouse=True)
def own_captures():
    """Begin every test without graphs of others."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def rows(n, *shape, words=0):
    x = torch.randint(words, (n, *shape)) if words else torch.randn(n, *shape)
    return x, torch.randint(3, (n,))


class Net(nn.Module):
    """Modules and a function of them."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x)


def error(passes, model, loss_fn, batch):
    """Return the relative error of a clipped sum beside plain autograd on single examples."""
    n = len(batch[0])
    calls = passes.calls(loss_fn, None, batch, n, torch.sum)
    assert calls is not None, passes.refusal
    blocks = [block for several in calls.values() for block in several]
    kept = [x for block in blocks for x in vars(block).values() if isinstance(x, Tensor)]
    assert not any(x.requires_grad for x in kept)
    singles = [tuple(x[i : i + 1] for x in batch) for i in range(n)]
    gradients = gradients_of_each(model, singles, loss_fn)
    clip = float(torch.tensor([norm_of(g) for g in gradients]).median())
    layers = find_layers(model)
    summer = ClippedSummer(layers, {}, Clip(clip))
    summer.add(calls, n)
    return relative_error(summer.result(), clipped_sum(gradients, clip))


def mlp(*inner):
    return nn.Sequential(nn.Linear(4, 6), *inner, nn.Tanh(), nn.Linear(6, 3))


def _language():
    """A tied table, positions, attention and a class token, as transformers have them."""

    def forward(m, ids):
        x = m.table(ids) + m.places[: ids.shape[1]]
        x = torch.cat([m.token.expand(len(ids), -1, -1), x], 1)
        h = m.layer(x)
        return F.linear(m.norm(h[:, 0]), m.table.weight)[:, :3]

    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return Net(
        forward,
        table=nn.Embedding(11, 8),
        places=nn.Parameter(torch.randn(6, 8)),
        token=nn.Parameter(torch.randn(1, 1, 8)),
        layer=layer,
        norm=nn.LayerNorm(8),
    )


def _images():
    """Convolutions of several kinds, group norm and a weight that is computed."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, groups=2, stride=2),
        nn.ConvTranspose2d(4, 3, 2),
        nn.Flatten(),
        parametrizations.weight_norm(nn.Linear(27, 5)),
        nn.PReLU(),
        nn.Linear(5, 3, bias=False),
    )


def _uses():
    """One matrix is multiplied, summed, transposed and indexed; experts are one tensor."""

    def forward(m, x):
        h = torch.tanh(F.linear(x, m.w) + m.w.sum(1))
        h = torch.einsum("ni,eio->neo", h, m.experts).sum(1)
        return F.linear(h, m.w.T)[:, :3] + m.w[x[:, :3].argmax(1)][:, :3]

    return Net(
        forward, w=nn.Parameter(torch.randn(5, 4)), experts=nn.Parameter(torch.randn(2, 5, 5))
    )


def _recurrent():
    def forward(m, x):
        return m.head(m.cell(x)[0][:, -1])

    return Net(forward, cell=nn.LSTM(4, 3, batch_first=True), head=nn.Linear(3, 3))


def _pooled():
    """Max pooling with channels in front and last, with and without places."""
    layers = [nn.Conv2d(2, 9, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(9, 8, 2), nn.Tanh()]
    model = nn.Sequential(*layers, nn.MaxPool2d(3, 2, 1, ceil_mode=True))

    def forward(m, x):
        h = m.images(x)
        largest, places = F.max_pool2d(h, 2, stride=1, dilation=1, return_indices=True)
        places = places.flatten(1).to(h.dtype)
        return m.head(torch.cat([largest.flatten(1), places.sin()], 1))

    return Net(forward, images=model, head=nn.Linear(16, 3))


@pytest.mark.quick("_uses-*", "_recurrent-*", "_pooled-*")
@pytest.mark.parametrize(
    ("make", "shape", "words"),
    [
        (_language, (5,), 11),
        (_images, (2, 6, 6), 0),
        (_uses, (4,), 0),
        (_recurrent, (3, 4), 0),
        (_pooled, (2, 9, 9), 0),
    ],
)
def test_one_capture_equals_single_examples_at_every_size(make, shape, words):
    model = make()
    passes = GraphPasses(model, find_layers(model))
    for n in (2, 7, 3):
        assert error(passes, model, cross_entropy, rows(n, *shape, words=words)) < 1e-10
    assert passes.captures == 1


@pytest.mark.slow
@pytest.mark.skipif(bool(find_compiler_fault()), reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("make", "shape", "words"),
    [(_language, (5,), 11), (_images, (2, 6, 6), 0), (_uses, (4,), 0), (_recurrent, (3, 4), 0)],
)
def test_a_compiled_graph_equals_single_examples_at_every_size(make, shape, words):
    model = make()
    counters["inductor"].clear()
    passes = GraphPasses(model, find_layers(model), compiles=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*the graph is not compiled")
        for n in (2, 7, 20):
            assert error(passes, model, cross_entropy, rows(n, *shape, words=words)) < 1e-10
    # The forward and the backward pass.
    counts = counters["inductor"]
    assert counts["fxgraph_cache_hit"] + counts["fxgraph_cache_miss"] == 2


@pytest.mark.slow
@pytest.mark.skipif(bool(find_compiler_fault()), reason="needs a C++ compiler")
def test_a_mask_of_weights_and_inputs_is_drawn_once_in_a_compiled_graph():
    """With one mask of zeros and ones, the product of masked ones is the number of ones."""

    def forward(m, x):
        mask = torch.bernoulli(torch.full((1, 64), 0.5))
        return F.linear(x * mask, m.w * mask) - mask.sum()

    model = Net(forward, w=nn.Parameter(torch.ones(1, 64)))
    passes = GraphPasses(model, find_layers(model), compiles=True)
    seen = []

    def weigh(losses):
        seen.append(losses.detach())
        return losses.sum()

    counters["inductor"].clear()
    for n in (3, 7):
        batch = (torch.ones(n, 64),)
        calls = passes.calls(lambda m, b: m(b[0]).squeeze(1), None, batch, n, weigh)
        assert calls is not None, passes.refusal
    assert counters["inductor"] and not torch.cat(seen).any()


def test_a_folder_with_a_space_is_named(monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/data of wards/tmp")
    assert find_compiler_fault() == (
        "torch compiles only where no path has a space: /data of wards/tmp"
    )


@pytest.mark.skipif(bool(find_compiler_fault()), reason="needs a C++ compiler")
def test_a_graph_that_the_compiler_refuses_runs_uncompiled(monkeypatch):
    def refuse(*_, **__):
        raise torch._dynamo.exc.TorchDynamoException("17")

    compile_ = torch.compile

    def compile_all_but_inductor(function, backend, **options):
        return refuse if backend == "inductor" else compile_(function, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", compile_all_but_inductor)
    model = mlp()
    passes = GraphPasses(model, find_layers(model), compiles=True)
    with pytest.warns(UserWarning, match=r"not compiled \(TorchDynamoException\); it runs unc"):
        assert error(passes, model, cross_entropy, rows(5, 4)) < 1e-10


@pytest.mark.skipif(bool(find_compiler_fault()), reason="needs a C++ compiler")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_compiler_that_fails_in_either_pass_leaves_the_graph_uncompiled(monkeypatch, failing):
    from torch._inductor import compile_fx

    compiled = []

    def fail(graph, *_, **__):
        compiled.append(graph)
        if len(compiled) > failing:
            raise ValueError("17")
        return graph.forward

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", fail)
    model = mlp()
    passes = GraphPasses(model, find_layers(model), compiles=True)
    with torch.compiler.config.patch(force_disable_caches=True):
        with pytest.warns(UserWarning, match="^PRIVATE, .* not compiled .*; it runs uncompiled"):
            assert error(passes, model, cross_entropy, rows(5, 4)) < 1e-10
    assert error(passes, model, cross_entropy, rows(7, 4)) < 1e-10
    assert len(compiled) == failing + 1


_WRONG_ID = """
import torch
from dpkfc.gradients.discovery import find_layers
from dpkfc.graph.passes import GraphPasses

torch.set_num_threads(2)
model, ids = torch.nn.Embedding(50, 16), torch.randint(50, (3000,))
passes = GraphPasses(model, find_layers(model), compiles=True)
ids[1700] = 60
for wrong in (True, False):
    try:
        calls = passes.calls(lambda m, b: m(b).square().sum(1), None, ids, 3000, torch.sum)
        assert calls is not None and not wrong
    except (IndexError, RuntimeError):
        assert wrong
    ids[1700] = 1
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(find_compiler_fault()), reason="needs a C++ compiler")
def test_a_wrong_id_raises_in_a_compiled_graph_of_several_threads():
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", _WRONG_ID], check=True)


def test_a_machine_without_a_compiler_replays_the_graphs(monkeypatch, caplog):
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    torch.set_default_dtype(torch.float32)
    model, data = mlp(), rows(20, 4)
    plan = PrivacyConfig(expected_batch_size=6, steps=2).with_noise(1.0, 1e-3, 20)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with Session(plan, model, optimizer, data, compile=True) as session:
        for batch in session.batches():
            session.step(batch, cross_entropy)
        assert session._gradient_mode.graph.captures == 1
    assert "compile=True: no C++ compiler was found" in caplog.text


def test_lengths_of_sequences_share_a_graph():
    model = _language()
    passes = GraphPasses(model, find_layers(model))
    for n, length in ((2, 5), (3, 4), (5, 3)):
        assert error(passes, model, cross_entropy, rows(n, length, words=11)) < 1e-10
    assert passes.captures == 1


# -- what mixes or remembers is not captured -------------------------------------------------------


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, g):
        return g - g.mean(0)


def _count(m, x):
    m.count = m.count + 1
    return m.body(x)


def _keep(m, x):
    h = m.body(x)
    m.last = h.detach().mean(0)
    return h


def _update_buffer(m, x):
    h = m.body(x)
    m.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return h


_seen = []


def _append(m, x):
    h = m.body(x)
    _seen.append(h.detach())
    return h


def _hook(m, x):
    h = m.body(x)
    h.register_hook(lambda g: g - g.mean(0))
    return h


def _change_output(change):
    return lambda m, x: change(m.body(x))


@pytest.mark.parametrize(
    "forward",
    [
        _change_output(lambda h: h - h.mean(0)),
        _change_output(lambda h: h.softmax(0)),
        _change_output(lambda h: h + h[:1]),
        _change_output(lambda h: h.T.reshape(h.shape)),
        _change_output(lambda h: h[torch.randperm(len(h))]),
        _change_output(lambda h: h / len(h)),
        _change_output(lambda h: h * torch.arange(len(h)).unsqueeze(1)),
        _change_output(lambda h: h * torch.ones(len(h)).sum()),
        _change_output(lambda h: h.repeat(1, len(h)).sum(1, keepdim=True) + h),
        _change_output(lambda h: h.unsqueeze(1).expand(-1, len(h), -1).sum(1)),
        _change_output(lambda h: h * F.pad(h, (0, len(h)), value=1.0).sum(1, keepdim=True)),
        _change_output(lambda h: torch.cat([h[: len(h) // 2], h[len(h) // 2 :] + h[:1]])),
        _change_output(lambda h: h * 2 if h.max() > 0 else h),
        _change_output(lambda h: torch.cat([h[:4], h[4:] + h[: len(h[4:])]]) if len(h) > 4 else h),
        _change_output(lambda h: h * 2 if len(h) > 4 else h),
        _change_output(lambda h: h.roll(len(h), 1)),
        _change_output(lambda h: h + h[:, : len(h)].sum(1, keepdim=True)),
        _change_output(lambda h: h.unsqueeze(1).expand(-1, 3, -1).tril(len(h)).sum(1)),
        _change_output(lambda h: h * torch.randint(len(h), (len(h), 1))),
        _change_output(lambda h: h + F.avg_pool1d(h.unsqueeze(1), 1, len(h)).sum(2)),
        _change_output(lambda h: h.split(len(h), 1)[0]),
        _change_output(lambda h: h + h.chunk(len(h), 1)[0]),
        _change_output(lambda h: F.dropout(h, 1 / len(h))),
        _change_output(lambda h: h if len(h) % 2 else -h),
        _change_output(lambda h: h * float(len(h) > 4)),
        _change_output(lambda h: h.index_put((h[:, 0] > 0,), h[h[:, 0] > 0].mean(0))),
        _change_output(lambda h: h / h[0, 0].item()),
        _change_output(lambda h: h[: int(h.argmax()) + 1]),
        _change_output(lambda h: F.batch_norm(h, None, None, training=True)),
        _change_output(_Squared.apply),
        _count,
        _keep,
        _update_buffer,
        _append,
        _hook,
    ],
)
def test_a_program_that_mixes_or_remembers_is_not_captured(forward):
    model = Net(forward, body=nn.Linear(4, 3))
    model.count, model.last = 0, None
    model.register_buffer("mean", torch.zeros(3))
    passes = GraphPasses(model, find_layers(model))
    assert passes.calls(cross_entropy, None, rows(6, 4), 6, torch.sum) is None
    assert passes.refusal is not None
    assert (model.count, model.last, _seen) == (0, None, [])
    assert not model.mean.any()


def test_a_loss_that_the_compiler_computes_wrongly_is_not_captured():
    """With fewer labels than classes the compiler's value is another one than torch's own."""
    model, labels = nn.Linear(4, 3), torch.tensor([[1, -1, 0]] * 5)

    def loss_fn(model, batch):
        return nn.MultiLabelMarginLoss(reduction="none")(model(batch[0]), batch[1])

    passes = GraphPasses(model, find_layers(model))
    assert passes.calls(loss_fn, None, (torch.randn(5, 4), labels), 5, torch.sum) is None
    assert passes.refusal.operation == "multilabel_margin_loss"


def test_a_graph_that_computes_something_else_than_the_program_is_not_replayed():
    def forward(m, x):
        h = m.body(x)
        return m.head(2 * h if torch.compiler.is_compiling() else h)

    data = torch.randn(24, 4), torch.randint(3, (24,))

    def release(captures):
        torch.manual_seed(0)
        model = Net(forward, body=nn.Linear(4, 6), head=nn.Linear(6, 3))
        session = open_session(model, data, capture_graphs=captures)
        with session:
            session.step(next(session.batches()), cross_entropy)
        return model.head.weight.detach().clone(), session

    expected, _ = release(False)
    found, session = release(True)
    reason = session._gradient_mode.graph.refusal.reason
    assert reason == "its gradients on public rows differ from plain autograd"
    assert torch.equal(found, expected)


def test_the_comparison_of_graphs_draws_no_numbers_of_the_run():
    def noisy(records):
        x, y = default_collate(records)
        return x + 0.1 * torch.randn_like(x), y

    data = TensorDataset(torch.randn(24, 4), torch.randint(3, (24,)))

    def train(captures):
        torch.manual_seed(0)
        session = open_session(mlp(), data, collate_fn=noisy, capture_graphs=captures)
        with session:
            for batch in session.batches():
                session.step(batch, cross_entropy)
        return torch.cat([p.detach().flatten() for p in session.model.parameters()])

    assert torch.allclose(train(True), train(False), rtol=0, atol=1e-12)


def test_what_is_detached_or_frozen_has_no_gradient():
    def forward(m, x):
        with torch.no_grad():
            target = m.head(torch.tanh(m.body(x)))
        h = m.body(x)
        return m.head(h) - target + m.head(h.detach()) * m.gate.detach()

    model = Net(
        forward, body=nn.Linear(4, 6), head=nn.Linear(6, 3), gate=nn.Parameter(torch.randn(3))
    )
    model.body.bias.requires_grad_(False)
    passes = GraphPasses(model, find_layers(model))
    assert error(passes, model, cross_entropy, rows(5, 4)) < 1e-10


# -- what changes between two steps ----------------------------------------------------------------


def test_a_changed_program_is_captured_anew():
    model = mlp(nn.Dropout(0.5))
    model.eval()
    scale, table = 1.0, torch.ones(3)

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]) * scale * table, batch[1], reduction="none")

    passes = GraphPasses(model, find_layers(model))

    def check(captures):
        assert error(passes, model, loss_fn, rows(5, 4)) < 1e-10
        assert passes.captures == captures

    check(1)
    table = torch.randn(3)  # an input of the graph
    check(1)
    with torch.no_grad():
        model[0].weight.mul_(2)
    check(1)
    scale = 0.5
    check(2)
    model[0].register_forward_hook(lambda module, args, output: 3 * output)
    check(3)
    model[3].register_forward_pre_hook(lambda module, args: (args[0] - 1,))
    check(4)
    model[2] = nn.Softplus()
    check(5)
    model[1].p = 0.25
    model.train()
    assert passes.calls(loss_fn, None, rows(5, 4), 5, torch.sum) is not None
    assert passes.captures == 6


def test_a_loss_that_differs_at_every_step_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(capture, "MOST_GRAPHS", 1)
    model, scale = mlp(), 0.5
    passes = GraphPasses(model, find_layers(model))

    def loss_fn(model, batch):
        return cross_entropy(model, batch) * scale

    assert passes.calls(loss_fn, None, rows(5, 4), 5, torch.sum) is not None
    scale = 1.5
    assert passes.calls(loss_fn, None, rows(5, 4), 5, torch.sum) is None
    assert "differs at every step" in passes.refusal.reason


def test_an_error_of_the_program_is_not_logged_by_the_compiler(caplog):
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)
    model = mlp()
    passes = GraphPasses(model, find_layers(model))
    assert passes.calls(lambda m, b: m(b[0][:, 1:]), None, rows(5, 4), 5, torch.sum) is None
    logger.removeHandler(caplog.handler)
    assert logger.name not in {record.name for record in caplog.records}
    assert not logger.disabled


def test_captures_of_other_sessions_do_not_count(monkeypatch):
    monkeypatch.setattr(capture, "MOST_GRAPHS", 2)
    for _ in range(4):
        model = mlp()
        passes = GraphPasses(model, find_layers(model))
        assert error(passes, model, cross_entropy, rows(5, 4)) < 1e-10
        assert passes.captures == 1


def test_a_hook_that_mixes_after_the_first_step_is_refused():
    model = mlp()
    passes = GraphPasses(model, find_layers(model))
    assert error(passes, model, cross_entropy, rows(5, 4)) < 1e-10
    model[0].register_forward_hook(lambda module, args, output: output - output.mean(0))
    assert passes.calls(cross_entropy, None, rows(5, 4), 5, torch.sum) is None


def test_the_data_set_outside_of_the_batch_is_refused_by_name():
    model, (x, y) = mlp(), rows(20, 4)
    passes = GraphPasses(model, find_layers(model), [x])

    def centred(model, batch):
        return cross_entropy(model, (batch[0] - x.mean(0), batch[1]))

    with pytest.raises(StateChangedError, match=r"reads the private data set by .*x"):
        passes.calls(centred, None, (x[:5].clone(), y[:5]), 5, torch.sum)


# -- sessions --------------------------------------------------------------------------------------


@pytest.mark.quick("kfac", "units")
@pytest.mark.parametrize("settings", ["plain", "kfac", "disk", "views", "units"])
def test_a_session_releases_the_same_with_graphs(settings):
    torch.set_default_dtype(torch.float32)
    x, y = torch.randn(24, 1, 6, 6), torch.randint(3, (24,))
    options = {}
    if settings == "kfac":
        options["preconditioner"] = KFAC(probe=PinkNoise((1, 6, 6)), probe_size=16)
    if settings == "disk":
        options["postprocess"] = DiSK()
    if settings == "views":
        options["augmentations"] = 2
    if settings == "units":
        options |= {"unit": "patient", "max_records_per_unit": 2}
    released = []
    for captures in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
        )
        size = 12 if settings == "units" else 24
        plan = PrivacyConfig(
            max_grad_norm=0.1, expected_batch_size=6, steps=3, test_mode_seed=1, **options
        ).with_noise(0.0, 1e-3, size)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        units = [i // 2 for i in range(24)] if settings == "units" else None
        data = x, y
        with Session(plan, model, optimizer, data, units=units, capture_graphs=captures) as session:
            for batch in session.batches():
                session.step(batch, cross_entropy)
            mode = session._gradient_mode
            if captures:
                assert mode.graph is not None
                # Torch has another convolution from 16 rows on, and a graph for each.
                assert mode.graph.refusal is None and mode.graph.captures <= 2
        released.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*released, rtol=1e-4, atol=1e-6)
