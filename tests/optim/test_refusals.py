"""What an optimizer cannot do is refused in one sentence, and nothing is changed or lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import quotient_manifolds as qm
from tests.optim.cases import backward, made, same, train, weights


def begun() -> tuple[nn.Module, qm.QuotientAdam, Any, torch.Tensor]:
    """A model in training, with gradients."""
    model, inputs, targets, found = made("encoder")
    optimizer = qm.QuotientAdam(model.named_parameters(), found, lr=0.01)
    train(model, optimizer, inputs, targets, 2)
    backward(model, inputs, targets)
    return model, optimizer, inputs, targets


def with_gradient(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[nn.Module], None]:
    """Change the gradient of a parameter."""

    def spoil(model: nn.Module) -> None:
        p = model.get_parameter(name)
        assert p.grad is not None
        with torch.sparse.check_sparse_tensor_invariants(enable=True):
            p.grad = change(p.grad)

    return spoil


def spoil_weight(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].linear1.weight[0, 0] = float("nan")


IN_PAIR, OUTSIDE = "0.linear1.weight", "2.weight"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        *((with_gradient(name, lambda g: g * torch.nan), f"{name} holds NaN") for name in (IN_PAIR, OUTSIDE)),
        *((with_gradient(name, lambda g: g * torch.inf), f"{name} holds NaN") for name in (IN_PAIR, OUTSIDE)),
        *((with_gradient(name, lambda g: g.to_sparse()), f"sparse one of {name}") for name in (IN_PAIR, OUTSIDE)),
        (with_gradient(IN_PAIR, lambda g: None), f"{IN_PAIR} has none"),
        (spoil_weight, "smaller lr"),
    ],
)
def test_a_step_that_cannot_be_made_changes_nothing(spoil: Callable[[nn.Module], None], said: str) -> None:
    model, optimizer, _, _ = begun()
    spoil(model)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=said):
        optimizer.step()
    assert same(weights(model), before)
    after = optimizer.state_dict()
    assert after["state"].keys() == state["state"].keys()
    assert torch.equal(after["state"]["0 relu neuron"]["gradient"], state["state"]["0 relu neuron"]["gradient"])


def test_what_is_frozen_stays_and_half_a_pair_is_refused() -> None:
    model, inputs, targets, found = made("encoder")
    for p in model[0].self_attn.parameters():
        p.requires_grad_(False)
    before = weights(model[0].self_attn)
    train(model, qm.QuotientAdam(model.named_parameters(), found, lr=0.01), inputs, targets, 2)
    assert same(before, weights(model[0].self_attn))
    model[0].self_attn.in_proj_weight.requires_grad_(True)
    with pytest.raises(ValueError, match="is frozen in part"):
        qm.QuotientAdam(model.named_parameters(), found)


@pytest.mark.parametrize("name", ["encoder", "GPT", "Llama"])
@pytest.mark.parametrize("kind", [qm.QuotientSGD, qm.QuotientAdam])
def test_half_a_pair_of_any_kind_is_refused_and_the_message_says_what_to_leave_out(kind: Any, name: str) -> None:
    model, inputs, targets, found = made(name)
    for pair in found.pairs:
        model.requires_grad_(True)
        frozen = {view.name for view in pair.G.views} - {view.name for view in pair.H.views}
        for each in frozen:
            model.get_parameter(each).requires_grad_(False)
        if not frozen:  # one parameter holds both factors
            continue
        with pytest.raises(ValueError, match="is frozen in part") as said:
            kind(model.named_parameters(), found)
        assert repr(pair.name) in str(said.value)
        halves = [each.name for each in found.pairs if frozen.intersection(each.names) not in (set(), {*each.names})]
        assert all(repr(each) in str(said.value) for each in halves)
        before = weights(model)
        train(model, kind(model.named_parameters(), found.without(halves), lr=0.01), inputs, targets, 1)
        changed = {each for each, w in weights(model).items() if not torch.equal(w, before[each])}
        assert frozen.isdisjoint(changed)
        assert changed


def test_a_pair_has_one_group_and_one_precision() -> None:
    model, _, _, found = made("low rank")
    named = dict(model.named_parameters())
    one, rest = "0.B.weight", [name for name in named if name != "0.B.weight"]
    with pytest.raises(ValueError, match="must be in one group"):
        qm.QuotientAdam([{"params": [(one, named[one])]}, {"params": [(name, named[name]) for name in rest]}], found)
    model[0].A.float()
    with pytest.raises(ValueError, match=r"torch.float32 on cpu and torch.float64 on cpu"):
        qm.QuotientAdam(model.named_parameters(), found)


def test_groups_have_settings_of_their_own() -> None:
    model, inputs, targets, found = made("low rank")
    before, named = weights(model), [*model.named_parameters()]
    adapters, head = ([each for each in named if each[0][0] in places] for places in ("02", "4"))
    train(model, qm.QuotientSGD([{"params": adapters, "lr": 0.0}, {"params": head}], found, lr=0.1), inputs, targets, 1)
    assert {name for name, p in named if not torch.equal(p, before[name])} == {name for name, _ in head}


def audited(model: nn.Module, found: qm.Symmetries, **settings: Any) -> Any:
    batch = (made("low rank")[1], made("low rank")[2])
    return qm.orbit_audit(
        lambda m: torch.optim.SGD(m.parameters()),
        model,
        lambda m, b: m(b[0]).sum(),
        [batch],
        symmetries=found,
        **settings,
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda m, f: qm.QuotientAdam(m.parameters(), f), "named"),
        (lambda m, f: qm.QuotientAdam(m, f), "model.named_parameters"),
        (lambda m, f: qm.QuotientAdam(m.named_parameters(), None), "find_symmetries"),
        (lambda m, f: qm.QuotientAdam(m.named_parameters(), f, metric="max"), "inv, mix"),
        (lambda m, f: qm.QuotientSGD(m.named_parameters(), f, metric="inw"), "Found 'inw'; did you mean 'inv'"),
        (lambda m, f: qm.QuotientAdam(m.named_parameters(), f, lr=-1.0), "learning rate"),
        (lambda m, f: qm.QuotientAdam(m.named_parameters(), f, max_norm=0), "max_norm"),
        (lambda m, f: qm.QuotientAdam(nn.Sequential(m).named_parameters(), f), "inside of any wrapper"),
        (
            lambda m, f: qm.QuotientAdam([*m.parameters()], f),
            r"params must be named parameters: give model.named_parameters\(\), or groups of such. Found no names",
        ),
        (lambda m, f: qm.QuotientSGD([{"params": [*m.named_parameters()], "nonsense": 3}], f), "Found nonsense"),
        (lambda m, f: qm.QuotientAdam([{"params": [*m.named_parameters()], "amsgrad": True}], f), "Found amsgrad"),
        (lambda m, f: qm.SAM(torch.optim.SGD(m.parameters()), m, radius=-1), "radius"),
        (lambda m, f: qm.SAM(torch.optim.SGD(nn.Linear(2, 2).parameters()), m, radius=1), "none of its"),
        (lambda m, f: qm.SAM(torch.optim.SGD(m.parameters()), m, geometry="mix", radius=1), "Quotient\\('mix', symm"),
        (lambda m, f: qm.SAM(torch.optim.SGD(m.parameters()), m, radius=1).step(), "closure"),
        (lambda m, f: qm.SAM(m, torch.optim.SGD(m.parameters()), radius=1), "model must be a torch.nn.Module"),
        (lambda m, f: qm.SAM(torch.optim.SGD, m, radius=1), "base must be an optimizer"),
        (
            lambda m, f: qm.orbit_audit(lambda m: None, m, lambda m, x: m(x).sum(), [torch.ones(2, 8)], symmetries=f),
            "must return an optimizer. Found NoneType",
        ),
        (lambda m, f: audited(m, f, steps=2.5), "steps must be an integer of at least 1. Found 2.5"),
        (lambda m, f: audited(m, f, condition=0), "condition must be a positive finite number. Found 0"),
        (lambda m, f: audited(m, f, condition="all"), "condition must be a positive finite number. Found 'all'"),
        (lambda m, f: audited(m, f, seed="one"), "seed must be an integer of 64 bits. Found 'one'"),
        (
            lambda m, f: qm.orbit_audit(print, nn.ReLU(), qm.cross_entropy, [0], symmetries=qm.Symmetries(())),
            "Found none",
        ),
    ],
)
def test_settings_that_are_none(make: Callable[[nn.Module, qm.Symmetries], Any], said: str) -> None:
    model, _, _, found = made("low rank")
    with pytest.raises((ValueError, TypeError), match=said):
        make(model, found)


def test_what_is_unfrozen_later_is_trained_as_a_pair() -> None:
    model, inputs, targets, found = made("low rank")
    model[2].A.requires_grad_(False)
    model[2].B.requires_grad_(False)
    optimizer = qm.QuotientAdam(model.named_parameters(), found, lr=0.01)
    train(model, optimizer, inputs, targets, 2)
    assert [name for name in optimizer.state if isinstance(name, str)] == [found.pairs[0].name]
    model[2].A.requires_grad_(True)
    for _ in range(2):
        with pytest.raises(ValueError, match="is frozen in part"):
            train(model, optimizer, inputs, targets, 1)
    model[2].B.requires_grad_(True)
    train(model, optimizer, inputs, targets, 2)
    assert {name for name in optimizer.state if isinstance(name, str)} == {pair.name for pair in found.pairs}
    assert float(optimizer.state[found.pairs[1].name]["step"]) == 2


def test_a_group_that_is_refused_is_not_there() -> None:
    model, inputs, targets, found = made("low rank")
    named = dict(model.named_parameters())
    first = [(name, named[name]) for name in named if name.startswith("0.") and "base" not in name]
    optimizer = qm.QuotientAdam(first, found, lr=0.01)
    with pytest.raises(ValueError, match="as a whole or not at all"):
        optimizer.add_param_group({"params": [("2.B.weight", named["2.B.weight"])]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [(name, named[name]) for name in ("2.A.weight", "2.B.weight")]})
    train(model, optimizer, inputs, targets, 1)
    assert found.pairs[1].name in optimizer.state


@pytest.mark.parametrize("kind", [qm.QuotientSGD, qm.QuotientAdam])
@pytest.mark.parametrize(("metric", "size"), [("inv", 1e22), ("mix", 1e-20)])
def test_a_step_that_overflows_is_refused(kind: Any, metric: str, size: float) -> None:
    """Finite weights and gradients: `inv` multiplies these by products of weights, `mix` divides by such."""
    model = nn.Sequential(nn.Linear(6, 3, bias=False), nn.Linear(3, 5, bias=False)).eval()
    found = qm.find_symmetries(model, torch.randn(4, 6))
    optimizer = kind(model.named_parameters(), found, lr=0.1, metric=metric)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(size)
            p.grad = torch.full_like(p, 1e30)
    before = weights(model)
    with pytest.raises(ValueError, match="finite"):
        optimizer.step()
    assert same(weights(model), before)


def trained(kind: Callable[..., torch.optim.Optimizer], name: str = "low rank", first: int = 0) -> Any:
    """An optimizer after a step, of the pairs from the first of these on."""
    model, inputs, targets, found = made(name)
    found = found.without([pair.name for pair in found.pairs[:first]])
    plain = kind is torch.optim.AdamW
    optimizer = kind(model.named_parameters(), **({} if plain else {"symmetries": found}), lr=0.01)
    train(model, optimizer, inputs, targets, 1)
    return optimizer


ADAM, SGD = qm.QuotientAdam, qm.QuotientSGD


@pytest.mark.parametrize(
    ("own", "other", "said"),
    [
        ((ADAM,), (torch.optim.AdamW,), "Found groups without"),
        ((ADAM,), (SGD,), "must be that of a QuotientAdam"),
        ((SGD,), (ADAM,), "must be that of a QuotientSGD"),
        ((ADAM,), (ADAM, "encoder"), "Found groups with other parameters"),
        ((ADAM,), (ADAM, "rank one"), "another shape"),
        ((ADAM, "low rank", 1), (ADAM,), "Found a pair in one of both only"),
        ((ADAM,), (ADAM, "low rank", 1), "Found a pair in one of both only"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(own: tuple[Any, ...], other: tuple[Any, ...], said: str) -> None:
    optimizer, saved = trained(*own), trained(*other).state_dict()
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == before
