"""Settings: every field from a file or a flag, one clear error for everything else, and an exact
replay.
"""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpkfc
from dpkfc import convex
from dpkfc.app import settings as declared
from dpkfc.app.curvature_settings import Facts, make_kfac
from dpkfc.app.defaults import layer_settings
from dpkfc.app.library_values import explain_setting, library_key, library_values
from dpkfc.app.methods import METHODS
from dpkfc.app.plan_settings import make_privacy_config
from dpkfc.app.prepare import prepare
from dpkfc.app.recipes.catalogue import RECIPES, run_config
from dpkfc.app.run_config import SECTION_OF, SECTIONS, SETTINGS, RunConfig, make_config
from dpkfc.app.settings_file import flatten, known_settings, read_choices, read_config, to_toml
from dpkfc.app.toml import ConfigError, read_toml, tomllib
from dpkfc.config import PrivacyConfig
from dpkfc.curvature import likelihood
from dpkfc.curvature.kfac import KFAC
from dpkfc.integrations import loggers
from dpkfc.postprocess import AdamBC, pipeline

FIELDS = SETTINGS
FACTS = Facts((1, 8, 8), 1000)


def _choose_other(field):
    """A value that is not the default."""
    choices = [c for c in field.metadata.get("choices", ()) if c and c != field.default]
    if field.name in {"method", "optimizer", "eval_on"}:
        return {"method": "dp-sgd", "optimizer": "sgd", "eval_on": "validation"}[field.name]
    if field.name == "exponent":
        return 0.25
    if choices:
        return choices[0]
    return {"bool": True, "str": 'a "b" \\ c', "int": 3, "float": 0.3125}[str(field.type)]


@pytest.mark.parametrize("method", METHODS)
def test_every_recipe_has_defaults_for_every_method(method):
    for name in RECIPES:
        config = run_config({"recipe": name, "method": method, "public_data": "x.safetensors"})
        wanted = {"dp-sgd": "sgd", "dp-adam": "adam"}.get(method, config.optimizer.optimizer)
        assert config.optimizer.optimizer == wanted, name
        other = "adam" if config.optimizer.optimizer == "sgd" else "sgd"
        if method == "dp-kfc":
            changed = run_config({"recipe": name, "method": method, "optimizer": other})
            assert changed.optimizer.lr != config.optimizer.lr, name


def test_a_written_config_replays_every_field(tmp_path):
    changed = make_config(
        **{name: _choose_other(field) for name, field in FIELDS.items() if name != "out"}
    )
    path = tmp_path / "config.toml"
    path.write_text(to_toml(changed), "utf-8")
    assert make_config(**flatten(read_toml(path), "config.toml")) == changed
    assert all(
        changed.values[name] != field.default for name, field in FIELDS.items() if name != "out"
    )


