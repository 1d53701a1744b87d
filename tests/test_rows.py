"""Embeddings in the ascent: what is left out is zero, and leaving it out changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.geometry import Adaptive, Euclidean, Geometry, TangentSpace
from quotient_manifolds.geometry.sparse import sparse_rows
from quotient_manifolds.sharpness import AutoPGD
from quotient_manifolds.sharpness.blocks import Blocks, dot, norm
from quotient_manifolds.sharpness.objective import BatchObjective, LossOf
from quotient_manifolds.sharpness.rows import Rows, SparseEmbeddings
from quotient_manifolds.symmetries import Params


class Reader(nn.Module):
    """Mean embedding of tokens, a hidden layer, logits; `tied` to the embedding or not."""

    def __init__(self, *, tied: bool = False, **options: object) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 4, dtype=torch.float64, **options)
        self.hidden = nn.Linear(4, 4, dtype=torch.float64)
        self.out = nn.Linear(4, 12, dtype=torch.float64)
        if tied:
            self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(self.embedding(tokens).mean(1))))


Batch = tuple[Tensor, Tensor]
BATCH: Batch = torch.tensor([[1, 3, 3], [8, 1, 0]]), torch.tensor([2, 5])


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Objective:
    """A BatchObjective that remembers the layouts of what it is given and gives, and may make gradients dense."""

    def __init__(self, model: nn.Module, space: TangentSpace, dense: bool, batch: Batch = BATCH) -> None:
        out = {name: torch.empty_like(w) for name, w in space.point.items()}
        self.inner = BatchObjective(LossOf(model, loss), space, batch, "b", out, lambda: None)
        self.dense = dense
        self.sparse_points: list[set[str]] = []
        self.sparse_gradients: list[set[str]] = []

    def zero(self) -> Params:
        return self.inner.zero()

    def sample(self, generator: torch.Generator) -> Params:
        return self.inner.sample(generator)

    def value(self, z: Params) -> float:
        return self.inner.value(z)

    def value_and_gradient(self, z: Params) -> tuple[float, Params]:
        value, gradient = self.inner.value_and_gradient(z)
        if self.dense:
            gradient = {key: block.to_dense() for key, block in gradient.items()}
        self.sparse_points.append({key for key, block in z.items() if block.is_sparse})
        self.sparse_gradients.append({key for key, block in gradient.items() if block.is_sparse})
        return value, gradient


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "geometry",
    [Euclidean(), Adaptive(), Euclidean("linf"), Adaptive(0.01, "linf")],
    ids=lambda geometry: geometry.name,
)
def test_the_climb_is_that_of_dense_gradients(geometry: Geometry, tied: bool, restarts: int) -> None:
    model = Reader(tied=tied).eval()
    space = geometry.at(model)
    sparse, dense = Objective(model, space, dense=False), Objective(model, space, dense=True)
    found, expected = (
        AutoPGD(steps=12, restarts=restarts).maximise(each, 0.3, torch.Generator().manual_seed(1), norm=space.norm)
        for each in (sparse, dense)
    )
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    torch.testing.assert_close(found.z, expected.z, rtol=1e-9, atol=1e-12)
    embedding = {"embedding.weight"}
    assert all(not keys for keys in (*dense.sparse_points, *dense.sparse_gradients))
    if tied:  # the gradient as output weights has all rows
        assert all(not keys for keys in (*sparse.sparse_points, *sparse.sparse_gradients))
    else:
        assert all(keys == embedding for keys in sparse.sparse_gradients)
        first, second = sparse.sparse_points[:12], sparse.sparse_points[12:]
        assert first == [set(), *[embedding] * 11]
        assert all(not keys for keys in second)  # a random start has all rows
        assert not restarts or len(second) == 12


def test_a_warm_start_keeps_its_rows() -> None:
    model = Reader().eval()
    space = Adaptive().at(model)
    start = space.zero()
    start["embedding.weight"][6] = 0.01
    sparse, dense = Objective(model, space, dense=False), Objective(model, space, dense=True)
    found, expected = (
        AutoPGD(steps=6).maximise(each, 0.3, torch.Generator(), start=start, base=0.0) for each in (sparse, dense)
    )
    torch.testing.assert_close(found.z, expected.z, rtol=1e-9, atol=1e-12)
    assert found.z["embedding.weight"][6].all()
    assert sparse.sparse_points[1] == {"embedding.weight"}


class Drifting(nn.Module):
    """Looks up the row that its bias points to: the gradient's rows change as the climb proceeds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 2, dtype=torch.float64)
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        index = (100 * self.bias.detach()).abs().floor().long().clamp(max=39)
        return self.table(index).sum() * x.sum() + 3 * self.bias.sum()


def test_rows_are_added_when_a_gradient_has_them() -> None:
    model = Drifting().eval()
    space = Euclidean().at(model)
    out = {name: torch.empty_like(w) for name, w in space.point.items()}
    results = []
    touched: set[int] = set()
    for dense in (False, True):
        inner = BatchObjective(
            LossOf(model, lambda m, batch: m(batch)), space, torch.ones(1).double(), "b", out, lambda: None
        )

        class Layout:
            zero, sample, value = inner.zero, inner.sample, inner.value

            @staticmethod
            def value_and_gradient(
                z: Params, inner: BatchObjective = inner, dense: bool = dense
            ) -> tuple[float, Params]:
                value, gradient = inner.value_and_gradient(z)
                touched.update(gradient["table.weight"].to_dense().any(1).nonzero()[:, 0].tolist())
                return value, {key: block.to_dense() if dense else block for key, block in gradient.items()}

        results.append(AutoPGD(steps=20).maximise(Layout(), 0.4, torch.Generator()))
    assert len(touched) > 3
    assert results[0].losses == pytest.approx(results[1].losses, rel=1e-12)
    torch.testing.assert_close(results[0].z, results[1].z, rtol=1e-12, atol=1e-14)


