"""What is found in small nets is there: no move changes the function, and nothing that was found before is missing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import Symmetries, balance, find_symmetries, random_move
from quotient_manifolds.symmetries.tangents import tangents
from tests.symmetries.nets import MISSING, NETS, PLACES, net

RANK, FALSE, CHANGE, PLACE = 1e-9, 1e-9, 1e-8, 1e-6
every_net = pytest.mark.parametrize(("name", "bias"), [(name, bias) for name in NETS for bias in (True, False)])


def shown(name: str, x: Tensor) -> Tensor:
    """What symmetries are found on: of shorter sequences they hold for longer ones, too, and of some experts for all."""
    return x[:, :3] if name.startswith("short") else -x.abs() if name.startswith("idle") else x


@dataclass(frozen=True)
class Truth:
    """Hold the directions along which no output changes, as far as a Jacobian tells."""

    jacobian: Tensor
    dimension: int

    @staticmethod
    def of(model: nn.Module, x: Tensor) -> Truth:
        params = {name: w.detach() for name, w in model.named_parameters()}
        parts = torch.func.jacfwd(lambda params: torch.func.functional_call(model, params, (x,)).reshape(-1))(params)
        jacobian = torch.cat([part.flatten(1) for part in parts.values()], 1)
        jacobian = torch.linalg.qr(jacobian, mode="r").R
        sizes = torch.linalg.svdvals(jacobian)
        return Truth(jacobian / sizes[0], jacobian.shape[1] - int((sizes > RANK * sizes[0]).sum()))

    def change(self, directions: Tensor) -> float:
        """Return by how much a direction changes the outputs, at most, of all that a direction may change them."""
        sizes = directions.norm(dim=1).clamp_min(1e-300)
        return float(((directions @ self.jacobian.mT).norm(dim=1) / sizes).max())


@cache
def found_in(name: str, bias: bool) -> tuple[nn.Module, Tensor, Symmetries]:
    model, x = net(name, bias)
    return model, x, find_symmetries(model, shown(name, x))


@every_net
def test_nothing_is_false_and_no_more_is_missing_than_before(name: str, bias: bool) -> None:
    model, x, symmetries = found_in(name, bias)
    truth, found = Truth.of(model, x), tangents(symmetries, dict(model.named_parameters()))
    assert [each for each, directions in found.items() if truth.change(directions) > FALSE] == []
    every = torch.nn.functional.normalize(torch.cat([*found.values(), torch.zeros(1, truth.jacobian.shape[1])]))
    spanned = int(torch.linalg.matrix_rank(every, rtol=1e-7))
    assert spanned >= truth.dimension - MISSING.get(name, (0, 0))[not bias]
    counted = sum(pair.group_dimension for pair in symmetries.pairs)
    counted += sum(shift.dimension for shift in symmetries.translations)
    counted += sum(sum(each.families.values()) for each in symmetries.freedoms)
    assert counted == spanned


@every_net
def test_the_function_stays_and_its_place_is_the_same_from_wherever_it_was_moved(name: str, bias: bool) -> None:
    model, x, symmetries = found_in(name, bias)
    moved = random_move(model, symmetries, log_scale=0.5, seed=3)
    with torch.no_grad():
        expected = model(x)
        bound = CHANGE * float(expected.abs().max())
        places = [] if name in PLACES else [balance(model, symmetries), balance(moved, symmetries)]
        for params in (moved, *places):
            answer = torch.func.functional_call(model, params, (x,))
            torch.testing.assert_close(answer, expected, rtol=0, atol=bound)
    for key, w in places[0].items() if places else ():
        torch.testing.assert_close(places[1][key], w, rtol=0, atol=PLACE * float(w.abs().max()), msg=key)
