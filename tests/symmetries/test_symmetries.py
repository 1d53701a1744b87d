"""Every model of the table: its pairs are found exactly, read and written exactly."""

from __future__ import annotations

import copy
import json
import pickle
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import prune

from quotient_manifolds.symmetries import (
    Params,
    Symmetries,
    find_permutations,
    find_symmetries,
    random_representative,
    verify_symmetries,
)
from quotient_manifolds.symmetries.checks import ModelError
from studies.invariance import Subject
from tests.nets.attention import BY_NAME, MODELS, ModelCase, coverage, noise
from tests.nets.net import Computed

every_model = pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)


def parameters(model: nn.Module) -> Params:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


# --- what is found ---------------------------------------------------------------------------------------------------


@every_model
def test_the_pairs_are_exactly_these_and_rest_is_what_no_pair_touches(case: ModelCase) -> None:
    model = case.build()
    touched = [name for name, _ in model.named_parameters() if any(re.fullmatch(name_, name) for name_ in case.touched)]
    found = case.found()
    assert {(pair.name, pair.heads, pair.n, pair.m, pair.h) for pair in found.pairs} == set(case.pairs)
    assert len(found.pairs) == len(case.pairs)
    assert all(pair.kind == pair.name.split()[-1] for pair in found.pairs)
    assert all(pair.group == f"GL({pair.h})^{pair.heads}" for pair in found.pairs)
    assert touched
    assert set(found.names) == set(touched)
    assert sorted(found.rest) == sorted(name for name, _ in model.named_parameters() if name not in touched)


# --- reading and writing ---------------------------------------------------------------------------------------------


@every_model
def test_read_and_write_are_inverse_bit_for_bit_and_every_element_has_one_owner(case: ModelCase) -> None:
    params = parameters(case.build())
    found = case.found()
    owners = {name: torch.zeros_like(value) for name, value in params.items()}
    for pair in found.pairs:
        blank = {name: torch.full_like(value, torch.nan) for name, value in params.items()}
        pair.write(blank, pair.read(params))
        point = torch.randn(pair.heads, pair.n + pair.m, pair.h)
        changed = {name: value.clone() for name, value in params.items()}
        pair.write(changed, point)
        assert torch.equal(pair.read(changed), point)
        assert torch.equal(pair.G.read(changed), point[:, : pair.n])
        assert torch.equal(pair.H.read(changed), point[:, pair.n :])
        own = coverage(Symmetries((pair,)), params)
        for name, value in params.items():
            assert torch.equal(blank[name].isnan(), ~own[name])
            assert torch.equal(blank[name][own[name]], value[own[name]])
            assert torch.equal(changed[name][~own[name]], value[~own[name]])
            owners[name] += own[name]
    for name, value in params.items():
        assert torch.equal(owners[name], torch.full_like(value, float(name in found.names))), name


# --- moving ----------------------------------------------------------------------------------------------------------


def test_a_random_move_returns_all_parameters_as_new_tensors() -> None:
    model = BY_NAME["GPT-2"].build()
    before = copy.deepcopy(model.state_dict())
    found = BY_NAME["GPT-2"].found()
    moved = random_representative(model, found, scale=3.0, seed=1)
    assert list(moved) == [name for name, _ in model.named_parameters()]
    for name, value in model.named_parameters():
        assert moved[name].dtype == value.dtype
        assert moved[name].data_ptr() != value.data_ptr()
        assert torch.equal(moved[name], value) == (name not in found.moved)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    again = random_representative(parameters(model), found, scale=3.0, seed=1)
    other = random_representative(model, found, scale=3.0, seed=2)
    assert all(torch.equal(moved[name], again[name]) for name in moved)
    assert not any(torch.equal(moved[name], other[name]) for name in found.names)
    assert torch.allclose(
        functional_call(model, moved, (BY_NAME["GPT-2"].inputs()["input_ids"],)).logits,
        model(**BY_NAME["GPT-2"].inputs()).logits,
        atol=1e-4,
    )


