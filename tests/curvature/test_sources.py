"""Where curvature comes from: hybrids, the random control, the private oracle, and labels that do
not fit.
"""

import json
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from dpkfc.config import PrivacyConfig
from dpkfc.curvature import NGD, AdaDPS, FeatureNoise, PrivateOracle, PublicData
from dpkfc.curvature.base import PreconditionerState
from dpkfc.curvature.changed_factors import combine_factors
from dpkfc.linalg.metric import Kronecker
from dpkfc.report.card import CardFacts, build_card, stamp
from dpkfc.report.card_files import to_markdown
from tests.curvature.toys import CNN_SHAPE, Text, capture, cnn, dense_matrix, make_kfac, mlp


def net():
    torch.manual_seed(0)
    return mlp().double()


def public(classes=4, n=40):
    torch.manual_seed(4)
    return PublicData(
        2 * torch.randn(n, 12), torch.randint(classes, (n,)), provenance="random rows"
    )


kfac = partial(make_kfac, probe_size=32)


# -- hybrids ---------------------------------------------------------------------------------------


def test_a_hybrid_takes_a_from_one_probe_and_g_from_the_other():
    model = net()
    first, second = FeatureNoise(12), FeatureNoise(12, std=3.0)
    hybrid = kfac(probe=first, output_probe=second).factors(model, capture)
    alone = [kfac(probe=p).factors(model, capture) for p in (first, second)]
    for name in ("0", "2"):
        sides = hybrid[name].sides
        assert _distance(sides["input"], alone[0][name].sides["input"]) < 1e-12
        assert _distance(sides["output"], alone[1][name].sides["output"]) < 1e-12
        assert _distance(sides["input"], alone[1][name].sides["input"]) > 0.1


def test_a_layer_that_one_probe_alone_reaches_takes_both_factors_of_that_probe():
    factors = kfac(probe=FeatureNoise(12)).factors(net(), capture)
    one = {"0": factors["0"]}
    assert combine_factors(factors, one)["2"] is factors["2"]
    assert combine_factors(one, factors)["2"] is factors["2"]


def _distance(one, other):
    return float((dense_matrix(one) - dense_matrix(other)).norm() / dense_matrix(one).norm())


def test_a_hybrid_builds_and_describes_itself():
    config = kfac(output_probe=public(), labels="given")
    description = config.describe()
    json.dumps(description)
    assert (
        description["output_probe"]["kind"] == "PublicData"
        and description["probe"]["kind"] == "FeatureNoise"
    )
    assert description["curvature_source"] == "A from synthetic; G from public: random rows"
    assert set(config.build(net(), capture, 0).metric) == {"0", "2"}
    assert "output_probe" not in kfac().describe() and "control" not in kfac().describe()
    with pytest.raises(ValueError, match="output_probe must derive from"):
        kfac(output_probe=3)


# -- the control -----------------------------------------------------------------------------------


def eigenvalues(side):
    return torch.linalg.eigvalsh(side.apply(torch.eye(side.root.shape[0], dtype=torch.float64)))


def test_the_random_control_has_the_spectrum_and_other_directions():
    model = net()
    plain, control = (
        kfac(control=c, damping=0.01).build(model, capture, 0) for c in ("none", "random")
    )
    for name in ("0", "2"):
        one, other = plain.metric[name], control.metric[name]
        assert isinstance(one, Kronecker) and isinstance(other, Kronecker)
        for side in ("input", "output"):
            found = [eigenvalues(getattr(e, side)) for e in (one, other)]
            # the scale on the probe is another
            found = [x / x.prod() ** (1 / len(x)) for x in found]
            assert_close(found[0], found[1], rtol=1e-6, atol=0)
        assert (
            float((one.input.root - other.input.root * one.input.norm / other.input.norm).norm())
            > 0.1
        )
    later = kfac(control="random", damping=0.01).build(model, capture, 50)
    overlap = later.metric["0"].input.root, control.metric["0"].input.root
    assert not torch.allclose(*overlap)  # the spectrum is measured anew


def test_the_control_permutes_diagonals():
    torch.manual_seed(0)
    model = Text().double()
    probe = PublicData(torch.randint(11, (30, 5)), provenance="ids")
    found = [
        kfac(probe=probe, control=c, scale="trace").build(model, capture, 0)
        for c in ("none", "random")
    ]
    scales = [f.metric["norm"].scale["weight"] for f in found]
    assert not torch.equal(*scales)
    assert_close(*(s.sort().values for s in scales))
    with pytest.raises(ValueError, match="control must be one of"):
        kfac(control="shuffled")


# -- the oracle ------------------------------------------------------------------------------------


def facts(**more):
    rest = {"assumed_public": {}, "chosen_by": "nobody", "not_private": {}, "device": "cpu"}
    return CardFacts(title="t", releases=2, ledger={"releases": 2}, **{**rest, **more})


