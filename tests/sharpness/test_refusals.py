"""What a measure cannot take is refused in one sentence, and the model is left as it was."""

from __future__ import annotations

import copy
import inspect
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quotient_manifolds as qm
from quotient_manifolds.replica import replica
from quotient_manifolds.sharpness.losses import counted_logits
from tests.nets.classifiers import Batch
from tests.sharpness.test_ascent import Plain, generator

X, Y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double(), torch.tensor([0, 2, 1, 0])
ENTROPY = qm.cross_entropy


class Net(nn.Module):
    """Two layers; `change` is applied to what the first returns, in the forward pass."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor] = lambda self, z: z) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.last, self.change = nn.Linear(3, 5), nn.Dropout(0.1), nn.Linear(5, 3), change
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.change(self, self.first(x)))))


class Closure(Net):
    """Holds a function that closes over the module itself, as a copy of it would still do."""

    def __init__(self) -> None:
        super().__init__()
        self.function = lambda x: Net.forward(self, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, x, use_reentrant=True).tanh())


def spoilt(spoil: Callable[[Any], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Net()
        spoil(model)
        return model

    return make


def clamped(model: Any, z: Tensor) -> Tensor:
    model.first.weight.data.clamp_(-0.3, 0.3)
    return z


def renormalised() -> nn.Module:
    """An embedding whose rows the forward pass shortens in place: not here, but in a ball around its weights."""
    return nn.Sequential(nn.Embedding(7, 3, max_norm=100.0), nn.Flatten(), nn.Linear(6, 3)).double().eval()


def scaled(factor: Any) -> Callable[[nn.Module, Any], Any]:
    return lambda model, batch: ENTROPY(model, batch) * factor


def noisy_later(model: nn.Module, batch: Batch) -> Tensor:
    return ENTROPY(model, batch) + (0.0 if len(batch[1]) == 4 else torch.rand(()))


def infinite_later(model: nn.Module, batch: Batch) -> Tensor:
    loss = ENTROPY(model, batch)
    return loss * torch.where(loss > 1.3, torch.inf, 1.0)


ORIGINAL = Net()

MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "text": (lambda: "linear", "torch.nn.Module. Found an object of type str"),
    "meta": (lambda: nn.Linear(3, 3, device="meta").eval(), "meta device"),
    "empty": (lambda: nn.Identity().eval(), "no parameter to measure"),
    "training": (lambda: Net().train(), "must be in eval mode. Found the model itself"),
    "part of it training": (
        spoilt(lambda m: m.drop.train()),
        r"Found drop \(Dropout\) in train mode; call model\.eval",
    ),
    "nan weight": (
        spoilt(lambda m: m.last.bias.data.fill_(math.nan)),
        r"parameter 'last\.bias' must be finite",
    ),
    "writes its weights": (lambda: Net(clamped), r"must leave the weights alone\. Found .* first\.weight"),
    "closes over itself": (Closure, "a closure"),
    "reentrant": (Checkpointed, r"first runs with gradients turned off .* use_reentrant=False"),
    "lock": (spoilt(lambda m: setattr(m, "lock", threading.Lock())), "must be copyable.*lock"),
}
LOSSES: dict[str, tuple[Any, str]] = {
    "noisy": (lambda m, b: ENTROPY(m, b) + 1e-3 * torch.rand(()), "must be deterministic"),
    "noisy later": (noisy_later, r"must be deterministic.*batch 1"),
    "nan": (scaled(math.nan), "unperturbed model must be finite"),
    "infinite later": (infinite_later, r"finite in the whole ball\. Found inf on batch"),
    "vector": (scaled(torch.ones(2)), r"one element\. Found shape \(2,\)"),
    "complex": (scaled(1j), "real floating point"),
    "text": ("cross_entropy", "callable"),
    "detached": (lambda m, b: ENTROPY(m, b).detach(), "depend on any measured parameter"),
    "of another model": (lambda m, b: nn.Parameter(torch.ones(1)).sum(), "depend on any measured parameter"),
    "closes over the model": (lambda _, b: ENTROPY(ORIGINAL, b), r"\.weight of the original is reached"),
    "lost in rounding": (lambda m, b: ENTROPY(m, b).float() * 1e-9 + 1, "to its last digit"),
}
BATCHES: dict[str, tuple[Any, str]] = {
    "none": ([], "at least one batch"),
    "a single one": ((X, Y), "list of batches"),
    "a mapping": ({"x": X, "labels": Y}, "list of batches"),
    "a number": (3, "list of batches"),
    "labels of another shape": ([(X, Y[:, None])], r"without their last axis, \(4,\)\. Found \(4, 1\)"),
    "labels out of range": ([(X, Y + 1)], r"Labels must lie in 0 \.\.\. 2, .* Found 3"),
    "float labels": ([(X, Y.double())], r"class indices \(integers\)\. Found torch\.float64"),
    "no labels": ([{"input": X}], 'must have "labels"'),
    "images and labels of a data set": (
        [{"image": X, "label": Y}],
        r"Found \['image', 'label'\]; give \(inputs, targets\), such as \(batch\['image'\], batch\['label'\]\)",
    ),
}


def measured(
    model: Any = None, loss: Any = ENTROPY, batches: Any = None, geometry: Any = "adaptive", **others: Any
) -> None:
    model = (ORIGINAL if "closes" in str(loss) else Net()) if model is None else model
    batches = [(X, Y), (X[:3], Y[:3])] if batches is None else batches
    qm.worst_case_sharpness(model, loss, batches, geometry, **{"radius": 0.5, "steps": 5, **others})


def refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("what", MODELS)
def test_models(what: str) -> None:
    made, words = MODELS[what]
    model = made()
    before = copy.deepcopy(model.state_dict()) if what in ("training", "writes its weights", "reentrant") else {}
    refused(lambda: measured(model), words)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


@pytest.mark.parametrize("what", LOSSES)
def test_losses(what: str) -> None:
    loss, words = LOSSES[what]
    model = ORIGINAL if what == "closes over the model" else Net()
    radius = 1e-3 if what == "lost in rounding" else 2.0
    refused(lambda: measured(model, loss, radius=radius), words)


MEASURES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "worst case": (qm.worst_case_sharpness, {"radius": 0.1}),
    "average": (qm.average_case_sharpness, {"sigma": 0.1}),
    "legacy": (qm.legacy_sharpness, {"radius": 0.1}),
    "trace": (qm.hessian_trace, {}),
    "eigenvalue": (qm.top_eigenvalue, {}),
}
SETTINGS: list[tuple[str, str, Any, str]] = [
    *(("worst case average legacy trace eigenvalue", name, value, words) for name, value, words in (
        ("seed", 1.5, "seed must be an integer of at least 0"),
        ("seed", True, "seed must be an integer"),
        ("radius", 0, "radius must be a positive finite number"),
        ("radius", math.nan, "radius must be a positive finite number"),
        ("sigma", -1.0, "sigma must be a positive finite number"),
        ("sigma", math.inf, "sigma must be a positive finite number"),
        ("samples", 1, "samples must be an integer of at least 2"),
        ("steps", 0, "steps must be an integer of at least 1"),
        ("restarts", 0.5, "restarts must be an integer"),
        ("restarts", -1, "restarts must be an integer"),
        ("tolerance", 0.0, "tolerance must"),
        ("tolerance", 1.0, "tolerance must"),
        ("tolerance", "1e-4", "tolerance must"),
    )),
    ("trace eigenvalue", "geometry", qm.Euclidean(norm="linf"), "needs an inner product"),
    ("legacy", "geometry", qm.Quotient(), r"must be Euclidean\(\) or Adaptive\(\) for .* Found Quotient"),
]  # fmt: skip


@pytest.mark.parametrize(("names", "setting", "value", "words"), SETTINGS)
def test_settings(names: str, setting: str, value: Any, words: str) -> None:
    """Settings of one name are checked alike in all measures that have it."""
    tried = 0
    for name, (measure, given) in MEASURES.items():
        takes = {*inspect.signature(measure).parameters}
        if name in names and setting in takes:
            tried += 1
            call = partial(measure, Net(), ENTROPY, [(X, Y)], **{"geometry": "adaptive", **given, setting: value})
            refused(call, words)
    assert tried


bowl = nn.Linear(1000, 1, bias=False).double().eval()


def wide(model: nn.Module, batch: Tensor) -> Tensor:
    return (torch.linspace(0, 1, 1000).double() * model.weight[0] ** 2).sum() / 2 + batch  # type: ignore[index,operator]


def climbed(function: Callable[[Tensor], Tensor], radius: float, **settings: Any) -> None:
    qm.AutoPGD().maximise(Plain(function, (2,)), radius, generator(), **settings)


def given(measure: Callable[..., Any], *others: Any, **settings: Any) -> Callable[[], object]:
    return lambda: measure(Net(), ENTROPY, [(X, Y)], *others, **settings)


OTHERS: dict[str, tuple[Callable[[], object], str]] = {
    "radii": (given(qm.worst_case_profile, "adaptive", radii=(0.2, 0.1)), r"Radii must ascend\. Found 0\.2, 0\.1"),
    "no radii": (given(qm.worst_case_profile, "inv", radii=()), "at least one radius"),
    "a norm": (lambda: climbed(torch.sum, 1.0, norm="l1"), "one of l2, linf"),
    "a radius": (lambda: climbed(torch.sum, 0.0), "radius must be"),
    "a slope": (lambda: climbed(lambda z: z.sqrt().sum(), 1.0), "gradient of the loss must be finite"),
    "restarts": (given(qm.top_eigenvalue, "adaptive", restarts=0), "restarts must be an integer of at least 1"),
    "Lanczos": (
        lambda: qm.top_eigenvalue(bowl, wide, [torch.zeros(1)], "euclidean", tolerance=1e-12, restarts=1),
        r"Lanczos must converge\. It has not on batch 0 after 1 restarts",
    ),
    "verify": (lambda: qm.Quotient("inv", verify="some"), "verify must be one of gradient, full, none"),  # type: ignore[arg-type]
    "a name": (lambda: replica(nn.Linear(2, 2), {"0.weight": torch.zeros(2)}), r"Linear has no parameter 0\.weight"),
    "max_norm": (
        lambda: qm.gradient_norm(renormalised(), ENTROPY, [(torch.ones(4, 2).long(), Y)], "adaptive"),
        r"writes to 0\.weight",
    ),
}


NO_GEOMETRIES = ("geodesic", None, True, qm.Quotient, 3 + 1j, math.nan)
OTHERS |= {f"batches: {what}": (partial(measured, batches=given), words) for what, (given, words) in BATCHES.items()}
OTHERS |= {f"geometry: {each}": (partial(measured, geometry=each), "geometry|metric") for each in NO_GEOMETRIES}


@pytest.mark.parametrize("what", OTHERS)
def test_others(what: str) -> None:
    refused(*OTHERS[what])


@pytest.mark.parametrize("measure", [qm.gradient_norm, qm.hessian_trace, qm.top_eigenvalue])
def test_a_detached_loss_has_neither_slope_nor_curvature(measure: Callable[..., Any]) -> None:
    loss, words = LOSSES["detached"]
    refused(lambda: measure(Net(), loss, [(X, Y)], geometry="adaptive"), words)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"pixel_values": torch.ones(1, 2)}, 'needs "labels" or "input_ids"'),
        ((torch.tensor([[1]]), torch.tensor([[1]])), "at least 2 tokens"),
        ((torch.tensor([1, 2]), torch.tensor([1, 2])), "logits of shape"),
        ((torch.tensor([[1, 2]]), torch.tensor([[1, 9]])), r"Labels must lie in 0 \.\.\. 2"),
    ],
)
def test_batches_of_tokens(batch: Any, words: str) -> None:
    for function in (qm.next_token_cross_entropy, partial(counted_logits, causal=True)):
        refused(partial(function, nn.Embedding(5, 3), batch), words)
