"""What a geometry measures and what it refuses; symmetries are found and proved once for several measures."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, KnownSymmetries, Quotient
from quotient_manifolds.geometry.known import Memo
from quotient_manifolds.manifolds import FixedRankQuotient
from quotient_manifolds.sharpness import GradientNorm, Measure, WorstCase, cross_entropy
from quotient_manifolds.symmetries import Symmetries
from quotient_manifolds.symmetries.verify import verify_on_batches
from studies.appendix_g import AdaptiveNorm
from tests.counters import recorded_runs
from tests.geometry.cases import GEOMETRIES, encoder, generator, space_at, symmetries_of
from tests.nets.classifiers import Batch, Classifier
from tests.nets.net import shaken


def test_frozen_parameters_are_not_measured() -> None:
    model = encoder()
    for name, w in model.named_parameters():
        w.requires_grad_("linear1" in name or "self_attn" in name)
    space = space_at(Quotient(), model)
    assert set(space.move(space.zero())) == {name for name, w in model.named_parameters() if w.requires_grad}
    for name, w in model.named_parameters():
        w.requires_grad_("linear1" in name)
    with pytest.raises(ValueError, match=r"needs at least one symmetric pair .* has a frozen parameter"):
        space_at(Quotient(), model)


def test_tied_weights_are_one_parameter() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert set(Adaptive().tangent_space(model).point) == {"0.weight", "0.bias", "1.bias"}


SETTINGS: dict[str, Callable[[], Geometry]] = {
    "norm must be one of l2, linf. Found 'l1'": lambda: Euclidean(norm="l1"),  # type: ignore[arg-type]
    "or a finite number. Found 'euclid'": lambda: Quotient("euclid"),
    "Found 'third'": lambda: Quotient(geodesic="third"),
    "must be one of all, pairs, paper, or Symmetries. Found 'none'": lambda: Quotient(symmetries="none"),  # type: ignore[arg-type]
    "eta must be a finite number of at least 0. Found -0.1": lambda: Adaptive(-0.1),
}


@pytest.mark.parametrize("words", SETTINGS)
def test_settings_of_no_geometry_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        SETTINGS[words]()
    assert words in str(caught.value)


def pairs_of(spoil: Callable[[Any], object] = lambda attention: None) -> tuple[Geometry, nn.Module]:
    """The quotient by the pairs of an encoder, whose first attention is spoilt afterwards."""
    model = encoder()
    symmetries = symmetries_of(model).within("pairs")
    with torch.no_grad():
        spoil(model.layers[0].self_attn)  # type: ignore[union-attr,index]
    return Quotient(symmetries=symmetries), model


def without_rank() -> tuple[Geometry, nn.Module]:
    return pairs_of(lambda attention: (attention.in_proj_weight[:3].zero_(), attention.in_proj_bias[:3].zero_()))


def twice() -> tuple[Geometry, nn.Module]:
    model = encoder()
    return Quotient(symmetries=Symmetries(symmetries_of(model).pairs[:1] * 2)), model


UNMEASURED: dict[str, tuple[Callable[[], tuple[Geometry, nn.Module]], str]] = {
    "nan": (
        lambda: pairs_of(lambda attention: attention.out_proj.bias[:1].fill_(math.nan)),
        r"parameter 'layers\.0\.self_attn\.out_proj\.bias' must be finite",
    ),
    "rank": (without_rank, r"Pair layers\.0\.self_attn.* in a quotient metric: rank"),
    "meta": (
        lambda: (Adaptive(), nn.Linear(2, 2, device="meta")),
        "'weight' must have values. Found it on the meta",
    ),
    "complex": (lambda: (Adaptive(), nn.Linear(2, 2, dtype=torch.complex64)), "parameter 'weight' must be real"),
    "frozen": (lambda: (Adaptive(), nn.Linear(2, 2).requires_grad_(False)), "Linear has no parameter to measure"),
    "half": (
        lambda: pairs_of(lambda attention: attention.out_proj.weight.requires_grad_(False)),
        r"pair 'layers\.0\.self_attn.* is frozen in part \(layers.*out_proj\.weight",
    ),
    "none": (
        lambda: (Quotient(symmetries=Symmetries(())), nn.Linear(2, 2)),
        "needs at least one symmetric pair of measured parameters, and Linear has none",
    ),
    "twice": (twice, "shares elements with another pair"),
    "foreign": (lambda: (pairs_of()[0], nn.Linear(2, 2)), "parameters that Linear has. Found"),
}


@pytest.mark.parametrize(("broken", "message"), UNMEASURED.values(), ids=UNMEASURED)
def test_what_cannot_be_measured_is_refused(broken: Callable[[], tuple[Geometry, nn.Module]], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        space_at(*broken())
    assert "\n" not in str(caught.value)


def test_a_pair_without_rank_is_refused_before_the_loss_is_computed() -> None:
    def never(model: nn.Module, batch: Any) -> torch.Tensor:
        raise AssertionError("the loss is computed")

    geometry, model = without_rank()
    with pytest.raises(ValueError, match=r"in a quotient metric: rank"):
        GradientNorm(geometry).of(model, never, [torch.zeros(2, 3)])


def test_names_tell_geometries_apart() -> None:
    several = [*GEOMETRIES, Quotient(0.5), Quotient(0.25, "exact")]
    assert len({geometry.name for geometry in several}) == len(several)
    assert Quotient(0.5).name == "t = 0.5 (second order)"
    norm_off = AdaptiveNorm(Quotient(symmetries="paper"))
    assert norm_off.name == "inv (second order, biases as rows, adaptive norm)"


def test_eps_reaches_the_manifold_and_admits_a_pair_without_full_rank() -> None:
    geometry, model = without_rank()
    space = space_at(replace(geometry, eps=0.5), model)  # type: ignore[type-var]
    block, z = space.pairs[0], space.sample(generator())
    relaxed = FixedRankQuotient(block.pairs[0].n, block.pairs[0].m, "inv", eps=0.5).at(block.space.point)
    torch.testing.assert_close(block.space.vector(z[block.key]), relaxed.vector(z[block.key]))
    assert all(bool(torch.isfinite(w).all()) for w in space.move(z).values())


@pytest.fixture(scope="module")
def subject() -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(0)
    model = shaken(Classifier().double(), 0.3)
    return model, [(torch.randn(2, 3, 4, dtype=torch.float64), torch.arange(2) + 1)]


MEASURES: list[Measure] = [
    WorstCase(Quotient("inv"), 0.1, steps=2),
    WorstCase(Quotient("inv"), 0.2, steps=2),
    WorstCase(Quotient("mix"), 0.1, steps=2),
    GradientNorm(Quotient("inv", symmetries="paper")),
    GradientNorm(Adaptive()),
]


@pytest.mark.filterwarnings("ignore:measures of this model are not constant")  # whose outputs a loss lets rotate
def test_all_measures_of_a_model_need_one_run(subject: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = subject
    alone = [measure.of(model, cross_entropy, batches) for measure in MEASURES]
    runs, known = recorded_runs(monkeypatch), KnownSymmetries()
    assert [measure.of(model, cross_entropy, batches, known=known) for measure in MEASURES] == alone
    assert len(runs) == 1


@pytest.mark.filterwarnings("ignore:measures of this model are not constant")  # whose outputs a loss lets rotate
def test_another_loss_is_a_run_of_its_own_and_other_inputs_and_weights_are_none(
    subject: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batches = subject
    runs, known, measure = recorded_runs(monkeypatch), KnownSymmetries(), GradientNorm(Quotient("inv"))
    for each, loss, several, count in [
        (model, cross_entropy, batches, 1),
        (model, lambda *given: 2 * cross_entropy(*given), batches, 1),
        (model, cross_entropy, [(2 * batches[0][0], batches[0][1])], 0),
        (shaken(Classifier().double(), 0.3), cross_entropy, batches, 0),
    ]:
        alone = measure.of(each, loss, several)
        before = len(runs)
        assert measure.of(each, loss, several, known=known) == alone
        assert len(runs) - before == count


ELSEWHERE: dict[str, tuple[Callable[[Any], object], int]] = {
    "other weights": (lambda model: shaken(model, 0.3), 1),
    "in float32": (lambda model: model.float(), 1),
    "frozen": (lambda model: model.head.weight.requires_grad_(False), 2),
    "one head": (lambda model: vars(model.attention).update(num_heads=1, head_dim=4), 2),
    "other sizes": (lambda model: setattr(model, "head", nn.Linear(4, 5).double().eval()), 2),
}


@pytest.mark.filterwarnings("ignore:measures of this model are not constant")  # whose outputs a loss lets rotate
@pytest.mark.parametrize("change", ELSEWHERE)
def test_symmetries_serve_all_models_that_compute_alike(
    subject: tuple[Any, ...], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batches = subject[0], [(x.float().double(), y) for x, y in subject[1]]
    other, measure, known = copy.deepcopy(model), GradientNorm(Quotient("inv")), KnownSymmetries()
    changed, count = ELSEWHERE[change]
    changed(other)
    there = [(x.to(next(other.parameters())), y) for x, y in batches]
    alone, runs = measure.of(other, cross_entropy, there), recorded_runs(monkeypatch)
    measure.of(model, cross_entropy, batches, known)
    assert measure.of(other, cross_entropy, there, known.elsewhere()).mean == pytest.approx(alone.mean, rel=1e-5)
    assert len(runs) == count


def normed() -> nn.Module:
    """Neurons behind a BatchNorm with statistics of its own."""
    norm = nn.BatchNorm1d(6)
    norm.load_state_dict(norm.state_dict() | {"running_mean": torch.randn(6), "running_var": torch.rand(6) + 0.5})
    return shaken(nn.Sequential(nn.Linear(4, 6), norm, nn.ReLU(), nn.Linear(6, 3)).double(), 0.3)


def test_symmetries_are_those_of_a_models_own_statistics() -> None:
    """What scales the input of a BatchNorm moves its mean, which no weight is."""
    x = torch.randn(5, 4, dtype=torch.float64, generator=generator())
    batch, known = (x, torch.arange(5) % 3), KnownSymmetries()
    for model in (normed(), normed()):
        found = known.elsewhere().found(model, cross_entropy, batch)
        assert not verify_on_batches(model, cross_entropy, [batch], found).failed


def test_what_fails_is_not_kept() -> None:
    memo, calls, subject = Memo[list[int]](), list[int](), object()

    def failing() -> list[int]:
        calls.append(1)
        raise ValueError("out of order")

    for count in (1, 2):
        with pytest.raises(ValueError, match="out of order"):
            memo.of((subject,), failing)
        assert len(calls) == count
    assert memo.of((subject,), lambda: calls) is memo.of((subject,), list) is calls
    assert memo.of((object(),), list) == memo.of((subject,), list, "other settings") == []
