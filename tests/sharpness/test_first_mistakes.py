"""What a newcomer gets wrong first is answered by one sentence that says what to do."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import quotient_manifolds as qm
from quotient_manifolds.symmetries import certify


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(5, 4), torch.randint(3, (5,))


def measured(model: nn.Module, batches: Any, **settings: Any) -> qm.Result:
    chosen = {"loss": qm.cross_entropy, "geometry": "inv", "radius": 0.1, "steps": 2, **settings}
    return qm.worst_case_sharpness(model, batches=batches, **chosen)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy, F.mse_loss, nn.MSELoss(), F.l1_loss])
def test_losses_of_torch(model: nn.Module, batch: Any, loss: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"must be called as loss\(model, batch\). Found torch's") as raised:
        measured(model, [batch], loss=loss)
    assert ("quotient_manifolds.cross_entropy" in str(raised.value)) == ("ross" in str(loss))


def test_a_loss_that_is_none(model: nn.Module, batch: Any) -> None:
    with pytest.raises(TypeError, match=r"must be callable as loss\(model, batch\). Found NoneType"):
        measured(model, [batch], loss=None)
    with pytest.raises(TypeError, match=r"must be callable as loss\(model, batch\). Found str"):
        measured(model, [batch], loss="cross_entropy")


def test_outputs_that_are_probabilities_already(model: nn.Module, batch: Any) -> None:
    """Their value is not that of the classifier, as one sentence says; log-probabilities are logits like others."""
    (inputs, labels), ended = batch, nn.Sequential(model, nn.Softmax(-1)).eval()
    with pytest.warns(UserWarning, match=r"must get logits\. Found probabilities") as caught:
        found = measured(ended, [batch, batch], geometry="adaptive")
    assert len(caught) == 1
    assert found.batches[0].base_loss == pytest.approx(F.cross_entropy(model(inputs).softmax(-1), labels).item())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right, same = (
            measured(each, [batch], geometry="euclidean", steps=20).value
            for each in (model, nn.Sequential(model, nn.LogSoftmax(-1)).eval())
        )
        qm.cross_entropy(nn.Embedding.from_pretrained(torch.eye(4)), (torch.arange(4), torch.arange(4)))
    assert same == pytest.approx(right, rel=1e-4)
    ids = torch.arange(6).reshape(2, 3)
    table = nn.Sequential(nn.Embedding(6, 6), nn.Softmax(-1)).eval()
    for half in (table, table.bfloat16()):
        with pytest.warns(UserWarning, match="Found probabilities"):
            qm.next_token_cross_entropy(half, (ids, ids))


def test_one_logit_for_two_classes(batch: Any) -> None:
    for labels in (torch.zeros(5, dtype=torch.long), torch.tensor([0, 1, 0, 1, 0]), torch.ones(5, 1)):
        with pytest.raises(ValueError, match=r"at least 2 classes\. Found one logit.*binary_cross_entropy_with_logits"):
            measured(nn.Linear(4, 1).eval(), [(batch[0], labels)])


def test_inputs_in_another_precision(model: nn.Module, batch: Any) -> None:
    with pytest.raises(TypeError, match=r"must have the dtype of the model, float32\. Found float64"):
        measured(model, [(batch[0].double(), batch[1])])
    with pytest.raises(TypeError, match=r"must have the dtype of the model, float64\. Found float32"):
        measured(model.double(), [batch])


def test_batches_of_numpy(model: nn.Module, batch: Any) -> None:
    with pytest.raises(TypeError, match=r"A batch must hold tensors\. Found numpy\.ndarray; .*torch\.as_tensor"):
        measured(model, [(batch[0].numpy(), batch[1].numpy())])


def test_several_radii(model: nn.Module, batch: Any) -> None:
    with pytest.raises(ValueError, match="use worst_case_profile for several radii"):
        measured(model, [batch], radius=[0.1, 0.2])


def test_settings_of_another_measure(model: nn.Module, batch: Any) -> None:
    with pytest.raises(TypeError, match=r"^worst_case_sharpness\(\) missing .* 'radius'"):
        qm.worst_case_sharpness(model, qm.cross_entropy, [batch], "inv")
    with pytest.raises(TypeError, match=r"^gradient_norm\(\) got an unexpected keyword argument 'radius'"):
        qm.gradient_norm(model, qm.cross_entropy, [batch], "inv", radius=0.1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"takes sigma, the standard deviation per coordinate, .* Found radius"):
        qm.average_case_sharpness(model, qm.cross_entropy, [batch], "inv", radius=0.1)  # type: ignore[call-arg]


FUNCTIONS = {
    qm.worst_case_sharpness: qm.sharpness.WorstCase,
    qm.average_case_sharpness: qm.sharpness.AverageCase,
    qm.gradient_norm: qm.sharpness.GradientNorm,
    qm.hessian_trace: qm.sharpness.HessianTrace,
    qm.top_eigenvalue: qm.sharpness.TopEigenvalue,
    qm.legacy_sharpness: qm.sharpness.LegacyWorstCase,
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
def test_a_function_takes_the_settings_of_its_measure(function: Any) -> None:
    own = {n: (p.default, p.kind) for n, p in inspect.signature(function).parameters.items()}
    settings = inspect.signature(FUNCTIONS[function]).parameters
    assert [*own] == ["model", "loss", "batches", *settings]
    assert {name: own[name] for name in settings} == {n: (p.default, p.kind) for n, p in settings.items()}


def test_a_module_is_not_called(model: nn.Module, batch: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^quotient_manifolds\.sharpness is a module; call one of its functions, .*worst_case_"
    ):
        qm.sharpness(model, qm.cross_entropy, [batch])


def test_batches_that_are_one_tensor_are_not_taken_row_by_row(model: nn.Module, batch: Any) -> None:
    with pytest.raises(TypeError, match="Found one Tensor: wrap it in a list"):
        certify(model, batch[0])


def test_radii_that_are_one_number(model: nn.Module, batch: Any) -> None:
    with pytest.raises(TypeError, match=r"radii must be a list\. Found 0\.1; give radii=\[0\.1\]"):
        qm.worst_case_profile(model, qm.cross_entropy, [batch], "inv", radii=0.1)  # type: ignore[arg-type]


def test_losses_and_batches_of_a_path_and_an_audit(model: nn.Module, batch: Any) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters())

    for function, first in ((qm.loss_along_path, model), (qm.orbit_audit, make)):
        with pytest.raises(TypeError, match=r"must be called as loss\(model, batch\)"):
            function(first, model, F.cross_entropy, [batch])  # type: ignore[operator]
        with pytest.raises(TypeError, match=r"wrap it: \[batch\]"):
            function(first, model, qm.cross_entropy, batch)  # type: ignore[operator]
    with pytest.raises(ValueError, match="must be in eval mode"):
        qm.loss_along_path(model, model.train(), qm.cross_entropy, [batch])


@pytest.mark.parametrize("wrong", [torch.optim.AdamW, torch.optim.SGD([torch.zeros(1)])])
def test_an_optimizer_that_does_not_take_the_model(model: nn.Module, batch: Any, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"a function of the model, as lambda model: .*\(model\.parameters\(\)\)"):
        qm.orbit_audit(wrong, model, qm.cross_entropy, [batch])


def test_names_and_scopes_of_symmetries(model: nn.Module, batch: Any) -> None:
    found = qm.find_symmetries(model, batch[0])
    assert found.without("relu neuron").pairs == ()
    with pytest.raises(ValueError, match="Found 'relu neurons'; did you mean 'relu neuron'"):
        found.without(["relu neurons"])
    with pytest.raises(ValueError, match="Found 'pair'; did you mean 'pairs'"):
        found.within("pair")  # type: ignore[arg-type]


def test_an_objective_by_name(model: nn.Module, batch: Any) -> None:
    with pytest.raises(TypeError, match=r"RoundingError\(bits=4\), Sparsity\(\) or a function. Found 'int4'"):
        qm.descend_orbit(model, "int4", batch[0])  # type: ignore[arg-type]


def test_what_is_found_prints_in_few_lines(model: nn.Module, batch: Any) -> None:
    """Neither the geometry of these symmetries nor what descends or aligns by them prints their weights or traces."""
    found = qm.find_symmetries(model, batch[0])
    assert repr(found) == "Symmetries(of 6 dimensions, 1 pair)"
    assert len(repr(qm.Quotient("inv", symmetries=found))) < 200
    descent, aligned = qm.descend_orbit(model, qm.Sparsity(), batch[0], steps=3), qm.align(model, model, batch[0])
    assert all("tensor" not in repr(each) and len(repr(each)) < 200 for each in (descent, aligned))


@pytest.mark.parametrize(("wrong", "right"), [("inw", "inv"), ("adaptve", "adaptive"), ("Euclidean", "euclidean")])
def test_misspelt_geometries(model: nn.Module, batch: Any, wrong: str, right: str) -> None:
    with pytest.raises(ValueError, match=f"Found '{wrong}'; did you mean '{right}'"):
        measured(model, [batch], geometry=wrong)


def test_a_shuffled_loader_is_said_and_another_is_not(model: nn.Module, batch: Any) -> None:
    rows = TensorDataset(*batch)
    with pytest.warns(UserWarning, match="a shuffled DataLoader gives other batches"):
        measured(model, DataLoader(rows, batch_size=5, shuffle=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measured(model, DataLoader(rows, batch_size=5), geometry="euclidean", steps=20)


def test_a_result_is_printed_and_has_a_value(model: nn.Module, batch: Any) -> None:
    found = measured(model, [batch])
    assert found.value == found.mean
    assert "(1 batch, radius 0.1, steps 2, restarts 0, seed 0, ascent FullStepAPGD)" in str(found)
    with pytest.raises(ValueError, match=r"single batch\. Found 2; use mean"):
        _ = measured(model, [batch, batch]).value
