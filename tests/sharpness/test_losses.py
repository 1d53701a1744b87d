"""Losses: next tokens as Hugging Face shifts them, and what is refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import quotient_manifolds as qm
from quotient_manifolds.sharpness.losses import next_token_logits_and_labels

transformers = pytest.importorskip("transformers")


def causal(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
        ).eval()
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config).eval()


def padded() -> dict[str, Tensor]:
    ids = torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_next_tokens_are_those_of_hugging_face(kind: str) -> None:
    model, batch = causal(kind), padded()
    expected = model(**batch).loss.item()
    unlabelled = {key: value for key, value in batch.items() if key != "labels"}
    for given in (batch, unlabelled, (unlabelled, batch["labels"])):
        assert qm.next_token_cross_entropy(model, given).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_cross_entropy_of_a_causal_model_names_the_other(kind: str) -> None:
    with pytest.raises(ValueError, match="use next_token_cross_entropy"):
        qm.cross_entropy(causal(kind), padded())
    with pytest.raises(ValueError, match="use next_token_cross_entropy"):
        qm.gradient_norm(causal(kind), qm.normalised_logits(qm.cross_entropy), [padded()], geometry="euclidean")


def test_a_causal_model_is_measured_in_every_geometry() -> None:
    model, batch = causal("llama").double(), padded()
    for geometry in ("euclidean", "adaptive", "inv", "mix"):
        found = qm.worst_case_sharpness(
            model, qm.next_token_cross_entropy, [batch], geometry=geometry, radius=0.1, steps=6
        )
        assert found.mean > 0
        assert found.base_losses[0] == pytest.approx(model(**batch).loss.item(), rel=1e-6)


def test_a_token_classifier_keeps_its_labels_in_place() -> None:
    model = nn.Embedding(5, 3)
    tokens = torch.tensor([[0, 1, 2]])
    found = qm.cross_entropy(model, (tokens, torch.tensor([[0, 1, -100]])))
    expected = nn.functional.cross_entropy(model(tokens)[0, :2], torch.tensor([0, 1]))
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"pixel_values": torch.ones(1, 2)}, 'needs "labels" or "input_ids"'),
        ((torch.tensor([[1]]), torch.tensor([[1]])), "at least 2 tokens"),
        ((torch.tensor([1, 2]), torch.tensor([1, 2])), "logits of shape"),
        ((torch.tensor([[1, 2]]), torch.tensor([[1, 9]])), "Labels must lie in 0 ... 2"),
    ],
)
def test_bad_batches_of_tokens_are_one_sentence(batch: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        qm.next_token_cross_entropy(nn.Embedding(5, 3), batch)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=message):
        next_token_logits_and_labels(nn.Embedding(5, 3), batch)


def test_next_tokens_are_those_of_the_loss() -> None:
    model, batch = nn.Embedding(5, 3), (torch.tensor([[0, 1, 2], [3, 4, 0]]), torch.tensor([[0, 1, -100], [2, 2, 0]]))
    logits, labels = next_token_logits_and_labels(model, batch)
    assert labels.tolist() == [1, 2, 0]
    assert torch.equal(logits, model.weight[[0, 3, 4]])
    assert torch.allclose(nn.functional.cross_entropy(logits, labels), qm.next_token_cross_entropy(model, batch))


# What a measure cannot take: one sentence, always ValueError or TypeError.

DATA = [(torch.ones(2, 3), torch.tensor([0, 1]))]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2).eval()


@pytest.mark.parametrize(
    "model",
    [
        "linear",
        lambda x: x,
        None,
        nn.Linear(3, 2, dtype=torch.complex64).eval(),
        nn.Linear(3, 2, device="meta").eval(),
        nn.LazyLinear(2).eval(),
        nn.Identity().eval(),
        linear().train(),
    ],
    ids=["text", "function", "none", "complex", "meta", "lazy", "empty", "training"],
)
def test_models_that_cannot_be_measured(model: nn.Module) -> None:
    for geometry in ("euclidean", "adaptive", "inv"):
        with pytest.raises((ValueError, TypeError)) as caught:
            qm.worst_case_sharpness(model, qm.cross_entropy, DATA, geometry=geometry, radius=0.1)
        assert "\n" not in str(caught.value)


def scaled(factor: object) -> qm.sharpness.Loss:
    return lambda model, batch: qm.cross_entropy(model, batch) * factor


@pytest.mark.parametrize(
    "loss",
    [
        scaled(1j),
        scaled(torch.ones(1, device="meta")[0]),
        scaled(torch.ones(2)),
        lambda model, batch: qm.cross_entropy(model, batch).reshape(1).to_sparse(),
        lambda model, batch: qm.cross_entropy(model, batch).item(),
        lambda model, batch: qm.cross_entropy(model, batch) > 0,
        scaled(float("nan")),
        "cross_entropy",
    ],
    ids=["complex", "meta", "vector", "sparse", "number", "bool", "nan", "text"],
)
def test_losses_that_cannot_be_measured(loss: qm.sharpness.Loss) -> None:
    for measure, size in ((qm.worst_case_sharpness, "radius"), (qm.average_case_sharpness, "sigma")):
        with pytest.raises((ValueError, TypeError)) as caught:
            measure(linear(), loss, DATA, geometry="adaptive", **{size: 0.1})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("geometry", ["geodesic", None, True, qm.Quotient, 3 + 1j, float("nan")])
def test_what_is_no_geometry(geometry: object) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        qm.gradient_norm(linear(), qm.cross_entropy, DATA, geometry=geometry)
    assert "\n" not in str(caught.value)


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

    def rise(factor: float) -> qm.Result:
        return qm.worst_case_sharpness(linear(), scaled(factor), DATA, geometry="euclidean", radius=0.5, steps=5)

    found, expected = rise(scale), rise(1.0)
    assert found.critical_starts == ()
    assert found.mean / scale == pytest.approx(expected.mean, rel=1e-3)
    assert qm.gradient_norm(linear(), scaled(scale), DATA, geometry="euclidean").mean == pytest.approx(
        scale * qm.gradient_norm(linear(), qm.cross_entropy, DATA, geometry="euclidean").mean, rel=1e-4
    )


# Climbs that have not converged.


def climbed(**settings: float) -> qm.Result:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double().eval()
    batches = [(torch.randn(6, 3).double(), torch.randint(2, (6,)))]
    return qm.worst_case_sharpness(model, qm.cross_entropy, batches, geometry="euclidean", **settings)


def test_a_climb_that_still_rises_at_its_end_is_flagged() -> None:
    with pytest.warns(
        qm.sharpness.ConvergenceWarning, match=r"\d+% of the rise came in the last quarter of the steps"
    ) as caught:
        short = climbed(radius=1.0, steps=2)
    assert len(caught) == 1
    assert short.late_rise > 0.05
    assert short.warning == str(caught[0].message)


def test_a_climb_that_has_converged_is_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        long = climbed(radius=1.0, steps=60)
    assert long.late_rise <= 0.05
    assert long.warning is None


def test_the_late_rise_is_that_of_the_last_quarter() -> None:
    losses = (1.0, 2.0, 1.5, 4.0, 3.0, 5.0)  # five steps: the last two are the last quarter
    batch = qm.sharpness.BatchResult(value=4.0, base_loss=1.0, forward_passes=6, backward_passes=5, losses=losses)
    assert batch.late_rise == 1.0
    flat = qm.sharpness.BatchResult(value=0.0, base_loss=1.0, forward_passes=6, backward_passes=5, losses=(1.0,) * 6)
    one = qm.Result("m", "g", {"radius": 0.1}, (batch, flat), "0")
    assert one.late_rise == pytest.approx(0.25)
    assert qm.Result("m", "g", {"radius": 0.1}, (flat,), "0").late_rise is None
    assert "25% of the rise" in (one.warning or "")


# Rises that are rounding.


def risen(radius: float, dtype: torch.dtype) -> qm.Result:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).eval().to(dtype)
    batches = [(torch.randn(6, 3).to(dtype), torch.randint(2, (6,)))]
    return qm.worst_case_sharpness(model, qm.cross_entropy, batches, geometry="adaptive", radius=radius)


def test_rises_near_the_spacing_of_the_loss_are_flagged() -> None:
    """Whatever differs by more than a few percent from double precision is said to."""
    flagged = 0
    for radius in (1e-2, 1e-3, 1e-4, 3e-5, 1e-5, 5e-6):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            single, double = risen(radius, torch.float32), risen(radius, torch.float64)
        assert double.rounding_warning is None
        flagged += single.rounding_warning is not None
        if single.mean != pytest.approx(double.mean, rel=0.05):
            assert single.rounding_warning is not None
    assert flagged
    with pytest.warns(qm.sharpness.RoundingWarning, match="take a larger radius, or float64"):
        risen(5e-6, torch.float32)
