"""The user's model is never touched: whatever it is made of, whatever happens meanwhile, and the numbers are right."""

from __future__ import annotations

import copy
import random
import sys
import threading
import warnings
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
from quotient_manifolds.replica import parameter_reached, private_batch, replica
from quotient_manifolds.symmetries import Symmetries

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


class Clamped(Embedded):
    """An embedding whose rows the forward pass writes where autograd does not count it."""

    def forward(self, x: Tensor) -> Tensor:
        self.table.weight.data.clamp_(-0.4, 0.4)
        return super().forward(x)


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


def renormalised() -> nn.Module:
    model = plain()

    def shorten(module: nn.Module, inputs: Any) -> None:
        with torch.no_grad():
            module.weight.div_(torch.linalg.matrix_norm(module.weight))

    model[0].register_forward_pre_hook(shorten)
    return model


def weight_norm() -> nn.Module:
    model = plain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model[0])
    return model


def spectral_norm() -> nn.Module:
    model = plain()
    nn.utils.spectral_norm(model[0])
    return model


def pruned() -> nn.Module:
    model = plain()
    prune.random_unstructured(model[0], "weight", 0.3)
    return model


def parametrised() -> nn.Module:
    model = plain()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[2])
    return model


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(WIDTH, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x[:, None])[0][:, 0])


class Uncopyable(nn.Module):
    """Holds what cannot be copied: a lock, a module of Python, an open generator."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.lock, self.torch = plain(), threading.Lock(), torch
        self.numbers = (k for k in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.torch.sin(self.body(x))


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, CLASSES)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "used twice": used_twice,
    "tied": tied,
    "max_norm": lambda: Embedded(frozen=False),
    "frozen max_norm": lambda: Embedded(frozen=True),
    "clamped": lambda: Clamped(frozen=False),
    "in place": InPlace,
    "renormalised": renormalised,
    "weight norm": weight_norm,
    "spectral norm": spectral_norm,
    "pruned": pruned,
    "parametrised": parametrised,
    "recurrent": Recurrent,
    "uncopyable": Uncopyable,
    "batch norm": normed,
}
WRITING = ("max_norm", "clamped", "in place", "renormalised")  # to measured weights


def made(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]().to(dtype).eval()


def two_pairs(model: nn.Module) -> Symmetries:
    """Of two linear layers in a row."""
    x = torch.randn(2, WIDTH, dtype=next(model.parameters()).dtype)
    return qm.find_symmetries(model, x)


def linear_pair() -> nn.Module:
    torch.manual_seed(3)
    shared = nn.Linear(WIDTH, WIDTH)
    pair = nn.Sequential(nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False))
    return nn.Sequential(shared, nn.Tanh(), pair, nn.Tanh(), shared, nn.Linear(WIDTH, CLASSES)).double().eval()


MEASURES: dict[str, Callable[[nn.Module, list[Batch]], qm.Result]] = {
    "worst case": lambda m, b: qm.worst_case_sharpness(
        m, qm.cross_entropy, b, geometry=qm.Adaptive(), radius=0.05, steps=3
    ),
    "legacy": lambda m, b: qm.legacy_sharpness(m, qm.cross_entropy, b, geometry=qm.Adaptive(), radius=0.05, steps=3),
    "average": lambda m, b: qm.average_case_sharpness(
        m, qm.cross_entropy, b, geometry=qm.Euclidean(), sigma=0.01, samples=2
    ),
    "gradient": lambda m, b: qm.gradient_norm(m, qm.cross_entropy, b, geometry=qm.Euclidean()),
    "trace": lambda m, b: qm.hessian_trace(m, qm.cross_entropy, b, geometry=qm.Euclidean(), samples=2),
    "eigenvalue": lambda m, b: qm.top_eigenvalue(
        m, qm.cross_entropy, b, geometry=qm.Euclidean(), products="difference", tolerance=0.1
    ),
    "normalised": lambda m, b: qm.gradient_norm(m, qm.normalised_logits(qm.cross_entropy), b, geometry=qm.Euclidean()),
}


def _grad(tensor: Tensor) -> Tensor | None:
    return tensor.grad if tensor.is_leaf else None


class State:
    """Everything of a model that a measure might change: tensors (which ones, and their bits), attributes, hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors = {
            id(t): (t, t.detach().clone(), t.requires_grad, t.grad if t.is_leaf else None) for t in self._tensors(model)
        }
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
        outputs = [
            replica(model, {key: w.clone() for key, w in params.items()})(private_batch(x)).detach() for _ in range(2)
        ]
    assert torch.equal(outputs[0], outputs[1])  # fresh every time
    assert torch.allclose(outputs[0], copied_by_hand(name, params)(x.clone()), rtol=1e-12)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("name", MODELS)
