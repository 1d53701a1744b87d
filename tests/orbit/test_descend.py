"""Descent over an orbit: what is returned is the group element applied, the function stays, the objective falls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune

from quotient_manifolds.orbit import Descent, RoundingError, Sparsity, descend_orbit
from quotient_manifolds.orbit.descend import mean_loss
from quotient_manifolds.sharpness import cross_entropy
from quotient_manifolds.symmetries import Params
from tests.nets.attention import BY_NAME
from tests.nets.net import difference
from tests.nets.small import NETS, found_in

MOVED = [name for name in NETS if not name.startswith(("short", "idle"))]


def power(p: float, seed: int) -> Callable[[Params], Tensor]:
    """A sum of powers of all numbers, with random factors."""

    def value(params: Params) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        parts = [(torch.rand(w.shape, generator=draw).to(w) * w.abs().pow(p)).sum() for w in params.values()]
        return torch.stack(parts).sum()

    return value


def near(seed: int) -> Callable[[Params], Tensor]:
    """The squared distance from random numbers."""

    def value(params: Params) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        return torch.stack(
            [(w - torch.randn(w.shape, generator=draw).to(w)).square().sum() for w in params.values()]
        ).sum()

    return value


def objective(kind: str, seed: int) -> Any:
    return {"power": power(1 + seed % 7 / 2, seed), "near": near(seed), "L1": Sparsity(), "4 bits": RoundingError()}[
        kind
    ]


def descent(name: str, kind: str, seed: int, **settings: Any) -> tuple[nn.Module, Tensor, Descent]:
    model, x, symmetries = found_in(name, seed % 2 == 0)
    given = {"steps": 15, "learning_rate": 0.03, **settings}
    return model, x, descend_orbit(model, objective(kind, seed), x, symmetries=symmetries, **given)


@given(
    name=st.sampled_from(MOVED),
    kind=st.sampled_from(["power", "near", "L1", "4 bits"]),
    seed=st.integers(0, 99),
)
def test_the_group_element_is_what_moved_the_model(name: str, kind: str, seed: int) -> None:
    model, x, _ = found_in(name, seed % 2 == 0)
    try:
        model, x, found = descent(name, kind, seed)
    except ValueError as error:
        if "no continuous symmetry" in str(error) or "needs weights that symmetries change" in str(error):
            return
        raise
    applied = found.element.apply({key: w.detach() for key, w in model.named_parameters()})
    for key, w in found.params.items():
        torch.testing.assert_close(applied[key], w, rtol=1e-12, atol=1e-12 * float(w.abs().max()), msg=key)
        assert torch.equal(found.model.get_parameter(key), w)
    held_out = torch.randint_like(x, 0, int(x.max()) + 1) if x.dtype == torch.long else torch.randn_like(x)
    shown = -held_out.abs() if name.startswith("idle") else held_out
    assert difference(model, shown, found.params) < 1e-12 * max(100.0, found.condition)
    assert found.change < 1e-12 * max(100.0, found.condition)
    assert found.after <= found.before
    assert found.after == pytest.approx(min(found.path), rel=1e-6)


def test_the_objective_falls_on_nine_of_ten_draws() -> None:
    draw = torch.Generator().manual_seed(0)
    lower, count = 0, 0
    while count < 30:
        name = MOVED[int(torch.randint(len(MOVED), (), generator=draw))]
        kind = ("power", "near", "L1", "4 bits")[count % 4]
        try:
            _, _, found = descent(name, kind, int(torch.randint(99, (), generator=draw)))
        except ValueError:
            continue
        count += 1
        lower += found.after < found.before
    assert lower >= 0.9 * count


def test_a_loss_on_batches_is_an_objective_too() -> None:
    """Here how large activations are inside of a gated layer, which the output does not show."""
    model, x, symmetries = found_in("relu", True)
    first = next(module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == 8)
    name = next(key for key, module in model.named_modules() if module is first)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        given = []
        handle = model.get_submodule(name).register_forward_hook(lambda module, args, y: given.append(y))
        model(batch)
        handle.remove()
        return given[0].square().mean() + (1 / given[0].square().mean())

    found = descend_orbit(model, loss, x, symmetries=symmetries, batches=[x, 2 * x], steps=30)
    assert found.after < 0.9 * found.before


def test_weights_that_autograd_made_are_copied_too() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4), nn.Linear(4, 3)).eval()
    prune.l1_unstructured(model[3], "weight", 0.3)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    before = model(x)
    found = descend_orbit(model, Sparsity(), x, steps=5)
    assert torch.allclose(found.model(x), before, atol=1e-5)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_low_precision_stays_there(dtype: torch.dtype) -> None:
    model = BY_NAME["BERT"].build().to(dtype)
    before = {key: w.detach().clone() for key, w in model.named_parameters()}
    found = descend_orbit(model, RoundingError(), BY_NAME["BERT"].inputs(), steps=20)
    assert all(torch.equal(w, before[key]) for key, w in model.named_parameters())
    assert {w.dtype for w in found.params.values()} == {dtype}
    assert found.after < found.before
    assert found.change < 1e-11
    assert found.stored < 100 * torch.finfo(dtype).eps
    assert 1 < found.condition < 1e3


def test_the_bound_on_the_condition_holds() -> None:
    _, _, found = descent("narrow", "power", 2, condition=1.5, steps=40, learning_rate=0.3)
    assert 1 < found.condition <= 1.5 * (1 + 1e-9)


def test_progress_is_told_and_a_descent_that_stands_ends() -> None:
    told: list[tuple[str, int, int]] = []
    model, x, symmetries = found_in("narrow", True)
    kept = {"symmetries": symmetries, "steps": 500, "progress": lambda *each: told.append(each)}
    found = descend_orbit(model, Sparsity(), x, tolerance=1e-2, **kept)
    assert told == [("descent", step + 1, 500) for step in range(len(told))]
    assert len(told) == len(found.path) - 2 < 400


def test_the_bound_of_the_rounding_error_is_the_sum_over_channels() -> None:
    model, x, symmetries = found_in("narrow", False)
    (pair,) = symmetries.pairs
    alone = symmetries.without([each.name for each in symmetries.every if each is not pair])
    own = {key: w.detach() for key, w in model.named_parameters()}
    total = 0.0
    for factor, partner in ((pair.G, pair.H), (pair.H, pair.G)):
        lengths = partner.read(own)[0].square().sum(0)  # (h,)
        for W in (own[view.name] for view in factor.views if own[view.name].ndim == 2):
            for row in range(len(W)):
                step = 2 * float(torch.linalg.vector_norm(W[row], 12)) / 7
                units = [row] * W.shape[1] if len(W) == pair.h else range(W.shape[1])  # of a; of b
                total += sum(step**2 / 12 * float(lengths[j]) for j in units)
    found = descend_orbit(model, RoundingError(bits=3), x, symmetries=alone, steps=1)
    assert found.before == pytest.approx(total, rel=1e-9)


def test_rounding_and_pruning() -> None:
    W = torch.tensor([[7.0, -3.4, 0.6], [0.7, 0.31, -0.2]], dtype=torch.float64)
    rounded = RoundingError(bits=4).round({"w": W}, ["w"])["w"]
    torch.testing.assert_close(rounded, torch.tensor([[7.0, -3.0, 1.0], [0.7, 0.3, -0.2]], dtype=torch.float64))
    by_groups = RoundingError(bits=2, group_size=1).round({"w": W}, ["w"])["w"]
    torch.testing.assert_close(by_groups, W)
    by_columns = RoundingError(bits=2, axis=1).round({"w": W}, ["w"])["w"]
    torch.testing.assert_close(by_columns, torch.tensor([[7.0, -3.4, 0.6], [0, 0, 0]], dtype=torch.float64))
    wide = torch.randn(4, 64, dtype=torch.float64)
    plain, clipped = (RoundingError(bits=3, clip=clip).round({"w": wide}, ["w"])["w"] for clip in (False, True))
    assert (clipped - wide).norm() < (plain - wide).norm()
    pruned = Sparsity.prune({"w": W}, ["w"], 0.5)["w"]
    torch.testing.assert_close(pruned, torch.tensor([[7.0, -3.4, 0], [0.7, 0, 0]], dtype=torch.float64))


REFUSED = [
    (
        {"objective": lambda params: torch.tensor(float("nan"), dtype=torch.float64) * params["embed.weight"].sum()},
        "finite number. Found nan",
    ),
    ({"objective": lambda params: params["embed.weight"].detach().sum()}, "must be differentiable"),
    ({"objective": lambda params: params["embed.weight"]}, "must return one floating point number as a tensor. Found"),
    ({"objective": lambda params: 1.0}, "Found float"),
    ({"objective": Sparsity(names=("nothing",))}, "must hold 'nothing'"),
    ({"objective": Sparsity(names="nothing")}, "must hold 'nothing'"),
    ({"objective": RoundingError(group_size=5)}, "group_size must divide .* Found 5"),
    ({"steps": 0}, "steps must be an integer of at least 1. Found 0"),
    ({"learning_rate": -1.0}, "learning_rate must be a positive finite number"),
    ({"tolerance": -1.0}, "tolerance must be a finite number of at least 0"),
    ({"condition": 0.5}, "condition number must be a number above 1"),
    ({"batches": []}, "at least one batch"),
    ({"batches": [0], "objective": Sparsity()}, r"batches must come with a loss\(model, batch\). Found Sparsity"),
    ({"objective": lambda params: nn.Linear(2, 2).weight.sum()}, "Found that it depends on none"),
    ({"objective": Sparsity(names=["no.bias"])}, "params must hold 'no.bias'"),
    ({"objective": RoundingError(names=["norm.weight"])}, r"along axis 0.*Found 'norm.weight' of shape \(8,\)"),
    ({"objective": RoundingError(axis=2)}, "channels along axis 2"),
]


@pytest.mark.parametrize(("given", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_bad_input_gets_one_sentence(given: dict[str, Any], why: str) -> None:
    model, x, symmetries = found_in("encoder", True)
    with pytest.raises(ValueError, match=why):
        descend_orbit(model, **{"objective": power(1.0, 0), "inputs": x, "symmetries": symmetries, **given})


def test_a_word_for_padding_has_its_slope() -> None:
    model = nn.Sequential(nn.Embedding(4, 3, padding_idx=0), nn.Linear(3, 2)).double().eval()
    (term,) = mean_loss(lambda model, x: model(x).square().sum(), model, [torch.tensor([[0, 1]])], torch.float64)
    own = {name: w.detach().requires_grad_() for name, w in model.named_parameters()}
    (slope,) = torch.autograd.grad(term(dict(own)), own["0.weight"])
    assert bool(slope[0].any())


def test_a_class_is_no_objective() -> None:
    model, x, symmetries = found_in("encoder", True)
    with pytest.raises(TypeError, match=r"Sparsity\(\) or a function. Found the class Sparsity"):
        descend_orbit(model, Sparsity, x, symmetries=symmetries)


def test_bits_and_groups_are_checked() -> None:
    with pytest.raises(ValueError, match="bits must be an integer of at least 2"):
        RoundingError(bits=1)
    with pytest.raises(ValueError, match="group_size must be an integer of at least 1"):
        RoundingError(group_size=0)
    with pytest.raises(ValueError, match="axis must be an integer of at least 0"):
        RoundingError(axis=-1)
    with pytest.raises(ValueError, match=r"fraction must be a number from 0 to 1. Found 1.5"):
        Sparsity.prune({}, [], 1.5)
    assert not Sparsity.prune({"w": torch.ones(2, 2)}, "w", 1.0)["w"].any()
    for change in (RoundingError().round, lambda params, names: Sparsity.prune(params, names, 0.5)):
        with pytest.raises(ValueError, match="params must hold 'v'"):
            change({"w": torch.ones(2, 2)}, ["v"])
        with pytest.raises(ValueError, match="parameter 'w' must be of floating point"):
            change({"w": torch.ones(2, 2, dtype=torch.int64)}, ["w"])
    with pytest.raises(ValueError, match=r"channels along axis 0, and others. Found 'w' of shape \(2,\)"):
        RoundingError().round({"w": torch.ones(2)}, ["w"])


def test_the_unit_of_an_objective_is_no_matter() -> None:
    model, x, symmetries = found_in("narrow", True)
    found = [
        descend_orbit(model, objective, x, symmetries=symmetries, steps=20)
        for objective in (RoundingError(bits=4), RoundingError(bits=24))
    ]
    assert found[1].after / found[1].before == pytest.approx(found[0].after / found[0].before, rel=1e-3)


def test_one_batch_in_place_of_a_list_is_refused() -> None:
    model, x, symmetries = found_in("encoder", True)
    with pytest.raises(TypeError, match=r"held_out must be a list of inputs. Found one Tensor"):
        descend_orbit(model, Sparsity(), x, symmetries=symmetries, held_out=x)
    with pytest.raises(TypeError, match="Found torch's MSELoss"):
        descend_orbit(model, nn.MSELoss(), x, symmetries=symmetries, batches=[x])
    with pytest.raises(TypeError, match=r"Found cross_entropy without batches .*'batch'\): give batches="):
        descend_orbit(model, cross_entropy, x, symmetries=symmetries)
    with pytest.raises(TypeError, match=r"names must be a list of names of parameters. Found 3"):
        descend_orbit(model, Sparsity(names=3), x, symmetries=symmetries)  # type: ignore[arg-type]


def test_a_model_without_symmetries_and_a_false_symmetry_are_refused() -> None:
    model = nn.Linear(3, 3).eval()
    with pytest.raises(ValueError, match="no continuous symmetry"):
        descend_orbit(model, Sparsity(), torch.randn(2, 3))
    gelu, x, _ = found_in("gelu", True)
    _, _, of_relu = found_in("relu", True)
    with pytest.raises(ValueError, match="the function must stay on inputs number 1"):
        descend_orbit(gelu, Sparsity(), x, symmetries=of_relu, steps=5)
