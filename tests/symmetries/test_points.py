"""Points for charges: other weights, inputs and sizes at which a model runs, and taps for what no derivative passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from quotient_manifolds.symmetries.charges.narrow import Narrow
from quotient_manifolds.symmetries.charges.points import Drawn, Point, Points, tamed
from quotient_manifolds.symmetries.charges.samples import Sample, Uses, samples, stacked_gradients
from quotient_manifolds.symmetries.charges.taps import cuts
from quotient_manifolds.symmetries.charges.variations import Variations, numbers
from quotient_manifolds.symmetries.charges.walk import Walk
from quotient_manifolds.symmetries.outputs import answer
from quotient_manifolds.symmetries.trace import replay
from tests.nets.net import Computed
from tests.nets.small import NETS, net
from tests.symmetries.test_trace import BY_NUMBERS


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def expected(model: nn.Module, point: Point, batch: Any, seed: int, loss: int = 0) -> dict[str, Tensor]:
    """Return the gradients by autograd of the model itself, of the loss of `samples`."""
    leaves = {name: w.clone().requires_grad_() for name, w in point.weights.items()}
    y = torch.func.functional_call(model, leaves, (batch,))
    up = torch.randn(2, *y.shape, generator=torch.Generator().manual_seed(seed), dtype=y.dtype)[loss]
    total = (up * y).sum() / y.detach().square().mean().sqrt().clamp(1e-30)
    return dict(zip(leaves, torch.autograd.grad(total, [*leaves.values()], materialize_grads=True), strict=True))


@pytest.mark.parametrize("part", range(4))
def test_points_of_every_net_have_the_gradients_of_autograd(part: int) -> None:
    """At the weights, inputs and sizes of each point; nets that branch on values are recorded on other values."""
    compared = 0
    for name in list(NETS)[part::24]:
        model, x = net(name, part % 2 == 0)
        points = Points(model, x[:4])
        shapes = {tuple(each.values[each.program.inputs[0]].shape) for each in points.recordings}
        assert len(points.recordings) > 3, name
        assert len({shape[0] for shape in shapes}) > 1, name
        assert len({shape[1] for shape in shapes}) > 1 or points.held, name
        points.samples(1, vectors=names(model))
        for _ in range(2):
            point, generator = points.point(), torch.Generator().manual_seed(1)
            if name in BY_NUMBERS:
                continue
            used = Uses(point.recording.program)
            for sample in [*samples(used, *point[1:], 2, generator, vectors=names(model), generic=False)][:1]:
                for key, g in expected(model, point, point.inputs[0], 1).items():
                    size = 1e-9 * float(1 + g.abs().max())
                    torch.testing.assert_close(sample.gradients[key], g, rtol=1e-7, atol=size)
                compared += 1
    assert compared > 15


def sampled(function: Any, **parts: Any) -> tuple[Point, Sample]:
    torch.manual_seed(0)
    model = Computed(function, **parts).double()
    points = Points(model, torch.randn(6, 5, 4).double())
    point, (sample,) = points.samples(1, vectors=names(model))
    return point, sample


def charge(point: Point, sample: Sample, name: str) -> float:
    """Return the charge of a scale of all of one weight, relative to its summands."""
    terms = sample.gradients[name] * point.weights[name]
    return float(terms.sum().abs() / terms.abs().sum())


def quantized(x: Tensor) -> Tensor:
    """Round x; the gradient is that of x."""
    return torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -99, 99)


def parts() -> dict[str, nn.Module]:
    return {"g": nn.Linear(4, 3, bias=False), "a": nn.Linear(4, 3), "table": nn.Embedding(3, 2)}


CUT: dict[str, tuple[Any, bool]] = {
    "compared with 0": (lambda s, x: s.a(x).where(s.g(x) > 0, 1), True),
    "compared with a number": (lambda s, x: s.a(x).where(s.g(x) > 0.1, 1), False),
    "compared with inputs": (lambda s, x: s.a(x).where(s.g(x) > x[..., :3], 1), False),
    "compared with the mean": (lambda s, x: s.a(x).where(s.g(x) > s.g(x).mean(), 1), True),
    "largest": (lambda s, x: s.table(s.g(x).argmax(-1)), True),
    "two largest": (lambda s, x: s.table(s.g(x).topk(2).indices).sum(-2), True),
    "order": (lambda s, x: s.a(x).gather(-1, s.g(x).argsort(-1)), True),
    "sign": (lambda s, x: s.a(x) * s.g(x).sign(), True),
    "rounded": (lambda s, x: s.a(x) * s.g(x).round(), False),
    "cast": (lambda s, x: s.a(x) * s.g(10 * x).long(), False),
    "whole quotient": (lambda s, x: s.a(x) + s.g(x) // 0.1, False),
    "remainder": (lambda s, x: s.a(x) + (s.g(x).remainder(1) - s.g(x)), False),
    "bucket": (lambda s, x: s.table(torch.bucketize(s.g(x).sum(-1), torch.tensor([0.1, 0.3]).double())), False),
    "quantized": (lambda s, x: s.a(x) + quantized(s.g(x)) - s.g(x), False),
    "a number": (lambda s, x: s.a(x) * int(10 * s.g(x).mean()), False),
    "a list": (lambda s, x: s.a(x) + torch.tensor(s.g(x).tolist()), False),
}
"""Weights g that no derivative reaches, and whether a positive scale of them changes nothing."""


@pytest.mark.parametrize("how", CUT)
def test_what_no_derivative_passes_is_tapped_and_a_positive_scale_is_free_where_only_signs_or_orders_count(
    how: str,
) -> None:
    function, free = CUT[how]
    point, sample = sampled(function, **parts())
    assert float(sample.gradients["g.weight"].abs().min()) > 1e-6
    size = charge(point, sample, "g.weight")
    assert size < 1e-12 if free else size > 1e-4


WHOLE: dict[str, Any] = {
    "kinks": lambda s, x: s.g(s.a(x).relu() @ s.g.weight).clamp(-1, 1).amax(-1),
    "dropped from the graph": lambda s, x: s.g(x) + (s.a(x) - s.g(x)).detach(),
    "a function of the inputs": lambda s, x: s.a(x).where(x[..., :3] > 0, s.g(x)),
    "checked": lambda s, x: s.a(x) + s.g(x) if not bool(s.a(x).isnan().any()) else x,
}


@pytest.mark.parametrize("how", WHOLE)
def test_nothing_is_tapped_where_derivatives_pass_or_nothing_depends_on_a_weight(how: str) -> None:
    """A straight-through estimator has the derivative of what is computed: W of a alone."""
    model = Computed(WHOLE[how], **parts()).double()
    points = Points(model, torch.randn(6, 5, 4).double())
    point = points.point()
    used = Uses(point.recording.program)
    one, two = samples(used, *point[1:], 2, torch.Generator().manual_seed(0), vectors=names(model), generic=False)
    if how == "checked":
        for loss, sample in enumerate((one, two)):
            torch.testing.assert_close(sample.gradients, expected(model, point, point.inputs[0], 0, loss))
    else:
        assert not cuts(point.recording.program)
    if how == "dropped from the graph":
        assert float(two.gradients["g.weight"].abs().max()) < 1e-14
        assert float(two.gradients["a.weight"].abs().max()) > 1e-2


def test_token_vectors_are_those_of_the_walk_at_recordings_of_other_sizes() -> None:
    model, x = net("attn", True)
    points = Points(model, x[:4])
    walk = Walk(points.recordings[0])
    assert points.like(walk.program) == list(range(len(points.recordings)))
    seen = set()
    for _ in points.recordings:
        _, (sample,) = points.samples(1, walk=walk, vectors=names(model))
        seen.add(sample.written[0].values.shape[0])
        product = sample.written[0].slopes.T @ sample.read[0].values
        torch.testing.assert_close(product, sample.gradients["embed.weight"])
    assert len(seen) > 2


MODULES: dict[str, tuple[Any, bool]] = {
    "padding": (lambda: nn.Embedding(10, 3, padding_idx=2), True),
    "gradients by frequency": (lambda: nn.Embedding(10, 3, scale_grad_by_freq=True), True),
    "sparse": (lambda: nn.Embedding(10, 3, sparse=True), True),
    "sums of words": (lambda: nn.EmbeddingBag(10, 3, mode="sum", padding_idx=2), True),
    "means of words": (lambda: nn.EmbeddingBag(10, 3, mode="mean", padding_idx=2), True),
    "largest of words": (lambda: nn.EmbeddingBag(10, 3, mode="max"), True),
    "recurrent": (lambda: Computed(lambda s, x: s.r(x)[0], r=nn.LSTM(8, 3, batch_first=True)), False),
}
"""Layers with gradients of their own, or with none, in float32, and whether they take words."""


@pytest.mark.parametrize("kind", MODULES)
def test_gradients_are_derivatives_of_what_a_layer_computes(kind: str) -> None:
    """Against a difference of values of the layer itself along a random direction."""
    make, words = MODULES[kind]
    torch.manual_seed(0)
    model = make()
    points = Points(model, torch.randint(10, (5, 6)) if words else torch.randn(5, 6, 8))
    point = points.point()
    used = Uses(point.recording.program)
    sample, _ = samples(used, *point[1:], 2, torch.Generator().manual_seed(1), vectors=names(model), generic=False)
    assert points.left_out == 0
    weights = {name: w.double() for name, w in point.weights.items()}
    along = {name: torch.randn_like(w) for name, w in weights.items()}
    model.double()
    y, high, low = (
        torch.func.functional_call(
            model, {k: w + step * along[k] for k, w in weights.items()}, (point.inputs[0],)
        ).detach()
        for step in (0, 1e-5, -1e-5)
    )
    up = torch.randn(2, *y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)[0]
    up = up / y.square().mean().sqrt()
    slope = sum((g * along[name]).sum() for name, g in sample.gradients.items())
    torch.testing.assert_close(slope, (up * (high - low)).sum() / 2e-5, rtol=1e-5, atol=1e-7)


def test_indices_stay_in_their_tables_and_all_words_are_dealt() -> None:
    model = Computed(
        lambda s, t: F.cross_entropy(s.out(s.words(t["words"]) + s.places(t["places"])).flatten(0, 1), t["class"]),
        words=nn.Embedding(17, 4),
        places=nn.Embedding(6, 4),
        out=nn.Linear(4, 9),
    ).double()
    tokens = {"words": torch.randint(3, (5, 6)), "places": torch.arange(6).expand(5, 6), "class": torch.arange(30) % 2}
    tokens["class"][3] = -100
    points = Points(model, tokens, lambda model, batch: model(batch))
    assert points.limits == {0: 17, 1: 6, 2: 9}
    first = points.recordings[0]
    drawn = [points.inputs(first) for _ in range(8)]
    for words, places, classes in drawn:
        assert sorted(words.unique().tolist()) == list(range(17))
        assert sorted(places.unique().tolist()) == list(range(6))
        assert sorted(classes.unique().tolist()) == [-100, *range(9)]
    assert len({tuple(words.flatten().tolist()) for words, *_ in drawn}) == 8
    points.samples(1, vectors=names(model))
    assert not points.left_out


def test_labels_that_a_loss_selects_stay_classes() -> None:
    def loss(s: Computed, t: dict[str, Tensor]) -> Tensor:
        counted = t["class"] != -100
        return F.cross_entropy(s.out(t["x"])[counted], t["class"][counted])

    classes = torch.tensor([0, -100, 3, 1, 2, 2])
    points = Points(
        Computed(loss, out=nn.Linear(3, 5)).double(),
        {"x": torch.randn(6, 3).double(), "class": classes},
        lambda model, batch: model(batch),
    )
    assert points.limits == {1: 5}
    drawn = [points.inputs(points.recordings[0])[1] for _ in range(8)]
    assert all(torch.equal(each < 0, classes < 0) and set(each.tolist()) <= {-100, *range(5)} for each in drawn)
    points.samples(1, vectors=["out.weight"])
    assert not points.left_out


def test_numbers_whose_differences_are_looked_up_are_no_words() -> None:
    model = Computed(
        lambda s, t: s.left(t["box"][..., 0]) + s.width(t["box"][..., 1] - t["box"][..., 0]) + s.words(t["words"]),
        left=nn.Embedding(9, 4),
        width=nn.Embedding(9, 4),
        words=nn.Embedding(5, 4),
    )
    batch = {"box": torch.tensor([[[1, 4], [2, 8]]]).expand(3, 2, 2), "words": torch.arange(6).view(3, 2) % 5}
    points = Points(model.double(), batch, lambda model, batch: model(batch))
    assert list(points.limits.values()) == [5]
    points.samples(1, vectors=names(model))


@pytest.mark.parametrize("outputs", [1, 2])
def test_gradients_at_many_inputs_at_once_are_those_of_each(outputs: int) -> None:
    """Rows of a batch are independent combinations of the gradients of its outputs, of single numbers, too.

    What no output depends on has gradients of 0. What is checked of inputs alone, by operations that take no stack, is
    not run again.
    """
    torch.manual_seed(0)

    def checked(s: Any, x: Tensor) -> Tensor:
        assert len(x.nonzero())
        return s.sharp * s.a(x).tanh().softmax(-1)[..., :outputs].mean(0)

    parts = {"a": nn.Linear(3, 4), "sharp": nn.Parameter(torch.tensor(0.5)), "idle": nn.Parameter(torch.ones(5))}
    model = Computed(checked, **parts).double()
    points = Points(model, torch.randn(5, 3).double())
    recording, stack = points.recordings[0], torch.randn(6, 5, 3).double()
    used, weights = Uses(recording.program), dict(model.named_parameters())
    draw = torch.Generator().manual_seed(0)
    several = [weights, {name: 2 * w.detach() for name, w in weights.items()}]
    for own, found in zip(several, stacked_gradients(used, several, [stack], [], names(model), 9, draw), strict=True):
        assert {name: g.shape for name, g in found.items()} == {n: (3 * outputs, *w.shape) for n, w in own.items()}
        rows = torch.cat([found[name].reshape(3 * outputs, -1) for name in own], 1).view(3, outputs, -1)
        model.load_state_dict(own)
        for k, x in enumerate(stack[:3] if own is weights else stack[3:]):
            ys = model(x)
            each = [torch.autograd.grad(y, [*weights.values()], retain_graph=True, materialize_grads=True) for y in ys]
            Q = torch.linalg.qr(torch.stack([torch.cat([g.flatten() for g in one]) for one in each]).mT)[0]
            assert int(torch.linalg.matrix_rank(rows[k])) == outputs
            assert float((rows[k] - rows[k] @ Q @ Q.mT).norm() / rows[k].norm()) < 1e-9
    finder = Narrow(points, draw)
    assert all(finder.point().gradients.shape == (8, 22) for _ in range(5))
    assert finder.counted().gradients.shape == (32, 22)


def test_a_stack_whose_gradients_are_wrong_is_not_used() -> None:
    """torch has a wrong rule for gradients of `select_scatter` in stacks: then inputs are taken one by one."""

    def assigned(s: Any, x: Tensor) -> Tensor:
        return torch.select_scatter(s.a(x), s.b(x[:, 0]), 1, 0).tanh().mean()

    model = Computed(assigned, a=nn.Linear(3, 4), b=nn.Linear(3, 4)).double()
    points = Points(model, torch.randn(5, 6, 3).double())
    with pytest.raises(RuntimeError, match="those at each"):
        points.stacked(8, 1, names(model), None, [points.weights()], words=True)
    finder = Narrow(points, torch.Generator().manual_seed(0))
    assert finder.counted().gradients.shape == (8, 32)


def test_masks_stay_masks_that_show_something_of_a_row_and_now_and_then_all() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.zeros(3, 4).masked_fill(torch.ones(3, 4).triu(2).bool(), -torch.inf)
    masks = torch.ones(3, 4), torch.ones(3, 4, dtype=torch.long), torch.zeros(3, 4, dtype=torch.bool), hidden
    for mask in masks:
        drawn = [numbers(mask, (5, 7), generator, mood) for mood in ("normal", "huge", "positive")]
        shown = mask.unique()[-1]
        assert bool((drawn[0][:, 0] == shown).all())
        assert all(bool((each == shown).any(1).all()) and each.dtype == mask.dtype for each in drawn)
        assert any(bool((numbers(mask, (5, 7), generator, "huge")[:, 0] != shown).any()) for _ in range(5))
        assert [bool((each == shown).all()) for each in drawn] == [False, False, True]
        assert all(len(each.unique()) == 2 for each in drawn[:2])
    tokens = numbers(torch.ones(3, 4, 1), (5, 7, 1), generator, "normal")
    assert bool(tokens.any(1).all())
    assert not bool(tokens.all())
    assert bool(numbers(torch.ones(3, 4), (5, 1), generator, "normal").all())  # tokens are hidden, and no examples
    x = torch.randn(20, 5) + 3
    assert float(numbers(x, (400, 5), generator, "negative").max()) < 0
    assert float(numbers(x, (400, 5), generator, "huge").std()) > 20


def test_lengths_and_batch_sizes_vary_and_what_cannot_is_said() -> None:
    sizes: dict[str, int] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6}
    torch.manual_seed(0)
    bert = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=30, max_position_embeddings=12)).eval()
    batch = {"input_ids": torch.randint(30, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    points = Points(bert, batch)
    shapes = [tuple(each.values[each.program.inputs[0]].shape) for each in points.recordings]
    assert points.held == ()
    assert {length for _, length in shapes} > {6, 9}
    assert {rows for rows, _ in shapes} > {2, 3}
    assert points.limits == {0: 30}
    points.samples(1, vectors=names(bert))
    vit = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=4, patch_size=2)).eval()
    assert Points(vit, {"pixel_values": torch.randn(2, 3, 4, 4)}).held == (
        "pixel_values: axis 2 always has size 4",
        "pixel_values: axis 3 always has size 4",
    )
    alike = Points(bert, batch, shapes=False)
    assert {tuple(each.values[each.program.inputs[0]].shape) for each in alike.recordings} == {(2, 6)}
    assert len(alike.held) == 4


def test_examples_vary_alone_where_they_are_as_many_as_tokens() -> None:
    variations = Variations(torch.zeros(5, 5, 3), torch.Generator(), {})
    assert [(axes.size, axes.places) for axes in variations.axes] == [
        (5, ((0, 0),)), (5, ((0, 1),)), (5, ((0, 0), (0, 1))), (3, ((0, 2),))
    ]  # fmt: skip
    points = Points(nn.Linear(3, 2), torch.randn(5, 5, 3))
    assert {tuple(each.values[0].shape[:2]) for each in points.recordings} >= {(5, 5), (7, 5), (5, 7)}


def test_the_model_and_its_batch_are_unchanged_also_where_the_model_writes() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1  # type: ignore[operator]
            return self.a(x.mul_(2))

    model, x = Counts(), torch.randn(5, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = x.clone()
    points = Points(model, x)
    points.samples(1, vectors=["a.weight"])
    answers = points.answers()
    answers.change({}, {"a.weight": torch.randn(3, 4).double()})
    torch.testing.assert_close(dict(model.state_dict()), before)
    assert torch.equal(x, given)
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def test_a_model_that_runs_nowhere_else_is_one_sentence() -> None:
    w = torch.randn(3)
    model = Computed(lambda s, x: x * (1e-9 - (s.w - w).square()).sqrt(), w=nn.Parameter(w.clone()))
    with pytest.raises(RuntimeError, match="Points must exist at which the model runs and is finite"):
        Points(model, torch.randn(4, 3)).samples(1, vectors=["w"])


def test_shapes_that_values_decide_are_recorded_anew() -> None:
    """Each row is computed by the weight that its sign chooses; the record holds how many these are."""

    def chosen(s: Any, x: Tensor) -> Tensor:
        out, on = torch.zeros(len(x), 3, dtype=x.dtype), s.g(x)[:, 0] > 0
        for where, part in ((on, s.a), (~on, s.b)):
            rows = x[where]
            out[where] = part(rows.view(len(rows) * 2, 2)).view(len(rows), 6)[:, :3]
        return out

    model = Computed(chosen, g=nn.Linear(4, 1), a=nn.Linear(2, 3), b=nn.Linear(2, 3)).double()
    points = Points(model, torch.randn(9, 4).double())
    drawn = [points.samples(1, vectors=names(model))[1][0].gradients for _ in range(20)]
    assert all(any(bool(each[name].any()) for each in drawn) for name in names(model))
    assert points.left_out > 2


def rescaled(w: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"a.weight": 3 * w["a.weight"], "b.weight": w["b.weight"] / 3}


def negated(w: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"c": -w["c"]}


def added(where: Any) -> Any:
    """Add a parameter if the batch is of some kind."""
    return lambda s, x: s.b(s.a(x)) + (s.c.sum() if where(x) else 0)


def test_a_frozen_parameter_of_integers_is_neither_moved_nor_differentiated() -> None:
    model = Computed(lambda s, x: s.a(x @ s.w.to(x.dtype)), a=nn.Linear(4, 3))
    model.w = nn.Parameter(torch.randint(-3, 3, (4, 4), dtype=torch.int8), requires_grad=False)
    point, (sample,) = Points(model, torch.randn(5, 4)).samples(1, vectors=names(model))
    assert torch.equal(point.weights["w"], model.w)
    assert sample.gradients.keys() == {"a.weight", "a.bias"}


def test_far_inputs_are_tried_whatever_the_size_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 2000), nn.ReLU(), nn.Linear(2000, 1500), nn.Linear(1500, 3))
    x = torch.randn(300, 4)
    batches = Points(model, x).answers().batches
    sizes = [float(batch.norm() / len(batch) ** 0.5 / (x.norm() / len(x) ** 0.5)) for batch in batches]
    assert min(map(len, batches)) < 10
    assert max(map(len, batches)) < 300
    assert max(sizes) > 500
    assert min(sizes) < 1e-2


def test_integers_that_no_other_may_replace_stay_as_recorded_which_is_said() -> None:
    """How often rows are repeated, so that there are seven."""
    model = Computed(lambda s, t: s.a(t[0].repeat_interleave(t[1], 0, output_size=7).view(7, 4)), a=nn.Linear(4, 3))
    points = Points(model, (torch.randn(3, 4), torch.tensor([1, 4, 2])), lambda model, batch: model(batch))
    for _ in range(12):
        point, _ = points.samples(1, vectors=names(model))
    assert point.inputs[1].tolist() == [1, 4, 2]
    assert "input 1: integers always as recorded" in points.held


@pytest.mark.parametrize("name", ["ln", "rot2"])
def test_weights_of_a_large_model_are_drawn_again_and_saved_by_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model, x = net(name, True)
    some, found, kept = names(model)[-1:], list[Any](), list[Any]()
    packed = replay.Values.packed
    monkeypatch.setattr(replay.Values, "packed", lambda *given: kept.append(packed(*given)) or kept[-1])
    for most in (1e9, 0):
        for module in ("charges.points", "trace.replay"):
            monkeypatch.setattr(f"quotient_manifolds.symmetries.{module}.HELD", most)
        points = Points(model, x[:3])
        found.append(points.samples(2, walk=Walk(points.recordings[0]), vectors=some))
    (held, one), (drawn, other) = found
    assert all(held.weights[n] is held.weights[n] and drawn.weights[n] is not drawn.weights[n] for n in names(model))
    assert any(isinstance(each, tuple) for each in kept)
    saved = [each for each in kept if isinstance(each, Tensor)]
    for n in set(names(model)) - set(some):
        w = drawn.weights[n].double()
        assert not any(each.shape == v.shape and torch.equal(each, v) for each in saved for v in (w, w.movedim(0, -1)))
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a.gradients, b.gradients, rtol=0, atol=0)
        for n, side in a.written.items():
            torch.testing.assert_close(side.slopes, b.written[n].slopes, rtol=0, atol=0)


@pytest.mark.parametrize("alike", [False, True])
def test_rows_of_a_large_table_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch, alike: bool) -> None:
    """Drawn in chunks of four rows, which differ."""
    monkeypatch.setattr("quotient_manifolds.symmetries.charges.points._CHUNK", 25)
    own, index = {"b": torch.ones(7), "t": torch.ones(50, 6)}, torch.randint(50, (4, 5))
    held = Drawn(own, 3, alike)
    assert held.rows("t", index) is None
    monkeypatch.setattr("quotient_manifolds.symmetries.charges.points.HELD", 0)
    drawn = Drawn(own, 3, alike)
    assert torch.equal(drawn["t"], held["t"])
    assert torch.equal(drawn.rows("t", index), drawn["t"][index])
    assert len(torch.cat([drawn["b"], drawn["t"].flatten()]).unique()) > 290


def test_points_start_from_weights_of_ordinary_size() -> None:
    """Far along an orbit some rows are thousands of times as large as others: noise of a tenth of them drowns these."""
    own = torch.randn(18, 6, generator=torch.Generator().manual_seed(0)).double()
    assert torch.equal(tamed(own), own)
    assert torch.equal(tamed(torch.zeros(3, 2)), torch.zeros(3, 2))
    far = torch.cat([own[:12], 4e3 * own[12:]])
    several = torch.cat([own[:6], 10 * own[6:12], 30 * own[12:]])
    for w in (far, several, 50 * far, far.T, -far):
        near = tamed(w)
        assert torch.equal(near.sign(), w.sign())
        assert torch.equal(near.abs().flatten().argsort(), w.abs().flatten().argsort())
        assert len(near.unique()) == len(w.unique())
        assert float(near.abs().max()) <= 32 * float(near.abs().median())
        assert float(near.square().mean().sqrt()) * 6**0.5 <= 6 + 1e-9


@pytest.mark.parametrize("norm", [nn.LayerNorm(5), nn.RMSNorm(5), nn.BatchNorm1d(5).eval()])
def test_inputs_of_models_with_norms_are_taken_together(norm: nn.Module) -> None:
    """What keeps a norm's root off 0 is made larger: by another amount for each input, whether alone or in a stack."""
    model = Computed(lambda s, x: s.b(s.norm(s.a(x)).tanh()).mean(), a=nn.Linear(3, 5), norm=norm, b=nn.Linear(5, 2))
    points = Points(model.double(), 5 * torch.randn(6, 3).double())
    several = [points.weights() for _ in range(2)]
    made = points.stacked(8, 1, names(model), None, several, words=True)
    assert [len(each["a.weight"]) for each in made] == [8, 8]