def test_no_measure_touches_the_model_and_all_calls_agree(name: str, measure: str) -> None:
    if name == "recurrent" and measure == "trace":
        pytest.skip("recurrent kernels have no second derivative")
    model, data = made(name), batch()
    if name in WRITING:
        with untouched(model, data), pytest.raises(ValueError, match="must leave the weights alone"):
            MEASURES[measure](model, [data])
        return
    wrong = measure == "trace" and name in ("weight norm", "parametrised")  # torch's second derivative of a weight norm
    with pytest.warns(UserWarning, match="second derivative by autograd") if wrong else nullcontext():
        with untouched(model, data):
            values = [MEASURES[measure](model, [data]).values for _ in range(3)]
        assert values[0] == values[1] == values[2]
        assert values[0] == MEASURES[measure](copy_of(name, model), [data]).values


def copy_of(name: str, model: nn.Module) -> nn.Module:
    return copied_by_hand(name, dict(model.named_parameters()))


def test_a_module_used_twice_is_measured_as_the_same_model_without_sharing() -> None:
    """By hand: the gradient of a tied weight is the sum of those of its uses."""
    data = batch()
    model = made("used twice")
    leaves = [w.detach().clone().requires_grad_() for w in model.parameters()]
    w, b, head, offset = leaves
    x, y = data
    hidden = torch.tanh(torch.tanh(x @ w.T + b) @ w.T + b)
    loss = nn.functional.cross_entropy(hidden @ head.T + offset, y)
    expected = torch.stack([g.square().sum() for g in torch.autograd.grad(loss, leaves)]).sum().sqrt()
    assert qm.gradient_norm(model, qm.cross_entropy, [data], geometry=qm.Euclidean()).mean == pytest.approx(
        float(expected), rel=1e-12
    )


@pytest.mark.parametrize("geometry", [qm.Quotient("inv"), qm.Quotient("mix"), qm.Quotient("mix", geodesic="exact")])
def test_quotient_measures_and_the_proof_leave_shared_modules_alone(geometry: qm.Quotient) -> None:
    model, data = linear_pair(), batch()
    symmetries = two_pairs(model)
    assert symmetries.pairs
    chosen = qm.Quotient(geometry.metric, geodesic=geometry.geodesic, symmetries=symmetries)
    with untouched(model, data):
        values = [
            qm.worst_case_sharpness(model, qm.cross_entropy, [data], geometry=chosen, radius=0.1, steps=4).values
            for _ in range(2)
        ]
        proof = qm.prove_symmetries(model, data[0], symmetries)
    assert values[0] == values[1]
    assert proof.all_proved


