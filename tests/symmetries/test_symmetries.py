"""Every model of the table: its pairs are found exactly, read and written exactly; moving them keeps the function."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from quotient_manifolds.manifolds import FixedRankQuotient
from quotient_manifolds.symmetries import (
    ParameterView,
    Params,
    Span,
    SymmetricPair,
    Symmetries,
    find_symmetries,
    prove_symmetries,
    random_move,
)
from tests.models import BY_NAME, MODELS, ModelCase, ViTAttention

every_model = pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)


def parameters(model: nn.Module) -> Params:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def flat(output: Any) -> Tensor:
    """Every floating point tensor of a model's output in one vector."""
    if isinstance(output, Tensor):
        return output.flatten() if output.is_floating_point() else torch.zeros(0)
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(flat(part) for part in parts)])


def answer(model: nn.Module, inputs: Any, params: Params) -> Tensor:
    """The outputs of a float64 copy loaded with the given parameters."""
    twin = copy.deepcopy(model).double()
    with torch.no_grad():
        twin.load_state_dict({name: value.double() for name, value in params.items()}, strict=False)
        if isinstance(inputs, dict):
            return flat(twin(**{k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}))
        return flat(twin(*(value.double() for value in (inputs if isinstance(inputs, tuple) else (inputs,)))))


# --- what is found ---------------------------------------------------------------------------------------------------


@every_model
def test_the_pairs_are_exactly_these(case: ModelCase) -> None:
    found = find_symmetries(case.build())
    assert tuple((pair.name, pair.heads, pair.n, pair.m, pair.h) for pair in found.pairs) == case.pairs
    assert [pair.kind for pair in found.pairs] == [name.split()[-1] for name, *_ in case.pairs]
    assert [pair.group for pair in found.pairs] == [f"GL({h})^{heads}" for _, heads, _, _, h in case.pairs]
    assert found.unrecognised == ()


@every_model
def test_rest_is_exactly_what_no_pair_touches(case: ModelCase) -> None:
    model = case.build()
    touched = [name for name, _ in model.named_parameters() if any(re.fullmatch(name_, name) for name_ in case.touched)]
    found = find_symmetries(model)
    assert touched
    assert set(found.names) == set(touched)
    assert found.rest == tuple(name for name, _ in model.named_parameters() if name not in touched)


@every_model
def test_every_covered_element_has_one_owner(case: ModelCase) -> None:
    params = parameters(case.build())
    found = find_symmetries(case.build())
    total = found.coverage(params)
    owners = {name: torch.zeros_like(value) for name, value in params.items()}
    for pair in found.pairs:
        for name, mask in Symmetries((pair,)).coverage(params).items():
            owners[name] += mask
    for name, value in params.items():
        assert total[name].shape == value.shape
        assert torch.equal(owners[name], torch.full_like(value, float(name in found.names))), name
        assert torch.equal(total[name], owners[name] > 0)
    assert sum(int(mask.sum()) for mask in total.values()) == sum(
        heads * (n + m) * h for _, heads, n, m, h in case.pairs
    )


def test_coverage_of_spans() -> None:
    torch_model, gpt2 = (BY_NAME[name].build() for name in ("torch", "GPT-2"))
    packed = Symmetries(find_symmetries(torch_model).pairs[:1]).coverage(parameters(torch_model))
    assert packed["attention.in_proj_weight"].all(1).tolist() == [True] * 24 + [False] * 12
    assert packed["attention.in_proj_bias"].tolist() == [True] * 24 + [False] * 12
    assert not packed["attention.out_proj.weight"].any()
    fused = Symmetries(find_symmetries(gpt2).pairs[1:2]).coverage(parameters(gpt2))
    assert fused["transformer.h.0.attn.c_attn.weight"].all(0).tolist() == [False] * 24 + [True] * 12
    assert fused["transformer.h.0.attn.c_proj.weight"].all()


# --- reading and writing ---------------------------------------------------------------------------------------------


