"""Define the interface of continuous symmetries: the action of a group, and the charges of its generators."""

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
    """Act on parameters by a Lie group. Generators X are tensors of one shape; `exp` maps them to group elements."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Return the parameters that `act` changes, each once."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the parameters that `act` depends on, each once; those that it changes come first."""
        return self.names

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Return the shape of generators."""

    @abstractmethod
    def move(self, draft: Draft, element: Tensor) -> None:
        """Act by a group element on the parameters in a draft, in place.

        Raises ValueError if the element or a parameter has another shape, or if a parameter is missing.
        """

    def act(self, params: Mapping[str, Tensor], element: Tensor) -> Params:
        """Return all parameters, acted on by a group element and cast once to their dtypes; `params` is not changed.

        Raises ValueError like `move`.
        """
        draft = Draft(params)
        self.move(draft, element)
        return draft.finished()

    @abstractmethod
    def element(self, generator: torch.Generator, scale: float = 1.0) -> Tensor:
        """Draw a random group element at a distance of about `scale` from the identity."""

    @abstractmethod
    def charge(self, params: Mapping[str, Tensor], cotangent: Mapping[str, Tensor]) -> Charge:
        """Compute the charge C with <C, X> = <cotangent, tangent(params, X)>, and the size of its summands.

        C has the shape of a generator. With the gradient of a loss as cotangent, C vanishes at all parameters if and
        only if the loss is invariant.
        """

    @abstractmethod
    def dimension(self, params: Mapping[str, Tensor]) -> int:
        """Return the rank of X -> tangent(params, X); generators that change no parameter do not count."""

    def gains(self, params: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """Return slices of gains, one entry per row, each of which a single log-scale can bring to 1."""
        return ()

    @property
    def units(self) -> tuple[Rows, ...]:
        """Return the entries that are units (gains) between channels and parameters; `act` does not change them."""
        return ()

    @property
    def mixes(self) -> bool:
        """Return whether group elements are matrices that mix the channels of a wire."""
        return False

    @property
    def identity(self) -> Tensor:
        """Return the identity element."""
        return torch.zeros(self.shape, dtype=torch.float64)

    def compose(self, first: Tensor, then: Tensor) -> Tensor:
        """Return the group element that acts like `first` followed by `then`; the default is for commuting ones."""
        return first + then

    def inverse(self, element: Tensor) -> Tensor:
        """Return the inverse of a group element."""
        return -element

    def condition(self, element: Tensor) -> float:
        """Return the condition number of a group element; 1 if it only rotates or translates."""
        return 1.0

    def bounded(self, element: Tensor, condition: float) -> Tensor:
        """Return the nearest element with a condition number of at most `condition`; the identity if none is found."""
        return element

    def stretching(self, X: Tensor) -> Tensor:
        """Return the stretching part S of a generator X; the condition number of exp(X) is at most exp(2 |S|)."""
        return torch.zeros_like(X)

    def overlap(self, params: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> Tensor:
        """Return M with <M, R> = <target, act(params, R)> + constant for orthogonal elements R, if all units are 1."""
        return torch.zeros_like(self.identity)

    def nearest(self, overlap: Tensor) -> Tensor:
        """Return the orthogonal element R with the largest <M, R>, M from `overlap`: it acts nearest to the target."""
        return self.identity

    @property
    def blocks(self) -> Iterator[tuple[Algebra, Tensor | None, tuple[tuple[Rows, Tensor, bool], ...]]]:
        """Yield each block of matrices: its algebra, its allowed reflections, and the rows that it acts on.

        Rows are given as (entries of a parameter, row numbers (m,), whether they write the channels).
        """
        return iter(())

    def basis(self) -> Tensor:
        """Return generators (k, *shape) that span the algebra."""
        return torch.eye(self.identity.numel(), dtype=torch.float64).view(-1, *self.shape)

    def project(self, X: Tensor) -> Tensor:
        """Project tensors (..., *shape) orthogonally onto the generators."""
        return X

    def exp(self, X: Tensor) -> Tensor:
        """Return the group element exp(X) of a generator X."""
        return self.generator(X)

    def generator(self, X: Tensor) -> Tensor:
        """Return generators (..., *shape) in float64. Raises ValueError for another shape, or if X is complex."""
        if tuple(X.shape[X.ndim - len(self.shape) :]) != self.shape or X.is_complex():
            raise ValueError(f"a generator must be real, of shape {self.shape}. Found {tuple(X.shape)}, {X.dtype}.")
        return X.double()

    def moved(self, params: Mapping[str, Tensor], generator: torch.Generator, scale: float = 1.0) -> Params:
        """Return the parameters, acted on by a random element at a distance of about `scale` from the identity.

        Translations are relative to the root mean square of the entries that they change.
        """
        return self.act(params, self.drawn(params, generator, scale))

    def drawn(self, params: Mapping[str, Tensor], generator: torch.Generator, scale: float = 1.0) -> Tensor:
        """Draw the random element by which `moved` acts."""
        return self.element(generator, scale)

    def flow(self, params: Mapping[str, Tensor], X: Tensor) -> Params:
        """Return act(params, exp(X))."""
        return self.act(params, self.exp(X))

    def tangent(self, params: Mapping[str, Tensor], X: Tensor) -> Params:
        """Return d/dt act(params, exp(t X)) at t = 0, float64, for the parameters in `names`.

        For every group, the charge is linear in the cotangent, and the tangent is its transpose. X may be a batch
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