def test_losses_that_differentiate_inside_are_measured_in_quotient_geometries_too() -> None:
    """A gradient penalty: the short proof before a measure evaluates it as well."""
    model, (x, y) = linear_pair(), batch()

    def penalised(given: nn.Module, batch: Batch) -> Tensor:
        inputs = batch[0].detach().clone().requires_grad_()
        outputs = given(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return nn.functional.cross_entropy(outputs, batch[1]) + slope.square().mean()

    geometry = qm.Quotient("mix", symmetries=two_pairs(model), complete=False)
    assert qm.worst_case_sharpness(model, penalised, [(x, y)], geometry=geometry, radius=0.1, steps=4).mean > 0


def test_a_proof_in_single_precision_leaves_the_model_in_it() -> None:
    model, data = linear_pair().float(), batch(torch.float32)
    with untouched(model, data):
        qm.prove_symmetries(model, data[0], two_pairs(model))
    assert {w.dtype for w in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("geometry", ["euclidean", "adaptive"])
def test_embeddings_with_sparse_gradients_are_measured_as_others(geometry: str) -> None:
    def rise(sparse: bool) -> tuple[float, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 3)).double().eval()
        tokens = [(torch.tensor([[1, 5], [1, 2]]), torch.tensor([0, 2]))]
        climbed = qm.worst_case_sharpness(model, qm.cross_entropy, tokens, geometry=geometry, radius=0.3, steps=6)
        return climbed.loss_steps[0]

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
    symmetries = two_pairs(model)
    quotient = qm.Quotient("mix", symmetries=symmetries)
    return {
        "worst case": lambda: qm.worst_case_sharpness(
            model, qm.cross_entropy, [data], geometry=quotient, radius=0.1, steps=1
        ),
        "proof": lambda: qm.prove_symmetries(model, data[0], symmetries),
        "trace": lambda: qm.hessian_trace(model, qm.cross_entropy, [data], geometry=qm.Euclidean(), samples=2),
    }


@pytest.mark.parametrize("job", ["worst case", "proof", "trace"])
def test_an_interrupt_at_any_bytecode_leaves_the_model_as_it_was(job: str) -> None:
    model, data = linear_pair(), batch()
    run = small_jobs(model, data)[job]
    state = State(model)
    with Interrupter(None) as counter:
        run()
    assert counter.count > 1000
    chosen = random.Random(0).sample(range(1, counter.count + 1), 40)
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


# Exceptions.


def test_an_exception_in_the_forward_pass_leaves_the_model_as_it_was() -> None:
    model, data = made("plain"), batch()
    calls = 0

    def failing(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("broken")
        return qm.cross_entropy(model, batch)

    with untouched(model, data), pytest.raises(RuntimeError, match="broken"):
        qm.worst_case_sharpness(model, failing, [data], geometry=qm.Adaptive(), radius=0.1)


# What a copy cannot do.


class Closure(nn.Module):
    """Holds a function that closes over the module itself, as a copy of it would still do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = plain()
        self.function = lambda x: self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_a_loss_that_closes_over_the_model_is_refused() -> None:
    model, data = made("plain"), batch()
    with pytest.raises(ValueError, match=r"\d\.weight of the original is reached"):
        qm.gradient_norm(model, lambda _, b: qm.cross_entropy(model, b), [data], geometry=qm.Euclidean())


def test_a_penalty_on_the_original_model_is_refused() -> None:
    model, data = made("plain"), batch()

    def loss(given: nn.Module, batch: Batch) -> Tensor:
        return qm.cross_entropy(given, batch) + model[2].bias.square().sum()

    with pytest.raises(ValueError, match=r"2\.bias of the original is reached"):
        qm.gradient_norm(model, loss, [data], geometry=qm.Euclidean())


def test_a_model_that_closes_over_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="a closure"):
        qm.gradient_norm(Closure().double().eval(), qm.cross_entropy, [batch()], geometry=qm.Euclidean())


def test_a_loss_that_is_a_module_shares_what_it_shares_with_the_model() -> None:
    class Penalised(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, model: nn.Module, batch: Batch) -> Tensor:
            return qm.cross_entropy(model, batch) + self.part.weight.square().sum()

    model, data = made("plain"), batch()
    with untouched(model, data):
        found = qm.gradient_norm(model, Penalised(model[2]), [data], geometry=qm.Euclidean()).mean

    def by_hand(given: nn.Module, batch: Batch) -> Tensor:
        return qm.cross_entropy(given, batch) + given[2].weight.square().sum()

    assert found == qm.gradient_norm(model, by_hand, [data], geometry=qm.Euclidean()).mean


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, x, use_reentrant=self.reentrant).tanh())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_is_refused() -> None:
    model = Checkpointed(reentrant=True).double().eval()
    with pytest.raises(ValueError, match=r"first runs with gradients turned off .* use_reentrant=False"):
        qm.gradient_norm(model, qm.cross_entropy, [batch()], geometry=qm.Euclidean())


def test_other_checkpointing_measures_the_same() -> None:
    torch.manual_seed(0)
    model = Checkpointed(reentrant=False).double().eval()
    layers = nn.Sequential(model.first, nn.Tanh(), model.last).eval()
    for measure in (MEASURES["worst case"], MEASURES["trace"]):
        found, expected = (measure(each, [batch()]).mean for each in (model, layers))
        assert found == pytest.approx(expected, rel=1e-10)


def test_a_part_that_runs_without_gradients_too_is_no_reason_to_refuse() -> None:
    model, data = made("plain"), batch()

    def consistent(given: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            target = given(batch[0])
        return qm.cross_entropy(given, batch) + (given(batch[0]) - target).square().mean()

    assert qm.gradient_norm(model, consistent, [data], geometry=qm.Euclidean()).mean > 0


def test_a_scripted_model_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(made("plain"))
    with pytest.raises(ValueError, match="before scripting"):
        qm.gradient_norm(scripted, qm.cross_entropy, [batch()], geometry=qm.Euclidean())


def test_a_model_that_refuses_to_be_copied_is_refused() -> None:
    class Single(nn.Linear):
        def __deepcopy__(self, memo: object) -> Single:
            raise RuntimeError("there can be only one")

    model = Single(WIDTH, CLASSES).double().eval()
    with pytest.raises(ValueError, match=r"must be copyable.*only one"):
        qm.gradient_norm(model, qm.cross_entropy, [batch()], geometry=qm.Euclidean())


def test_a_name_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear has no parameter 0\.weight"):
        replica(nn.Linear(2, 2), {"0.weight": torch.zeros(2, 2)})


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


def test_the_graph_is_followed_to_the_model_only() -> None:
    model = made("plain")
    x = batch()[0]
    copied = replica(model, {name: w.detach().clone().requires_grad_() for name, w in model.named_parameters()})
    assert parameter_reached(copied(x).sum(), model) is None
    assert parameter_reached(model(x).sum(), model) in dict(model.named_parameters())
    assert parameter_reached(copy.deepcopy(model)(x).sum(), model) is None
    assert parameter_reached(torch.zeros(1), model) is None


def test_a_model_that_accelerate_dispatched_is_measured_as_itself_and_one_that_it_offloaded_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, data = made("plain"), batch()
    expected = MEASURES["worst case"](model, [data]).values
    places = {name: "cpu" for name, _ in model.named_children()}
    model = accelerate.dispatch_model(model, places, main_device="cpu", force_hooks=True)
    assert all("forward" in vars(module) for module in model.children())  # bound to the original module
    with untouched(model, data):
        assert MEASURES["worst case"](model, [data]).values == expected
    offloaded = accelerate.cpu_offload(made("plain"), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"has no values here \(meta device\).* or is offloaded"):
        MEASURES["worst case"](offloaded, [data])