@every_model
def test_read_and_write_are_inverse_bit_for_bit(case: ModelCase) -> None:
    params = parameters(case.build())
    found = find_symmetries(case.build())
    covered = found.coverage(params)
    for pair in found.pairs:
        blank = {name: torch.full_like(value, torch.nan) for name, value in params.items()}
        pair.write(blank, pair.read(params))
        point = torch.randn(pair.heads, pair.n + pair.m, pair.h)
        own = Symmetries((pair,)).coverage(params)
        for name, value in params.items():
            assert torch.equal(blank[name].isnan(), ~own[name])
            assert torch.equal(blank[name][own[name]], value[own[name]])
        changed = {name: value.clone() for name, value in params.items()}
        pair.write(changed, point)
        assert torch.equal(pair.read(changed), point)
        assert torch.equal(pair.G.read(changed), point[:, : pair.n])
        assert torch.equal(pair.H.read(changed), point[:, pair.n :])
        for name, value in params.items():
            assert torch.equal(changed[name][~own[name]], value[~own[name]])
            assert covered[name][own[name]].all()


def test_factors_are_the_head_s_slices() -> None:
    """Head 1 of 3, cut out by hand."""
    head = slice(4, 8)
    model, prefix = BY_NAME["BERT"].build(), "encoder.layer.1.attention"
    params, (qk, vo) = parameters(model), find_symmetries(model).pairs[2:]
    q, k, v = (
        torch.cat([params[f"{prefix}.self.{x}.weight"].T, params[f"{prefix}.self.{x}.bias"][None]])[:, head]
        for x in ("query", "key", "value")
    )
    assert torch.equal(qk.read(params)[1], torch.cat([q, k]))
    assert torch.equal(vo.read(params)[1], torch.cat([v, params[f"{prefix}.output.dense.weight"][:, head]]))

    model = BY_NAME["torch with appended tokens"].build()
    params, (qk, vo) = parameters(model), find_symmetries(model).pairs
    weight, bias = params["attention.in_proj_weight"], params["attention.in_proj_bias"]
    q, k, v = (torch.cat([weight[i : i + 12].T, bias[None, i : i + 12]])[:, head] for i in (0, 12, 24))
    assert torch.equal(qk.read(params)[1], torch.cat([q, k, params["attention.bias_k"][0, :, head]]))
    out = params["attention.out_proj.weight"][:, head]
    assert torch.equal(vo.read(params)[1], torch.cat([v, params["attention.bias_v"][0, :, head], out]))

    model = BY_NAME["GPT-2"].build()
    params, (qk, vo) = parameters(model), find_symmetries(model).pairs[:2]
    fused = torch.cat([params["transformer.h.0.attn.c_attn.weight"], params["transformer.h.0.attn.c_attn.bias"][None]])
    assert torch.equal(qk.read(params)[1], torch.cat([fused[:, 4:8], fused[:, 16:20]]))
    out = params["transformer.h.0.attn.c_proj.weight"][head].T
    assert torch.equal(vo.read(params)[1], torch.cat([fused[:, 28:32], out]))


