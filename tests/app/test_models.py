"""The networks: sizes, shapes, no module that mixes examples, initial weights by seed."""

import torch

from dpkfc.app.models import build_seeded, digits_cnn


def test_initial_weights_are_a_function_of_the_seed_alone():
    state = torch.random.get_rng_state()
    first, again, other = (
        build_seeded(digits_cnn, 1),
        build_seeded(digits_cnn, 1),
        build_seeded(digits_cnn, 2),
    )
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)
    )
    assert not all(
        torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True)
    )
