"""Every method by its name: it runs, says what it is, and composes; wrong combinations are refused
before any training.
"""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from dpkfc.app.assembly import learning_rate, make_augment, make_optimizer
from dpkfc.app.methods import METHODS
from dpkfc.app.prepare import prepare
from dpkfc.app.recipes.catalogue import run_config
from dpkfc.app.recipes.objective import cross_entropy
from dpkfc.app.run_config import SETTINGS
from dpkfc.app.toml import ConfigError
from dpkfc.app.train import resume, run
from dpkfc.session import Session
from tests.app.finished import read_card
from tests.documents import ROOT

QUICK = {
    "recipe": "digits",
    "steps": 2,
    "expected_batch_size": 24,
    "accountant": "rdp",
    "epsilon": 1.0,
    "probe_size": 16,
}
QUICK |= {"gep_rank": 6, "delta": 1e-4}


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """Forty labelled public images of the digits' shape."""
    generator = torch.Generator().manual_seed(3)
    path = tmp_path_factory.mktemp("public") / "public.safetensors"
    save_file(
        {
            "inputs": torch.rand(40, 1, 8, 8, generator=generator),
            "labels": torch.randint(10, (40,), generator=generator),
        },
        path,
    )
    return str(path)


def two_steps(chosen):
    """What `run` does, without the folder and its pictures."""
    config = run_config({**QUICK, **chosen})
    prepared = prepare(config)
    optimizer, augment = (
        make_optimizer(config, prepared.model),
        make_augment(config, prepared.recipe.input_shape),
    )
    before = [p.detach().clone() for p in prepared.model.parameters()]
    with Session(
        prepared.plan, prepared.model, optimizer, prepared.data.train, augment=augment
    ) as session:
        for batch in session.batches():
            session.step(batch, cross_entropy)
        assert session.steps_done == 2 and 0 < session.epsilon <= 1.0 + 1e-6
    assert all(
        not torch.equal(p, q) for p, q in zip(before, prepared.model.parameters(), strict=True)
    )
    return config


SIDES = {
    "dp-kfc": "both",
    "dp-kfc-a": "input",
    "dp-kfc-natural": "input",
    "dp-kfc-g": "output",
    "dp-kfc-random": "both",
}


@pytest.mark.parametrize("method", SIDES)
def test_a_method_whitens_the_sides_that_its_equation_has(method):
    assert (
        prepare(run_config({**QUICK, "method": method})).plan.config.preconditioner.sides
        == SIDES[method]
    )


@pytest.mark.quick(
    "dp-adamw", "dp-sgd-normalised", "de-et-al", "dp-kfc-g", "disk", "doppler", "sofim"
)
# One is for a linear head on fixed features, as tables have.
@pytest.mark.parametrize("method", [method for method in METHODS if method != "dp-moments"])
def test_every_method_trains(method, public):
    more = {"pretrain_epochs": 1} if "pretrain_epochs" in METHODS[method].settings else {}
    config = two_steps({**more, "method": method, "public_data": public})
    for name, value in METHODS[method].settings.items():
        assert config.values[name] == {**{name: value}, **more}[name]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dp-ngd", "gep", "dp-sgd-pt"])
def test_the_card_says_what_was_run(method, tmp_path, public):
    more = (
        {"pretrain_epochs": 1, "filter": "disk", "momentum": 0.0} if method == "dp-sgd-pt" else {}
    )
    run(
        run_config(
            {**QUICK, **more, "method": method, "public_data": public, "out": str(tmp_path / "run")}
        )
    )
    text = (tmp_path / "run" / "privacy_card.md").read_text()
    assert METHODS[method].label in text and "public.safetensors" in text
    assert ("disk" in text.lower()) == bool(more)


@pytest.mark.parametrize(
    "chosen",
    [
        {"method": "dp-kfc", "filter": "disk", "optimizer": "sgd", "momentum": 0.0},
        {"method": "de-et-al", "preconditioner": "kfac", "augmentations": 2},
        {"method": "dp-ngd", "pretrain_epochs": 1},
        {"method": "dp-kfc", "source": "public", "output_source": "pink"},
        {
            "method": "dp-sgd",
            "clipping": "per_layer",
            "nesterov": True,
            "schedule": "cosine",
            "warmup_steps": 1,
        },
    ],
    ids=lambda chosen: " ".join(map(str, chosen.values())),
)
def test_axes_compose(chosen, public):
    two_steps({**chosen, "public_data": public})