def test_a_random_move_is_scale_times_gaussian() -> None:
    """Both sides tell A: G A^-1 and H A^T; A of scale a is a times A of scale 1."""
    model = BY_NAME["torch"].build().double()
    found = BY_NAME["torch"].found()
    pair, params = found.pairs[0], parameters(model)
    G, H = pair.G.read(params), pair.H.read(params)
    transforms = []
    for scale in (1.0, 0.01):
        moved = random_representative(model, found.within("paper"), scale=scale, seed=5)
        A = torch.linalg.lstsq(H, pair.H.read(moved)).solution.mT
        assert torch.allclose(pair.G.read(moved) @ A, G)
        transforms.append(A)
    assert torch.allclose(transforms[1], 0.01 * transforms[0])
    assert not torch.allclose(transforms[0][0], transforms[0][1])


# --- what is refused, and why ----------------------------------------------------------------------------------------


def test_a_model_without_attention_may_have_no_pairs() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
    found = find_symmetries(model, noise(5, 3))
    assert (found.pairs, found.rest) == ((), ("0.weight", "0.bias", "2.weight", "2.bias"))
    assert found.within("pairs") == Symmetries((), found.rest, refused=found.refused)
    assert str(found).startswith("symmetries of 0 dimensions")


def test_a_model_that_returns_its_inputs_has_no_symmetries() -> None:
    model, x = nn.Identity().eval(), torch.ones(2, 3)
    assert not find_symmetries(model, x).every
    assert find_permutations(model, x) == ()


def test_a_function_may_insist_on_the_size_of_the_batch() -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval(), noise(5, 4)

    def insisting(module: nn.Module, inputs: Tensor) -> Tensor:
        assert len(inputs) == 5
        outputs: Tensor = module(inputs)
        return outputs

    found = find_symmetries(model, x, evaluate=insisting)
    assert len(found.pairs) == 1
    assert verify_symmetries(model, x, found, evaluate=insisting).failed == {}


# --- as text and data ------------------------------------------------------------------------------------------------


def test_symmetries_print_as_a_table() -> None:
    text = str(BY_NAME["BERT"].found())
    assert re.search(r"^encoder\.layer\.1\.attention value/output +GL\(4\)\^3 +13 x 4 +12 x 4 +3$", text, re.MULTILINE)
    assert "encoder.layer.0.attention.self.value.bias redundant bias" in text
    assert "reparameterization: first parameter it moves, kind" in text
    assert re.search(r"^  encoder\.layer\.\*\.attention\.output\.dense\.bias  \(2\)$", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["gpt2 with a head", "llama with a head"])
