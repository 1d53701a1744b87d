"""Losses: next tokens as Hugging Face shifts them, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn

import quotient_manifolds as qm
from quotient_manifolds.geometry import Geometry
from quotient_manifolds.sharpness.losses import counted_logits
from quotient_manifolds.symmetries import propose_symmetries, small_copy
from studies.fibres import hugging_face, small_model

CAUSAL = ("gpt2 with a head", "llama with a head")


def padded() -> dict[str, Tensor]:
    ids = torch.randint(8, (3, 4), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("name", CAUSAL)
def test_next_tokens_are_those_of_hugging_face(name: str) -> None:
    model, batch = small_model(name)[0], padded()
    expected = model(**batch).loss.item()
    unlabelled = {key: value for key, value in batch.items() if key != "labels"}
    for given in (batch, unlabelled, (unlabelled, batch["labels"])):
        assert qm.next_token_cross_entropy(model, given).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", CAUSAL)
def test_cross_entropy_of_a_causal_model_names_the_other(name: str) -> None:
    with pytest.raises(ValueError, match="use next_token_cross_entropy"):
        qm.cross_entropy(small_model(name)[0], padded())


def test_cross_entropy_knows_a_causal_model_in_wrappers() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(small_model(CAUSAL[1])[0], peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"Found LlamaForCausalLM.*use next_token_cross_entropy"):
        qm.cross_entropy(adapted, padded())


# Which loss is right is a question of the data: labels that are the input tokens, and a model that is causal.

MULTIMODAL = {
    "mistral3": "Mistral3",
    "llava": "Llava",
    "llava_next": "LlavaNext",
    "vipllava": "VipLlava",
    "gemma3": "Gemma3",
    "internvl": "InternVL",
    "aya_vision": "AyaVision",
    "idefics3": "Idefics3",
    "smolvlm": "SmolVLM",
    "qwen3_vl": "Qwen3VL",
    "mllama": "Mllama",
}


def small(model_type: str, head: str) -> nn.Module:
    return small_copy(hugging_face(model_type, head), seed=0)


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(3, 8, (3, 6), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Running(nn.Module):
    """Predicts the next token from the mean of those so far."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(8, 5), nn.Linear(5, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids).cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None])


def subclass() -> nn.Module:
    model = small_model(CAUSAL[1])[0]
    model.__class__ = type("Mine", (type(model),), {})
    return model


def predicted_next(model: nn.Module, batch: dict[str, Tensor]) -> float:
    """The loss of the next tokens of rows without padding."""
    with torch.no_grad():
        logits = model(**batch).logits
    return float(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()))


WRAPPED = {"a subclass": subclass, "DataParallel": lambda: nn.DataParallel(small_model(CAUSAL[1])[0])}
WRAPPED |= {name: (lambda name=name, kind=kind: small(name, f"{kind}ForConditionalGeneration"))
            for name, kind in MULTIMODAL.items()}  # fmt: skip


@pytest.mark.parametrize("name", WRAPPED)
def test_cross_entropy_knows_a_causal_model_by_what_it_computes(name: str) -> None:
    model, batch = WRAPPED[name](), tokens()
    assert qm.next_token_cross_entropy(model, batch).item() == pytest.approx(predicted_next(model, batch), rel=1e-6)
    for given in ({**batch, "labels": batch["input_ids"]}, (batch, batch["input_ids"])):
        with pytest.raises(ValueError, match="use next_token_cross_entropy"):
            qm.cross_entropy(model, given)


