"""Directions at given weights leave outputs unchanged, exceed no kernel of the Jacobian, and are each found once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quotient_manifolds.symmetries.charges.find import find
from quotient_manifolds.symmetries.charges.frame import Frame
from quotient_manifolds.symmetries.charges.kernel import Point, Unknowns, solve
from quotient_manifolds.symmetries.charges.shifts import _parts_of
from quotient_manifolds.symmetries.charges.stacks import Stack, Stacks, read_stacks
from quotient_manifolds.symmetries.charges.walk import Walk
from quotient_manifolds.symmetries.groups import Translation
from quotient_manifolds.symmetries.outputs import answer
from quotient_manifolds.symmetries.trace.record import record
from quotient_manifolds.symmetries.trace.replay import Replay
from tests.symmetries import finders
from tests.symmetries.nets import WORDS, Computed, net
from tests.symmetries.test_nets import shown

CHANGE, RANK, LOSSES = 1e-10, 1e-8, 16


class Drawn:
    """Draw gradients and tokens of one recording at other inputs of the same shapes and signs."""

    def __init__(self, model: nn.Module, batch: Any, seed: int = 0) -> None:
        self.recording = record(model, batch, answer)
        self.walk, self.generator = Walk(self.recording), torch.Generator().manual_seed(seed)
        self.frame, self.replay = Frame(self.walk), Replay(self.recording.program)
        self.weights = {name: w.double() for name, w in self.recording.parameters.items()}

    def normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator, dtype=torch.float64)

    def inputs(self) -> list[Tensor]:
        made = []
        for number in self.recording.program.inputs:
            given = self.recording.values[number]
            if not given.is_floating_point():
                made.append(torch.randint(WORDS, given.shape, generator=self.generator))
                continue
            x = self.normal(given) * (0.2, 1, 5)[int(torch.randint(3, (), generator=self.generator))]
            made.append(-x.abs() if bool((given <= 0).all()) else x)
        return made

    def elsewhere(self) -> dict[str, Tensor]:
        return {
            n: w * (1 + 0.3 * self.normal(w)) + 0.1 * w.std(correction=0) * self.normal(w)
            for n, w in self.weights.items()
        }

    def gradients(self, weights: Mapping[str, Tensor], generic: bool = False) -> Tensor:
        leaves = {name: weights[name].detach().requires_grad_() for name in self.weights}
        outputs, _ = self.replay.run(leaves.__getitem__, self.inputs(), {}, generic=generic)
        outputs = [y for y in outputs if y.requires_grad]
        up = [
            torch.randn(LOSSES, *y.shape, generator=self.generator, dtype=y.dtype) / y.detach().norm() for y in outputs
        ]
        found = torch.autograd.grad(outputs, [*leaves.values()], up, is_grads_batched=True, materialize_grads=True)
        every = zip(found, leaves.values(), strict=True)
        return torch.cat([g.expand(LOSSES, *w.shape).reshape(LOSSES, -1) for g, w in every], 1)

    def point(self) -> Point:
        weights = self.elsewhere()
        theta = torch.cat([w.reshape(-1) for w in weights.values()])
        return Point(theta, self.walk.entries.read(weights.__getitem__), self.gradients(weights, True))

    def narrow(self) -> Stacks:
        elsewhere = lambda _: self.gradients(self.elsewhere(), True)  # noqa: E731
        return read_stacks(self.frame, self.gradients, elsewhere, self.weights, self.generator)

    def row(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return changes of parameters (k, ...) as rows (k, P)."""
        count = len(next(iter(params.values())))
        shapes = self.recording.parameters.items()
        every = [params[n] if n in params else torch.zeros(count, *w.shape).double() for n, w in shapes]
        return torch.cat([each.flatten(1) for each in every], 1)

    def tangents(self, stack: Stack) -> Tensor:
        a, b = stack.translation.shape
        return self.row(stack.translation.tangent(self.weights, torch.eye(a * b).double().view(a * b, a, b)))


@cache
def drawn(name: str, bias: bool) -> tuple[nn.Module, Tensor, Drawn, Stacks]:
    model, x = net(name, bias)
    made = Drawn(model, shown(name, x)[:4])
    return model, shown(name, x), made, made.narrow()


def rank(*parts: Tensor) -> int:
    """Return the rank of rows, of which those much smaller than others of their part are none."""
    kept = [torch.zeros(1, 1, dtype=torch.float64)] if not any(map(len, parts)) else []
    for part in parts:
        size = part.norm(dim=1, keepdim=True)
        kept.append(
            (part / size)[size[:, 0] > 1e-7 * size.max()] if len(part) else torch.zeros(0, part.shape[1]).double()
        )
    return int(torch.linalg.matrix_rank(torch.cat(kept), rtol=RANK))


def change(model: nn.Module, x: Tensor, weights: Mapping[str, Tensor], stacks: Sequence[Stack]) -> float:
    """Return how much random elements of all of these together change the outputs."""
    moved, generator = dict(weights), torch.Generator().manual_seed(3)
    for stack in stacks:
        moved = stack.translation.act(moved, stack.translation.element(generator, 0.3))
    with torch.no_grad():
        y = torch.func.functional_call(model, dict(weights), (x,))
        return float((torch.func.functional_call(model, moved, (x,)) - y).abs().max() / y.abs().max())


# With biases, and without: which nets, in turns.
NAMES = """
linear; relu; glu; maxout; dead; outer; two; lora; gain; gain lin; added twice; fewer classes; ln; ln res; ln final;
rms; rms with a bias; ln plain; groupnorm; batchnorm; bn relu; attn; attn ln; gqa; qknorm; causal; pos; pos attn; cls;
bias twice; read twice; conv; depthwise; idle; idle expert; experts; padded before a conv; two writers, by half;
constant; words and positions; tied table and head
"""
RUNS = [(name.strip(), k % 3 < 2) for k, name in enumerate(NAMES.split(";"))]
COMPLETE = 10


