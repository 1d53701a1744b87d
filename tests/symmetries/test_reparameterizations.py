"""What is free in models of several kinds moves without changing the function, and has one place on its orbit."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.symmetries import (
    Params,
    Reparameterization,
    Shift,
    Symmetries,
    balance,
    example_inputs,
    find_symmetries,
    make_generic,
    output_change,
    propose_symmetries,
    random_representative,
    small_copy,
    verify_symmetries,
)
from studies.invariance import Subject
from tests.models import orbit_dimension
from tests.symmetries.nets import Computed
from tests.symmetries.small_models import build

D = 8
X = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0)).double()


def convolutions() -> nn.Module:
    """Return batch norms after a convolution with a bias and one without, and after a linear map; a layer scale."""

    def forward(s: Any, x: Tensor) -> Tensor:
        x = s.norms[1](s.second(s.norms[0](s.first(x)).sin())).sin().mean((-1, -2))
        return s.norms[2](s.head(s.norm(x**3 + s.scale * s.branch(x)))).tanh()

    norms = nn.ModuleList([nn.BatchNorm2d(D), nn.BatchNorm2d(D), nn.BatchNorm1d(3)])
    convolved = {"first": nn.Conv2d(2, D, 2), "second": nn.Conv2d(D, D, 2, bias=False), "norms": norms}
    scaled = {"branch": nn.Linear(D, D), "scale": nn.Parameter(torch.randn(D)), "norm": nn.LayerNorm(D)}
    return Computed(forward, **convolved, **scaled, head=nn.Linear(D, 3))


class Handwritten(nn.Module):
    """A block as people write it: fused projections, cut apart; norms written out; einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift, self.scale = (nn.Parameter(torch.ones(D)) for _ in range(3))
        self.to_qkv, self.to_out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Parameter(torch.randn(2, D, D)), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        n = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)
        q, k, v = (part.unflatten(-1, (2, 4)).mT for part in self.to_qkv(n * self.gain + self.shift).chunk(3, dim=-1))
        mixed = torch.einsum("...dih,...djh->...dij", q, k).softmax(-1) @ v
        x = x + self.to_out(mixed.mT.flatten(-2))
        r = self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        first, second = (r @ part for part in self.up)
        return x + self.down(torch.cat([F.gelu(first), second], -1))


def by_sign(s: Any, x: Tensor) -> Tensor:
    """Go to one of two experts by the sign of an example's first number."""
    out = x.new_zeros(len(x), 3)
    for index, expert in enumerate(s.experts):
        rows = (x[:, 0] > 0) == bool(index)
        if rows.any():
            out[rows] = expert(s.norm(x[rows]))
    return out


def experts(make: Callable[[], nn.Module], norm: nn.Module) -> nn.Module:
    return make_generic(Computed(by_sign, norm=norm, experts=nn.ModuleList(make() for _ in range(2)))).double().eval()


def layer(kind: type[nn.Module] = nn.TransformerEncoderLayer, **how: Any) -> Callable[[], nn.Module]:
    return lambda: kind(D, 2, 12, batch_first=True, **how)


IMAGES = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0)).double()
MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "torch, norms first": (layer(norm_first=True), X),
    "torch, norms last": (layer(), X),
    "torch decoder": (layer(nn.TransformerDecoderLayer, norm_first=True), (X, X)),
    "handwritten": (Handwritten, X),
    "batch norms": (convolutions, IMAGES),
    **{name: (lambda name=name: small_copy(build(name)), None) for name in ("gpt2", "llama", "qwen3", "vit")},
}


@cache
def found_in(name: str) -> tuple[nn.Module, Any, tuple[Reparameterization, ...], Params]:
    make, inputs = MODELS[name]
    model = make_generic(make()).double().eval()
    inputs = example_inputs(model) if inputs is None else inputs
    reparameterizations = find_symmetries(model, inputs).reparameterizations
    return model, inputs, reparameterizations, {key: w.detach().clone() for key, w in model.named_parameters()}


def change(model: nn.Module, inputs: Any, params: Params) -> float:
    return output_change(model, inputs, {}, params)


@pytest.mark.parametrize("name", MODELS)
def test_every_move_leaves_the_function_alone_and_its_control_does_not(name: str) -> None:
    model, inputs, reparameterizations, own = found_in(name)
    assert len({each.name for each in reparameterizations}) == len(reparameterizations) > 0
    for each in reparameterizations:
        moved, control = ({**own, **{key: own[key].clone() for key in each.names}} for _ in range(2))
        each.transform(moved, torch.Generator().manual_seed(2), 1.0)
        assert change(model, inputs, moved) < 1e-8, each.name
        each.transform(control, torch.Generator().manual_seed(2), 1.0, control=True)
        if each.names != ("layers.0.attention.k_proj.bias",):  # which nothing reads, whatever is added to it
            assert change(model, inputs, control) > 1e-6, each.name


