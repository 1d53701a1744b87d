"""Whatever is passed to the functions of symmetries, the answer is a result or one sentence of what was wrong.

Errors of a model say where; those of the package are never taken for the model's.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quotient_manifolds as qm
from quotient_manifolds import symmetries as package
from quotient_manifolds.symmetries import (
    certify,
    declare_pair,
    example_inputs,
    find_symmetries,
    output_change,
    random_representative,
    verify_symmetries,
)
from tests.nets.model_types import build
from tests.nets.net import Computed, linear
from tests.refusals import one_sentence


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)).eval()


X = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))

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


def answers(call: Callable[[], Any]) -> None:
    """Call, and where that raises assert that it says why in one sentence."""
    said = "an answer, of whatever kind"
    try:
        call()
    except (ValueError, TypeError) as error:
        said = str(error)
    assert one_sentence(said), said


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
    answers(lambda: FUNCTIONS[function](network, found, 0))


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


# --- one sentence each ------------------------------------------------------------------------------------------------

RUN = r"^Computed must run on the inputs to show its symmetries\. Found that "
DENSE = r"inputs must be dense tensors\. Found "
INNER = r"addmm in module 'inner\.0' \(Linear\) raises RuntimeError: "


def middle(between: Callable[[Tensor], Any] = torch.tanh, width: int = 6) -> nn.Module:
    """Return two linear maps and something between them."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 8))
    return Computed(lambda s, x: s.inner(between(s.a(x))), a=nn.Linear(8, width), inner=inner).eval()


def _fails(x: Tensor) -> Tensor:
    raise KeyError("hidden_states")


def finds(between: Callable[[Tensor], Any] = torch.tanh, width: int = 6) -> Callable[[], object]:
    return lambda: find_symmetries(middle(between, width), X)


def on(inputs: Callable[[], Any]) -> Callable[[], object]:
    return lambda: find_symmetries(middle(), inputs())


def training(deep: bool) -> nn.Module:
    network = model()
    (network[0].self_attn if deep else network).train()
    return network


def noisy() -> nn.Module:
    return Computed(lambda s, x: s.b(s.a(x)) + torch.rand(8), **linear("a", 8, 3), **linear("b", 3, 8)).eval()


def stored() -> dict[str, Tensor]:
    return {name: w.detach().clone() for name, w in model().named_parameters()}


PAIR = FOUND.pairs[0]
NO_LIST, WEIGHT = "others must be a list of inputs. Found one ", "0.self_attn.in_proj_weight"
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    # what a model does
    "shapes": (
        finds(torch.tanh, 7),
        RUN + INNER + r"mat1 and .* \(12x7 and 6x8\); it is called as model\(inputs\), "
        "with one argument, a Tensor: give what the model takes, without targets, or evaluate=$",
    ),
    "code": (finds(_fails), RUN + "its forward raises KeyError: 'hidden_states'; it is called as model"),
    "types": (finds(lambda x: x.int()), RUN + INNER + ".* dtype"),
    "no output": (finds(lambda x: x[:0]), "output on these inputs is empty: nothing can be compared"),
    "integers": (
        lambda: find_symmetries(middle(), X, evaluate=lambda network, x: (network(x) > 0).long()),
        "the model's output holds no floating point tensor that could be compared",
    ),
    "random": (lambda: verify_symmetries(noisy(), X), r"must compute the same .* draws random numbers \(rand\)"),
    "nan": (lambda: verify_symmetries(middle(lambda x: x * torch.nan), X), "must be numbers, .* Found NaN"),
    "train": (lambda: find_symmetries(training(False), X), r"Found the model itself \(Sequential\) in train mode"),
    "train, deep": (
        lambda: verify_symmetries(training(True), X),
        r"Found 0\.self_attn \(MultiheadAttention\) in train mode",
    ),
    # what it is given
    "sparse": (on(lambda: X[0].to_sparse()), DENSE + r"a sparse one: call to_dense\(\)"),
    "nested": (on(lambda: torch.nested.nested_tensor([*X])), DENSE + "a nested one: pad it"),
    "jagged": (on(lambda: torch.nested.nested_tensor([*X], layout=torch.jagged)), DENSE + "a nested one: pad it"),
    "quantised": (
        on(lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)),
        RUN + r"addmm in module 'a' \(Linear\) raises",
    ),
    "meta": (
        on(lambda: X.to("meta")),
        RUN + r"addmm in module 'a' \(Linear\) raises RuntimeError: Tensor on device meta",
    ),
    "complex": (on(lambda: X + 1j * X), RUN + "addmm in module 'a'"),
    "none": (on(lambda: {"x": None}), RUN + r"module 'a' \(Linear\) raises"),
    "empty": (on(lambda: X[:0]), "empty"),
    # pairs
    "point": (lambda: PAIR.write(stored(), torch.zeros(2, 17, 4)), r"has shape \(2, 18, 4\). Found \(2, 17, 4\)"),
    "no parameters": (lambda: PAIR.read({}), f"must hold '{WEIGHT}'"),
    "other shapes": (lambda: PAIR.read({WEIGHT: torch.zeros(23, 8)}), rf"'{WEIGHT}' has shape \(23, 8\)"),
    "the model's own": (
        lambda: PAIR.write(dict(model().named_parameters()), PAIR.read(stored())),
        f"would change the model's own parameter '{WEIGHT}'",
    ),
    "overflow": (
        lambda: random_representative(model().half(), FOUND, scale=1e6),
        r"A = 1e\+06 x Gaussian overflows torch.float16",
    ),
}
OF_TYPE: dict[str, tuple[Callable[[], object], str]] = {
    "a batch of others": (lambda: verify_symmetries(middle(), X, others=X), NO_LIST + "Tensor"),
    "a dict of others": (lambda: verify_symmetries(middle(), X, others={"x": X}), NO_LIST + "dict"),  # type: ignore[arg-type]
    "no others": (lambda: verify_symmetries(middle(), X, others=None), NO_LIST + "NoneType"),  # type: ignore[arg-type]
    "cuts": (
        lambda: declare_pair(model(), "a", "b", G="weight", H=len),  # type: ignore[arg-type]
        "G and H must be functions of the parameters by name. Found str",
    ),
    "parameters": (lambda: FOUND.transformed(stored()), r"torch\.nn\.Module"),  # type: ignore[type-var]
    "a name": (lambda: example_inputs("bert"), "must be a torch.nn.Module. Found an object of type str"),  # type: ignore[arg-type]
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", [*REFUSED, *OF_TYPE])
def test_a_refusal_is_one_sentence(what: str) -> None:
    error, table = (ValueError, REFUSED) if what in REFUSED else (TypeError, OF_TYPE)
    call, sentence = table[what]
    with pytest.raises(error, match=sentence) as caught:
        call()
    assert one_sentence(str(caught.value))


CALLS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "verify": lambda model, x: verify_symmetries(model, X, others=[x]),
    "find": lambda model, x: find_symmetries(model, X, x),
    "certify": lambda model, x: certify(model, [x]),
    "same_function": lambda model, x: qm.same_function(model, model, x),
    "output_change": lambda model, x: output_change(model, x, {}, {}),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_whoever_runs_a_model_says_where_it_fails(call: Callable[[nn.Module, Tensor], Any]) -> None:
    says = r"'a' \(Linear\) raises RuntimeError: mat1 and .*called as model\(inputs\), with one argument, a Tensor"
    with pytest.raises(ValueError, match=says):
        call(Computed(lambda s, x: s.b(s.a(x).relu()), a=nn.Linear(8, 3), b=nn.Linear(3, 2)).eval(), X[..., :5])


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, IndexError, AssertionError])
@pytest.mark.parametrize("where", ["charges.walk.Walk._step", "discovery.named"])
def test_an_error_of_the_package_is_not_taken_for_the_models(
    monkeypatch: pytest.MonkeyPatch, where: str, kind: type[Exception]
) -> None:
    def fails(*_: object) -> None:
        raise kind("of the package")

    monkeypatch.setattr(f"quotient_manifolds.symmetries.{where}", fails)
    with pytest.raises(kind, match=r"^of the package$"):
        find_symmetries(middle(), X)


