"""Store the symmetries of a model: symmetric pairs, other reparameterizations, and refused candidates with reasons."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from quotient_manifolds.check import check_number, check_one_of, meant
from quotient_manifolds.messages import text_table
from quotient_manifolds.replica import twin
from quotient_manifolds.symmetries.canonical import canonical
from quotient_manifolds.symmetries.checks import check_model, check_parameters, check_weights, fitting, generator_of
from quotient_manifolds.symmetries.groups import Draft
from quotient_manifolds.symmetries.groups import Symmetry as Acting
from quotient_manifolds.symmetries.pair import BESIDE_ATTENTION, Params, SymmetricPair
from quotient_manifolds.symmetries.reparameterization import REDUNDANT, Reparameterization
from quotient_manifolds.symmetries.representatives import gaussian_element

Model = TypeVar("Model", bound=nn.Module)

Scope = Literal["all", "pairs", "paper"]
"""Which symmetries to use: all; pairs of attention and adapters and redundant biases; or pairs with biases as rows."""

Symmetry = SymmetricPair | Reparameterization

NAMED = "reparameterization: first parameter it moves, kind"
"""The scheme by which reparameterizations are named; these names are not names of parameters."""

HOW_TO = "docs/own_attention.md shows how to declare symmetries"
"""Where users find help when symmetries are not found."""


@dataclass(frozen=True)
class Refused:
    """Name a part of a model that looks like a symmetry but is not one, with the reason."""

    name: str  # module and kind, as for a pair; "" if charges refuse it, for the reason then names the parameters
    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" if self.name else self.reason


@dataclass(frozen=True, repr=False)
class Symmetries:
    """Store the symmetric pairs of a model, its other reparameterizations, and the parameters in no pair.

    rest: the parameters in no pair. refused: candidates that are no continuous symmetries, with reasons. traced: pairs
    that were found in a run of the model; all other pairs are declared. held: properties of the inputs that could not
    be varied. The symmetries are established only for inputs that share these properties.
    """

    pairs: tuple[SymmetricPair, ...]
    rest: tuple[str, ...] = ()
    refused: tuple[Refused, ...] = ()
    reparameterizations: tuple[Reparameterization, ...] = ()
    traced: tuple[SymmetricPair, ...] = field(default=(), compare=False)
    held: tuple[str, ...] = ()

    @property
    def declared(self) -> tuple[SymmetricPair, ...]:
        """Return the pairs that were declared by hand, not derived from the model's operations: assumed to be true."""
        return tuple(pair for pair in self.pairs if pair not in self.traced)

    def within(self, scope: Scope) -> Symmetries:
        """Return the symmetries within the scope."""
        check_one_of("scope", scope, get_args(Scope))
        if scope == "all":
            return self
        kept = self.without([pair.name for pair in self.pairs if pair.kind in BESIDE_ATTENTION])
        biases = (each for each in kept.reparameterizations if each.kind == REDUNDANT and each.names[0] in kept.names)
        return replace(kept, reparameterizations=() if scope == "paper" else tuple(biases))

    def beside(self, frozen: Collection[str]) -> Symmetries:
        """Return these symmetries without reparameterizations that change both frozen and trainable parameters.

        Such a group leaves the function unchanged only if it acts on both. A measure of the trainable parameters alone
        is therefore not invariant under it.
        """
        frozen = {frozen} if isinstance(frozen, str) else set(frozen)
        kept = (each for each in self.reparameterizations if len(set(each.names) - frozen) in (0, len(each.names)))
        return replace(self, reparameterizations=tuple(kept))

    def without(self, names: Collection[str]) -> Symmetries:
        """Return these symmetries without the named pairs and reparameterizations. names: several, or a single string.

        Parameters of a removed pair move to `rest` unless another pair has them. ValueError for an unknown name.
        """
        names = {names} if isinstance(names, str) else set(names)
        if unknown := names - (known := {each.name for each in self.every}):
            name = min(unknown)
            raise ValueError(f"names must be those of symmetries found. Found {name!r}{meant(name, [*known])}")
        pairs = tuple(pair for pair in self.pairs if pair.name not in names)
        kept = replace(
            self,
            pairs=pairs,
            reparameterizations=tuple(each for each in self.reparameterizations if each.name not in names),
        )
        return replace(kept, rest=(*self.rest, *sorted(set(self.names) - set(kept.names))))

    def refusing(self, reasons: Mapping[str, str]) -> Symmetries:
        """Return these symmetries with some of them refused. reasons: the reason by the name of the symmetry."""
        refused = (Refused(each.name, each.kind, reasons[each.name]) for each in self.every if each.name in reasons)
        return replace(self.without(reasons), refused=(*refused, *self.refused))

    def transformed(self, model: Model, *, scale: float = 1.0, log_scale: float = 1.0, seed: int = 0) -> Model:
        """Return a copy of the model elsewhere on its orbit: the same function, other parameters.

        The parameters are drawn by `random_representative` with the same arguments. Frozen parameters change, too (but
        see `beside`). Buffers, ties, mode, hooks and dtype are copied, and the model itself is not changed. A model in
        bfloat16 or float16 is rounded once more, which changes its outputs by several percent: a UserWarning says so.
        Raises the errors of `random_representative`, and TypeError for anything but a module.
        [paper, the invariance test of Sec. 6.2, ICML version]

        >>> model = torch.nn.Sequential(torch.nn.Linear(5, 2), torch.nn.Linear(2, 4)).eval()
        >>> x = torch.randn(3, 5)
        >>> twin = find_symmetries(model, x).transformed(model, seed=1)
        >>> torch.allclose(twin(x), model(x), atol=1e-4), torch.allclose(twin[0].weight, model[0].weight)
        (True, False)
        """
        check_model(model)
        moved = random_representative(model, self, scale=scale, log_scale=log_scale, seed=seed)
        there = twin(model)
        with torch.no_grad():
            for name, w in there.named_parameters():
                w.copy_(moved[name])
        return there

    @property
    def groups(self) -> tuple[Acting, ...]:
        """Return the groups in an order in which they may act: first reparameterizations, then pairs."""
        own = (each.symmetry for each in self.reparameterizations)
        return (*own, *(pair.symmetry for pair in self.pairs))

    @property
    def every(self) -> tuple[Symmetry, ...]:
        """Return all pairs and reparameterizations, in this order."""
        return (*self.pairs, *self.reparameterizations)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters that any pair changes, each once."""
        return tuple(dict.fromkeys(name for pair in self.pairs for name in pair.names))

    @property
    def moved(self) -> tuple[str, ...]:
        """Return the parameters that any pair or reparameterization changes, each once."""
        folded = (name for reparameterization in self.reparameterizations for name in reparameterization.names)
        return tuple(dict.fromkeys((*self.names, *folded)))

    @property
    def families(self) -> dict[str, int]:
        """Return the dimension of the symmetry group by kind, over pairs and reparameterizations."""
        found = Counter[str]()
        for each in self.every:
            found.update(each.families)
        return dict(found)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {
            "pairs": [
                {**asdict(pair), "group": pair.group, "heads": pair.heads, "n": pair.n, "m": pair.m, "h": pair.h}
                for pair in self.pairs
            ],
            "reparameterizations": [
                {"name": each.name, "kind": each.kind, "names": list(each.names), "families": dict(each.families)}
                for each in self.reparameterizations
            ],
            "refused": [asdict(refusal) for refusal in self.refused],
            "rest": list(self.rest),
            "held": list(self.held),
        }

    def __repr__(self) -> str:
        pairs = f"{len(self.pairs)} pair{'s' * (len(self.pairs) != 1)}"
        return f"Symmetries(of {sum(self.families.values()):,} dimensions, {pairs})"

    def __str__(self) -> str:
        by_kind = ", ".join(f"{kind} {size:,}" for kind, size in self.families.items())
        blocks = [f"symmetries of {sum(self.families.values()):,} dimensions" + (f": {by_kind}" if by_kind else "")]
        pairs = [
            (pair.name, pair.group, f"{pair.n} x {pair.h}", f"{pair.m} x {pair.h}", str(len(pair.names)))
            for pair in self.pairs
        ]
        header = ("symmetric pair", "group", "G", "H", "tensors")
        if pairs:
            blocks.append(text_table(header, pairs))
        if self.reparameterizations:
            free = [(each.name, each.group) for each in self.reparameterizations]
            blocks.append(text_table((NAMED, "group"), free))
        for title, lines in (
            ("refused:", without_layers(map(str, self.refused))),
            (f"in no pair, {len(self.rest)} tensors:", without_layers(self.rest)),
        ):
            if lines:
                blocks.append("\n  ".join((title, *lines)))
        return "\n\n".join(blocks)


def without_layers(lines: Iterable[str]) -> tuple[str, ...]:
    """Merge lines that differ only in layer numbers into one line with their count."""
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", line) for line in lines)
    return tuple(line if count == 1 else f"{line}  ({count})" for line, count in counts.items())


# ---- other points of the orbit


@torch.no_grad()
def random_representative(
    model_or_params: nn.Module | Mapping[str, Tensor],
    symmetries: Symmetries,
    *,
    scale: float = 1.0,
    log_scale: float = 1.0,
    seed: int = 0,
) -> Params:
    """Apply a random element of every symmetry group; return parameters of the same function elsewhere on its orbit.

    Returns all named parameters as new tensors; `Symmetries.transformed` returns a model with them.

    First, translations shift numbers by log_scale x Gaussian times their typical size. Then scales multiply by
    exp(log_scale x Gaussian), and matrices exp(log_scale X) act, with X random of spectral norm 1. Last, pairs become
    (G A^-1, H A^T), with A = scale x Gaussian for every head: real matrices, complex numbers for rotary planes,
    scale x exp(Gaussian) if only positive numbers act. All is computed in float64 and cast back to each dtype.
    ValueError for weights without values, NaN or infinite, and for a scale so extreme that new weights overflow.
    [paper, the invariance test of Sec. 6.2, ICML version]
    """
    check_number("scale", scale, positive=True)
    check_number("log_scale", log_scale)
    generator = generator_of(seed)
    stored, moved = _start(model_or_params, symmetries)
    with fitting():
        drawn = {pair.name: scale * gaussian_element(pair, generator) for pair in symmetries.pairs}
        draft = Draft({})
        draft.update(moved)  # copies, which may be written to
        for symmetry in replace(symmetries, pairs=()).groups:
            symmetry.move(draft, symmetry.drawn(draft, generator, log_scale))
        moved = {**draft}
        for pair in symmetries.pairs:
            pair.write(moved, pair.act(drawn[pair.name], pair.read(moved)))
    return _rounded(moved, stored, symmetries, f"A = {scale:g} x Gaussian")


def balance(model_or_params: nn.Module | Mapping[str, Tensor], symmetries: Symmetries) -> Params:
    """Return the balanced parameters on the orbit, up to rounding the same from every point of the orbit.

    They are unique unless singular values coincide. In every pair G^T G = H^T H is diagonal (|g| = |k| for planes of a
    rotary embedding). Returns all named parameters as new tensors. Computed in float64.
    """
    stored, moved = _start(model_or_params, symmetries)
    with fitting():
        moved = canonical(symmetries.groups, moved).params
    return _rounded(moved, stored, symmetries, "balancing")


def _start(
    model_or_params: nn.Module | Mapping[str, Tensor], symmetries: Symmetries
) -> tuple[Mapping[str, Tensor], Params]:
    """Return the parameters and copies of them, in float64 if a symmetry changes them. Warn if rounding will matter."""
    if isinstance(model_or_params, nn.Module):
        stored: Mapping[str, Tensor] = dict(model_or_params.named_parameters())
    else:
        check_parameters(model_or_params)
        stored = model_or_params
    check_symmetries(symmetries)
    check_weights(stored, symmetries.moved)
    moving = set(symmetries.moved)
    warn_of_rounding(stored[name].dtype for name in symmetries.moved)
    kinds = {name: torch.float64 if name in moving else w.dtype for name, w in stored.items()}
    return stored, {name: w.detach().to(kinds[name], copy=True) for name, w in stored.items()}


def warn_of_rounding(stored: Iterable[torch.dtype]) -> None:
    """Warn if changed parameters are stored in less precision than float32, because rounding changes the function."""
    if short := [kind for kind in dict.fromkeys(stored) if kind.is_floating_point and torch.finfo(kind).eps > 1e-4]:
        percent = 50 * torch.finfo(short[0]).eps
        warnings.warn(
            f"Rounding to {short[0]} changes the function: moved weights by up to {percent:.2g} %, outputs by more; "
            "transform model.float() instead, or compare the outputs",
            stacklevel=4,
        )


def _rounded(moved: Params, stored: Mapping[str, Tensor], symmetries: Symmetries, by: str) -> Params:
    """Return parameters cast to the dtypes of the stored ones; ValueError if they overflow."""
    found = {name: w.to(stored[name].dtype) for name, w in moved.items()}
    ends = {name: torch.stack(found[name].aminmax()) for name in symmetries.moved if found[name].numel()}
    overflown = [name for name, each in ends.items() if not bool(torch.isfinite(each).all())]
    if overflown:
        raise ValueError(
            f"transforming {overflown[0]!r} by {by} overflows {found[overflown[0]].dtype}: "
            "choose a scale nearer 1 or a wider dtype."
        )
    return found


def check_symmetries(symmetries: Any) -> None:
    """Raise TypeError for anything but Symmetries."""
    if not isinstance(symmetries, Symmetries):
        found = f"an object of type {type(symmetries).__name__}"
        raise TypeError(f"symmetries must be Symmetries, as find_symmetries returns them. Found {found}.")
