"""Whatever is passed to the functions of symmetries, the answer is a result or one sentence of what was wrong."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import quotient_manifolds as qm
from quotient_manifolds import symmetries as package
from tests.symmetries.nets import Computed


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)).eval()


X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))

FOUND = qm.find_symmetries(model(), X)

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "find": lambda network, found, seed: qm.find_symmetries(network, X),
    "verify": lambda network, found, seed: qm.verify_symmetries(network, X, found, seed=seed),
    "move": lambda network, found, seed: qm.random_representative(network, found, seed=seed),
    "balance": lambda network, found, seed: qm.balance(network, found),
    "count": lambda network, found, seed: qm.count_symmetries(network, found),
    "descend": lambda network, found, seed: qm.descend_orbit(network, qm.Sparsity(), X, symmetries=found, steps=1),
}


def spoilt(spoil: Callable[[nn.Parameter], Any], name: str) -> nn.Module:
    network = model()
    owner, _, leaf = name.rpartition(".")
    value = spoil(network.get_parameter(name))
    setattr(network.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    return network


def quantised(value: nn.Parameter) -> torch.Tensor:
    return torch.quantize_per_tensor(value.detach(), 0.1, 0, torch.qint8)


def inference(value: nn.Parameter) -> torch.Tensor:
    with torch.inference_mode():
        return value.detach().clone()


SPOILT: dict[str, Callable[[nn.Parameter], Any]] = {
    "meta": lambda value: value.detach().to("meta"),
    "complex": lambda value: value.detach().to(torch.complex64),
    "sparse": lambda value: value.detach().to_sparse(),
    "float8": lambda value: value.detach().to(torch.float8_e4m3fn),
    "int8": lambda value: value.detach().to(torch.int8),
    "quantised": quantised,
    "nan": lambda value: torch.full_like(value.detach(), torch.nan),
    "inf": lambda value: torch.full_like(value.detach(), torch.inf),
    "empty": lambda value: torch.zeros(0),
    "a row less": lambda value: value.detach()[1:],
    "inference mode": inference,
    "bfloat16": lambda value: value.detach().bfloat16(),
    "zero": lambda value: torch.zeros_like(value.detach()),
}
BROKEN = ("nan", "inf", "meta", "int8")
PARAMETERS = [name for name, _ in model().named_parameters()]
NOTHING = (None, "symmetries", 3, (), [], {}, {"a": 1}, object(), torch.zeros(2), nn.Linear, model().forward)


def says(call: Callable[[], Any]) -> None:
    said = "an answer, of whatever kind"
    try:
        call()
    except (ValueError, TypeError) as error:
        said = str(error)
    assert "\n" not in said.strip(), said
    assert len(said) > 20, said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", FUNCTIONS)
@settings(max_examples=25)
@given(spoil=st.sampled_from(sorted(SPOILT)), name=st.sampled_from(PARAMETERS), given_symmetries=st.booleans())
def test_strange_weights(function: str, spoil: str, name: str, given_symmetries: bool) -> None:
    network = spoilt(SPOILT[spoil], name)
    if function in ("find", "verify") and spoil != "meta":  # what the model raises by itself is for the model to say
        try:
            with torch.no_grad():
                network(X)
        except Exception:
            return
    found = None if function == "verify" and not given_symmetries else FOUND
    says(lambda: FUNCTIONS[function](network, found, 0))


FINITE, VALUES = "'0.linear1.weight' must be finite", "'0.linear1.weight' must have values"


@pytest.mark.parametrize(
    ("function", "spoil", "sentence"),
    [
        ("find", "nan", FINITE),
        ("find", "inf", FINITE),
        ("find", "meta", VALUES),
        ("find", "int8", "must run on the inputs to show its symmetries"),
        ("verify", "inf", FINITE),
        ("verify", "meta", VALUES),  # a model that is not wholly loaded is no random one
        *((function, spoil, "'0.self_attn.in_proj_weight'") for function in ("move", "balance") for spoil in BROKEN),
    ],
)
def test_broken_weights_are_named(function: str, spoil: str, sentence: str) -> None:
    name = "0.linear1.weight" if function in ("find", "verify") else "0.self_attn.in_proj_weight"
    with pytest.raises(ValueError, match=sentence):
        FUNCTIONS[function](spoilt(SPOILT[spoil], name), FOUND, 0)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("nothing", NOTHING, ids=lambda each: type(each).__name__)
def test_what_is_no_model(function: str, nothing: object) -> None:
    if not (isinstance(nothing, dict) and not nothing):  # no parameters at all can be moved
        with pytest.raises((ValueError, TypeError)) as caught:
            FUNCTIONS[function](nothing, qm.Symmetries(()), 0)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name != "find"])
@pytest.mark.parametrize("nothing", NOTHING[1:], ids=lambda each: type(each).__name__)
def test_what_is_no_symmetries(function: str, nothing: object) -> None:
    with pytest.raises(TypeError, match="symmetries must be Symmetries, as find_symmetries returns them"):
        FUNCTIONS[function](model(), nothing, 0)


@pytest.mark.parametrize("function", ["verify", "move"])
@pytest.mark.parametrize("seed", [1.5, "1", None, True, 2**70, float("nan"), torch.zeros(2)], ids=repr)
def test_what_is_no_seed(function: str, seed: object) -> None:
    with pytest.raises((ValueError, TypeError), match="seed must"):
        FUNCTIONS[function](model(), FOUND, seed)


def test_seeds_of_other_libraries_are_integers() -> None:
    numpy = pytest.importorskip("numpy")
    moved, same = (qm.random_representative(model(), FOUND, seed=seed) for seed in (numpy.int64(3), 3))
    assert all(torch.equal(moved[name], same[name]) for name in moved)


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf"), "1", None, torch.ones(2), 1j], ids=repr)
def test_what_is_no_scale(scale: Any) -> None:
    with pytest.raises(ValueError, match="scale must be a positive finite number"):
        qm.random_representative(model(), FOUND, scale=scale)


def test_symmetries_of_another_model() -> None:
    found = qm.find_symmetries(nn.ModuleDict({"other": model()}).eval(), X, evaluate=lambda outer, x: outer["other"](x))
    for name in ("verify", "move", "balance", "count", "descend"):
        with pytest.raises(ValueError, match=r"'other\.0\.self_attn"):
            FUNCTIONS[name](model(), found, 0)


def test_one_name_of_what_is_frozen() -> None:
    name = next(each.names[0] for each in FOUND.reparameterizations if len(each.names) > 1)
    assert FOUND.beside(name) == FOUND.beside([name]) != FOUND


def test_example_inputs_are_of_a_model() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module. Found an object of type str"):
        qm.example_inputs("bert")  # type: ignore[arg-type]


def test_layers_that_have_no_shape_yet() -> None:
    says(lambda: qm.find_symmetries(nn.Sequential(nn.LazyLinear(3), *model()).eval(), X))


# --- size ------------------------------------------------------------------------------------------------------------


def calls(count: int) -> int:
    """How many functions are called to find the symmetries of so many layers."""
    torch.manual_seed(0)
    network, seen = nn.Sequential(*(attends() for _ in range(count))).eval(), [0]

    def watch(frame: object, event: str, argument: object) -> None:
        seen[0] += event == "call"

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        qm.find_symmetries(network, X)
    finally:
        sys.setprofile(before)
    return seen[0]


def attends() -> nn.Module:
    """Return a layer of attention after a norm."""

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        y = s.norm(x)
        return x + s.inner(y, y, y)[0]

    return Computed(forward, norm=nn.LayerNorm(8), inner=nn.MultiheadAttention(8, 2, batch_first=True))


def test_the_work_grows_with_the_number_of_layers_and_not_its_square() -> None:
    calls(2)  # what is kept for later calls
    assert calls(24) < 5 * calls(6)


# --- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [qm, package], ids=["top", "symmetries"])
def test_signatures_can_be_read(module: Any) -> None:
    for name in module.__all__:
        member = getattr(module, name)
        if callable(member):
            try:
                readable = 800 if inspect.isclass(member) else 500
                assert len(str(inspect.signature(member))) < readable, name
            except ValueError:  # a type alias
                continue
