"""The user's model is never touched: whatever it is made of, whatever happens meanwhile, and the numbers are right."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import quotient_manifolds as qm
from quotient_manifolds.replica import private_batch, replica

Batch = tuple[Tensor, Tensor]
WIDTH, CLASSES = 6, 3


def batch(dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, WIDTH, generator=generator).to(dtype), torch.randint(CLASSES, (5,), generator=generator)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def used_twice() -> nn.Module:
    shared = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
    model[2].weight = model[0].weight
    return model


class Embedded(nn.Module):
    """An embedding whose rows the forward pass shortens in place, by max_norm."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, max_norm=0.5).requires_grad_(not frozen)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x.abs().long().clamp(max=6)).mean(dim=1))


class InPlace(nn.Module):
    """Writes to its input, to a buffer, to an attribute and, through .data, to its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("seen", torch.zeros(1))
        self.cache = {"scale": torch.ones(1)}
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        self.cache["scale"].mul_(0.5)
        self.first.weight.data.clamp_(-0.3, 0.3)
        x.relu_()
        return self.last(self.first(x)) * self.calls * self.cache["scale"].to(x)


def pruned() -> nn.Module:
    model = plain()
    prune.random_unstructured(model[0], "weight", 0.3)
    return model


def parametrised() -> nn.Module:
    model = plain()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[2])
    return model


def normed() -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.ReLU(inplace=True), nn.Linear(WIDTH, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "used twice": used_twice,
    "tied": tied,
    "max_norm": lambda: Embedded(frozen=False),
    "frozen max_norm": lambda: Embedded(frozen=True),
    "in place": InPlace,
    "pruned": pruned,
    "parametrised": parametrised,
    "batch norm": normed,
}
WRITING = ("max_norm", "in place")  # to measured weights


def made(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]().to(dtype).eval()


def linear_pair() -> nn.Module:
    torch.manual_seed(3)
    shared = nn.Linear(WIDTH, WIDTH)
    pair = nn.Sequential(nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False))
    return nn.Sequential(shared, nn.Tanh(), pair, nn.Tanh(), shared, nn.Linear(WIDTH, CLASSES)).double().eval()


def measuring(measure: Callable[..., qm.Result], geometry: str, **settings: Any) -> Callable[..., qm.Result]:
    return lambda model, batches, loss=qm.cross_entropy, geometry=geometry: measure(
        model, loss, batches, geometry=geometry, **settings
    )


MEASURES: dict[str, Callable[..., qm.Result]] = {
    "worst case": measuring(qm.worst_case_sharpness, "adaptive", radius=0.05, steps=3),
    "legacy": measuring(qm.legacy_sharpness, "adaptive", radius=0.05, steps=3),
    "average": measuring(qm.average_case_sharpness, "euclidean", sigma=0.01, samples=2),
    "gradient": measuring(qm.gradient_norm, "euclidean"),
    "trace": measuring(qm.hessian_trace, "euclidean", samples=2),
    "eigenvalue": measuring(qm.top_eigenvalue, "euclidean", tolerance=0.1),
}


def _grad(tensor: Tensor) -> Tensor | None:
    return tensor.grad if tensor.is_leaf else None


class State:
    """Everything of a model that a measure might change: tensors (which ones, and their bits), attributes, hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors = {id(t): (t, t.detach().clone(), t.requires_grad, _grad(t)) for t in self._tensors(model)}
        self.places = self._places(model)
        self.order = [id(t) for t in self._tensors(model)]

    @staticmethod
    def _tensors(model: nn.Module) -> list[Tensor]:
        attributes = [value for module in model.modules() for value in vars(module).values()]
        nested = [value for each in attributes if isinstance(each, dict) for value in each.values()]
        return [value for value in (*attributes, *nested) if isinstance(value, Tensor)]

    @staticmethod
    def _places(model: nn.Module) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for name, value in vars(module).items():
                if isinstance(value, dict):
                    found[f"{prefix}.{name}"] = {key: id(each) for key, each in value.items()}
                else:
                    found[f"{prefix}.{name}"] = value if isinstance(value, (int, float, str, bool)) else id(value)
        return found

    def check(self, model: nn.Module) -> None:
        assert self._places(model) == self.places
        assert [id(t) for t in self._tensors(model)] == self.order
        for tensor, before, requires_grad, grad in self.tensors.values():
            assert torch.equal(tensor, before)
            assert tensor.requires_grad is requires_grad
            assert _grad(tensor) is grad


@contextmanager
def untouched(model: nn.Module, *batches: Batch) -> Iterator[None]:
    state, inputs = State(model), [x.clone() for x, _ in batches]
    yield
    state.check(model)
    assert all(torch.equal(x, before) for (x, _), before in zip(batches, inputs, strict=True))


def copied_by_hand(name: str, params: dict[str, Tensor]) -> nn.Module:
    """Another model of the same kind, with these parameters: an oracle that shares nothing."""
    model = made(name)
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.copy_(params[key])
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_replica_computes_what_a_model_with_these_parameters_does(name: str) -> None:
    model, (x, _) = made(name), batch()
    params = {key: w.detach() + 0.1 * torch.randn_like(w) for key, w in model.named_parameters()}
    with untouched(model, (x, x)):
        own = [{key: w.clone() for key, w in params.items()} for _ in range(2)]
        outputs = [replica(model, each)(private_batch(x)).detach() for each in own]
    assert torch.equal(outputs[0], outputs[1])  # fresh every time
    assert torch.allclose(outputs[0], copied_by_hand(name, params)(x.clone()), rtol=1e-12)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("name", MODELS)
