"""Errors: those of a model are one sentence that says where, those of the package are never taken for the model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.orbit import same_function
from quotient_manifolds.symmetries import (
    certify,
    find_symmetries,
    output_change,
    propose_symmetries,
    verify_symmetries,
)
from quotient_manifolds.symmetries.example_inputs import example_inputs
from quotient_manifolds.symmetries.wires.walk import Walk
from tests.symmetries.nets import Computed, linear
from tests.symmetries.small_models import build

RUN = r"^Computed must run on the inputs to show its symmetries\. Found that "
X = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))


def middle(between: Callable[[Tensor], Any], width: int = 6) -> nn.Module:
    """Return two linear maps and something between them."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 8))
    return Computed(lambda s, x: s.inner(between(s.a(x))), a=nn.Linear(8, width), inner=inner).eval()


def _fails(x: Tensor) -> Tensor:
    raise KeyError("hidden_states")


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            middle(torch.tanh, 7),
            RUN + r"addmm in module 'inner\.0' \(Linear\) raises RuntimeError: mat1 and .* \(12x7 and 6x8\); "
            r"it is called as model\(inputs\), with one argument, a Tensor: give what the model takes, "
            r"without targets, or evaluate=$",
        ),
        (middle(_fails), RUN + r"its forward raises KeyError: 'hidden_states'; it is called as model"),
        (
            middle(lambda x: x.int()),
            RUN + r"addmm in module 'inner\.0' \(Linear\) raises RuntimeError: .* dtype",
        ),
    ],
    ids=["shapes", "code", "types"],
)
def test_an_error_of_the_model_says_where(model: nn.Module, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        find_symmetries(model, X)


CALLS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "verify": lambda model, x: verify_symmetries(model, X, others=[x]),
    "find": lambda model, x: find_symmetries(model, X, x),
    "certify": lambda model, x: certify(model, [x]),
    "same_function": lambda model, x: same_function(model, model, x),
    "output_change": lambda model, x: output_change(model, x, {}, {}),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_whoever_runs_a_model_says_where_it_fails(call: Callable[[nn.Module, Tensor], Any]) -> None:
    says = r"'a' \(Linear\) raises RuntimeError: mat1 and .*called as model\(inputs\), with one argument, a Tensor"
    with pytest.raises(ValueError, match=says):
        call(Computed(lambda s, x: s.b(s.a(x).relu()), a=nn.Linear(8, 3), b=nn.Linear(3, 2)).eval(), X[..., :5])


@pytest.mark.parametrize("others", [X, {"x": X}, None], ids=lambda each: type(each).__name__)
def test_one_batch_is_no_list_of_others(others: Any) -> None:
    with pytest.raises(TypeError, match=r"others must be a list of inputs. Found one (Tensor|dict|NoneType)"):
        verify_symmetries(nn.Linear(8, 2).eval(), X, others=others)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, IndexError, AssertionError])
def test_an_error_of_the_walk_is_not_taken_for_the_models(monkeypatch: Any, kind: type[Exception]) -> None:
    def step(*_: object) -> None:
        raise kind("of the package")

    monkeypatch.setattr(Walk, "_step", step)
    with pytest.raises(kind, match=r"^of the package$"):
        find_symmetries(middle(torch.tanh), X)


def test_an_error_while_verifying_is_not_taken_for_the_models(monkeypatch: Any) -> None:
    def verify(*_: object) -> None:
        raise RuntimeError("of the package")

    monkeypatch.setattr("quotient_manifolds.symmetries.find.verify_on_batches", verify)
    model = build("mixtral")
    with pytest.raises(RuntimeError, match=r"^of the package$"):
        find_symmetries(model, {"input_ids": torch.tensor([[1]])})


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


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (
        lambda: X[0].to_sparse(),
        r"inputs must be dense tensors\. Found a sparse one: call to_dense\(\)",
    ),
    "nested": (lambda: torch.nested.nested_tensor([*X]), r"inputs must be dense tensors\. Found a nested one: pad it"),
    "jagged": (
        lambda: torch.nested.nested_tensor([*X], layout=torch.jagged),
        r"inputs must be dense tensors\. Found a nested one: pad it",
    ),
    "quantised": (
        lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
        RUN + r"addmm in module 'a' \(Linear\) raises",
    ),
    "meta": (lambda: X.to("meta"), RUN + r"addmm in module 'a' \(Linear\) raises RuntimeError: Tensor on device meta"),
    "complex": (
        lambda: X + 1j * X,
        RUN + r"addmm in module 'a'",
    ),
    "none": (
        lambda: None,
        RUN + r"module 'a' \(Linear\) raises",
    ),
    "empty": (lambda: X[:0], "empty"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_inputs_of_another_kind_are_named(name: str) -> None:
    make, sentence = OTHERS[name]
    with pytest.raises(ValueError, match=sentence):
        find_symmetries(middle(torch.tanh), {"x": make()} if name == "none" else make())


def test_an_output_that_says_nothing() -> None:
    with pytest.raises(ValueError, match="the model's output on these inputs is empty: nothing can be compared"):
        find_symmetries(middle(lambda x: x[:0]), X)
    assert find_symmetries(middle(torch.ones_like), X).pairs == ()


@pytest.mark.parametrize(
    ("name", "between"),
    [
        ("sort", lambda x: x.sort(-1).values),
        ("logcumsumexp", lambda x: x.logcumsumexp(-1)),
        ("_fft_r2c", lambda x: torch.fft.rfft(x, n=10).abs()),
        ("_linalg_eigh", lambda x: torch.linalg.eigh(x[..., None] * x[..., None, :]).eigenvalues),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_an_operation_that_no_rule_knows_is_refused(name: str, between: Callable[[Tensor], Any]) -> None:
    found = find_symmetries(middle(between), X)
    assert found.pairs == ()
    (refusal,) = (each for each in found.refused if each.kind == "operation")
    assert (refusal.name, refusal.reason) == (
        name,
        "this use of the operation is not understood, so its inputs are held fixed",
    )
    assert verify_symmetries(middle(between), X, found).failed == {}


def test_known_operations_are_not_refused() -> None:
    for name in ("bert", "llama", "t5"):
        model = build(name)
        assert not [each for each in find_symmetries(model, example_inputs(model)).refused if each.kind == "operation"]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "torch"])
@pytest.mark.parametrize("tokens", [1, 2])
def test_attention_over_one_token_has_no_queries(name: str, tokens: int) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)).eval()
    model = layer if name == "torch" else build(name)
    ids = torch.arange(3, 3 + 2 * tokens).view(2, tokens)
    found = find_symmetries(model, X[:2, :tokens] if name == "torch" else {"input_ids": ids})
    about = [each for each in found.every if "query/key" in each.name or "key bias" in each.name]
    reasons = {each.reason for each in found.refused if each.kind == "query/key"}
    assert bool(about) == (tokens > 1)
    assert reasons == ({"softmax over one key is always 1: give inputs of at least 2 tokens"} if tokens == 1 else set())


@pytest.mark.filterwarnings("ignore:var")
def test_a_deviation_of_one_number_is_not_a_number() -> None:
    model = Computed(lambda s, x: s.a(x).var(0), **linear("a", 3, 2))
    assert not propose_symmetries(model.eval(), torch.randn(1, 3)).every