@pytest.mark.parametrize(("name", "bias"), RUNS)
def test_each_direction_leaves_outputs_unchanged_and_all_of_one_side_do_together(name: str, bias: bool) -> None:
    model, x, made, found = drawn(name, bias)
    for stack in found.found:
        assert change(model, x, made.weights, [stack]) < CHANGE, stack.family
    for outputs in (False, True):
        assert change(model, x, made.weights, [s for s in found.found if s.outputs == outputs]) < CHANGE


def test_with_the_groups_of_the_kernel_they_fill_most_kernels_of_the_jacobian() -> None:
    """Counted by P - rank J, which is never exceeded."""
    complete = 0
    for name, bias in RUNS[::3]:
        _, _, made, found = drawn(name, bias)
        theta = torch.cat([w.reshape(-1) for w in made.weights.values()])
        G = torch.cat([made.gradients(made.weights) for _ in range(10 + len(theta) // 40)])
        point = Point(theta, made.walk.entries.read(made.weights.__getitem__), G)
        kernel = solve(Unknowns(made.frame), made.point)
        fields = (kernel.unknowns.fields(point) @ kernel.basis).T
        free, together = len(theta) - rank(G), rank(*map(made.tangents, found.found), fields)
        assert together <= free, name
        complete += together == free
    assert complete >= COMPLETE


def of(model: nn.Module, x: Tensor) -> tuple[Drawn, Stacks]:
    made = Drawn(model.double(), x.double())
    return made, made.narrow()


def families(made: Drawn, found: Stacks) -> dict[str, int]:
    count: Counter[str] = Counter()
    for stack in found.found:
        count[stack.family] += stack.translation.dimension(made.weights)
    return dict(count)


def added(model: nn.Module, x: Tensor) -> int:
    """Return how many dimensions translations have, all of which hold at all weights."""
    found = find(model.double().eval(), x.double() if x.is_floating_point() else x)
    assert not found.stacks
    translations = [each for each in found.symmetries if isinstance(each, Translation)]
    return finders.rank(translations, finders.weights(model))


def test_an_adapter_beside_its_base_gives_back_what_the_base_takes() -> None:
    """W + 2 B A, with W (8, 6), A (2, 6) and B (8, 2): r (i + o) dimensions, both by gradients and by tokens."""
    torch.manual_seed(0)
    parts = {"w": nn.Linear(6, 8, bias=False), "a": nn.Linear(6, 2, bias=False), "b": nn.Linear(2, 8, bias=False)}
    model = Computed(lambda s, x: torch.tanh(s.w(x) + 2 * s.b(s.a(x))), **parts)
    assert added(model, torch.randn(12, 6)) == 2 * (6 + 8)


def test_a_bias_that_two_maps_share_takes_nothing_back_alone() -> None:
    """tanh(u + t + b) + tanh(u A + t A' + b): shifts of t need one bias each."""
    torch.manual_seed(0)

    def shared(s: Computed, x: Tensor) -> Tensor:
        y = s.e(x)
        return torch.tanh(F.linear(y, s.v) + s.p) + torch.tanh(F.linear(y, s.w) + s.p)

    parts: dict[str, Any] = {"e": nn.Linear(6, 3), "p": nn.Parameter(torch.randn(4))}
    parts |= {name: nn.Parameter(torch.randn(4, 3)) for name in "vw"}
    assert added(Computed(shared, **parts), torch.randn(12, 6)) == 0


def test_a_table_that_is_tied_to_the_head_has_no_direction_of_its_own() -> None:
    torch.manual_seed(0)

    def tied(s: Computed, x: Tensor) -> Tensor:
        y = s.t(x)
        return F.linear(torch.tanh(y - y.mean(-1, keepdim=True)), s.t.weight)

    def alone(s: Computed, x: Tensor) -> Tensor:
        y = s.t(x)
        return torch.tanh(y - y.mean(-1, keepdim=True))

    words = torch.randint(WORDS, (40, 3))
    for function, expected in ((tied, 0), (alone, WORDS)):
        assert added(Computed(function, t=nn.Embedding(WORDS, 6)), words) == expected


def test_a_unit_that_is_off_here_but_not_elsewhere_is_not_free() -> None:
    torch.manual_seed(0)
    model = Computed(lambda s, x: s.b(torch.relu(s.a(x))), a=nn.Linear(6, 5), b=nn.Linear(5, 3)).double()
    with torch.no_grad():
        model.a.weight[0] *= 1e-3  # type: ignore[union-attr,operator,index]
        model.a.bias[0] = -0.1  # type: ignore[union-attr,operator,index]
    made, found = of(model, torch.randn(12, 6))
    assert families(made, found) == {}
    assert any("have no gradient here" in each for each in found.refused)


def test_a_constant_does_not_pass_a_padded_convolution() -> None:
    torch.manual_seed(0)
    counts = []
    for padding in (0, 1):
        parts = {"a": nn.Linear(4, 3), "c": nn.Conv1d(3, 3, 3, padding=padding)}
        model = Computed(lambda s, x: torch.tanh(s.c(s.a(x).mT)), **parts)
        counts.append(added(model, torch.randn(4, 6, 4)))
    assert counts == [3, 0]


def test_columns_that_one_sample_alone_has_are_no_parts_of_their_own() -> None:
    """Of words that occur once it is not known at which other positions they may be."""
    g = torch.ones(2, 3, 6)
    g[0, :, [1, 4]] = g[1, :, [2, 4]] = 0
    assert _parts_of(g).tolist() == [1, 1, 1, 2, 2, 3]
