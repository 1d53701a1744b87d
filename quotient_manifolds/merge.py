"""Merge LoRA adapters in weight space, which does not depend on how they are factored."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from importlib.util import find_spec
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.files import expanded
from quotient_manifolds.linalg import product_svd
from quotient_manifolds.load.adapter_names import renamed_module, targets
from quotient_manifolds.load.adapters import attached, base_of, empty_base, present_module, resize
from quotient_manifolds.load.huggingface import renamings
from quotient_manifolds.load.lora import LoraAdapter, names_of, read_lora, write_adapter
from quotient_manifolds.messages import brief, shown

__all__ = ["MergedAdapter", "MergedModule", "merge_adapters"]

SUM_TOLERANCE = 1e-6  # of weights that must sum to 1
TARGETS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")  # which modules have updates


@dataclass(frozen=True)
class MergedModule:
    """Hold what became of the updates of one module.

    name: its path in the base model. size: (n, m) of its update. ranks: those of the adapters' updates, 0 where an
    adapter has none. rank: that of the merged update. norm: that of the mean (Frobenius). lost: that of what truncation
    cut off.
    """

    name: str
    size: tuple[int, int]
    ranks: tuple[int, ...]
    rank: int
    norm: float
    lost: float

    @property
    def relative_error(self) -> float:
        """Return which part of the mean is lost by truncation to the rank, |mean - merged| / |mean| (Frobenius)."""
        return self.lost / self.norm if self.norm else 0.0


@dataclass(frozen=True)
class MergedAdapter:
    """Hold an adapter that was merged of others, in memory.

    settings: the content of adapter_config.json. tensors: that of adapter_model.safetensors, by name. modules: what
    became of each module's updates. weights: those of the adapters. averaged: names of tensors that are stored whole
    (heads, biases, embeddings, buffers) and differ between adapters.
    """

    settings: dict[str, Any] = field(repr=False)
    tensors: dict[str, Tensor] = field(repr=False)
    modules: tuple[MergedModule, ...]
    weights: tuple[float, ...]
    averaged: tuple[str, ...] = ()

    @property
    def relative_error(self) -> float:
        """Return which part of the mean of all updates together is lost by truncation (Frobenius)."""
        norm = math.hypot(*(module.norm for module in self.modules))
        return math.hypot(*(module.lost for module in self.modules)) / norm if norm else 0.0

    def __str__(self) -> str:
        weights = ", ".join(f"{weight:g}" for weight in self.weights)
        s = "s" * (len(self.weights) > 1)
        head = f"{len(self.weights)} adapter{s} merged with weight{s} {weights}; {self.relative_error:.2%} lost in all"
        width = max((len(module.name) for module in self.modules), default=0)
        lines = [f"{each.name:{width}}  rank {each.rank}, {each.relative_error:.2%} lost" for each in self.modules]
        means = [f"stored whole and averaged, as they differ: {', '.join(self.averaged)}"] if self.averaged else []
        return "\n".join([head, *lines, *means])

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the adapter to a new directory, as peft does: `PeftModel.from_pretrained` and `load_model` read it.

        The directory is complete or not there at all. Raises ValueError if it is there already.
        """
        write_adapter(expanded(os.fspath(directory)), self.settings, self.tensors)