@pytest.mark.parametrize("name", MODELS)
def test_dimensions_add_up_to_those_of_the_tangent_vectors(name: str) -> None:
    _, _, reparameterizations, own = found_in(name)
    counted = sum(sum(each.families.values()) for each in reparameterizations)
    assert orbit_dimension(Symmetries((), reparameterizations=reparameterizations), own) == counted


@pytest.mark.parametrize("name", MODELS)
def test_the_canonical_place_is_the_same_from_everywhere_and_of_the_same_function(name: str) -> None:
    model, inputs, reparameterizations, own = found_in(name)
    start = {key: w.clone() for key, w in own.items()}
    there, draw = {key: w.clone() for key, w in own.items()}, torch.Generator().manual_seed(1)
    for index in torch.randperm(len(reparameterizations), generator=draw):
        reparameterizations[int(index)].transform(there, draw, 0.5)
    for params in (start, there):
        for each in reparameterizations:
            each.canonicalize(params)
    assert change(model, inputs, start) < 1e-8
    for key, w in start.items():
        torch.testing.assert_close(there[key], w, rtol=0, atol=1e-6 * max(1.0, float(w.abs().max())), msg=key)
    constant = {key for each in reparameterizations for key in each.constant}
    assert all(bool((start[key] * (start[key] - 1)).abs().max() < 1e-12) for key in constant)


def test_what_an_idle_expert_may_read_is_refused() -> None:
    model, x = experts(lambda: nn.Linear(D, 3), nn.LayerNorm(D)), torch.randn(6, D).double()
    x[:, 0] = torch.tensor([1, -1, 1, -1, 1, -1])
    assert "norm.weight norm gain" in [each.name for each in find_symmetries(model, x).reparameterizations]
    found = find_symmetries(model, x[::2])
    assert not found.reparameterizations
    assert any("did not run, and may be part of it" in each.reason for each in found.refused)


def test_neurons_of_experts_that_the_first_examples_do_not_go_to_are_found() -> None:
    model, x = experts(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), nn.Identity()), X[0, :, :4]
    x = torch.cat([x.abs(), -x.abs()])
    assert len(find_symmetries(model, x).pairs) == 2


def test_a_mask_that_masks_nothing_is_a_mask() -> None:
    """The reader's bias is added where it masks, too, so none of what is found is a shift."""
    masked = Computed(lambda s, x, mask: s.reader(s.norm(x) * mask).sin(), norm=nn.LayerNorm(D), reader=nn.Linear(D, 3))
    model, mask = make_generic(masked).double().eval(), torch.ones(2, 5, 1).double()
    whole = find_symmetries(model, (X, mask))
    mask[0, 4] = 0.0
    assert change(model, (X, mask), balance(model, whole)) < 1e-12
    names = [each.name for each in whole.reparameterizations]
    assert names == [each.name for each in find_symmetries(model, (X, mask)).reparameterizations]
    assert not any(isinstance(each, Shift) for each in whole.reparameterizations)


@pytest.mark.parametrize("name", ["gpt2 with a head", "llama with a head"])
def test_symmetries_are_sent_to_other_processes(name: str) -> None:
    here = Subject.of(name)
    found = here.symmetries()
    again = pickle.loads(pickle.dumps(found))
    assert [each.name for each in again.every] == [each.name for each in found.every]
    for key, w in random_representative(here.model, found, seed=1).items():
        torch.testing.assert_close(random_representative(here.model, again, seed=1)[key], w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dead", [1.0, 1e-9, 5e-33, 0.0])
def test_a_channel_without_gain_makes_no_other_one_constant_and_is_not_rotated(dead: float, seed: int) -> None:
    """A gain may be a number like 1e-33, as in pretrained models, where a channel died."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 2)).eval()
    norm = model[1]
    with torch.no_grad():
        norm.weight.copy_(torch.rand(8) + 0.5)
        norm.weight[:2] = torch.tensor([dead, 1.2 * dead])
        norm.bias.copy_(torch.randn(8))
    inputs = torch.randn(12, 6)
    found = propose_symmetries(model, inputs)
    assert found.families["constant input direction"] == 5  # a number for each row of the weight that follows
    assert ("hidden rotation" in found.families) == (dead >= 1e-9)
    refused = [each.name for each in found.refused if "gain" in each.reason]
    assert refused == ["0.weight hidden rotation"] * (dead < 1e-9)
    assert verify_symmetries(model, inputs, found).failed == {}
