"""Measures are functions of the fibre: the same at every point that the symmetries of a model reach."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quotient_manifolds as qm
from quotient_manifolds.geometry import Geometry, KnownSymmetries, Quotient
from quotient_manifolds.sharpness import AverageCase, GradientNorm, HessianTrace, Measure, TopEigenvalue, WorstCase
from quotient_manifolds.symmetries import Symmetries, find_symmetries, random_representative
from quotient_manifolds.symmetries.representatives import group_element
from studies.fibres import names
from studies.invariance import TARGETS, Subject, loss
from tests.nets.net import shaken

MEASURES: dict[str, Callable[[Geometry], Measure]] = {
    "worst case": lambda geometry: WorstCase(geometry, 0.05, steps=5, restarts=1),
    "average case": lambda geometry: AverageCase(geometry, 0.05, samples=2),
    "gradient norm": GradientNorm,
    "trace": lambda geometry: HessianTrace(geometry, samples=2),
    "top eigenvalue": TopEigenvalue,
}


def measured(here: Subject, measures: list[str], geometry: Geometry) -> list[float]:
    """Means, for which symmetries are found and verified once."""
    known = KnownSymmetries()
    return [MEASURES[what](geometry).of(here.model, loss, [here.batch], known).mean for what in measures]


def same_along_the_orbit(
    here: Subject, measures: list[str], geometry: Callable[[Subject], Quotient], move: tuple[int, float], rel: float
) -> None:
    seed, log_scale = move
    there = here.at(random_representative(here.model, here.symmetries(), seed=seed, log_scale=log_scale))
    values = (measured(each, measures, geometry(each)) for each in (here, there))
    for what, first, second in zip(measures, *values, strict=True):
        iterated = 100 if what == "top eigenvalue" else 1  # its iteration ends at a tolerance of its own
        assert second == pytest.approx(first, rel=iterated * rel), what


FAMILIES = [
    *("torch's encoder, norms first", "gpt2 with a head", "llama with a head"),
    *("ViT with to_qkv and to_out", "decoder with RMSNorm and a head"),
]
moves = st.tuples(st.integers(0, 2**31), st.floats(0.1, 3))


@pytest.mark.parametrize(
    ("name", "metric", "precision"),
    [*zip(FAMILIES, ("inv", "mix") * 3, ["float64"] * 5, strict=False), (FAMILIES[0], "mix", "float32")],
)
@given(move=moves)
@settings(max_examples=1, deadline=None)
@pytest.mark.filterwarnings("ignore:measures of this model are not constant")  # whose outputs a loss lets rotate
def test_measures_do_not_change_along_the_whole_orbit(
    name: str, metric: str, precision: str, move: tuple[int, float]
) -> None:
    few = ("average case", "trace") if precision == "float32" else ()  # means over signs: rounding leaves few digits
    measures = [what for what in MEASURES if what not in few]
    same_along_the_orbit(Subject.of(name).to(precision), measures, lambda _: Quotient(metric), move, TARGETS[precision])


@given(
    name=st.sampled_from(names()),
    metric=st.sampled_from(["inv", "mix"]),
    what=st.sampled_from(list(MEASURES)),
    move=moves,
)
@example("modernbert", "mix", "average case", (0, 0.3))  # it casts to float32 inside, where factors round as they are
@example("gptj", "inv", "trace", (0, 1.0))
@example("convolutions with BatchNorm", "inv", "worst case", (0, 3.0))  # without a pair
@example("ViT with to_qkv and to_out", "inv", "worst case", (1, 3.0))  # the most ill-conditioned moves of the table
@settings(max_examples=2, deadline=None)
def test_measures_of_the_models_of_the_table_are_the_same_along_their_orbits(
    name: str, metric: str, what: str, move: tuple[int, float]
) -> None:
    found = lambda each: Quotient(metric, symmetries=each.symmetries())  # noqa: E731
    same_along_the_orbit(Subject.of(name), [what], found, move, TARGETS["float64"])


def test_ill_conditioned_factors_cost_no_digits() -> None:
    """In float32, a change of basis of condition 1e4: what is left is that moved weights were rounded when stored."""
    here = Subject.of("attention by einsum")
    generator = torch.Generator().manual_seed(1)
    params = {name: w.detach().clone() for name, w in here.model.named_parameters()}
    for pair in here.symmetries().pairs:
        pair.write(params, pair.act(group_element(pair, 1e4, generator), pair.read(params)))
    places = here.to("float32"), here.at(params).to("float32")
    first, second = (measured(each, ["worst case", "average case"], Quotient("inv")) for each in places)
    assert second == pytest.approx(first, rel=1e-3)


def test_frozen_parameters_stay_and_what_is_free_beside_them_is_not_seen() -> None:
    here = Subject.of("gpt2 with a head")
    model, batch, found = here.model, here.batch, here.symmetries()
    frozen = model.get_parameter("transformer.wpe.weight").requires_grad_(False)
    beside = found.beside(["transformer.wpe.weight"])
    lost = {reparameterization.name for reparameterization in found.reparameterizations} - {
        reparameterization.name for reparameterization in beside.reparameterizations
    }
    assert lost == {"transformer.wte.weight residual rotation", "transformer.wte.weight redundant bias"}
    move = random_representative(model, beside, seed=1)
    assert not torch.equal(move["transformer.wte.weight"], model.get_parameter("transformer.wte.weight"))
    values = [qm.gradient_norm(each.model, loss, [batch], geometry="inv").mean for each in (here, here.at(move))]
    assert values[1] == pytest.approx(values[0], rel=1e-9)
    assert (
        Quotient()
        .verified(model, loss, [batch])
        .tangent_space(model)
        .point.keys()
        .isdisjoint(["transformer.wpe.weight"])
    )
    assert not frozen.requires_grad


def moved(model: nn.Module, found: Symmetries, seed: int) -> nn.Module:
    return found.transformed(model, seed=seed, log_scale=0.5)


class OneHead(nn.Module):
    """A head as wide as the stream, and a bottleneck as wide as the logits: both lose a rank at the canonical place."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 1, 8, norm_first=norm_first, batch_first=True)
        self.norm, self.down, self.up = nn.LayerNorm(6), nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(self.norm(self.layer(x)).mean(1)))