def test_of_a_table_that_is_looked_up_no_more_than_the_rows_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quotient_manifolds.symmetries.charges.points.HELD", 20)
    model = Computed(lambda s, x: s.a(s.t(x)), t=nn.Embedding(9, 4), a=nn.Linear(4, 3, bias=False))
    points = Points(model, torch.randint(9, (4, 5)))
    asked, drawn = list[str](), Drawn._drawn
    monkeypatch.setattr(Drawn, "_drawn", lambda s, *given: asked.append(given[0]) or drawn(s, *given))
    point = points.point()
    whole = Drawn.__getitem__
    monkeypatch.setattr(Drawn, "__getitem__", lambda s, name: asked.append(f"whole {name}") or whole(s, name))
    (sample,) = samples(Walk(point.recording), *point[1:], 1, torch.Generator().manual_seed(1))
    assert set(asked) == {"t.weight", "a.weight", "whole a.weight"}
    table = point.weights["t.weight"].double()
    torch.testing.assert_close(sample.written[0].values, table[point.inputs[0].flatten()], rtol=0, atol=0)


MOVES: dict[str, tuple[Any, Any, bool]] = {
    "a scale": (lambda s, x: s.b(s.a(x).relu()), rescaled, False),
    "a scale, through a cast": (lambda s, x: s.b(s.a(x).float().relu().to(x.dtype)), rescaled, False),
    "a late position": (
        lambda s, x: s.b(s.a(x) + s.p[: x.shape[1]]),
        lambda w: {"p": torch.cat([w["p"][:5], -w["p"][5:]])},
        True,
    ),
    "shorter sentences": (added(lambda x: x.shape[1] < 5), negated, True),
    "pictures that are no multiple": (added(lambda x: x.shape[1] % 5), negated, True),
    "many examples": (added(lambda x: len(x) > 100), negated, True),
    "long sentences": (added(lambda x: x.shape[1] > 70), negated, True),
    "far inputs": (lambda s, x: s.b(s.a(x)) + (x.abs() > 500) * s.c, negated, True),
}
"""What is computed, a move, and whether it changes anything on some input."""


