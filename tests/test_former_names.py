"""Names that documents gave before the code was moved still work, and warn."""

from __future__ import annotations

from importlib import import_module

import pytest

from dpkfc import FORMER_MODULES, checkpoint


@pytest.mark.parametrize("name", FORMER_MODULES)
def test_a_former_module_hands_on_the_names_of_the_new_one(name: str) -> None:
    new = import_module(FORMER_MODULES[name])
    public = next(
        x
        for x, value in vars(new).items()
        if (getattr(value, "__module__", None) or "").startswith(new.__name__)
    )
    with pytest.warns(DeprecationWarning, match="is now dpkfc"):
        assert getattr(import_module(name), public) is getattr(new, public)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("dpkfc.report.of_session", "session_card"),
        ("dpkfc.federated.partition", "dirichlet"),
        ("dpkfc.federated.runner", "make_clients"),
        ("dpkfc.federated.app", "App"),
        ("dpkfc.privacy.grid", "grid_of"),
        ("dpkfc.studies.cell", "run_cell"),
        ("dpkfc.assurance.audit", "audit_step"),
        ("dpkfc.assurance.subject", "Subject"),
        ("dpkfc.audit.federated_runs", "check_client_noise"),
        ("dpkfc.data.checks", "check_disjoint"),
        ("dpkfc.postprocess.optimizers", "WeightEMA"),
        ("dpkfc.privacy.tradeoff", "attack_rates"),
        ("dpkfc.tracking.batch_rules", "register_batch_rule"),
    ],
)
def test_documented_names_are_found(module: str, name: str) -> None:
    with pytest.warns(DeprecationWarning, match=name):
        assert callable(getattr(import_module(module), name))


def test_a_name_that_never_was_is_an_error() -> None:
    with pytest.raises(ImportError):
        exec("from dpkfc.report.of_session import nothing_of_the_kind")


def test_the_former_name_of_a_function_warns(tmp_path) -> None:
    with pytest.warns(DeprecationWarning, match="exists"):
        assert checkpoint.is_there(tmp_path / "none") is False