def test_epochs_and_steps_exclude_each_other(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('recipe = "digits"\nepochs = 3\nsteps = 4\n', "utf-8")
    for file, flags in ((None, {"epochs": 3.0, "steps": 4}), (path, {})):
        with pytest.raises(ConfigError, match="epochs = 3.* and steps = 4 both say"):
            read_choices(file, {"recipe": "digits", **flags})
    path.write_text("steps = 4\n", "utf-8")
    config = run_config(read_choices(path, {"recipe": "digits", "epochs": 3.0}))
    assert (config.privacy.epochs, config.privacy.steps) == (3.0, 0)
    # The method has steps of its own.
    config = layer_settings({"method": {"dp-moments": {"steps": 40}}}, {"method": "dp-moments"})
    assert config.privacy.steps == 40
    chosen = {"method": "dp-moments", "epochs": 3.0}
    assert layer_settings({"method": {"dp-moments": {"steps": 40}}}, chosen).privacy.steps == 0
    # What a run has written holds both.
    path.write_text(to_toml(run_config({"recipe": "digits", "steps": 7})), "utf-8")
    assert run_config(read_choices(path, {})).privacy.steps == 7


def test_a_written_config_beats_the_recipe(tmp_path):
    changed = run_config({"recipe": "digits", "lr": 0.123, "epochs": 7.0})
    content = tomllib.loads(to_toml(changed))
    assert run_config(flatten(content, "x")) == changed
    assert set(content) == set(SECTIONS) and "out" not in content["run"]


@given(st.text(max_size=20), st.floats(1e-9, 1e9), st.integers(0, 10**9))
def test_any_value_survives_toml(text, number, integer):
    config = make_config(recipe="digits", chosen_by=text, lr=number, seed=integer)
    assert make_config(**flatten(tomllib.loads(to_toml(config)), "x")) == config


def test_settings_reach_the_library_in_its_types():
    kfac = make_kfac(make_config(factor_decay=0.5, layer_rules="linear conv"), FACTS)
    assert (kfac.decay, kfac.layer_rules) == (0.5, ("linear", "conv"))
    few = library_values(make_config(max_physical_batch_size=-1), PrivacyConfig)
    assert few["max_physical_batch_size"] == "auto"
    assert library_values(RunConfig(), AdamBC)["floor"] == "auto"


def test_settings_of_the_library_have_its_defaults_and_say_what_they_mean():
    for setting in FIELDS.values():
        assert explain_setting(setting.name), setting.name
        for name in setting.metadata.get("owners", ()):
            owner = getattr(dpkfc, name)
            assert library_key(setting.name) in {field.name for field in dataclasses.fields(owner)}
        for name in setting.metadata.get("owners", ())[:1]:
            owners = dataclasses.fields(getattr(dpkfc, name))
            theirs = next(f.default for f in owners if f.name == library_key(setting.name))
            # The library says otherwise that a value is not given, or must be.
            if theirs not in (dataclasses.MISSING, None, "auto"):
                assert setting.default == theirs, setting.name
    assert (declared.LABELS, declared.LIKELIHOODS) == (likelihood.LABELS, likelihood.LIKELIHOODS)
    assert (declared.LOGGERS, declared.READOUTS) == (loggers.LOGGERS, pipeline.READOUTS)
    assert SETTINGS["moments_share"].default == convex.SHARE
    kfac = make_kfac(RunConfig(), FACTS)
    assert kfac == KFAC(probe=kfac.probe)
    config = make_privacy_config(RunConfig(), FACTS)
    assert config == PrivacyConfig(expected_batch_size=256, epochs=5.0)


def test_the_library_says_what_is_wrong_with_its_field():
    with pytest.raises(ConfigError, match=r"^decay must lie in \[0, 1\), got 1\.0"):
        make_kfac(make_config(factor_decay=1.0), FACTS)


def test_a_setting_stands_in_one_section():
    assert sum(len(dataclasses.fields(getattr(RunConfig, name))) for name in SECTIONS) == len(
        FIELDS
    )
    for name, section in SECTION_OF.items():
        assert flatten({section: {name: 1}}, "x") == {name: 1}


def test_settings_of_a_file_are_read_with_unknown_keys():
    assert known_settings({"x": 1, "run": {"note": "a", "seed": 3}}) == {
        "x": 1,
        "note": "a",
        "seed": 3,
    }


@pytest.mark.parametrize(
    "content, what",
    [
        ({"epsilom": 1}, "unknown key 'epsilom'; did you mean 'epsilon'"),
        ({"privacy": {"epsilom": 1}}, "unknown key 'epsilom'; did you mean 'epsilon'"),
        ({"privcy": {"epsilon": 1}}, r"unknown section \[privcy\]; did you mean 'privacy'"),
        (
            {"optimizer": {"epsilon": 1}},
            r"epsilon is in \[optimizer\] but belongs in \[privacy\]",
        ),
        (
            {"optimizer": {"filter_kappa": 1}},
            r"filter_kappa is in \[optimizer\] but belongs in \[postprocess\]",
        ),
        ({"preconditioner": {"probe": "pink"}}, "unknown key 'probe'; did you mean 'probe_size'"),
        ({"run": {"seed": 1}, "seed": 2}, "seed is given twice"),
        ({"seed": 2, "run": {"seed": 1}}, "seed is given twice"),
        ({"qqq": 1}, "unknown key 'qqq'; known: "),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(content, what):
    with pytest.raises(ConfigError, match=what):
        flatten(content, "my.toml")


@pytest.mark.parametrize(
    "settings, what",
    [
        ({"epsilon": "three"}, r"epsilon must be a number, got 'three' \(str\)"),
        ({"epsilon": True}, "epsilon must be a number, got True"),
        ({"steps": 1.5}, "steps must be an integer, got 1.5"),
        ({"uncertified": 1}, "uncertified must be true or false"),
        ({"recipe": 3}, "recipe must be text in quotes"),
        ({"epsilon": 0.0}, "epsilon must be above 0, got 0"),
        ({"epsilon": math.inf}, "epsilon must be finite"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be at least 0"),
        ({"expected_batch_size": -1}, "expected_batch_size must be at least 0"),
        ({"preconditioner": "kfac", "max_grad_norm": 0.0}, "max_grad_norm = auto .or 0. is for"),
        ({"method": "dp-kfac"}, "unknown method 'dp-kfac'; did you mean 'dp-kfc'"),
        ({"sampler": "poison"}, "did you mean 'poisson'"),
        ({"exponent": 0.7}, "exponent must be at most 0.5"),
        ({"momentum": 1.0}, "momentum must be below 1"),
        ({"method": "dp-sgd", "optimizer": "adam"}, "means optimizer = 'sgd', got 'adam'"),
        ({"eval_on": "validation"}, "needs validation_size > 0"),
        ({"preconditioner": "kfac", "source": "public"}, "needs public_data"),
    ],
)
def test_a_bad_value_names_the_field_and_the_value(settings, what):
    with pytest.raises(ConfigError, match=what):
        make_config(**settings)


def test_an_integer_is_a_number():
    assert make_config(epsilon=3).privacy.epsilon == 3.0 and isinstance(
        make_config(epsilon=3).privacy.epsilon, float
    )


@pytest.mark.parametrize("chosen", [{}, {"recipe": ""}, {"recipe": "mnist-"}, {"recipe": 3}])
def test_an_unknown_recipe_is_named(chosen):
    with pytest.raises(ConfigError, match="mnist-cnn|which recipe or data.*dpkfc recipes"):
        run_config(chosen)


def test_layers_lie_over_one_another():
    defaults = {
        "privacy": {"epochs": 9},
        "lr": 0.5,
        "method": {
            "dp-kfc": {"optimizer": "adam", "every": 7, "adam": {"lr": 0.01}, "sgd": {"lr": 0.2}}
        },
    }
    plain = layer_settings(defaults, {"method": "dp-sgd"})
    assert (
        plain.optimizer.lr,
        plain.privacy.epochs,
        plain.preconditioner.every,
        plain.optimizer.optimizer,
    ) == (
        0.5,
        9.0,
        RunConfig.preconditioner.every,
        "sgd",
    )
    adam = layer_settings(defaults, {"method": "dp-kfc"})
    assert (adam.optimizer.lr, adam.preconditioner.every, adam.optimizer.optimizer) == (
        0.01,
        7,
        "adam",
    )
    assert layer_settings(defaults, {"method": "dp-kfc", "optimizer": "sgd"}).optimizer.lr == 0.2
    assert layer_settings(defaults, {"method": "dp-kfc", "lr": 3.0}).optimizer.lr == 3.0
    with pytest.raises(ConfigError, match="unknown key 'evry'"):
        layer_settings({"method": {"dp-kfc": {"evry": 3}}}, {"method": "dp-kfc"})


@pytest.mark.parametrize(
    "chosen, lr",
    [
        ({"method": "disk"}, 1.0),  # 0.1 with momentum 0.9 takes steps as long as 1.0 without
        ({"method": "de-et-al"}, 1.0),
        ({"method": "doppler"}, 0.1),
        ({"method": "disk", "momentum": 0.9, "filter_momentum": True}, 0.1),
        ({"method": "disk", "lr": 0.3}, 0.3),
        ({"method": "dp-ngd"}, 1.0 * 0.5 * 0.05 / 10),  # Eq. 16 with C = 0.5 and √λ_safe = 0.05
        ({"method": "dp-ngd", "max_grad_norm": 2.0, "lambda_safe": 0.01}, 1.0 * 0.5 * 0.1 / 2),
        ({"method": "dp-ngd", "readout": "whitened"}, 1.0 * 0.5 / 10),
        (
            {"method": "dp-ngd", "clipping": "normalised"},
            1.0 * 0.5 * 0.05,
        ),  # steps of length 1 whatever C is
        ({"method": "disk", "optimizer": "adam"}, 0.1),
    ],
)
def test_a_method_without_momentum_takes_steps_of_the_same_length(chosen, lr):
    defaults = {"privacy": {"max_grad_norm": 0.5}, "method": {"dp-sgd": {"lr": 0.1}}}
    assert layer_settings(
        defaults, {"public_data": "x.safetensors", **chosen}
    ).optimizer.lr == pytest.approx(lr)


@pytest.mark.parametrize(
    "chosen, lr",
    [
        ({"method": "dp-adam"}, 0.01),
        (
            {"method": "dp-adambc"},
            0.01 * (2 * 0.0316306) ** 0.5,
        ),  # the floor is twice what v̂ resolves, 3.16 % of Φ
        ({"method": "dp-adambc", "adam_bc_resolution": 8.0}, 0.01 * (8 * 0.0316306) ** 0.5),
        ({"method": "dp-adambc", "adam_bc_floor": 1e-6}, 0.01),
        ({"method": "dp-kfc", "optimizer": "adam-bc"}, 0.02 * (2 * 0.0316306) ** 0.5),
        ({"method": "dp-kfc-a", "optimizer": "adam-bc"}, 0.02 * (2 * 0.0316306) ** 0.5),
        ({"method": "dp-kfc-a", "optimizer": "adam-bc", "lr": 0.5}, 0.5),
        ({"method": "dp-sgd-pt", "optimizer": "adam-bc", "public_data": "x.safetensors"}, 0.1),
    ],
)
def test_adam_bc_takes_steps_as_long_as_adam_where_most_entries_are_noise(chosen, lr):
    rates = {"dp-sgd": {"lr": 0.1}, "dp-adam": {"lr": 0.01}, "dp-kfc": {"adam": {"lr": 0.02}}}
    assert layer_settings({"method": rates}, chosen).optimizer.lr == pytest.approx(lr, rel=1e-3)


def test_a_table_of_adam_bc_is_taken_as_it_is():
    whole = {"dp-kfc": {"lr": 0.7, "adam": {"lr": 0.02}}}
    assert (
        layer_settings({"method": whole}, {"method": "dp-kfc", "optimizer": "adam-bc"}).optimizer.lr
        == 0.7
    )
    rates = {"dp-kfc": {"adam": {"lr": 0.02}, "adam-bc": {"lr": 0.3}}}
    assert (
        layer_settings({"method": rates}, {"method": "dp-kfc", "optimizer": "adam-bc"}).optimizer.lr
        == 0.3
    )


def test_a_rate_of_its_own_or_without_momentum_stays_as_it_is():
    assert layer_settings({"method": {"disk": {"lr": 0.1}}}, {"method": "disk"}).optimizer.lr == 0.1
    assert (
        layer_settings(
            {"optimizer": {"momentum": 0.0}, "method": {"dp-sgd": {"lr": 0.1}}}, {"method": "disk"}
        ).optimizer.lr
        == 0.1
    )
    assert layer_settings({}, {"method": "disk"}).optimizer.lr == RunConfig.optimizer.lr


@pytest.mark.parametrize(
    "wrong",
    [{"max_grad_norm": "a"}, {"max_grad_norm": 0.0}, {"lambda_safe": -1.0}, {"momentum": 1.0}],
)
def test_a_wrong_value_behind_a_rate_is_named(wrong):
    chosen = {"method": "dp-ngd", "public_data": "x.safetensors", **wrong}
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        layer_settings({"method": {"dp-sgd": {"lr": 0.1}}}, chosen)
    with pytest.raises(ConfigError, match="adam_bc_resolution"):
        layer_settings(
            {"method": {"dp-adam": {"lr": 0.1}}}, {"method": "dp-adambc", "adam_bc_resolution": 0.0}
        )


def test_a_file_that_is_no_toml_is_named(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("epsilon = = 3")
    with pytest.raises(ConfigError, match=r"bad\.toml: is not TOML"):
        read_toml(path)
    with pytest.raises(ConfigError, match="does not exist"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_toml(path)


def test_later_refreshes_are_as_small_as_was_asked_for():
    more = {"factor_decay": 0.875, "later_probe_size": 32}
    made = [make_kfac(run_config({"recipe": "digits", **given}), FACTS) for given in ({}, more)]
    assert [of.later_probe_size for of in made] == [None, 32]


def test_the_rule_of_a_clip_norm_is_for_whitened_rows():
    config = run_config({"recipe": "digits", "method": "dp-sgd", "max_grad_norm": 0.0})
    with pytest.raises(ConfigError, match="'digits' needs C: give one above 0") as error:
        prepare(config)
    assert len(str(error.value)) <= 160


def test_auto_may_be_written_where_a_number_stands_for_it(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('recipe = "digits"\nmethod = "dp-adambc"\nadam_bc_floor = "auto"\n', "utf-8")
    written = read_choices(path, {"max_physical_batch_size": "auto"})
    numbers = read_choices(path, {"max_physical_batch_size": -1, "adam_bc_floor": 0.0})
    assert run_config(written) == run_config(numbers)
    clip = {"method": "dp-moments", "preconditioner": "moments", "max_grad_norm": "auto"}
    assert make_config(**clip).privacy.max_grad_norm == 0


def test_a_clip_or_noise_of_0_is_refused_as_a_flag_and_read_in_the_file_of_a_run(tmp_path):
    with pytest.raises(ConfigError, match="--max-grad-norm 0 would leave no gradient.*or auto"):
        read_choices(None, {"max_grad_norm": 0.0})
    with pytest.raises(ConfigError, match="--noise-multiplier 0 would add no noise; leave it out"):
        read_choices(None, {"noise_multiplier": 0.0})
    path = tmp_path / "config.toml"
    config = make_config(method="dp-moments", preconditioner="moments", max_grad_norm="auto")
    path.write_text(to_toml(config), "utf-8")
    assert read_config(path) == config
