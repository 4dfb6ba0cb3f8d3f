"""Export a privacy card in the form of the public registry of differential privacy deployments.

The registry is hosted by OpenDP, and NIST has proposed to take it over. Its schema is
`schemas/deployments-schema.yaml` of github.com/opendp/deployments-registry-data; this module
follows commit 057e5d81cf60150dd3307e0cf4504b957802fb3b.
docs/report.md has the mapping. What a card does
not hold stays an empty text, for the owner to fill in: the registry's own check names those fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dpkfc.report.numbers import number
from dpkfc.report.officer import meaning_text


def registry_record(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a card, as plain values that JSON or YAML can hold.

    Args:
        card: of a session or of a federated run, with all sections of this version.
    """
    declared, dates = card.get("declared") or {}, card.get("dates") or {}
    owner = declared.get("owner", "")
    return {
        "url_slug": re.sub(r"[^a-z0-9]+", "-", str(card["title"]).lower()).strip("-"),
        "deployment": {
            "basic": {
                "name": card["title"],
                "data_curators": [{"data_curator_name": owner, "data_curator_type": ""}],
                "description": (
                    f"Weights of a model trained with differential privacy: {card['title']}."
                ),
                "intended_use": declared.get("purpose", ""),
                "data_product_type": "Machine learning model",
                "data_product_region": "",
                "data_product_sector": "",
                "publication_date": str(dates.get("ended") or "")[:10],
            },
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": declared.get("data_subjects", ""),
                "unprotected_quantities": _join({**_reasons(card), **card["not_private"]}),
            },
            "privacy_loss": _privacy_loss(card),
            "deployment_model": _deployment_model(card),
            "implementation": _implementation(card),
            "administrative": {
                "status": "Draft",
                "registry_authors": [declared.get("contact") or owner],
                "tier": 3,
            },
        },
    }


def _reasons(card: Mapping[str, Any]) -> dict[str, str]:
    """Return what is taken as public, with the reason."""
    reasons = {}
    for name, entry in card["assumed_public"].items():
        reasons[name] = entry["why"] if isinstance(entry, Mapping) else entry
    return reasons


def _privacy_loss(card: Mapping[str, Any]) -> dict[str, Any]:
    promise = card["guarantee"]
    loss: dict[str, Any] = {
        "privacy_unit": promise["unit"],
        "privacy_unit_details": (
            f"neighbouring data sets differ in {promise['neighbours_differ_in']}"
        ),
    }
    for name, entry in card["assumed_public"].items():
        if name.startswith("number of") and " N" in name and isinstance(entry, Mapping):
            loss["number_of_privacy_units"] = entry["value"]
    epsilon = number(promise["epsilon"])
    if promise["certified"] is True and epsilon is not None:
        loss["privacy_parameters"] = {"epsilon": epsilon, "delta": promise["delta"]}
    loss["privacy_parameters_details"] = meaning_text(card)
    return loss


def _deployment_model(card: Mapping[str, Any]) -> dict[str, str]:
    promise = card["guarantee"]
    against = promise.get("against", "")
    return {
        "model_name": "Federated" if "rounds" in card else "Central",
        "model_name_details": promise.get("privacy_model", ""),
        "trust_assumptions": f"protects from {against}" if against else "",
        "actors": "",
        "release_type": "One release",
        "release_type_details": (
            "the weights of the last step; every noisy sum on the way is charged"
        ),
        "data_source_type": "Static",
        "data_source_type_details": "",
        "access_type": "Non-interactive",
        "access_type_details": "",
    }


def _implementation(card: Mapping[str, Any]) -> dict[str, str]:
    mechanism, software = card["mechanism"], card.get("software") or {}
    settings = card.get("hyper_parameters") or card
    accounts = card.get("accounting") or {}
    sums = {name: mechanism.get(name) for name in ("noise_multiplier", "sensitivity", "noise")}
    return {
        "preprocessing_and_hyperparameter_tuning": settings.get("chosen_by", ""),
        "mechanisms": _join({**sums, **software}),
        "composition": (
            f"{card['guarantee']['releases']} releases, composed by"
            f" {accounts.get('accountant', 'pld').upper()} of dp-accounting"
        ),
        "post_processing": _join({"steps": mechanism.get("postprocess") or "none"}),
        "justification": "",
        "utility": _join(card["results"]),
        "additional_information": f"plan {card['plan_hash']}, ledger head {card['ledger']['head']}",
    }


def _join(values: Mapping[str, Any]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in values.items())