def gradient_of(model: nn.Module, run: Callable[[], Tensor]) -> list[Tensor]:
    with SparseEmbeddings():
        return list(torch.autograd.grad(run(), list(model.parameters())))


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_sparse_gradients_are_the_dense_ones(options: dict[str, object]) -> None:
    model = Reader(**options)
    found = gradient_of(model, lambda: loss(model, BATCH))
    expected = torch.autograd.grad(loss(model, BATCH), list(model.parameters()))
    assert found[0].is_sparse == ("scale_grad_by_freq" not in options)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.to_dense(), theirs.to_dense(), rtol=1e-14, atol=0)


def test_where_other_operations_follow_the_gradient_stays_dense() -> None:
    weight = nn.Parameter(torch.randn(5, 2))
    for run in (
        lambda: F.embedding(torch.tensor([1]), weight * 2).sum(),
        lambda: F.embedding(torch.tensor([1]), weight, None, 10.0).sum(),
        lambda: F.embedding(torch.tensor([1]), weight=weight, max_norm=10.0).sum(),
    ):
        with SparseEmbeddings():
            (grad,) = torch.autograd.grad(run(), weight)
        assert not grad.is_sparse
    with SparseEmbeddings():
        (grad,) = torch.autograd.grad(F.embedding(torch.tensor([1]), weight=weight).sum(), weight)
    assert grad.is_sparse


def test_models_whose_own_embeddings_are_sparse_have_all_norms() -> None:
    model = Reader(sparse=True)
    space = Adaptive().at(model)
    _, gradient = Objective(model, space, dense=False).value_and_gradient(space.zero())
    dense = {key: block.to_dense() for key, block in gradient.items()}
    assert gradient["embedding.weight"].is_sparse
    assert norm(gradient) == pytest.approx(norm(dense), rel=1e-14)
    assert dot(gradient, dense) == pytest.approx(norm(dense) ** 2, rel=1e-14)


@pytest.mark.parametrize("geometry", [Euclidean(), Adaptive()], ids=lambda geometry: geometry.name)
def test_moving_a_few_rows_is_moving_all_with_the_others_at_zero(geometry: Geometry) -> None:
    """Also into a buffer of an earlier move: of other rows, written to since, or not."""
    model = Reader().eval()
    space = geometry.at(model)
    out = space.move(space.zero())
    random = torch.Generator().manual_seed(0)
    for rows, spoil in (([1, 5], False), ([1, 5], False), ([0, 5, 7], False), ([2], True), ([2], False), ([], False)):
        z = space.sample(random)
        index = torch.tensor(rows, dtype=torch.long)
        values = z["embedding.weight"][index]
        dense = torch.zeros_like(z["embedding.weight"]).index_copy(0, index, values)
        if spoil:
            out["embedding.weight"].fill_(9)
        again = space.move(z | {"embedding.weight": sparse_rows(index, values, dense.shape)}, out)
        torch.testing.assert_close(again, space.move(z | {"embedding.weight": dense}), rtol=0, atol=0)
    assert torch.equal(space.point["embedding.weight"], model.embedding.weight)


def test_packing_loses_nothing_and_grows_every_holder_once() -> None:
    start: Blocks = {"e": torch.zeros(10, 2), "w": torch.ones(3)}
    start["e"][4] = 1.0
    first = sparse_rows(torch.tensor([2, 7]), torch.tensor([[1.0, 2], [3, 4]]), torch.Size([10, 2]))
    rows = Rows(start, {"e": first, "w": torch.ones(3)})
    assert rows.kept["e"].tolist() == [2, 4, 7]
    z = rows.pack(start)
    assert z["e"].tolist() == [[0, 0], [1, 1], [0, 0]]
    packed = rows.pack_gradient({"e": first, "w": torch.ones(3)}, [z])
    assert packed["e"].tolist() == [[1, 2], [0, 0], [3, 4]]
    more = sparse_rows(torch.tensor([0, 7]), torch.tensor([[5.0, 6], [7, 8]]), torch.Size([10, 2]))
    grown = rows.pack_gradient({"e": more, "w": torch.ones(3)}, [z, packed, z])
    assert grown["e"].tolist() == [[5, 6], [0, 0], [0, 0], [7, 8]]
    assert packed["e"].tolist() == [[0, 0], [1, 2], [0, 0], [3, 4]]
    torch.testing.assert_close(rows.whole(z), start)
    dense = torch.arange(20.0).reshape(10, 2)
    assert torch.equal(rows.pack_gradient({"e": dense, "w": torch.ones(3)}, [z])["e"], dense)
    torch.testing.assert_close(rows.whole(z), start)


def test_many_rows_are_not_worth_it() -> None:
    start: Blocks = {"e": torch.zeros(4, 1)}
    three = sparse_rows(torch.tensor([0, 1, 3]), torch.ones(3, 1), torch.Size([4, 1]))
    rows = Rows(start, {"e": three})
    assert not rows.kept
    assert rows.pack_gradient({"e": three}, [])["e"].tolist() == [[1], [1], [0], [1]]