def merge_adapters(
    adapters: Sequence[str | os.PathLike[str]],
    weights: Sequence[float] | None = None,
    *,
    rank: int | None = None,
) -> MergedAdapter:
    """Compute the adapter that adds the weighted mean of what LoRA adapters of one base model add to its weights.

    An adapter adds s B A to the weight of a module, with s = lora_alpha / r, or lora_alpha / sqrt(r) with rsLoRA. For
    each module the result is the best approximation, in the Frobenius norm, of w_1 s_1 B_1 A_1 + ... + w_k s_k B_k A_k
    of rank at most `rank` (Eckart and Young 1936): a function of the products B A alone, which does not change if an
    adapter is written as (B Z^-1, Z A) with an invertible Z. Means of the factors B and A do change. It is computed in
    float64, without the matrices B A. Where two singular values at the cut are equal, the best approximation is one of
    many.

    adapters: directories of peft, at least one. weights: a number for each, 1/k by default; they are not normalised,
    as in peft's `add_weighted_adapter`: [1, 1] adds, [1, -1] subtracts. rank: by
    default the largest that the adapters have in the module; a module has no more than its size allows and than all
    adapters together have. An adapter without an update for a module counts as 0 there; a UserWarning says so.

    Names are those of the base model, also of modules that transformers has renamed since an adapter was trained. If
    the base model is on this machine, and peft installed, every tensor of the result is seen to arrive in it.

    What is stored as it is and not as an update (heads and other `modules_to_save`, biases, embeddings) must be in all
    adapters. It stays where it is the same in all; else it becomes the weighted mean, for which weights must sum to 1.

    The factors are balanced, B^T B = A A^T, at scale 1 (lora_alpha = r), in the dtype of the inputs. `modules` of the
    result says for each module which part of the mean was lost by the truncation (rounding to the dtype comes on top);
    `save` writes the directory.

    Raises ValueError in one sentence: adapters of different base models or tasks, kinds other than LoRA, DoRA, starts
    that change the base (PiSSA, ...), numbers that are not finite, shapes that do not fit, a wrong number of weights, a
    rank below 1 or above what any module allows, updates of modules that the base model does not have.
    """
    if not isinstance(adapters, (list, tuple)) or not adapters:
        raise ValueError(
            f"adapters must be a list of one or more directories. Found {brief(adapters)}: give a list, also of one"
        )
    given = _weights(weights, len(adapters))
    as_stored = [read_lora(expanded(os.fspath(each))) for each in adapters]
    _check_same_base(as_stored)
    first = as_stored[0]
    network = empty_base(first.path, first.settings, first.whole)
    read = _renamed(as_stored, network)
    _warn_of_modules(read)
    sizes = {name: _size(name, read) for name in sorted({name for adapter in read for name in adapter.updates})}
    most = max(min(size) for size in sizes.values())
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= most):
        raise ValueError(f"rank must be an integer from 1 to {most}, the most that a module has. Found {brief(rank)}")
    tensors = _whole(read, given)
    modules = []
    for name, size in sizes.items():
        module, stored = _merged(name, size, read, given, rank)
        modules.append(module)
        tensors |= stored
    settings = _settings(read, modules, network, keep=read == as_stored)
    if network is not None and (base := base_of(first.path)) and find_spec("peft"):
        resize(network, tensors)
        attached(network, settings, tensors, base, "merged adapter for the model")
    averaged = tuple(name for name in read[0].whole if not _is_one([adapter.whole[name] for adapter in read]))
    return MergedAdapter(settings, tensors, tuple(modules), given, averaged)


