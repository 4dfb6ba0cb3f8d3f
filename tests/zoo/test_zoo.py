"""Every architecture of the zoo trains with the clipped sum of its own gradients, or is refused
where it mixes examples.
"""

from collections import Counter

import pytest

from tests.zoo.known_failures import KNOWN_FAILURES
from tests.zoo.registry import SOUND
from tests.zoo.run import compare, select_entries

ALL = select_entries()
PRECONDITIONED = (
    "roformer",
    "rwkv_in_training",
    "whisper",
    "bart_eager",
    "packed_lstm",
    "sorted_by_hand_then_packed",
    "slot_attention",
    "hierarchical_documents",
    "message_passing_over_pairs",
    "weights_from_a_learnt_vector",
    "rows_routed_by_a_mask",
    "public_sparse_matrix",
    "loss_of_triplets",
)


def get_name(architecture):
    return architecture.name


def select_quick(architectures):
    """Return the names that `make test` takes: every model that must or may be refused, and one in
    six sound models of a family (in sixteen where a library makes the model).
    """
    names, seen = [], Counter()
    for architecture in architectures:
        if architecture.kind != SOUND:
            names.append(architecture.name)
            continue
        if seen[architecture.family] % (16 if architecture.requires else 6) == 0:
            names.append(architecture.name)
        seen[architecture.family] += 1
    return names


@pytest.mark.quick(*select_quick(ALL))
@pytest.mark.parametrize("architecture", ALL, ids=get_name)
def test_an_architecture_releases_the_clipped_sum_or_is_refused(architecture):
    result = compare(architecture)
    if architecture.name in KNOWN_FAILURES:
        assert not result.is_good, (
            f"{architecture.name} is right now; take it off the list of known failures"
        )
    else:
        assert result.is_good, f"{result.outcome}: {result.detail}"


@pytest.mark.quick("bart_eager", "packed_lstm", "hierarchical_documents", "loss_of_triplets")
@pytest.mark.parametrize("name", PRECONDITIONED)
def test_an_architecture_trains_with_a_preconditioner(name):
    """Layers whose examples the probe cannot tell apart keep the identity."""
    entries = {
        architecture.name: architecture
        for architecture in select_entries(with_missing_packages=True)
    }
    result = compare(entries[name], precondition=True)
    assert result.is_good, f"{result.outcome}: {result.detail}"


def test_known_failures_are_entries():
    assert set(KNOWN_FAILURES) <= {
        architecture.name for architecture in select_entries(with_missing_packages=True)
    }