def test_layers_that_have_no_shape_yet() -> None:
    answers(lambda: qm.find_symmetries(nn.Sequential(nn.LazyLinear(3), *model()).eval(), X))


# --- what is found all the same, and what is not ---------------------------------------------------------------------


def test_nothing_is_verified_where_all_is_refused() -> None:
    """A parameter of which some rows run on longer inputs alone, and that all symmetries touch."""
    model = Computed(
        lambda s, x: s.b(s.a(x + s.positions[: x.shape[1]])),
        positions=nn.Parameter(torch.randn(5, 8)),
        a=nn.Linear(8, 6),
        b=nn.Linear(6, 9),
    )
    found = find_symmetries(model.eval(), X)
    assert found.every == ()
    assert any("positions did not run" in each.reason for each in found.refused)
    assert not any("cannot be verified" in each.reason for each in found.refused)


def test_an_output_that_says_nothing() -> None:
    assert find_symmetries(middle(torch.ones_like), X).pairs == ()


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x.sort(-1).values,
        lambda x: x.logcumsumexp(-1),
        lambda x: torch.fft.rfft(x, n=10).abs(),
        lambda x: torch.linalg.eigh(x[..., None] * x[..., None, :]).eigenvalues,
    ],
)
def test_what_mixes_channels_leaves_a_common_scale_at_most(between: Callable[[Tensor], Any]) -> None:
    found = find_symmetries(middle(between), X)
    assert {pair.group for pair in found.pairs} <= {"GL+(1)^1"}
    assert verify_symmetries(middle(between), X, found).failed == {}


@pytest.mark.parametrize("name", ["gpt2", "torch"])
@pytest.mark.parametrize("tokens", [1, 2])
def test_attention_over_one_token_claims_nothing_that_fails_over_more(name: str, tokens: int) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)).eval()
    model = layer if name == "torch" else build(name)
    some, more = (
        X[:2, :n] if name == "torch" else {"input_ids": torch.arange(3, 3 + 2 * n).view(2, n)} for n in (tokens, 3)
    )
    found = find_symmetries(model, some)
    assert verify_symmetries(model, more, found).failed == {}
    assert tokens == 1 or any("query/key" in each.name for each in found.pairs)


@pytest.mark.filterwarnings("ignore:var")
def test_a_deviation_of_one_number_is_not_a_number() -> None:
    model = Computed(lambda s, x: s.a(x).var(0), **linear("a", 3, 2))
    with pytest.raises(ValueError, match=r"Outputs on the batch must be numbers.*Found NaN; give other inputs"):
        find_symmetries(model.eval(), torch.randn(1, 3))


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
