"""A recorded program computes what the model computes, also on other weights and inputs, whatever holds the inputs."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from quotient_manifolds.batches import tensors_in
from quotient_manifolds.symmetries.checks import ModelError
from quotient_manifolds.symmetries.outputs import answer, relative_change
from quotient_manifolds.symmetries.trace.record import Recording, record
from quotient_manifolds.symmetries.trace.replay import Replay
from tests.nets.net import Computed
from tests.nets.small import NETS, net


def replayed(found: Recording, weights: dict[str, Tensor], *inputs: Tensor) -> list[Tensor]:
    return Replay(found.program).run(weights.__getitem__, inputs, {}, generic=False)[0]


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
def test_a_program_gives_the_outputs_of_the_model_at_its_own_and_at_other_weights(bias: bool) -> None:
    differing = []
    for name in NETS:
        model, x = net(name, bias)
        found = record(model, x[:3], answer)
        assert len(found.program.inputs) == 1, name
        own = {key: w.detach() for key, w in model.named_parameters()}
        assert relative_change(replayed(found, own, x[:3]), [model(x[:3])]) < 1e-12, name
        other = {key: w * (1 + 0.01 * torch.randn_like(w)) for key, w in own.items()}
        expected = torch.func.functional_call(model, other, (x[3:6],))
        try:
            there = replayed(found, other, x[3:6])
        except (RuntimeError, IndexError):  # of shapes that values decide
            differing.append(name)
            continue
        if there[0].shape != expected.shape or relative_change(there, [expected]) > 1e-9:
            differing.append(name)
    assert differing == BY_NUMBERS


BY_NUMBERS = ["read as a number", "read as a list", "read by numpy", "idle expert"]
"""Nets that take numbers out of tensors, or choose by values what runs."""


class Sentences:
    """An object with tensors in its attributes, as those of many collators."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.more = tokens, {"rows": [tokens, None, "text"]}


Pair = namedtuple("Pair", "tokens other")
HELD: dict[str, Any] = {
    "dict": lambda t: {"tokens": t},
    "mapping": lambda t: UserDict(tokens=t),
    "named tuple in a tuple": lambda t: (Pair(t, None), 3),
    "list of lists": lambda t: [[t], "text"],
    "object": Sentences,
}


@pytest.mark.parametrize("container", HELD)
def test_tokens_are_an_input_whatever_holds_them(container: str) -> None:
    model = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 3))
    tokens = torch.randint(20, (2, 5))
    found = record(model, HELD[container](tokens), lambda model, batch: model(tensors_in(batch)[0]))
    assert len(found.program.inputs) == 1
    assert not found.program.constants


def test_data_that_a_loss_closes_over_are_inputs_and_tensors_of_a_forward_pass_constants() -> None:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 3))
    x, y, mask = torch.randint(20, (6,)), torch.randint(3, (6,)), torch.rand(8)
    found = record(model, None, lambda model, _: F.cross_entropy(model(x), y))
    assert len(found.program.inputs) == 2
    masked = Computed(lambda s, x: s.out(s.table(x) * mask), table=model[0], out=model[1])
    found = record(masked, x, answer)
    assert len(found.program.inputs) == 1
    assert [t is mask for t in found.program.constants.values()] == [True]


def test_parameters_over_one_memory_are_one() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)).double()
    model[1].weight.data = model[0].weight.data
    found = record(model, torch.arange(5), answer)
    assert dict(found.tied) == {"1.weight": "0.weight"}
    assert set(found.program.parameters.values()) == {"0.weight"}
    other = {"0.weight": torch.randn(7, 4, dtype=torch.float64)}
    expected = other["0.weight"][:5] @ other["0.weight"].T
    torch.testing.assert_close(replayed(found, other, torch.arange(5)), [expected])
    model[1].weight.data = model[0].weight.data[:3]
    with pytest.raises(ValueError, match=r"all their memory or none. Found that 1.weight is a part of 0.weight"):
        record(model, torch.arange(5), answer)


