"""Compute the token vectors of every use of a weight at one point, from which charges are formed.

A use y = W x adds the sum over tokens of dy y^T to the charge of the wire that W writes, and minus the sum of dx x^T to
the charge of the wire that it reads. Here dx and dy are the derivatives of a loss through this use alone. One backward
pass through the activations gives the charges of all wires, without any gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quotient_manifolds.symmetries.charges.taps import Taps, cuts
from quotient_manifolds.symmetries.charges.uses import Use
from quotient_manifolds.symmetries.trace.program import Program
from quotient_manifolds.symmetries.trace.replay import Replay, wide

_SMALL = 1e-30
_FAINT = 1e-5
"""Relative to the largest gradient: smaller ones have lost digits."""
_SAME = 1e-6
"""Largest distance between a stacked gradient and the gradient of one batch, relative to its norm."""
_AT_ONCE = 2e7
"""Entries of all gradients up to which they are computed in one batched call."""


class Undecided(RuntimeError):
    """Report that charges decide nothing: no points exist, or results at fresh points do not settle."""


@dataclass(frozen=True, eq=False)
class Side:
    """Hold the activations at one side of a use, and the derivatives of a loss by them, each (tokens, channels)."""

    values: Tensor
    slopes: Tensor


@dataclass(frozen=True, eq=False)
class Sample:
    """Hold, for one loss at one point, the activations of each use, by its number, and gradients of parameters.

    read: the inputs of uses, without lookups in tables. written: their results. gradients: requested ones, by name.
    """

    read: Mapping[int, Side]
    written: Mapping[int, Side]
    gradients: Mapping[str, Tensor]


class Used(Protocol):
    """Provide a program and the uses of weights whose token vectors are wanted, as a Walk does."""

    @property
    def program(self) -> Program:
        """Return the program."""

    @property
    def uses(self) -> Sequence[Use]:
        """Return the uses, by number."""


@dataclass(frozen=True, eq=False)
class Uses:
    """Hold a program and uses of weights in it; without uses, no token vectors are computed."""

    program: Program
    uses: Sequence[Use] = ()

    @classmethod
    def along(cls, walk: Used, program: Program) -> Uses:
        """Return the uses of a walk in another program, whose operations are the same up to views."""
        if program is walk.program:
            return cls(program, walk.uses)
        places = dict(zip(walk.program.computing, program.computing, strict=True))
        return cls(program, [replace(use, operation=places[use.operation]) for use in walk.uses])

    @property
    def fit(self) -> bool:
        """Return whether each use has as many channels here: a table may be cut to the length of the input."""
        return all(use.fits(self.program) for use in self.uses)

    @cached_property
    def replay(self) -> Replay:
        """Return the replay of the program."""
        return Replay(self.program)

    @cached_property
    def cuts(self) -> dict[int, tuple[int, ...]]:
        """Return `taps.cuts` of the program."""
        return cuts(self.program)


def samples(
    walk: Used,
    weights: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    losses: int,
    generator: torch.Generator,
    *,
    vectors: Collection[str] = (),
    generic: bool = True,
    own: Mapping[str, Tensor] | None = None,
) -> Iterator[Sample]:
    """Yield a sample for each of several random losses, linear in the outputs, which are scaled to mean square 1.

    The last loss, or each one if no output depends on a weight, also contains random multiples of all taps (see
    `taps`). weights: all parameters, by name. inputs: the inputs of the program, in order. vectors: parameters whose
    gradients are wanted, too; integers are ignored. generic: whether norms get an eps at which near symmetries fail
    (see `arguments`). own: parameters whose devices the weights are moved to; samples are small, and on the CPU.

    Yields nothing if an output has a NaN or no finite entry, or if no output or tap depends on a weight. Fewer samples
    are yielded if a derivative is not finite.
    """
    walk = walk if isinstance(walk, Uses) else Uses(walk.program, walk.uses)
    watch = {use.operation: use.tokens.place for use in walk.uses}
    vectors = [name for name in vectors if weights[name].is_floating_point()]
    leaves = Leaves(weights, vectors, own)
    taps = Taps(walk.cuts)
    outputs, seen = walk.replay.run(leaves.__getitem__, inputs, watch, rows=leaves.rows, generic=generic, tap=taps)
    outputs = [y for y in outputs if y.requires_grad]
    if not (outputs or taps.found) or not all(_has_numbers(y) for y in outputs):
        return
    sides = {(place, written): t for place, pair in seen.items() for written, t in enumerate(pair) if t is not None}
    wanted = [*sides.values(), *(leaves[name] for name in vectors)]
    terms = [(y, _multiples(y, losses, generator)) for y in outputs]
    for tap in taps.found:
        multiples = torch.stack([tap.multiples(generator) for _ in range(1 if outputs else losses)])
        none = multiples.new_zeros(losses - len(multiples), *multiples.shape[1:])
        terms.append((tap.values, torch.cat([none, multiples])))
    for found in _gradients(terms, wanted, losses):
        slopes = dict(zip(sides, found, strict=False))

        def side(number: int, written: bool, slopes: Mapping[tuple[int, int], Tensor] = slopes) -> Side:
            use = walk.uses[number]
            key = use.operation, int(written)
            return Side(*(use.tokens.of(each.cpu()) for each in (sides[key].detach(), slopes[key])))

        yield Sample(
            {n: side(n, False) for n, use in enumerate(walk.uses) if use.tokens.place is not None},
            {n: side(n, True) for n in range(len(walk.uses))},
            {name: g.cpu() for name, g in zip(vectors, found[len(sides) :], strict=True)},
        )


def stacked_gradients(
    used: Uses,
    weights: Sequence[Mapping[str, Tensor]],
    inputs: Sequence[Tensor],
    alone: Collection[int],
    vectors: Collection[str],
    losses: int,
    generator: torch.Generator,
    own: Mapping[str, Tensor] | None = None,
    *,
    trusted: bool = False,
) -> list[dict[str, Tensor]]:
    """Return, for each set of weights, gradients (rows, *shape) of random combinations of outputs, by parameter.

    inputs: the inputs of the program, in order. Along a leading axis they hold equally many batches for each set of
    weights, except at the places `alone`. A batch has one row for each number that it outputs, up to `losses`. Rows
    that are not finite are left out. So are rows far below the largest, which may be rounding errors, e.g. of a
    saturated softmax.

    Each batch has its own copy of the weights, so that one backward pass gives the rows of all batches.

    trusted: whether to skip a check of the longest row against the gradient of its batch alone. Torch's rules for
    stacks are wrong for some operations, such as `select_scatter`. Raises RuntimeError if the two differ.
    """
    leaves = [Leaves(each, (), own) for each in weights]
    places = tuple(None if k in alone else 0 for k in range(len(inputs)))
    if not (sizes := {len(t) for t, place in zip(inputs, places, strict=True) if place == 0}):
        raise ValueError("Some input must differ between batches. Found none that does.")
    share, apart = sizes.pop() // len(weights), {}
    for name in {*used.program.parameters.values(), *vectors}:
        if (every := torch.stack([wide(each[name]) for each in leaves])).is_floating_point():
            apart[name] = every.repeat_interleave(share, 0).requires_grad_(name in vectors)

    def outputs(apart: Mapping[str, Tensor], *batch: Tensor) -> tuple[Tensor, ...]:
        return tuple(used.replay.run(lambda name: apart[name] if name in apart else leaves[0][name], batch, {})[0])

    with _one_by_one():
        ys = tuple(y for y in torch.vmap(outputs, in_dims=(0, *places))(apart, *inputs) if y.requires_grad)
        count, wanted = min(losses, sum(y[0].numel() for y in ys)), [apart[name] for name in vectors]
        multiples = [_multiples(y, count, generator) for y in ys]
        found = torch.autograd.grad(ys, wanted, multiples, is_grads_batched=True, allow_unused=True)
    none = (w.new_zeros(count, *w.shape) for w in wanted)  # grad gives None, not 0, in batches
    pairs = zip(found, none, wanted, strict=True)
    rows = [(o if g is None else g).transpose(0, 1).reshape(len(weights), -1, *w.shape[1:]) for g, o, w in pairs]
    size = torch.stack([g.reshape(*g.shape[:2], -1).norm(dim=2) for g in rows]).norm(dim=0)
    finite = size.nan_to_num(0.0, 0.0)
    good = size.isfinite() & (size >= _FAINT * finite.amax(1, keepdim=True))
    if not trusted:
        k, row = divmod(int(finite[0].argmax()), count)
        alike = {name: apart[name].detach()[k].requires_grad_(name in vectors) for name in apart}
        batch = [t if place is None else t[k] for t, place in zip(inputs, places, strict=True)]
        one = [y for y in outputs(alike, *batch) if y.requires_grad]
        up, first = [each[row, k] for each in multiples], [g[0, k * count + row] for g in rows]
        single = torch.autograd.grad(one, [alike[name] for name in vectors], up, materialize_grads=True)
        far = sum(float((g - h).square().sum()) for g, h in zip(first, single, strict=True))
        if not far <= _SAME**2 * sum(float(h.square().sum()) for h in single):
            raise RuntimeError("Gradients at a stack of inputs must be those at each. Found others")
    return [{name: g[k][own].cpu() for name, g in zip(vectors, rows, strict=True)} for k, own in enumerate(good)]


@contextmanager
def _one_by_one() -> Iterator[None]:
    """Suppress warnings about operations that vmap runs batch by batch, such as losses without decompositions."""
    torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._functorch._set_vmap_fallback_warning_enabled(True)  # type: ignore[attr-defined]


@runtime_checkable
class Tables(Protocol):
    """Provide weights, with single rows of some tables that are never formed as a whole."""

    def rows(self, name: str, index: Tensor) -> Tensor | None:
        """Return the rows of such a table at an index, None for any other parameter."""


class Leaves(dict[str, Tensor]):
    """Provide weights detached from their graph; those in `vectors` are float64 and require gradients."""

    def __init__(
        self, weights: Mapping[str, Tensor], vectors: Collection[str], own: Mapping[str, Tensor] | None = None
    ) -> None:
        self._weights, self._own = weights, weights if own is None else own
        super().__init__({name: wide(self[name]).requires_grad_() for name in vectors})

    def __missing__(self, name: str) -> Tensor:
        return self._weights[name].detach().to(self._own[name].device)

    def rows(self, name: str, index: Tensor) -> Tensor | None:
        """Return the rows of a table at an index, None if they must be taken from the whole table."""
        if not isinstance(self._weights, Tables) or name in self:
            return None
        rows = self._weights.rows(name, index.cpu())
        return None if rows is None else rows.to(index.device)


def _has_numbers(y: Tensor) -> bool:
    """Return whether an output has finite entries and no NaN; infinite entries are allowed, as masks have them."""
    return not bool(y.isnan().any()) and bool(torch.isfinite(y).any())


def _multiples(y: Tensor, losses: int, generator: torch.Generator) -> Tensor:
    """Return random coefficients (losses, *shape) of an output over its root mean square, 0 at infinite entries."""
    known, drawn = y.detach(), torch.randn(losses, *y.shape, generator=generator, dtype=torch.float64).to(y.device)
    finite = torch.isfinite(known)
    size = known[finite].square().mean().sqrt().clamp(_SMALL) if bool(finite.any()) else 1.0
    return drawn * finite / size


def _gradients(terms: Sequence[tuple[Tensor, Tensor]], wanted: Sequence[Tensor], losses: int) -> Iterator[list[Tensor]]:
    """Yield the gradients of each loss until one is not finite; all at once if they are few and can be batched."""
    outputs = [y for y, _ in terms]
    if losses > 1 and losses * sum(w.numel() for w in wanted) < _AT_ONCE:
        try:
            up = [each for _, each in terms]
            every = torch.autograd.grad(
                outputs, wanted, up, retain_graph=True, is_grads_batched=True, allow_unused=True
            )
        except (RuntimeError, IndexError):  # vmap does not take every operation
            pass
        else:
            if all(g is None or bool(torch.isfinite(g).all()) for g in every):
                none = [torch.zeros_like(w) for w in wanted]
                pairs = [*zip(every, none, strict=True)]
                yield from ([o if g is None else g[k] for g, o in pairs] for k in range(losses))
            return
    for k in range(losses):
        up = [each[k] for _, each in terms]
        found = torch.autograd.grad(outputs, wanted, up, retain_graph=k < losses - 1, materialize_grads=True)
        if not all(bool(torch.isfinite(g).all()) for g in found):
            return
        yield list(found)