def test_an_oracle_voids_the_guarantee_and_says_so():
    torch.manual_seed(3)
    x, y = torch.randn(50, 12), torch.randint(4, (50,))
    config = kfac(probe=PrivateOracle((x, y)), labels="given")
    description = config.describe()
    assert description["uses_private_data"] is True and "sha256" not in description["probe"]
    plan = PrivacyConfig(expected_batch_size=5, steps=2, preconditioner=config).with_noise(
        4.0, 1e-3, 50
    )
    assert not plan.certified and any("private data themselves" in text for text in plan.caveats)
    assert stamp(plan) == "NOT PRIVATE"
    with pytest.warns(UserWarning, match="not a guarantee"):
        text = to_markdown(build_card(plan, facts()))
    assert "yes: NOT PRIVATE" in text and "no certified guarantee" in text
    plain = PrivacyConfig(expected_batch_size=5, steps=2, preconditioner=kfac()).with_noise(
        4.0, 1e-3, 50
    )
    assert plain.certified and plain.hash != plan.hash
    hybrid = kfac(output_probe=PrivateOracle((x, y)))
    assert hybrid.describe()["uses_private_data"] is True
    for other in (NGD(probe=config.probe, lambda_safe=1.0, steps=2), AdaDPS(probe=config.probe)):
        assert other.describe()["uses_private_data"] is True


def test_an_oracle_takes_tensors_or_a_dataset_of_pairs():
    x, y = torch.arange(20.0).view(10, 2), torch.arange(10)
    whole, rows = PrivateOracle((x, y)), PrivateOracle([(x[i], int(y[i])) for i in range(10)])
    for n in (4, 15):
        drawn = [p.sample(n, torch.Generator().manual_seed(0)) for p in (whole, rows)]
        assert torch.equal(drawn[0][0], drawn[1][0]) and torch.equal(drawn[0][1], drawn[1][1])
        assert torch.equal(drawn[0][0][:, 0], 2.0 * drawn[0][1])
    assert len(set(whole.sample(10, torch.Generator().manual_seed(1))[1].tolist())) == 10
    for bad in (x, 3, [], [(x[0],)]):
        with pytest.raises(ValueError, match="PrivateOracle needs"):
            PrivateOracle(bad)


# -- labels ----------------------------------------------------------------------------------------


def digest_of(metric_source):
    return [
        x
        for x in metric_source.build(net(), capture, 0).state_dict().values()
        if x.is_floating_point()
    ]


@pytest.mark.parametrize(
    "make", [kfac, lambda **s: NGD(lambda_safe=1.0, steps=5, **s), lambda **s: AdaDPS(**s)]
)
def test_public_labels_that_do_not_fit_the_head_are_drawn_from_the_model(make):
    """Ten classes of public labels on a head of four: as if `labels="model"` had been asked for,
    and said.
    """
    config = make(probe=public(classes=10), labels="given")
    built = config.build(net(), capture, 0)
    assert "do not fit" in built.note
    assert config.describe()["labels_that_do_not_fit"] == "drawn from the model"
    drawn = digest_of(make(probe=public(classes=10), labels="model"))
    assert all(torch.equal(a, b) for a, b in zip(digest_of(config), drawn, strict=True))
    again = PreconditionerState.from_state_dict(built.state_dict())
    assert again.note == built.note
    fitting = make(probe=public(), labels="given").build(net(), capture, 0)
    assert fitting.note == "" and "note" not in fitting.state_dict()


def test_which_labels_were_drawn_does_not_decide_what_they_are_used_for():
    """One label in forty is out of range; a refresh that happens not to draw it must do the
    same.
    """
    x = torch.randn(40, 12)
    y = torch.zeros(40, dtype=torch.long)
    y[7] = 4
    config = kfac(probe=PublicData(x, y, provenance="rows"), probe_size=4, labels="given")
    assert all(config.build(net(), capture, step).note for step in range(8))


def test_the_card_says_that_labels_were_drawn_and_where_each_factor_comes_from():
    config = kfac(probe=public(classes=10), labels="given", output_probe=FeatureNoise(12))
    built = config.build(net(), capture, 0)
    plan = PrivacyConfig(expected_batch_size=5, steps=2, preconditioner=config).with_noise(
        4.0, 1e-3, 50
    )
    refresh = {"step": 0, "digest": built.digest, "scale": built.scale, "note": built.note}
    text = to_markdown(build_card(plan, facts(refreshes=[refresh])))
    assert "labels were drawn from the model" in text and "labels that do not fit" in text
    assert "output factors come from | kind FeatureNoise" in text


def test_labels_per_position_and_images_are_compared_by_shape():
    torch.manual_seed(0)
    text = Text(pooled=False).double()
    ids, y = torch.randint(11, (12, 5)), torch.randint(3, (12, 5))
    good, bad = PublicData(ids, y, provenance="ids"), PublicData(ids, y[:, 0], provenance="ids")
    notes = [
        kfac(probe=p, probe_size=12, labels="given").build(text, capture, 0).note
        for p in (good, bad)
    ]
    assert notes[0] == "" and "do not fit" in notes[1]
    images = PublicData(torch.randn(12, *CNN_SHAPE), torch.randint(3, (12,)), provenance="images")
    assert (
        kfac(probe=images, probe_size=12, labels="given").build(cnn().double(), capture, 0).note
        == ""
    )