@pytest.mark.parametrize(
    "chosen, message",
    [
        ({"method": "dp-sgd", "filter": "disk", "momentum": 0.9}, "doubles the lag"),
        ({"method": "dp-sgd", "schedule": "cosine", "schedule_steps": 9}, "longer than the plan"),
        ({"method": "dp-sgd", "warmup_steps": 9}, "longer than the plan"),
        ({"method": "dp-kfc", "filter": "kalman"}, "unknown filter"),
        ({"method": "dp-sgd", "augmentations": 3}, "equal views"),
        ({"method": "dp-sgd-pt"}, "needs public_data"),
    ],
)
def test_wrong_settings_are_refused(chosen, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(run_config({**QUICK, **chosen, "out": str(tmp_path / "run")}))
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_an_oracle_is_stamped(tmp_path):
    chosen = {**QUICK, "method": "dp-kfc", "source": "private-oracle", "out": str(tmp_path / "run")}
    with pytest.warns(UserWarning, match="NOT PRIVATE"):
        result = run(run_config(chosen))
    assert "NOT PRIVATE" in result.stamp
    assert read_card(tmp_path / "run")["guarantee"]["certified"] is False


def test_public_data_that_nothing_has_compared_are_in_no_figure(tmp_path, monkeypatch):
    from dpkfc.app.recipes.catalogue import find_recipe

    config = run_config(
        {
            **QUICK,
            "method": "dp-sgd",
            "source": "public",
            "labels": "given",
            "out": str(tmp_path / "run"),
        }
    )
    train = find_recipe("digits").data(config).train
    save_file(
        {"inputs": train[0][:30].clone(), "labels": train[1][:30].clone()},
        tmp_path / "public.safetensors",
    )
    config = config.change(public_data=str(tmp_path / "public.safetensors"))
    monkeypatch.setattr(
        "dpkfc.app.curvature_settings.read_public_data",
        lambda *_: pytest.fail("private rows are read as public ones"),
    )
    assert run(config).stamp == ""


@pytest.mark.slow
def test_averaged_weights_are_evaluated_and_delivered(tmp_path):
    """And a run with filters, schedule and average is continued from its checkpoint."""
    chosen = {
        **QUICK,
        "method": "dp-sgd",
        "steps": 3,
        "weight_average": 0.5,
        "filter": "ema",
        "momentum": 0.0,
    }
    run(run_config({**chosen, "schedule": "linear", "out": str(tmp_path / "run")}))
    with pytest.raises(ConfigError, match="is complete"):
        resume(tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint"
    delivered, last = (
        load_file(tmp_path / "run" / "model.safetensors"),
        load_file(checkpoint / "model.safetensors"),
    )
    average = load_file(checkpoint / "average.safetensors")
    assert all(torch.equal(x, average[f"average.{name}"]) for name, x in delivered.items())
    assert not any(torch.equal(x, last[name]) for name, x in delivered.items())


def test_learning_rates_of_a_schedule():
    """A warm-up of 2 of 6 steps to 1.0, then down to 0 over what is left, or over `schedule_steps`
    of it.
    """

    def rates(**settings):
        config = run_config(
            {**QUICK, "steps": 6, "method": "dp-sgd", "lr": 1.0, "warmup_steps": 2, **settings}
        )
        return [round(learning_rate(config, step, 6), 6) for step in range(6)]

    assert rates() == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates(schedule="linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rates(schedule="cosine") == [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]
    assert rates(schedule="linear", schedule_steps=4) == [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]


def test_pre_training_moves_everything_but_the_head(public):
    """The head has the weights it was built with and no bias; all else has learned from the public
    examples.
    """
    chosen = run_config(
        {**QUICK, "method": "dp-sgd-pt", "pretrain_epochs": 1, "public_data": public}
    )
    fresh = run_config({**QUICK, "method": "dp-sgd"})
    trained, built = (dict(prepare(config).model.named_parameters()) for config in (chosen, fresh))
    head = list(built)[-2:]
    assert torch.equal(trained[head[0]], built[head[0]]) and not trained[head[1]].any()
    assert not any(torch.equal(trained[name], built[name]) for name in built if name not in head)


def test_every_page_exists_and_is_linked():
    for method in METHODS.values():
        assert (ROOT / "docs" / "methods" / method.page).is_file(), method.page


FLAG = re.compile(r"--([a-z][a-z0-9-]+)((?: (?!-)[A-Za-z0-9.|][A-Za-z0-9.|-]*)*)")
OWN = {"no", "data-dir", "config", "resume", "quiet"}


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "methods").glob("*.md")), ids=lambda page: page.stem
)
def test_flags_on_the_pages_exist(page):
    """In every piece of code on a page of docs/methods: the flag is a setting, and a value given
    with it is allowed.
    """
    fields = {f.name.replace("_", "-"): f for f in SETTINGS.values()}
    for code in re.findall(r"`([^`\n]+)`", page.read_text("utf-8")):
        for name, given in FLAG.findall(code):
            assert name in fields or name in OWN, f"{page.name}: --{name}"
            choices = fields[name].metadata.get("choices", ()) if name in fields else ()
            for value in filter(None, re.split(r"[ |]+", given)):
                assert not choices or value in choices, f"{page.name}: --{name} {value}"
                if name in fields and fields[name].type in ("int", "float"):
                    assert value[0].isdigit() or value in ("K", "FILE"), (
                        f"{page.name}: --{name} {value}"
                    )