def test_cross_entropy_knows_a_causal_model_that_is_shown_pictures() -> None:
    """Two in one row and none in another, with their placeholders among the labels."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    picture, torch_seed = 7, torch.Generator().manual_seed(0)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4),
        text_config=transformers.LlamaConfig(**sizes, vocab_size=9),
        image_token_index=picture,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = torch.randint(2, 7, (2, 12), generator=torch_seed)
    ids[0, 1:9] = picture
    batch = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8, generator=torch_seed), "labels": ids}
    assert qm.next_token_cross_entropy(model, batch).item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)
    with pytest.raises(ValueError, match="use next_token_cross_entropy"):
        qm.cross_entropy(model, batch)


def test_the_prefix_of_a_model_may_look_ahead() -> None:
    """Of PaliGemma, whose loss Hugging Face computes of the next tokens of what follows."""
    model, batch = small("paligemma", "PaliGemmaForConditionalGeneration"), tokens()
    follows = torch.tensor([0, 0, 0, 1, 1, 1]).expand(3, 6)
    labels = batch["input_ids"].masked_fill(follows == 0, -100)
    with pytest.raises(ValueError, match="use next_token_cross_entropy"):
        qm.cross_entropy(model, {**batch, "token_type_ids": follows, "labels": labels})
    within = {**batch, "labels": batch["input_ids"]}  # all tokens look at each other
    assert qm.cross_entropy(model, within).item() == pytest.approx(in_place(model, within).item(), rel=1e-6)


def padding_counts() -> tuple[nn.Module, dict[str, Tensor]]:
    batch = tokens()
    return small("bert", "BertForMaskedLM"), {
        "input_ids": batch["input_ids"].index_fill(1, torch.arange(2, 6), 0),
        "attention_mask": (torch.arange(6) < 2).long().expand(3, 6),
        "labels": batch["input_ids"].index_fill(1, torch.arange(2, 6), 0),
    }


def of_zeros() -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = masked()
    for w in model.cls.predictions.parameters():
        nn.init.zeros_(w)
    return model, batch


def test_a_measure_and_a_score_know_a_causal_model_of_ones_own() -> None:
    """Whether it trains, with whatever is ignored, and under whatever name it takes its tokens."""
    model, ids = nn.Sequential(Running(), nn.Dropout(0.5)).eval(), tokens()["input_ids"].int()
    named = Running()
    named.forward = lambda tokens: Running.forward(named, tokens)  # type: ignore[method-assign, assignment]
    labels = ids.long().index_fill(0, torch.tensor(0), -100)
    with pytest.raises(ValueError, match="use next_token_cross_entropy"):
        qm.gradient_norm(model, qm.cross_entropy, [(ids, labels)], "adaptive")
    state = torch.get_rng_state()
    for call in (
        lambda: qm.cross_entropy(model.train(), (ids, labels)),
        lambda: qm.cross_entropy(model.eval(), ((ids,), labels)),
        lambda: counted_logits(model, (ids, labels), causal=False),
        lambda: qm.cross_entropy(named, {"tokens": ids, "labels": labels}),
    ):
        torch.set_rng_state(state)
        with pytest.raises(ValueError, match="use next_token_cross_entropy"):
            call()


def test_tokens_that_a_model_treats_alone_may_be_its_labels() -> None:
    model, ids = nn.Embedding(8, 8), tokens()["input_ids"]
    expected = nn.functional.cross_entropy(model.weight[ids.flatten()], ids.flatten())
    assert qm.cross_entropy(model, (ids, ids)).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("ids", [[[5, 6]], [[4, 4, 4]], [[0, 0, 5, 6]], [[5, 6, 0, 0]], [[5, 6, 6, 6]]])
def test_few_tokens_tell_a_causal_model(ids: list[list[int]]) -> None:
    """Two, all alike, and with padding, which counts."""
    given = torch.tensor(ids)
    batch = {"input_ids": given, "attention_mask": (given > 0).long(), "labels": given}
    with pytest.raises(ValueError, match="use next_token_cross_entropy"):
        qm.cross_entropy(small_model(CAUSAL[1])[0], batch)


def in_place(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    counted = batch["labels"] != -100
    return nn.functional.cross_entropy(logits[counted], batch["labels"][counted])


def copying() -> tuple[nn.Module, dict[str, Tensor]]:
    batch = tokens()
    begun = torch.cat([torch.zeros_like(batch["input_ids"][:, :1]), batch["input_ids"][:, :-1]], dim=1)
    return small("t5", "T5ForConditionalGeneration"), {
        **batch,
        "decoder_input_ids": begun,
        "labels": batch["input_ids"],
    }


def masked() -> tuple[nn.Module, dict[str, Tensor]]:
    batch = tokens()
    return small("bert", "BertForMaskedLM"), {
        **batch,
        "labels": batch["input_ids"].masked_fill(torch.eye(3, 6) > 0, -100),
    }


def shifted() -> tuple[nn.Module, dict[str, Tensor]]:
    batch = tokens()
    labels = torch.cat([batch["input_ids"][:, 1:], torch.full((3, 1), -100)], dim=1)
    return small_model(CAUSAL[1])[0], {**batch, "labels": labels}


@pytest.mark.parametrize("made", [copying, masked, padding_counts, of_zeros, shifted])
def test_labels_in_place_are_measured(made: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> None:
    """Of T5 that copies, of masked language models (padded, untrained), and of causal ones where they are shifted."""
    model, batch = made()
    assert qm.cross_entropy(model, batch).item() == pytest.approx(in_place(model, batch).item(), rel=1e-6)
    found, expected = (
        qm.worst_case_sharpness(model, loss, [batch], "adaptive", radius=0.1, steps=2).value
        for loss in (qm.cross_entropy, in_place)
    )
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("made", [copying, masked, shifted])
def test_a_measure_looks_at_its_data_once(made: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> None:
    """Two more passes over one row where labels are the input tokens, none where they differ; symmetries are given."""
    model, batch = made()
    rows: list[int] = []
    model.register_forward_pre_hook(lambda module, args, given: rows.append(len(given["input_ids"])), with_kwargs=True)

    def passes(loss: qm.sharpness.Loss, geometry: Geometry) -> list[int]:
        rows.clear()
        qm.worst_case_sharpness(model, loss, [batch, batch], geometry, radius=0.1, steps=3)
        return sorted(rows)

    found = propose_symmetries(model, batch, evaluate=in_place)
    for geometry in (qm.Adaptive(), qm.Quotient("inv", symmetries=found)):
        more = [] if made is shifted else [1, 1]
        assert passes(qm.cross_entropy, geometry) == more + passes(in_place, geometry)


@pytest.mark.parametrize("side", ["left", "right"])
def test_no_token_is_predicted_from_padding(side: str) -> None:
    """Positions are relative, so rows give the same alone, without their padding."""
    model, ids = small_model(CAUSAL[1])[0], tokens()["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, slice(0, 2) if side == "left" else slice(4, 6)] = 0
    mask[2, slice(0, 4) if side == "left" else slice(2, 6)] = 0
    alone = []
    for row, kept in zip(ids, mask.bool(), strict=True):
        chances = model(input_ids=row[kept][None]).logits[0].log_softmax(-1)
        alone += [-chances[place, token] for place, token in enumerate(row[kept][1:])]
    assert len(alone) == 5 + 3 + 1
    found = qm.next_token_cross_entropy(model, {"input_ids": ids, "attention_mask": mask})
    torch.testing.assert_close(found, torch.stack(alone).mean(), rtol=1e-5, atol=0)


class Returns(nn.Module):
    """Returns one thing, whatever keywords or positions it is called with."""

    def __init__(self, output: object) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.output


def test_cross_entropy_reads_every_kind_of_output_and_skips_ignored_labels() -> None:
    logits = torch.randn(2, 4, 3)
    labels = torch.tensor([[0, 1, 2, -100], [-100, 1, 0, 0]])
    picked = [-logits[i, j].log_softmax(-1)[labels[i, j]] for i in range(2) for j in range(4) if labels[i, j] >= 0]
    batches = [((logits,), labels), ({"x": 1}, labels), {"x": 1, "labels": labels}, (logits, labels)]
    for output in (logits, {"logits": logits}, (logits, None)):
        for batch in batches:
            torch.testing.assert_close(qm.cross_entropy(Returns(output), batch), torch.stack(picked).mean())
    with pytest.raises(ValueError, match='needs "logits"'):
        qm.cross_entropy(Returns({"hidden": logits}), batches[0])
    with pytest.raises(TypeError, match=r"must return logits, a tensor\. Found NoneType"):
        qm.cross_entropy(Returns(None), batches[0])


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8])
def test_labels_may_be_integers_of_any_size(dtype: torch.dtype) -> None:
    logits, labels = torch.randn(2, 4, 3), torch.tensor([[0, 1, 2, 1], [0, 1, 0, 0]])
    given = Returns(logits), (logits, labels.to(dtype))
    assert qm.cross_entropy(*given) == qm.cross_entropy(Returns(logits), (logits, labels))
    assert qm.next_token_cross_entropy(*given) == qm.next_token_cross_entropy(Returns(logits), (logits, labels))
    assert all(each.dtype == torch.int64 for each in counted_logits(*given, causal=False)[1:])


def test_next_tokens_are_those_of_the_loss() -> None:
    model, batch = nn.Embedding(5, 3), (torch.tensor([[0, 1, 2], [3, 4, 0]]), torch.tensor([[0, 1, -100], [2, 2, 0]]))
    logits, labels = counted_logits(model, batch, causal=True)
    assert labels.tolist() == [1, 2, 0]
    assert torch.equal(logits, model.weight[[0, 3, 4]])
    assert torch.allclose(nn.functional.cross_entropy(logits, labels), qm.next_token_cross_entropy(model, batch))


DATA = [(torch.ones(2, 3), torch.tensor([0, 1]))]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2).eval()


def scaled(factor: object) -> qm.sharpness.Loss:
    return lambda model, batch: qm.cross_entropy(model, batch) * factor


def test_a_model_made_in_inference_mode_is_measured() -> None:
    with torch.inference_mode():
        made = linear()
    found, expected = (
        qm.worst_case_sharpness(model, qm.cross_entropy, DATA, geometry="adaptive", radius=0.1, steps=4).values
        for model in (made, linear())
    )
    assert found == expected


def test_a_loss_without_gradient_has_an_average_case_only() -> None:
    def error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]).argmax(-1) != batch[1]).double().mean()

    assert qm.average_case_sharpness(linear(), error, DATA, geometry="adaptive", sigma=0.5).mean >= -1
    with pytest.raises(ValueError, match="does not depend on any measured parameter"):
        qm.worst_case_sharpness(linear(), error, DATA, geometry="adaptive", radius=0.5)


# Numbers near the ends of float32's range.


@pytest.mark.parametrize("scale", [1e-28, 1e-22, 1e22])
def test_gradients_whose_squares_leave_the_range_of_single_precision_are_climbed(scale: float) -> None:
    """The climb is that of the loss before it was scaled: no critical start, no overflow."""
    for measure in (qm.sharpness.WorstCase(qm.Euclidean(), 0.5, steps=5), qm.sharpness.GradientNorm(qm.Euclidean())):
        found, expected = (measure.of(linear(), scaled(factor), DATA) for factor in (scale, 1.0))
        assert not any(each.critical_start for each in found.batches)
        assert found.mean / scale == pytest.approx(expected.mean, rel=1e-3)


# Climbs that have not converged, and rises that are rounding.


def climbed(geometry: str, dtype: torch.dtype = torch.float64, **settings: float) -> qm.Result:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).eval().to(dtype)
    batches = [(torch.randn(6, 3).to(dtype), torch.randint(2, (6,)))]
    return qm.worst_case_sharpness(model, qm.cross_entropy, batches, geometry=geometry, **settings)


def test_a_climb_that_promises_more_at_its_end_is_flagged_and_one_that_has_converged_is_not() -> None:
    with pytest.warns(
        qm.sharpness.ConvergenceWarning, match=r"one more step promises [\d.]+% of the increase, above 1%"
    ) as caught:
        short = climbed("euclidean", radius=1.0, steps=2)
    assert (short.relative_gap or 0.0) > 0.01
    assert [short.warning] == [str(each.message) for each in caught]
    long = climbed("euclidean", radius=1.0, steps=60)
    assert 0 <= (long.relative_gap or 0.0) <= 0.01
    assert long.warning is None


def test_gaps_are_added_up_and_the_worst_batch_counts_for_the_promise() -> None:
    def batch(value: float, gap: float | None, promise: float | None) -> qm.sharpness.BatchResult:
        return qm.sharpness.BatchResult(value, 1.0, 6, 5, losses=(1.0, 1.0 + value), gap=gap, promise=promise)

    def result(*batches: qm.sharpness.BatchResult) -> qm.Result:
        return qm.Result("m", "g", {"radius": 0.1}, batches, "0")

    found = result(batch(3.0, 0.5, 4.0), batch(1.0, 0.5, 1.0))
    assert found.relative_gap == pytest.approx(0.25)
    assert found.promise_kept == pytest.approx(0.75)
    assert "one more step promises 25% of the increase" in (found.warning or "")
    assert "bends down well inside" in (result(batch(3.0, 0.0, 4.0), batch(0.4, 0.0, 1.0)).warning or "")
    without = result(batch(0.0, 0.0, 0.0), batch(0.0, None, None))
    assert (without.relative_gap, without.promise_kept, without.warning) == (None, None, None)


def test_rises_near_the_spacing_of_the_loss_are_flagged() -> None:
    """Whatever differs by more than a few percent from double precision is said to."""
    flagged = 0
    for radius in (1e-2, 1e-3, 1e-4, 3e-5, 1e-5, 5e-6):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            single, double = (climbed("adaptive", each, radius=radius) for each in (torch.float32, torch.float64))
        assert double.rounding_warning is None
        flagged += single.rounding_warning is not None
        if single.mean != pytest.approx(double.mean, rel=0.05):
            assert single.rounding_warning is not None
    assert flagged
    with pytest.warns(qm.sharpness.RoundingWarning, match="take a larger radius, or float64"):
        climbed("adaptive", torch.float32, radius=5e-6)
