"""Noise that waits: the same steps as DP-SGD, and a table that shows nothing in between."""

import copy
import io
import itertools
import json
import logging
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpkfc.config import PrivacyConfig
from dpkfc.curvature.kfac import KFAC
from dpkfc.curvature.token_noise import TokenNoise
from dpkfc.postprocess import DiSK
from dpkfc.postprocess.weight_average import WeightEMA
from dpkfc.session import Session
from tests.mutation_cases import weights
from tests.sessions import cross_entropy as loss_fn

ROWS, RECORDS, READS = 50, 60, 5


class Texts(nn.Module):
    """Two tables, one with a row of padding, in front of a linear layer."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(ROWS, 4, padding_idx=0)
        self.places = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids):
        places = torch.arange(ids.shape[1]) % 2
        return self.head(
            (self.words(ids) + self.places(places) + self.words(ROWS // 2 - ids)).mean(1)
        )


def texts(dtype=torch.float64):
    torch.default_generator.manual_seed(0)
    return Texts().to(dtype)


def data(highest=ROWS // 2):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, highest, (RECORDS, READS), generator=generator)
    return ids, torch.randint(0, 3, (RECORDS,), generator=generator)


def session(model, noise=1.0, lr=0.5, options=None, **settings):
    values = {"expected_batch_size": 6, "steps": 8, "test_mode_seed": 3, "max_grad_norm": 0.5}
    plan = PrivacyConfig(**{**values, **settings}).with_noise(noise, 1e-3, RECORDS)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    return Session(plan, model, optimizer, **{"dataset": data(), **(options or {})})


def train(s, steps=100, loss=loss_fn):
    """Make steps at a rate that changes in each."""
    for done, batch in enumerate(s.batches(), 1):
        s.optimizer.param_groups[0]["lr"] = 0.5 * 0.8**batch.step
        s.step(batch, loss)
        if done == steps:
            break


def train_texts(lazy, model=None, loss=loss_fn, **settings):
    model = model or texts()
    with (
        session(model, **settings) as s,
        s.lazy_noise() if lazy else nullcontext(),
    ):
        train(s, loss=loss)
    return weights(model)


# -- the same steps --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_physical_batch_size": 4},
        {"max_physical_batch_size": 1},
        {"max_physical_batch_size": "auto"},
        {"clipping": "per_layer"},
        {"clipping": "automatic"},
        {"expected_batch_size": 1},
        {"sampler": "fixed"},
        {"augmentations": 2},
    ],
    ids=str,
)
def test_without_noise_the_steps_are_those_of_dp_sgd(settings):
    dense = train_texts(False, noise=0.0, **settings)
    assert torch.allclose(train_texts(True, noise=0.0, **settings), dense, rtol=0, atol=1e-12)
    assert not torch.equal(dense, weights(texts()))


def test_records_of_one_unit_are_clipped_once():
    options = {"dataset": data(), "units": [i // 2 for i in range(RECORDS)]}
    runs = []
    for lazy in (False, True):
        model = texts()
        config = PrivacyConfig(
            expected_batch_size=6,
            steps=5,
            test_mode_seed=1,
            unit="patient",
            max_records_per_unit=2,
        )
        plan = config.with_noise(0.0, 1e-3, RECORDS // 2)
        s = Session(plan, model, torch.optim.SGD(model.parameters(), 0.5), **options)
        with s, s.lazy_noise() if lazy else nullcontext():
            train(s)
        runs.append(weights(model))
    assert torch.allclose(*runs, rtol=0, atol=1e-12)


def test_an_empty_batch_lets_all_rows_wait():
    sizes = []
    model = texts()
    with session(model, expected_batch_size=1, steps=12) as s, s.lazy_noise():
        for batch in s.batches():
            sizes.append(s.step(batch, loss_fn).batch_size)
    assert 0 in sizes
    assert model.words.weight[1:].ne(texts().words.weight[1:]).all()


def test_a_record_that_fails_adds_nothing():
    ids, labels = data()
    ids[7, 2] = ROWS  # a row that the table does not have
    runs = []
    for lazy in (False, True):
        model = texts()
        options = {"dataset": (ids, labels), "public_records": [(ids[0], labels[0])] * 4}
        with (
            session(model, 0.0, options=options, expected_batch_size=30) as s,
            s.lazy_noise() if lazy else nullcontext(),
        ):
            train(s)
            assert s._failed_rows
        runs.append(weights(model))
    assert torch.allclose(*runs, rtol=0, atol=1e-12)


def test_only_tables_that_are_trained_wait():
    model = texts()
    model.places.requires_grad_(False)
    with session(model) as s, s.lazy_noise():
        train(s, 2)
        assert model.places.weight.isfinite().all()
        assert model.words.weight.isnan().all()


# -- nothing shows ---------------------------------------------------------------------------------


def test_a_table_is_empty_between_steps():
    model = texts()
    older = model.words.weight.detach()
    array = model.words.weight.detach().numpy()

    def check(*_):
        assert model.words.weight.isnan().all()

    with session(model, options={"verify": False}) as s, s.lazy_noise():
        handle = model.head.register_forward_hook(check)
        for batch in s.batches():
            s.step(batch, loss_fn)
            check()
            assert model.words.weight.grad is None
            assert older.isnan().all()
            assert torch.tensor(array).isnan().all()
        handle.remove()
    assert weights(model).isfinite().all()


def test_a_hook_of_the_optimizer_sees_no_gradient_of_a_table():
    model = texts()
    with session(model) as s, s.lazy_noise():
        found = []
        s.optimizer.register_step_pre_hook(lambda *_: found.append(model.words.weight.grad))
        s.optimizer.register_step_post_hook(lambda *_: found.append(model.words.weight.grad))
        train(s, 3)
    assert found == [None] * 6


def evaluate(s):
    with torch.inference_mode():
        s.model.eval()(data()[0])
    s.model.train()


def load(s):
    torch.manual_seed(5)
    s.model.load_state_dict(Texts().state_dict())


def accumulate(s):
    s.model.words(torch.tensor([1]))


@pytest.mark.parametrize(
    "read",
    [
        lambda s: s.model.state_dict(),
        lambda s: s.model.words.state_dict(),
        evaluate,
        accumulate,
        load,
        lambda s: s.check_released(),
        lambda s: s.released_state(),
        lambda s: s.check_weights(),
        lambda s: s.accept_weights(),
        lambda s: s.close(),
    ],
)
def test_what_reads_weights_finds_all_of_them(read):
    """Rows whose noise is still missing have the values of the beginning."""
    model = texts()
    with session(model) as s, s.lazy_noise():
        train(s, 3)
        read(s)
        for table in (model.words.weight[1:], model.places.weight):
            assert table.isfinite().all()
            begun = texts().state_dict()
            other = begun["words.weight"][1:] if len(table) > 10 else begun["places.weight"]
            assert table.ne(other).all()


def test_a_saved_and_a_written_model_hold_all_rows(tmp_path):
    model = texts()
    with session(model, options={"ledger_path": tmp_path / "l.jsonl"}) as s, s.lazy_noise():
        train(s, 3)
        s.save(tmp_path / "c")
        saved = {name: x.clone() for name, x in model.state_dict().items()}
        train(s, 2)
        s.write_card(tmp_path / "run", title="t", chosen_by="nobody", not_private={})
        assert weights(model).isfinite().all()
        train(s, 1)
        s.restore(tmp_path / "c")
        assert all(torch.equal(x, saved[name]) for name, x in model.state_dict().items())
        train(s, 1)
        assert model.words.weight.isnan().all()


def test_an_error_in_the_block_leaves_all_weights():
    model = texts()
    with pytest.raises(KeyboardInterrupt), session(model) as s, s.lazy_noise():
        train(s, 3)

        def interrupt(model, batch):
            model(batch[0])
            raise KeyboardInterrupt

        s.step(next(s.batches()), interrupt)
    moved = model.words.weight.ne(texts().words.weight).all(1)
    assert moved[1:].all()
    assert not moved[0], "the row of padding has no noise"
    assert model.words.weight.isfinite().all()


def interrupt_write(monkeypatch, s, call):
    """Make a step that Ctrl-C interrupts between the two writes of rows and of their counts."""
    batch, fill, calls = next(s.batches()), torch.Tensor.index_fill_, itertools.count()

    def interrupt(x, *args):
        if x.dtype == torch.int32 and next(calls) == call:
            raise KeyboardInterrupt
        return fill(x, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.Tensor, "index_fill_", interrupt)
        s.step(batch, loss_fn)


def test_rows_that_a_record_reads_have_no_noise_twice_after_ctrl_c(monkeypatch):
    model = texts()
    with session(model) as s, s.lazy_noise():
        train(s, 3)
        waiting = s._lazy._waiting["words.weight"]
        interrupt_write(monkeypatch, s, 0)
        rows, written, _ = waiting.unfinished
        model.state_dict()
        assert torch.equal(model.words.weight[rows], written)


def test_a_step_is_taken_once_where_ctrl_c_comes_inside_of_it(monkeypatch):
    runs = []
    for is_interrupted in (False, True):
        model = texts()
        with session(model) as s, s.lazy_noise():
            train(s, 3)
            s.optimizer.param_groups[0]["lr"] = 0.5 * 0.8**3
            if is_interrupted:
                interrupt_write(monkeypatch, s, 2)
            else:
                s.step(next(s.batches()), loss_fn)
        runs.append(weights(model))
    assert torch.equal(*runs)


def test_a_batch_that_raises_can_be_stepped_again():
    runs = []
    for fails in (False, True):
        model = texts()
        with session(model, 0.0, options={"verify": False}) as s, s.lazy_noise():
            train(s, 2)
            if fails:
                with pytest.raises(ValueError, match="one loss per example"):
                    s.step(next(s.batches()), lambda model, batch: loss_fn(model, batch).sum())
                assert model.words.weight.isnan().all()
            train(s)
        runs.append(weights(model))
    assert torch.equal(*runs)


def test_a_table_that_was_written_while_its_noise_waits_is_not_saved(tmp_path):
    model = texts()
    with session(model) as s:
        with s.lazy_noise():
            train(s, 2)
            with torch.no_grad():
                model.words.weight[3] = 0
            with pytest.raises(RuntimeError, match=r"'words\.weight' was written between"):
                s.save(tmp_path / "c")
        assert not (tmp_path / "c").exists()


def test_an_empty_model_is_not_copied():
    model = texts()
    with session(model) as s, s.lazy_noise():
        train(s, 2)
        with pytest.raises(RuntimeError, match="empty tables"):
            copy.deepcopy(model)
        with pytest.raises(RuntimeError, match="empty tables"):
            torch.save(model, io.BytesIO())
        model.state_dict()
        twin = copy.deepcopy(model)
        train(s)
    assert weights(twin).isfinite().all()
    assert weights(model).isfinite().all()


def test_checkpoint_ledger_and_log_are_those_of_dp_sgd(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    facts = []
    for name, lazy in (("dense", False), ("lazy", True)):
        model = texts()
        options = {"ledger_path": tmp_path / f"{name}.jsonl"}
        with session(model, options=options) as s, s.lazy_noise() if lazy else nullcontext():
            train(s)
            s.save(tmp_path / name)
            groups, meta = s._checkpoint_tensors(), s._checkpoint_meta(None)
        shapes = {k: {n: x.shape for n, x in group.items()} for k, group in groups.items()}
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        facts.append((shapes, meta.keys(), [json.loads(line).keys() for line in lines]))
    assert facts[0] == facts[1]
    assert not [record for record in caplog.records if record.name.startswith("dpkfc")]


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    ledger = tmp_path / "l.jsonl"
    model = texts()
    with session(model, options={"ledger_path": ledger}) as s, s.lazy_noise():
        train(s, 4)
        s.save(tmp_path / "c")
        before = ledger.read_bytes()
        train(s)
    ledger.write_bytes(before)
    other = texts()
    with session(other, options={"ledger_path": ledger, "resume": True}) as s, s.lazy_noise():
        s.restore(tmp_path / "c")
        train(s)
    assert torch.equal(weights(model), weights(other))


# -- what other code writes ------------------------------------------------------------------------


def write(p):
    with torch.no_grad():
        p.mul_(0.9)


def write_unseen(p):
    p.data.fill_(0.0)


def move(p):
    p.data = p.data.clone()


@pytest.mark.parametrize("change", [write, move])
def test_an_empty_table_is_not_written(change):
    model = texts()
    with session(model) as s, s.lazy_noise():
        train(s, 2)
        change(model.words.weight)
        with pytest.raises(RuntimeError, match=r"'words\.weight' was moved or written"):
            train(s, 1)
    assert weights(model).isfinite().all()


@pytest.mark.parametrize("change", [write, write_unseen])
@pytest.mark.parametrize("when", ["empty", "full"])
def test_written_weights_do_not_go_on(change, when):
    model = texts()
    with session(model) as s, s.lazy_noise():
        train(s, 2)
        if when == "empty":
            change(model.words.weight)
            model.state_dict()
        else:
            model.state_dict()
            change(model.words.weight)
        with pytest.raises(RuntimeError, match=r"'words\.weight' was written"):
            train(s, 1)
        if when == "full":
            s.accept_weights()
            train(s, 1)
            assert s.unprotected_figures


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda model, batch: loss_fn(model, batch) + model.words.weight.square().sum(),
            "outside of it",
        ),
        (
            lambda model, batch: (
                loss_fn(model, batch)
                + F.embedding(batch[0] + 20, model.words.weight).square().sum((1, 2))
            ),
            "otherwise than by calling its module",
        ),
    ],
)
def test_a_table_is_read_by_its_module_alone(loss, message):
    model = texts()
    with (
        pytest.raises(ValueError, match=message),
        session(model) as s,
        s.lazy_noise(),
    ):
        train(s, loss=loss)
    assert torch.equal(weights(model), weights(texts()))


# -- what is refused -------------------------------------------------------------------------------


def session_with(make=texts, optimizer=None, **settings):
    model = make()
    values = {"expected_batch_size": 6, "steps": 8, "test_mode_seed": 3, **settings}
    plan = PrivacyConfig(**values).with_noise(1.0, 1e-3, RECORDS)
    optimizer = optimizer or (lambda p: torch.optim.SGD(p, 0.1))
    return Session(plan, model, optimizer(list(model.parameters())), data())


class Tied(Texts):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, ROWS, bias=False)
        self.head.weight = self.words.weight


def two_names():
    model = texts()
    model.again = nn.Embedding(ROWS, 4, padding_idx=0, _weight=model.words.weight)
    model.again.weight = model.words.weight
    return model.double()


class OwnSGD(torch.optim.SGD):
    pass


REFUSED = {
    "rounded": ("noise='rounded'", {"noise": "rounded"}),
    "correlated": ("noise='correlated'", {"noise": "correlated", "bands": 2}),
    "metric": ("preconditioner", {"preconditioner": KFAC(probe=TokenNoise(ROWS, READS, pad_id=0))}),
    "filter": ("postprocess", {"postprocess": (DiSK(),)}),
    "average": ("weight_average", {"weight_average": WeightEMA(0.9)}),
    "adam": ("Adam", {"optimizer": lambda p: torch.optim.Adam(p)}),
    "own class": ("OwnSGD", {"optimizer": lambda p: OwnSGD(p, 0.1)}),
    "momentum": ("momentum", {"optimizer": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)}),
    "decay": ("weight_decay", {"optimizer": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1)}),
    "maximize": ("maximize", {"optimizer": lambda p: torch.optim.SGD(p, 0.1, maximize=True)}),
    "tied": ("shared by several modules", {"make": Tied}),
    "two names": ("shared by several modules", {"make": two_names}),
    "half": ("bfloat16", {"make": lambda: texts(torch.bfloat16)}),
    "none": ("no nn.Embedding", {"make": lambda: nn.Sequential(nn.Linear(5, 3))}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_noise_cannot_wait_for_is_refused(name):
    expected, settings = REFUSED[name]
    with session_with(**settings) as s:
        before = weights(s.model)
        with pytest.raises(ValueError, match=expected) as error, s.lazy_noise():
            pass
        assert len(str(error.value)) <= 160
        assert torch.equal(before, weights(s.model))


def test_noise_does_not_wait_where_graphs_are_captured():
    with session(texts(), options={"capture_graphs": True}) as s:
        with pytest.raises(ValueError, match="does not go with captured graphs"), s.lazy_noise():
            pass


def test_a_setting_that_changes_in_the_block_is_refused():
    with session(texts()) as s, s.lazy_noise():
        train(s, 1)
        s.optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(ValueError, match=r"momentum=0\.9"):
            train(s, 1)
        with pytest.raises(ValueError, match="enter it once"), s.lazy_noise():
            pass


def test_after_the_block_steps_are_those_of_dp_sgd():
    runs = []
    for lazy in (False, True):
        model = texts()
        with session(model, 0.0) as s:
            train(s, 2)
            with s.lazy_noise() if lazy else nullcontext():
                train(s, 3)
            train(s, 1)
            assert model.words.weight.isfinite().all()
            assert not model.words._forward_pre_hooks
            with s.lazy_noise() if lazy else nullcontext():
                train(s)
        runs.append(weights(model))
    assert torch.allclose(*runs, rtol=0, atol=1e-12)