def _weights(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    if weights is None:
        return (1 / count,) * count
    if not isinstance(weights, (list, tuple)) or len(weights) != count:
        raise ValueError(f"weights must be a list with a number for each of {count} adapters. Found {brief(weights)}")
    for each in weights:
        if isinstance(each, bool) or not isinstance(each, Real) or not math.isfinite(each):
            raise ValueError(f"weights must be finite numbers. Found {brief(each)}")
    return tuple(map(float, weights))


def _check_same_base(read: Sequence[LoraAdapter]) -> None:
    first, *others = read
    for other in others:
        for what, mine, its in (
            ("base models", *_bases(first, other)),
            ("revisions of it", *((each.settings.get("revision") or "main") for each in (first, other))),
            ("tasks", *(each.settings.get("task_type") for each in (first, other))),
        ):
            if mine != its:
                raise ValueError(
                    f"adapters must be of one base model and one task. Found different {what} in {shown(first.path)} "
                    f"and {shown(other.path)}: {shown(mine)} and {shown(its)}"
                )


def _bases(*both: LoraAdapter) -> tuple[Any, ...]:
    """Return the base models of two adapters: as directories if both are on this machine, else as they are named."""
    here = [base_of(each.path) for each in both]
    if None not in here:
        return tuple(os.fspath(each.resolve()) for each in here if each is not None)
    return tuple(each.settings.get("base_model_name_or_path") for each in both)


def _renamed(read: Sequence[LoraAdapter], network: nn.Module | None) -> list[LoraAdapter]:
    """Return adapters with the present names of modules: those of the base, or of transformers' types of models.

    Without the base, a type of model whose renamings make modules of several adapters one tells them, if one of the
    adapters has the present names already.
    """
    if network is not None:
        return [adapter.renamed(present_module(network)) for adapter in read]
    sets = [frozenset(adapter.updates) for adapter in read]
    fewest, found = len(frozenset().union(*sets)), None
    for rename in renamings() if len(set(sets)) > 1 else ():
        renamed = [frozenset(renamed_module(module, rename) for module in each) for each in sets]
        if len(count := frozenset().union(*renamed)) < fewest and any(map(frozenset.__eq__, renamed, sets)):
            fewest, found = len(count), rename
    if found is None:
        return list(read)
    return [adapter.renamed(lambda module: renamed_module(module, found)) for adapter in read]


def _warn_of_modules(read: Sequence[LoraAdapter]) -> None:
    every = {name for adapter in read for name in adapter.updates}
    lacking = [(adapter.path, sorted(every - adapter.updates.keys())) for adapter in read]
    if found := [f"{shown(path)} without {len(names)} (such as {shown(names[0])})" for path, names in lacking if names]:
        warnings.warn(
            f"adapters should have updates of the same modules. Found {', '.join(found)} of {len(every)} modules: an "
            "update that an adapter lacks counts as 0",
            UserWarning,
            stacklevel=3,
        )


def _size(name: str, read: Sequence[LoraAdapter]) -> tuple[int, int]:
    """Return the size of a module's updates; ValueError unless all adapters have them in one form."""
    held = [(adapter, adapter.updates[name]) for adapter in read if name in adapter.updates]
    (first, mine), *others = held
    for other, its in others:
        if (mine.A.shape[1:], mine.B.shape[0], mine.embedding) != (its.A.shape[1:], its.B.shape[0], its.embedding):
            raise ValueError(
                f"updates of {shown(name)} must be of one layer. Found {mine.size[0]} x {mine.size[1]} in "
                f"{shown(first.path)}, {its.size[0]} x {its.size[1]} in {shown(other.path)}"
            )
    return mine.size


def _merged(
    name: str, size: tuple[int, int], read: Sequence[LoraAdapter], weights: Sequence[float], rank: int | None
) -> tuple[MergedModule, dict[str, Tensor]]:
    """Return what became of a module's updates, and its two factors by their names in the file."""
    updates = [adapter.updates.get(name) for adapter in read]
    ranks = tuple(0 if update is None else update.rank for update in updates)
    held = [(weight, update) for weight, update in zip(weights, updates, strict=True) if update is not None]
    kept = min(max(ranks) if rank is None else rank, *size, sum(ranks))
    B, A, norm, lost = truncated_sum([(weight * update.scale, *update.matrices()) for weight, update in held], kept)
    like = held[0][1]
    factors = [part for _, update in held for part in (update.A, update.B)]
    key_A, key_B = names_of(name, like.embedding)
    stored = {key_A: A.reshape(kept, *like.A.shape[1:]), key_B: B.reshape(-1, kept, *like.B.shape[2:])}
    rounded = {key: _rounded(value, factors, key) for key, value in stored.items()}
    return MergedModule(name, size, ranks, kept, norm, lost), rounded


def _whole(read: Sequence[LoraAdapter], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return the tensors that are no updates: those of all adapters, or their weighted mean where they differ."""
    first, *others = read
    for other in others:
        for name in sorted(first.whole.keys() ^ other.whole.keys()):
            lacking, having = (other, first) if name in first.whole else (first, other)
            raise ValueError(
                f"what is stored whole, as a head or a bias, must be in all adapters. Found {shown(name)} in "
                f"{shown(having.path)} and not in {shown(lacking.path)}: save both with one modules_to_save and bias"
            )
    return {name: _mean(name, [adapter.whole[name] for adapter in read], weights) for name in first.whole}


def _mean(name: str, values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    first = values[0]
    if len(shapes := {tuple(value.shape) for value in values}) > 1:
        raise ValueError(f"{shown(name)} must have one shape. Found {' and '.join(map(str, sorted(shapes)))}")
    if _is_one(values):
        return first
    if not abs(sum(weights) - 1) <= SUM_TOLERANCE:
        raise ValueError(
            f"weights must sum to 1, for {shown(name)} is stored whole and differs between adapters. Found a sum of "
            f"{sum(weights):g}: divide them by it"
        )
    mean = sum((weight * value.double() for weight, value in zip(weights, values, strict=True)), torch.zeros(()))
    return _rounded(mean, values, name)


def _is_one(values: Sequence[Tensor]) -> bool:
    """Return whether all are one tensor."""
    return all(torch.equal(values[0].double(), value.double()) for value in values)


def _rounded(value: Tensor, like: Sequence[Tensor], name: str) -> Tensor:
    rounded = value.to(reduce(torch.promote_types, (each.dtype for each in like)))
    if not torch.isfinite(rounded).all():
        raise ValueError(f"{shown(name)}, merged, must be finite in {rounded.dtype}. Found a larger number")
    return rounded


def _settings(
    read: Sequence[LoraAdapter], modules: Sequence[MergedModule], network: nn.Module | None, *, keep: bool
) -> dict[str, Any]:
    """Return the settings of the first adapter, with ranks, scales and targets of the merged one.

    The targets stay if `keep`, and they are the same in all.
    """
    settings = dict(read[0].settings)
    r = max(module.rank for module in modules)
    lower = {_pattern(module.name, modules): module.rank for module in modules if module.rank < r}
    settings |= {"r": r, "lora_alpha": r, "rank_pattern": lower, "alpha_pattern": dict(lower), "use_rslora": False}
    # How an adapter is started, which is over.
    settings |= {"init_lora_weights": True, "inference_mode": True, "loftq_config": {}}
    settings |= dict.fromkeys(("eva_config", "corda_config", "lora_ga_config"))
    if not keep or any(_targets(adapter.settings) != _targets(settings) for adapter in read):
        settings |= dict.fromkeys(TARGETS)
        names = [module.name for module in modules]
        among = names if network is None else [name for name, _ in network.named_modules()]
        settings["target_modules"] = targets(names, names, among)
    return settings


def _pattern(name: str, modules: Sequence[MergedModule]) -> str:
    """Return a key for rank_pattern and alpha_pattern: peft takes it as an expression for the end of a module's name.

    The name itself, which other readers look up, unless it is not one of plain letters or matches another module too.
    """
    plain = re.fullmatch(r"[\w.]+", name) is not None
    alone = plain and sum(re.search(rf"(^|\.){name}$", module.name) is not None for module in modules) == 1
    return name if alone else f"^{re.escape(name)}"


def _targets(settings: Mapping[str, Any]) -> list[Any]:
    """Return which modules are to have updates, in a form that can be compared: peft stores sets as lists."""
    return [sorted(value, key=str) if isinstance(value := settings.get(key), list) else value for key in TARGETS]


def truncated_sum(terms: Sequence[tuple[float, Tensor, Tensor]], rank: int) -> tuple[Tensor, Tensor, float, float]:
    """Compute the best approximation B A of this rank of the sum of c_i B_i A_i over terms (c_i, B_i, A_i).

    With [c_1 B_1 | ... | c_k B_k] and the A_i, stacked, it is found without an n x m matrix, and depends on the
    products B_i A_i alone: the factors are balanced (B^T B = A A^T = the singular values), and the largest entry of
    every column of B is positive. Shapes: B_i (n, r_i), A_i (r_i, m); rank at most n, m and the sum r of the r_i. Time
    O((n + m) r^2) and memory O((n + m) r), in float64.

    Returns B (n, rank) and A (rank, m), the norm of the sum (Frobenius), and that of what was cut off.
    """
    B, A = torch.cat([c * B.double() for c, B, _ in terms], dim=1), torch.cat([A.double() for _, _, A in terms])
    left, s, right = product_svd(B, A.mT)
    root = s[:rank].sqrt()
    return left[:, :rank] * root, (right[:, :rank] * root).mT, float(s.norm()), float(s[rank:].norm())