# heads 2, h 3, 5 inputs. Interleaved: q, k, v head by head. Grouped: queries 2g and 2g + 1 share key head g.
LAYOUTS: dict[str, tuple[tuple[int, ...], str, dict[str, int], Span | None, Callable[[Tensor, int], Tensor]]] = {
    "interleaved": (
        (18, 5),
        "heads block h rows -> heads (block rows) h",
        {"heads": 2},
        Span("(heads block h) rows", "block", 3, 1, 2),
        lambda w, head: w[9 * head + 3 : 9 * head + 6].T,
    ),
    "grouped": (
        (12, 5),
        "(heads g h) rows -> heads (g rows) h",
        {"heads": 2, "g": 2},
        None,
        lambda w, head: torch.cat([w[6 * head : 6 * head + 3].T, w[6 * head + 3 : 6 * head + 6].T]),
    ),
    "grouped within a span of unequal blocks": (
        (24, 5),
        "(heads g) h rows -> heads (g rows) h",
        {"heads": 2, "g": 2, "h": 3},
        Span("(unit h) rows", "unit", 8, 2, 6),
        lambda w, head: torch.cat([w[6 * head + 6 : 6 * head + 9].T, w[6 * head + 9 : 6 * head + 12].T]),
    ),
    "one pair without heads": ((3, 5), "h rows -> 1 rows h", {}, None, lambda w, head: w.T),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transposed_in_memory", [False, True])
def test_layouts_are_data(layout: str, transposed_in_memory: bool) -> None:
    shape, pattern, sizes, span, by_hand = LAYOUTS[layout]
    stored = torch.randn(shape)
    if transposed_in_memory:
        stored = stored.T.contiguous().T
    part = ParameterView.of("w", stored, pattern, sizes, span)
    read = part.read({"w": stored})
    assert part.shape == read.shape
    for head in range(part.shape[0]):
        assert torch.equal(read[head], by_hand(stored, head))
    target = torch.full_like(stored, torch.nan)
    part.write({"w": target}, read)
    assert int(target.isfinite().sum()) == read.numel()
    assert torch.equal(target[target.isfinite()], stored[target.isfinite()])


# --- moving ----------------------------------------------------------------------------------------------------------


@every_model
def test_the_action_keeps_the_function_and_one_side_changes_it(case: ModelCase) -> None:
    model, inputs = case.build(), case.inputs()
    params = {name: value.double() for name, value in parameters(model).items()}
    reference = answer(model, inputs, params)
    tolerance = 1e-10 * float(reference.abs().max())
    for pair in find_symmetries(model).pairs:
        x = pair.read(params)
        moved = FixedRankQuotient(pair.n, pair.m).action(torch.randn(pair.heads, pair.h, pair.h, dtype=x.dtype), x)
        changed = copy.deepcopy(params)
        pair.write(changed, moved)
        assert (answer(model, inputs, changed) - reference).abs().max() <= tolerance, pair.name
        pair.write(changed, torch.cat([moved[:, : pair.n], x[:, pair.n :]], dim=1))
        assert (answer(model, inputs, changed) - reference).abs().max() > 1e6 * tolerance, pair.name


@given(
    exponent=st.floats(-2, 2),
    seed=st.integers(0, 10**6),
    name=st.sampled_from(["torch", "GPT-2", "ALBERT, one attention for all layers"]),
)
def test_a_random_move_keeps_the_function(exponent: float, seed: int, name: str) -> None:
    case = BY_NAME[name]
    model = case.build().double()
    moved = random_move(model, find_symmetries(model), scale=10**exponent, seed=seed)
    reference = answer(model, case.inputs(), parameters(model))
    assert (answer(model, case.inputs(), moved) - reference).abs().max() <= 1e-7 * reference.abs().max()


def test_a_random_move_returns_all_parameters_as_new_tensors() -> None:
    model = BY_NAME["GPT-2"].build()
    before = copy.deepcopy(model.state_dict())
    found = find_symmetries(model)
    moved = random_move(model, found, scale=3.0, seed=1)
    assert list(moved) == [name for name, _ in model.named_parameters()]
    for name, value in model.named_parameters():
        assert moved[name].dtype == value.dtype
        assert moved[name].data_ptr() != value.data_ptr()
        assert torch.equal(moved[name], value) == (name not in found.moved)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    again = random_move(parameters(model), found, scale=3.0, seed=1)
    other = random_move(model, found, scale=3.0, seed=2)
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
    found = find_symmetries(model)
    pair, params = found.pairs[0], parameters(model)
    G, H = pair.G.read(params), pair.H.read(params)
    transforms = []
    for scale in (1.0, 0.01):
        moved = random_move(model, found, scale=scale, seed=5, translations=False)
        A = torch.linalg.lstsq(H, pair.H.read(moved)).solution.mT
        assert torch.allclose(pair.G.read(moved) @ A, G)
        transforms.append(A)
    assert torch.allclose(transforms[1], 0.01 * transforms[0])
    assert not torch.allclose(transforms[0][0], transforms[0][1])


# --- what is refused, and why ----------------------------------------------------------------------------------------


def test_a_model_without_attention_has_no_pairs() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert find_symmetries(model) == Symmetries((), ("0.weight", "0.bias", "2.weight", "2.bias"))
    assert "no symmetric pairs" in str(find_symmetries(model))


def test_a_module_used_twice_is_one_pair() -> None:
    attention = ViTAttention()
    model = nn.ModuleDict({"first": attention, "second": attention})
    assert [pair.name for pair in find_symmetries(model).pairs] == ["first query/key", "first value/output"]


def _tied_to_embedding() -> nn.Module:
    model = nn.ModuleDict({"attention": ViTAttention(), "embedding": nn.Embedding(12, 12)})
    model["attention"].v_proj.weight = model["embedding"].weight
    return model


def _query_is_key() -> nn.Module:
    model = nn.Sequential(ViTAttention())
    model[0].k_proj = model[0].q_proj
    return model


def _parametrised() -> nn.Module:
    model = nn.Sequential(ViTAttention())
    nn.utils.parametrizations.weight_norm(model[0].q_proj)
    return model


def _without_heads() -> nn.Module:
    model = nn.Sequential(ViTAttention())
    del model[0].num_attention_heads
    return model


def _with(name: str, value: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = nn.Sequential(ViTAttention())
        setattr(model[0], name, value)
        return model

    return build


class HomemadeAttention(nn.Module):
    """Projections where Llama keeps them, and nobody knows what happens to them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(12, 12) for _ in range(4))


class SubAttention(nn.MultiheadAttention):
    """Computes something else."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x)[0].tanh()


class MyMHA(nn.MultiheadAttention):
    """Computes what torch's does."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, batch_first=True)

    def extra_repr(self) -> str:
        return "mine"


Namesake = type("MultiheadAttention", (nn.Linear,), {"__module__": "somebody.elses"})


REFUSALS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], str]] = {
    "tied to an embedding": (
        _tied_to_embedding,
        ("attention query/key",),
        r"attention value/output: parameter 'attention.v_proj.weight' is tied to 'embedding.weight'",
    ),
    "query is key": (_query_is_key, ("0 value/output",), r"0 query/key: parameter '0.q_proj.weight' plays two parts"),
    "parametrised": (_parametrised, (), r"0 \(ViTAttention\): its projections are not where"),
    "one attention inside another": (
        _with("inner", ViTAttention()),
        (),
        r"0 \(ViTAttention\): it has a parameter 'inner.q_proj.weight'",
    ),
    "grouped heads": (
        _with("k_proj", nn.Linear(12, 6)),
        (),
        r"0 \(ViTAttention\): query has 3 heads of width 4, key 3 of width 2",
    ),
    "wrong number of heads": (_with("num_attention_heads", 5), (), r"'0.q_proj.weight' has shape \(12, 12\)"),
    "no number of heads": (_with("num_attention_heads", "three"), (), r"is 'three', expected a positive number"),
    "heads unknown": (
        _without_heads,
        (),
        r"it has no attribute 'num_attention_heads\|",
    ),
    "a class nobody knows": (
        lambda: nn.Sequential(HomemadeAttention()),
        (),
        r"0 \(HomemadeAttention\): no known layout is for this class",
    ),
    "a subclass of torch's": (
        lambda: nn.Sequential(SubAttention(12, 3)),
        (),
        r"0 \(SubAttention\): it is a MultiheadAttention with another forward",
    ),
    "a namesake of torch's": (
        lambda: nn.Sequential(Namesake(12, 3)),
        (),
        r"0 \(MultiheadAttention\): no known layout is for this class",
    ),
    "a strange linear": (
        _with("q_proj", type("Linear8", (nn.Linear,), {})(12, 12)),
        (),
        r"'q_proj' is a Linear8, expected Linear",
    ),
}


def test_a_subclass_that_changes_nothing_is_found() -> None:
    model = MyMHA(12, 3).eval()
    found = find_symmetries(model)
    assert [pair.name for pair in found.pairs] == ["query/key", "value/output"]
    assert found.unrecognised == ()
    x = torch.randn(2, 5, 12)
    assert prove_symmetries(model, (x, x, x), found).all_proved


def test_norms_on_queries_leave_value_output() -> None:
    found = find_symmetries(_with("q_norm", nn.LayerNorm(4))())
    assert [pair.name for pair in found.pairs] == ["0 value/output"]
    assert [(refusal.name, refusal.kind) for refusal in found.refused] == [("0 query/key", "query/key")]
    assert "normalised between projection and product" in found.refused[0].reason
    assert found.unrecognised == ()


def test_an_unknown_submodule_is_not_trusted() -> None:
    found = find_symmetries(_with("twist", nn.Hardtanh())())
    assert found.pairs == ()
    assert "it has a submodule 'twist' (Hardtanh) that the known layout lacks" in found.unrecognised[0]


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refusals_say_why(refusal: str) -> None:
    make, left, reason = REFUSALS[refusal]
    found = find_symmetries(make())
    assert tuple(pair.name for pair in found.pairs) == left
    assert len(found.unrecognised) == 1
    assert re.search(reason, found.unrecognised[0]), found.unrecognised
    assert found.unrecognised[0] in str(found)


def _broken(change: Callable[[nn.Module], None]) -> nn.Module:
    model = nn.Sequential(ViTAttention())
    change(model[0])
    return model


def _put(value: float) -> Callable[[nn.Module], None]:
    def change(attention: nn.Module) -> None:
        attention.k_proj.weight.data[0, 0] = value

    return change


def _quantise(attention: nn.Module) -> None:
    attention.k_proj.weight = nn.Parameter(torch.ones(12, 12, dtype=torch.int8), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_put(torch.nan), "parameter '0.k_proj.weight' contains NaN or infinite values"),
        (_put(torch.inf), "parameter '0.k_proj.weight' contains NaN or infinite values"),
        (lambda attention: attention.to("meta"), "parameter '0.q_proj.weight' is on the meta device"),
        (_quantise, "parameter '0.k_proj.weight' is torch.int8, expected floating point"),
    ],
    ids=["nan", "inf", "meta", "int8"],
)
def test_broken_weights_are_named(change: Callable[[nn.Module], None], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        find_symmetries(_broken(change))


def _one_pair() -> tuple[nn.Module, Symmetries, SymmetricPair]:
    model = nn.Sequential(ViTAttention())
    found = find_symmetries(model)
    return model, found, found.pairs[0]


def test_misuse_of_a_pair_is_one_sentence() -> None:
    model, _, pair = _one_pair()
    params = parameters(model)
    with pytest.raises(ValueError, match=r"has shape \(3, 26, 4\). Found \(3, 25, 4\)"):
        pair.write(params, torch.zeros(3, 25, 4))
    with pytest.raises(ValueError, match=r"hold no '0.q_proj.weight'"):
        pair.read({})
    with pytest.raises(ValueError, match=r"'0.q_proj.weight' has shape \(13, 12\)"):
        pair.read(params | {"0.q_proj.weight": torch.zeros(13, 12)})
    with pytest.raises(ValueError, match=r"would change the model's own parameter '0.q_proj.weight'"):
        pair.write(dict(model.named_parameters()), pair.read(params))


def test_misuse_of_a_random_move_is_one_sentence() -> None:
    model, found, _ = _one_pair()
    with pytest.raises(ValueError, match=r"positive number. Found 0"):
        random_move(model, found, scale=0)
    with pytest.raises(ValueError, match=r"A = 1e\+06 x Gaussian overflows torch.float16"):
        random_move(model.half(), found, scale=1e6)
    model.float()[0].q_proj.weight.data[:] = torch.nan
    with pytest.raises(ValueError, match=r"'0.q_proj.weight' contains NaN"):
        random_move(model, found)


# --- as text and data ------------------------------------------------------------------------------------------------


def test_symmetries_print_as_a_table() -> None:
    text = str(find_symmetries(BY_NAME["BERT"].build()))
    assert re.search(r"^encoder\.layer\.1\.attention value/output +GL\(4\)\^3 +13 x 4 +12 x 4 +3$", text, re.MULTILINE)
    assert re.search(r"^  encoder\.layer\.\*\.attention\.output\.dense\.bias  \(2\)$", text, re.MULTILINE)


def test_symmetries_are_plain_data() -> None:
    data = find_symmetries(BY_NAME["torch"].build()).to_dict()
    assert json.loads(json.dumps(data))["pairs"][0]["group"] == "GL(4)^3"
    assert data["pairs"][0]["G"]["views"][0]["name"] == "attention.in_proj_weight"
    assert data["rest"] == ["attention.out_proj.bias"]
