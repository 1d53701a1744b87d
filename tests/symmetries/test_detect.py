"""No attention is passed over in silence: by names of classes, children and parameters, or by what the forward does."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as sdpa

from quotient_manifolds.symmetries import find_symmetries


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


class Four(nn.Module):
    """Four matrices whose names say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (weight(8, 8) for _ in range(4))


class Mixer(Four):
    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ self.a) @ (x @ self.b).mT
        mixed = scores.softmax(-1)
        mixed = mixed * 1.0
        return mixed @ (x @ self.c) @ self.d


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([weight(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return sdpa(*(x @ value for value in self.weights[:3])) @ self.weights[3]


def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bij,bjd->bid", functional.softmax(torch.einsum("bid,bjd->bij", q, k), dim=-1), v)


class Two(nn.Module):
    """Two layers whose names say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.normalise = nn.Linear(8, 24), nn.Linear(8, 8), nn.Softmax(-1)


class ByAFunction(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.two(mix(*self.one(x).chunk(3, -1)))


class ByAMethod(Two):
    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT, -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.one(x).chunk(3, -1)
        return self.two(torch.matmul(self.weights(q, k), v))


class ByALayer(Two):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.one(x).chunk(3, -1)
        return self.two(self.normalise(q @ k.mT) @ v)


class ByItsAncestor(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def put_in_place() -> nn.Module:
    """A forward pass of the instance's own, as tools that move models between devices put there."""
    model = Four()
    model.forward = functools.partial(Mixer.forward, model)  # type: ignore[method-assign]
    return model


class BesideAnother(Two):
    """Recognised attention, and some of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.one(self.encoder(x)).chunk(3, -1)
        return self.two((q @ k.mT).softmax(-1) @ v)


BEHAVES: dict[str, Callable[[], nn.Module]] = {
    "matrices": Mixer,
    "a kernel under another name": Aliased,
    "a function of the file": ByAFunction,
    "a method": ByAMethod,
    "a layer": ByALayer,
    "an ancestor's forward": ByItsAncestor,
    "a forward put in its place": put_in_place,
    "beside recognised attention": BesideAnother,
    "traced": lambda: torch.fx.symbolic_trace(Mixer()),
}


@pytest.mark.parametrize("case", BEHAVES)
def test_what_behaves_like_attention_is_named(case: str) -> None:
    (line,) = find_symmetries(nn.ModuleDict({"block": BEHAVES[case]()})).unrecognised
    assert line.startswith("block (")
    assert "may be attention" in line


def test_without_source_the_names_in_the_code_decide() -> None:
    scope: dict[str, object] = {"nn": nn, "Four": Four}
    exec(
        "class Sourceless(Four):\n"
        "    def forward(self, x):\n"
        "        return (x @ self.a @ (x @ self.b).mT).softmax(-1) @ x\n",
        scope,
    )
    model = scope["Sourceless"]()  # type: ignore[operator]
    assert "may be attention (softmax" in find_symmetries(model).unrecognised[0]


@pytest.mark.parametrize(
    "names",
    ["wq wk wv", "W_Q W_K W_V W_O", "q_proj_weight k_proj_weight v_proj_weight", "qkv", "Wqkv", "in_proj_weight"],
)
@pytest.mark.parametrize("container", [nn.Module, nn.ParameterDict])
def test_parameters_named_as_projections_are_attention(names: str, container: type[nn.Module]) -> None:
    module = type("Mystery", (container,), {})()
    for name in names.split():
        module.register_parameter(name, weight(4, 4))
    (line,) = find_symmetries(nn.ModuleDict({"block": nn.ModuleDict({"mystery": module})})).unrecognised
    assert line == "block.mystery (Mystery): no known layout is for this class"


@pytest.mark.filterwarnings("ignore")
def test_scripted_attention_is_named() -> None:
    scripted = torch.jit.script(nn.MultiheadAttention(8, 2))
    assert len(find_symmetries(nn.ModuleDict({"block": scripted})).unrecognised) == 1


class Perceptron(Four):
    """Matrices, products, and a softmax over the logits."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.softmax(torch.relu(x @ self.a) @ self.b, -1)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(torch.relu(self.second(self.first(x))).flatten(1))
        return logits.log_softmax(1) if self.training else logits.softmax(1)


class Few(nn.Module):
    """One matrix: pooling over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(x).softmax(1).mT @ x


@pytest.mark.parametrize("make", [Perceptron, Classifier, Few, lambda: torch.fx.symbolic_trace(Perceptron())])
def test_a_softmax_over_logits_is_no_attention(make: Callable[[], nn.Module]) -> None:
    assert find_symmetries(make()).unrecognised == ()


@pytest.mark.parametrize(
    "names",
    [("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("to_q", "to_k", "to_v"), ("Wq", "Wk", "Wv"), ("qkv",)],
)
def test_unnamed_attention_is_detected_by_its_projections(names: tuple[str, ...]) -> None:
    mixer = type("Mixer", (nn.Module,), {})()
    for name in names:
        mixer.add_module(name, nn.Linear(4, 4))
    found = find_symmetries(nn.ModuleDict({"block": nn.ModuleDict({"mix": mixer})}))
    assert found.unrecognised == ("block.mix (Mixer): no known layout is for this class",)


def test_what_has_no_projections_is_no_attention() -> None:
    mixer = type("Mixer", (nn.Module,), {})()
    for name in ("key", "value", "norm"):
        mixer.add_module(name, nn.Linear(4, 4))
    assert find_symmetries(nn.Sequential(mixer)).unrecognised == ()
