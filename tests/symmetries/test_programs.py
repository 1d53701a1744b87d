"""Random programs of tensor operations on a stream of tokens: no symmetry that is proposed is false on any inputs."""

from __future__ import annotations

import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quotient_manifolds.symmetries import find_symmetries, random_representative
from tests.nets.net import GIVEN, TOKENS, Net, difference, generic
from tests.nets.parts import merged_heads, split_heads
from tests.nets.programs import OPERATIONS, Program, body

ROUNDING = 1e-6  # in chains of ill-conditioned maps; what is false changes the output by far more


programs = st.lists(
    st.tuples(st.sampled_from([*OPERATIONS]), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6
)


@settings(max_examples=4 * settings().max_examples)
@example(program=[("gated neurons", 0, 0)], bias=False, pooled=False)
@given(program=programs, bias=st.booleans(), pooled=st.booleans())
def test_no_symmetry_of_a_random_program_is_false(program: Program, bias: bool, pooled: bool) -> None:
    torch.manual_seed(0)
    inputs = [scale * torch.randn(size, TOKENS, GIVEN) for size, scale in ((3, 1.0), (4, 1.0), (2, 3.0), (1, 0.3))]
    model = generic(Net(body(program), bias, pooled, words=False), inputs[0])
    first, *others = (each.double() for each in inputs)
    # What is 0 but for rounding, such as a softmax over tokens less its mean, is nothing to compare with.
    assume(all(float(model(x).detach().abs().max()) > ROUNDING for x in (first, *others)))
    found = find_symmetries(model, first)
    moved = random_representative(model, found, log_scale=0.4, seed=3)
    assert max(difference(model, x, moved) for x in (first, *others)) < ROUNDING


class Picture(nn.Module):
    """A convolution, half of whose pixels go on: more of them than there are channels before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(392, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x).flatten(1)[:, ::2].relu())
        return y


def test_pixels_are_told_apart_however_many_there_are() -> None:
    torch.manual_seed(0)
    model, x = Picture().double().eval(), torch.randn(3, 1, 14, 14, dtype=torch.float64)
    found = find_symmetries(model, x)
    assert difference(model, x, random_representative(model, found, log_scale=0.4, seed=3)) < ROUNDING


class OwnHeads(nn.Module):
    """Tokens of a parameter, attending by heads to those of the inputs, and taking what they are themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        p = split_heads(self.p.expand_as(x) * 1.0)
        return merged_heads((p @ split_heads(x).mT).softmax(-1) @ p)


def test_a_parameter_that_is_repeated_may_attend_by_heads() -> None:
    model, x = OwnHeads().eval(), torch.randn(3, 4, 4, dtype=torch.float64)
    assert find_symmetries(model, x).moved == ()