def test_a_parameter_with_two_names_is_one_also_where_it_is_a_part_of_its_memory() -> None:
    w = nn.Parameter(torch.randn(9, 4).double()[2:])
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)).double()
    model[0].weight = model[1].weight = w
    model = nn.Sequential(model, nn.Linear(7, 7).double(), model[0])  # and a module with two names
    model.forward = lambda tokens: model[1](model[0](tokens)).sum(1, keepdim=True) * model[2](tokens)
    found = record(model, torch.arange(5), answer)
    assert dict(found.tied) == {"0.1.weight": "0.0.weight"}
    assert not found.program.constants
    assert model[2].weight is model[0][1].weight is w
    own = {name: w.detach() for name, w in model.named_parameters()}
    torch.testing.assert_close(replayed(found, own, torch.arange(5)), [model(torch.arange(5)).detach()])


def test_a_frozen_parameter_of_integers_is_a_constant() -> None:
    model = Computed(lambda s, x: s.out(x @ s.w.double()), out=nn.Linear(3, 2).double())
    model.w = nn.Parameter(torch.randint(-3, 3, (4, 3), dtype=torch.int8), requires_grad=False)
    found = record(model, torch.randn(5, 4).double(), answer)
    assert set(found.program.parameters.values()) == {"out.weight", "out.bias"}
    assert len(found.program.constants) == 1


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


RUNS: dict[str, Any] = {
    "requires_grad_": lambda s, x: s.a(x.requires_grad_()).tanh(),
    "checkpoint": lambda s, x: checkpoint(lambda y: s.a(y).tanh(), x, use_reentrant=False),
    "a function of its own": lambda s, x: Squared.apply(s.a(x)),
    "numbers": lambda s, x: s.a(x) * float(x.mean()) + torch.tensor(x.tolist())[..., :3],
    "in place": lambda s, x: s.a(x.mul_(2)).relu_(),
    "a layer that is made and not used": lambda s, x: (nn.Linear(4, 3), s.a(x))[1],
    "counts and a small number": lambda s, x: s.a(x) / ((x > 0).sum(-1, keepdim=True) + 1e-6 + 1),
}


@pytest.mark.parametrize("how", RUNS)
def test_whatever_autograd_is_asked_for_is_recorded(how: str) -> None:
    model = Computed(RUNS[how], a=nn.Linear(4, 3)).double()
    x = torch.randn(5, 4).double()
    found = record(model, x, answer)
    own = {name: w.detach() for name, w in model.named_parameters()}
    torch.testing.assert_close(replayed(found, own, x), [RUNS[how](model, x.clone()).detach()])
    assert not [each.name for each in found.program.operations if torch.Tag.nondeterministic_seeded in each.func.tags]
    assert Replay(found.program).run(own.__getitem__, [x], {}, generic=True)[0][0].isfinite().all()


def test_targets_that_a_loss_draws_with_a_seed_are_inputs() -> None:
    model, x = nn.Linear(4, 3).double(), torch.randn(5, 4).double()

    def loss(net: nn.Module, batch: Tensor) -> Tensor:
        y = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
        return (net(batch) - y.double()).square().mean()

    found = record(model, x, loss)
    own = {name: w.detach() for name, w in model.named_parameters()}
    assert {tuple(found.values[n].shape) for n in found.program.inputs} == {(5, 4), (5, 3)}
    given = [found.values[n] for n in found.program.inputs]
    out = Replay(found.program).run(own.__getitem__, given, {}, generic=False)[0][0]
    torch.testing.assert_close(out, loss(model, x).detach())


REFUSED: dict[str, tuple[Any, str]] = {
    "random": (lambda s, x: s.a(x) + torch.rand(3), "must compute the same on the same inputs. Found that the model"),
    "random where it decides": (
        lambda s, x: s.a(x) if torch.rand(()) < 2 else x,
        "must compute the same on the same inputs. Found that the model draws random numbers .rand",
    ),
    "drops": (lambda s, x: F.dropout(s.a(x), 0.5), "must compute the same on the same inputs. Found that the model"),
    "writes": (lambda s, x: s.a(x) + s.a.weight.add_(1).sum(), "must not write to its own weights"),
    "raises": (lambda s, x: s.a(x[:, :2]), r"must run on the inputs .* module 'a' \(Linear\) raises RuntimeError"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_recorded_is_one_sentence(what: str) -> None:
    function, message = REFUSED[what]
    model = Computed(function, a=nn.Linear(4, 3))
    for w in model.parameters():
        w.requires_grad_(False)
    before = {name: w.clone() for name, w in model.named_parameters()}
    with pytest.raises(ModelError, match=message):
        record(model, torch.randn(5, 4), answer)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    if what != "writes":
        torch.testing.assert_close(dict(model.named_parameters()), before)