@pytest.mark.parametrize("what", MOVES)
def test_answers_of_the_model_change_with_a_false_move_and_the_batch_becomes_a_source_of_points(what: str) -> None:
    function, move, false = MOVES[what]
    torch.manual_seed(0)
    model = Computed(
        function,
        a=nn.Linear(4, 4, bias=False),
        b=nn.Linear(4, 4),
        p=nn.Parameter(torch.randn(40, 4)),
        c=nn.Parameter(torch.randn(4)),
    ).double()
    x = torch.randn(3, 5, 4).double()
    own = {name: w.detach() for name, w in model.named_parameters()}
    points = Points(model, x)
    answers = points.answers()
    assert answers.change(own, own)[0] == 0
    change, (index, *_) = answers.change(own, {**own, **move(own)})
    if not false:
        assert change < 1e-12
        return
    assert change > 1e-3
    moved = next(iter(move(own)))
    _, (sample,) = points.samples(1, vectors=[moved], which=[points.add(answers.batches[index])])
    assert bool(sample.gradients[moved].any())


def test_points_are_the_same_from_the_same_seed() -> None:
    model, x = net("ln", True)
    here, there, other = (Points(model, x[:3], seed=seed).samples(1, vectors=names(model)) for seed in (3, 3, 4))
    torch.testing.assert_close(here[1][0].gradients, there[1][0].gradients, rtol=0, atol=0)
    assert not torch.equal(here[0].inputs[0], other[0].inputs[0])
    w = dict(model.named_parameters())["embed.weight"].detach()
    assert 0.05 < float(((here[0].weights["embed.weight"] - w) / w).abs().median()) < 0.6
    assert answer is Points(model, x[:3]).evaluate


def test_one_token_that_attends_to_itself_alone_is_no_point_where_others_are_longer() -> None:
    model = nn.MultiheadAttention(4, 2, batch_first=True).double().eval()
    points = Points(model, torch.randn(3, 3, 4).double(), lambda model, x: model(x, x, x)[0])
    lengths = [each.values[each.program.inputs[0]].shape[1] for each in points.recordings]
    assert 1 in lengths
    assert points.exercised()
    assert 1 not in [lengths[place] for place in points.exercised()]
