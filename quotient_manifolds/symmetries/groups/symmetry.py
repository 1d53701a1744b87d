"""State what every continuous symmetry is: an action, and the charges of its generators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.symmetries.groups.algebras import Algebra
from quotient_manifolds.symmetries.groups.rows import Draft, Params, Record, Rows, flattened
from quotient_manifolds.symmetries.groups.wire import Charge


@dataclass(frozen=True, eq=False)
class Symmetry(Record, ABC):
    """Let a Lie group act on parameters. Generators X are tensors of one shape, `exp` makes them elements."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Return the parameters that `act` changes, each once."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the parameters that `act` reads, each once: those that it changes first."""
        return self.names

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Return the shape of generators."""

    @abstractmethod
    def move(self, draft: Draft, element: Tensor) -> None:
        """Act on the parameters in a draft by an element (ValueError for one of another shape, and for parameters that
        are missing or have another shape).
        """

    def act(self, params: Mapping[str, Tensor], element: Tensor) -> Params:
        """Return all parameters, acted on by an element, cast once to their dtypes; nothing given is changed.

        Raises ValueError as `move` does.
        """
        draft = Draft(params)
        self.move(draft, element)
        return draft.finished()

    @abstractmethod
    def element(self, generator: torch.Generator, scale: float = 1.0) -> Tensor:
        """Draw an element of the group, at a distance of about `scale` from the identity."""

    @abstractmethod
    def charge(self, params: Mapping[str, Tensor], cotangent: Mapping[str, Tensor]) -> Charge:
        """Compute C, of the shape of generators, with <C, X> = <cotangent, tangent(params, X)>, and its summands' size.

        With the gradient of a loss for a cotangent, C vanishes at all parameters if and only if the loss is invariant.
        """

    @abstractmethod
    def dimension(self, params: Mapping[str, Tensor]) -> int:
        """Return the rank of X -> tangent(params, X): generators that move no parameter do not count."""

    def gains(self, params: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """Return slices of gains, one number each, that log-scales of their own bring to 1."""
        return ()

    @property
    def units(self) -> tuple[Rows, ...]:
        """Return the entries that are units between channels and what is moved, which it does not change."""
        return ()

    @property
    def mixes(self) -> bool:
        """Return whether elements mix channels that have partners, and do not only scale entries or add to them."""
        return False

    @property
    def identity(self) -> Tensor:
        """Return the element that changes nothing."""
        return torch.zeros(self.shape, dtype=torch.float64)

    def compose(self, first: Tensor, then: Tensor) -> Tensor:
        """Return the element that acts as two do, one after the other."""
        return first + then

    def inverse(self, element: Tensor) -> Tensor:
        """Return the element that undoes another."""
        return -element

    def condition(self, element: Tensor) -> float:
        """Return how much more an element stretches some numbers than others: 1 where it only adds or turns."""
        return 1.0

    def bounded(self, element: Tensor, condition: float) -> Tensor:
        """Return the nearest element with a condition number of at most this; the identity where that is none."""
        return element

    def stretching(self, X: Tensor) -> Tensor:
        """Return the part of a generator that stretches: the condition number of exp(X) is at most e^2 to its norm."""
        return torch.zeros_like(X)

    def overlap(self, params: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> Tensor:
        """Return M with <M, R> = <target, act(params, R)> + constant for orthogonal elements R (units of 1)."""
        return torch.zeros_like(self.identity)

    def nearest(self, overlap: Tensor) -> Tensor:
        """Return the orthogonal element with the largest <M, R>: of those that brings parameters nearest to others."""
        return self.identity

    @property
    def blocks(self) -> Iterator[tuple[Algebra, Tensor | None, tuple[tuple[Rows, Tensor, bool], ...]]]:
        """Yield the algebras of matrices, which reflections count, and rows (m,) of parameters that they act on, with
        whether these write channels.
        """
        return iter(())

    def basis(self) -> Tensor:
        """Return generators (k, *shape) that span all."""
        return torch.eye(self.identity.numel(), dtype=torch.float64).view(-1, *self.shape)

    def project(self, X: Tensor) -> Tensor:
        """Return the generators nearest to tensors of their shape."""
        return X

    def exp(self, X: Tensor) -> Tensor:
        """Return the element that a generator leads to in unit time."""
        return self.generator(X)

    def generator(self, X: Tensor) -> Tensor:
        """Return generators (..., *shape) in float64 (ValueError for another shape)."""
        if tuple(X.shape[X.ndim - len(self.shape) :]) != self.shape or X.is_complex():
            raise ValueError(f"a generator must be real, of shape {self.shape}. Found {tuple(X.shape)}, {X.dtype}.")
        return X.double()

    def moved(self, params: Mapping[str, Tensor], generator: torch.Generator, scale: float = 1.0) -> Params:
        """Return the parameters, acted on by a random element at a distance of about `scale` from the identity.

        What is added is relative to the size of what it is added to.
        """
        return self.act(params, self.drawn(params, generator, scale))

    def drawn(self, params: Mapping[str, Tensor], generator: torch.Generator, scale: float = 1.0) -> Tensor:
        """Return the random element by which `moved` acts."""
        return self.element(generator, scale)

    def flow(self, params: Mapping[str, Tensor], X: Tensor) -> Params:
        """Return act(params, exp(X))."""
        return self.act(params, self.exp(X))

    def tangent(self, params: Mapping[str, Tensor], X: Tensor) -> Params:
        """Return d/dt act(params, exp(t X)) at t = 0, float64, for the parameters in `names`.

        The charge is linear in the cotangent, and the tangent is its transpose, whatever the group. X may be a batch
        (k, *shape); tangents are then (k, *shape of the parameter).
        """
        X, x = self.generator(X), {name: w.detach() for name, w in params.items()}
        with torch.inference_mode(False), torch.enable_grad():
            y = {}
            for name in self.names:
                flattened(x, name, tuple(x[name].shape) if name in x else ())
                y[name] = torch.zeros_like(x[name], dtype=torch.float64, requires_grad=True)
            if not y:
                return {}
            C = self.charge(x, y).value
            X = X.to(C.device, copy=True)
            parts = torch.autograd.grad(C, list(y.values()), X, is_grads_batched=X.ndim > C.ndim)
        return dict(zip(y, parts, strict=True))