def test_no_measure_touches_the_model_and_all_calls_agree(name: str, measure: str) -> None:
    model, data = made(name), batch()
    if name in WRITING:
        with untouched(model, data), pytest.raises(ValueError, match="must leave the weights alone"):
            MEASURES[measure](model, [data])
        return
    # torch's second derivative of a weight norm is wrong
    wrong = measure in ("trace", "eigenvalue") and name == "parametrised"
    with pytest.warns(UserWarning, match="second derivative by autograd") if wrong else nullcontext():
        with untouched(model, data):
            values = [MEASURES[measure](model, [data]).values for _ in range(3)]
        assert values[0] == values[1] == values[2]
        assert values[0] == MEASURES[measure](copied_by_hand(name, dict(model.named_parameters())), [data]).values


@pytest.mark.parametrize("geometry", ["euclidean", "adaptive"])
def test_embeddings_with_sparse_gradients_are_measured_as_others(geometry: str) -> None:
    def rise(sparse: bool) -> tuple[float, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 3)).double().eval()
        tokens = [(torch.tensor([[1, 5], [1, 2]]), torch.tensor([0, 2]))]
        climbed = qm.worst_case_sharpness(model, qm.cross_entropy, tokens, geometry=geometry, radius=0.3, steps=6)
        return climbed.batches[0].losses

    assert rise(True) == pytest.approx(rise(False), rel=1e-12)


# Interrupts.


class Interrupter:
    """Raises KeyboardInterrupt at the n-th bytecode that runs in the package or in torch's handling of modules."""

    FILES = ("quotient_manifolds", "nn/modules/module", "copy.py", "functional_call")

    def __init__(self, at: int | None) -> None:
        self.at, self.count = at, 0

    def __enter__(self) -> Interrupter:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        if not any(part in frame.f_code.co_filename for part in self.FILES):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt
        return self._opcode


def small_jobs(model: nn.Module, data: Batch) -> dict[str, Callable[[], object]]:
    symmetries = qm.find_symmetries(model, data[0])
    quotient = qm.Quotient("mix", symmetries=symmetries)
    worst = qm.sharpness.WorstCase(quotient, radius=0.1, steps=1)
    return {
        "worst case": lambda: worst.of(model, qm.cross_entropy, [data]),
        "verification": lambda: qm.verify_symmetries(model, data[0], symmetries),
    }


@pytest.mark.parametrize("job", ["worst case", "verification"])
def test_an_interrupt_at_any_bytecode_leaves_the_model_as_it_was(job: str) -> None:
    model, data = linear_pair(), batch()
    run = small_jobs(model, data)[job]
    state = State(model)
    with Interrupter(None) as counter:
        run()
    assert counter.count > 1000
    chosen = random.Random(0).sample(range(1, counter.count + 1), 12)
    for at in chosen:
        with Interrupter(at), pytest.raises(KeyboardInterrupt):
            run()
        state.check(model)


# Threads.


def test_threads_that_measure_one_model_agree() -> None:
    model, data = linear_pair(), batch()
    jobs = small_jobs(model, data)
    expected = jobs["worst case"]()
    with untouched(model, data), ThreadPoolExecutor(4) as pool:
        found = [each.result() for each in [pool.submit(jobs["worst case"]) for _ in range(8)]]
    assert [each.values for each in found] == [expected.values] * 8


# What a copy shares.


def test_a_loss_that_is_a_module_shares_what_it_shares_with_the_model() -> None:
    class Penalised(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, model: nn.Module, batch: Batch) -> Tensor:
            return qm.cross_entropy(model, batch) + self.part.weight.square().sum()

    model, data = made("plain"), batch()
    by_hand = lambda given, batch: qm.cross_entropy(given, batch) + given[2].weight.square().sum()  # noqa: E731
    with untouched(model, data):
        found, expected = (MEASURES["gradient"](model, [data], loss) for loss in (Penalised(model[2]), by_hand))
    assert found.values == expected.values


class Asking(nn.Module):
    """Asks for gradients as Hugging Face and peft do, and recomputes a layer for them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(WIDTH, 5), nn.Linear(5, 5), nn.Linear(5, CLASSES)
        self.asks = True

    def forward(self, x: Tensor) -> Tensor:
        def layer(x: Tensor) -> Tensor:
            return self.inner(x).relu()

        y = self.first(x).relu()
        if not self.asks:
            return self.last(layer(y))
        y.requires_grad_()
        y.retain_grad()
        return self.last(checkpoint(layer, y, use_reentrant=False))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("measure", MEASURES)
def test_a_model_that_asks_for_gradients_is_measured_as_one_that_does_not(measure: str, frozen: bool) -> None:
    torch.manual_seed(3)
    model, data = Asking().double().eval(), batch()
    model.first.requires_grad_(not frozen)
    for geometry in ("euclidean", "mix")[: 1 if measure == "legacy" else 2]:  # which knows no quotients
        values = []
        for model.asks in (False, True):
            values.append(MEASURES[measure](model, [data], geometry=geometry).values)
        assert values[0] == pytest.approx(values[1], rel=1e-12)


def test_a_compiled_model_is_measured_as_itself() -> None:
    model, data = made("plain"), batch()
    compiled = torch.compile(model, backend="eager")
    with untouched(model, data):
        found = MEASURES["worst case"](compiled, [data])
    assert found.values == pytest.approx(MEASURES["worst case"](model, [data]).values, rel=1e-12)


def test_batches_of_any_mapping_are_copied_with_their_type() -> None:
    transformers = pytest.importorskip("transformers")
    given = transformers.BatchEncoding({"x": torch.ones(2), "nested": [torch.ones(1), "text"]})
    private = private_batch(given)
    private["x"].zero_()
    private["nested"][0].zero_()
    assert type(private) is transformers.BatchEncoding
    assert private["nested"][1] == "text"
    assert given["x"].sum() == 2
    assert given["nested"][0] == 1