@pytest.mark.parametrize(
    ("metric", "norm_first", "dtype"),
    [("inv", True, torch.float64), ("mix", False, torch.float64), ("mix", True, torch.float32)],
)
def test_a_pair_that_loses_rank_is_measured_with_the_columns_it_has(
    metric: str, norm_first: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = shaken(OneHead(norm_first).double(), 0.1).to(dtype)
    batch = (torch.randn(4, 5, 6, dtype=dtype), torch.tensor([0, 1, 2, 3]))

    found = find_symmetries(model, batch, evaluate=qm.cross_entropy)
    space = Quotient(metric, symmetries=found).tangent_space(model)
    widths = {pair.name: pair.h for pair in found.pairs}
    assert any(pair.h == widths[pair.name] - 1 for block in space.pairs for pair in block.pairs)
    elsewhere = moved(model, found, seed=1)
    rel = 1e-9 if dtype == torch.float64 else 1e-3
    measures = GradientNorm(Quotient(metric)), WorstCase(Quotient(metric), 0.1, steps=4)
    there, here = (
        [measure.of(m, qm.cross_entropy, [batch], known).mean for measure in measures]
        for m, known in ((elsewhere, KnownSymmetries()), (model, KnownSymmetries()))
    )
    assert there == pytest.approx(here, rel=rel)


class Pruned(nn.Module):
    """Neurons, or a bottleneck beside a stream, of which one unit does nothing."""

    def __init__(self, kind: str, out: float, inn: float) -> None:
        super().__init__()
        bottleneck = kind == "bottleneck"
        self.down, self.up, self.head = nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(6, 7)
        self.norm, self.between = nn.LayerNorm(6), nn.Identity() if bottleneck else nn.ReLU()
        with torch.no_grad():
            (self.up if bottleneck else self.head).weight[:, 2] *= out
            (self.down if bottleneck else self.up).weight[2] *= inn
            (self.down if bottleneck else self.up).bias[2] *= inn

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.between, nn.Identity):
            return self.head(torch.tanh(x + self.up(self.down(self.norm(x)))))
        return self.head(self.between(self.up(torch.tanh(self.down(x)))))


LOST = "where a bottleneck has lost its rank, biases beside it are settled by what rounding left of it"
LOSING = {("bottleneck", 1, 0, "mix"), ("bottleneck", 1e-9, 1e-9, "inv")}


def _dead(*case: Any) -> Any:
    out, inn, kind, metric, _ = case
    known = (kind, out, inn, metric) in LOSING
    return pytest.param(*case, marks=[pytest.mark.xfail(strict=True, reason=LOST)] if known else [])


DEAD = [
    _dead(out, inn, kind, metric, dtype)
    for out, inn in ((0, 1), (1, 0), (0, 0), (1e-9, 1e-9))
    for kind in ("bottleneck", "relu neuron")
    for metric, dtype in (("inv", torch.float64), ("mix", torch.float32))
]


@pytest.mark.parametrize(("out", "inn", "kind", "metric", "dtype"), DEAD)
def test_a_unit_that_does_nothing_is_none_anywhere_on_the_orbit(
    out: float, inn: float, kind: str, metric: str, dtype: torch.dtype
) -> None:
    """Rounding of moved weights, and of what folding them leaves, makes it a unit of size 1e-16 or 1e-8."""
    torch.manual_seed(0)
    model = Pruned(kind, out, inn).to(dtype).eval()
    batch = (torch.randn(8, 6, dtype=dtype), torch.arange(8) % 7)

    def trace(module: nn.Module) -> float:
        layers_without = pytest.warns(UserWarning, match="Pair relu neuron.* is measured elementwise")
        unread = kind == "bottleneck" or out == inn == 0  # which is no pair
        with nullcontext() if unread else layers_without:
            return qm.hessian_trace(module, qm.cross_entropy, [batch], geometry=Quotient(metric), samples=4).mean

    found = find_symmetries(model, batch, evaluate=qm.cross_entropy)
    here = trace(model)
    assert trace(moved(model, found, seed=1)) == pytest.approx(here, rel=1e-8 if dtype == torch.float64 else 1e-3)