def test_symmetries_that_were_used_are_sent_to_other_processes(name: str) -> None:
    here = Subject.of(name)
    found = here.symmetries()
    moved = random_representative(here.model, found, seed=1)
    again = random_representative(here.model, pickle.loads(pickle.dumps(found)), seed=1)
    for key, w in moved.items():
        torch.testing.assert_close(again[key], w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("store", [lambda found: pickle.loads(pickle.dumps(found)), copy.deepcopy])
def test_symmetries_of_cross_attention_are_stored_as_they_were_found(store: Callable[[Any], Any]) -> None:
    """Queries and keys come from one parameter: where in it each of them begins is kept."""
    model = nn.MultiheadAttention(12, 3, batch_first=True).double().eval()
    x, c = torch.randn(2, 4, 12).double(), torch.randn(2, 5, 12).double()
    found = find_symmetries(model, (x, c, c))
    stored = store(found)
    assert torch.allclose(stored.transformed(model, seed=1)(x, c, c)[0], model(x, c, c)[0], rtol=1e-9, atol=1e-9)
    here, there = (random_representative(model, each, seed=1) for each in (found, stored))
    assert all(torch.equal(there[name], w) for name, w in here.items())


def test_symmetries_are_plain_data() -> None:
    data = BY_NAME["torch"].found().to_dict()
    assert json.loads(json.dumps(data))["pairs"][0]["group"] == "GL(4)^3"
    assert data["pairs"][0]["G"]["views"][0]["name"] == "attention.in_proj_weight"
    assert data["rest"] == ["attention.out_proj.bias"]
    assert [each["families"] for each in data["reparameterizations"]] == [{"redundant bias": 12}] * 2  # values, keys


# --- what is left alone ----------------------------------------------------------------------------------------------


class Straight(torch.autograd.Function):
    """Round, with a gradient as if it did not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def switches() -> list[Any]:
    """What torch keeps once for a process."""
    cuda = torch.backends.cuda
    enabled = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), torch.backends.mha.get_fastpath_enabled())
    return [torch.autograd.Function.__dict__["apply"], *enabled]


def test_threads_leave_torch_as_it_is() -> None:
    """The second begins while the first one runs, and ends after it."""
    before, begun, finished = switches(), threading.Event(), threading.Event()
    model, x = nn.Sequential(nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 2)).eval(), noise(2, 8)

    def first(model: nn.Module, x: Tensor) -> Tensor:
        begun.wait(0.2)
        return model(x)

    def second(model: nn.Module, x: Tensor) -> Tensor:
        begun.set()
        finished.wait(0.2)
        return model(x)

    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(find_symmetries, model, x, evaluate=first)
        one.add_done_callback(lambda _: finished.set())
        other = threads.submit(find_symmetries, model, x, evaluate=second)
        assert one.result().families == other.result().families == {"relu neuron": 3}
    assert switches() == before


def test_functions_of_other_threads_have_their_gradients() -> None:
    def slope(x: Tensor) -> Tensor:
        return torch.autograd.grad(Straight.apply(x).sum(), x)[0]

    def evaluate(model: nn.Module, x: Tensor) -> Tensor:
        w = torch.ones(3, requires_grad=True)
        with ThreadPoolExecutor(1) as threads:
            slopes.append(threads.submit(slope, w).result())
        return model(x)

    slopes = list[Tensor]()
    model = nn.Sequential(nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
    assert find_symmetries(model, noise(2, 8), evaluate=evaluate).families == {"relu neuron": 3}
    assert slopes
    assert all(torch.equal(each, torch.ones(3)) for each in slopes)


def test_a_model_that_draws_at_random_is_refused() -> None:
    """A dropout that nobody turns off: nothing that the model computes can be compared."""
    model = Computed(lambda s, x: s.b(F.dropout(s.a(x).relu())), a=nn.Linear(8, 6), b=nn.Linear(6, 2)).eval()
    with pytest.raises(ModelError, match=r"must compute the same on the same inputs\. Found .* \(bernoulli\)"):
        find_symmetries(model, noise(4, 8))


def test_what_a_generator_of_a_seed_draws_is_data() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        return (y - torch.randn(y.shape, generator=torch.Generator().manual_seed(0))).square().mean()

    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    assert find_symmetries(model, noise(4, 8), evaluate=loss).families == {"relu neuron": 6}


class Summed(nn.Module):
    """A layer, and rows of which there may be none."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.layer, self.rows = nn.Linear(4, 3), nn.Parameter(torch.ones(rows, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) + self.rows.sum()
        return out


def test_an_empty_parameter_hides_no_symmetries() -> None:
    x = torch.randn(3, 4)
    some, none = (find_symmetries(Summed(rows).eval(), x) for rows in (2, 0))
    assert {"layer.bias", "rows"} <= {*some.moved}
    assert sum(some.families.values()) == 2 * 4  # outputs give the layer's weight, and its bias plus the sum of rows
    assert none.every == ()


@pytest.mark.parametrize("weigh", ["weight_norm", "prune"])
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_a_model_that_keeps_what_autograd_made_moves(weigh: str) -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    if weigh == "prune":
        prune.l1_unstructured(model[2], "weight", 0.3)
    else:
        torch.nn.utils.weight_norm(model[2])
    x = noise(4, 8).float()
    found = find_symmetries(model, x)
    there = found.transformed(model)
    assert found.moved
    assert torch.allclose(there(x), model(x), atol=1e-4)
    assert [w.requires_grad for w in there.parameters()] == [w.requires_grad for w in model.parameters()]
    there(x).sum().backward()
    assert all(w.grad is None for w in model.parameters())
