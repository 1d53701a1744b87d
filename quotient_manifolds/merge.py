"""Merge LoRA adapters in weight space, so that the result does not depend on how they are factored."""

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
from quotient_manifolds.load.adapter_names import renamed_module, target_modules
from quotient_manifolds.load.adapters import attach_adapter, base_of, current_module, empty_base, resize_vocabulary
from quotient_manifolds.load.huggingface import renamings
from quotient_manifolds.load.lora import LoraAdapter, names_of, read_lora, write_adapter
from quotient_manifolds.messages import brief, shown

__all__ = ["MergedAdapter", "MergedModule", "merge_adapters"]

SUM_TOLERANCE = 1e-6  # for weights that must sum to 1
TARGETS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")  # select modules with updates


@dataclass(frozen=True)
class MergedModule:
    """Hold the result of merging the updates of one module.

    name: its path in the base model. size: (n, m) of its update. ranks: of the adapters' updates, 0 if an adapter has
    none. rank: of the merged update. norm, lost: Frobenius norms of the mean, and of the part that truncation removes.
    """

    name: str
    size: tuple[int, int]
    ranks: tuple[int, ...]
    rank: int
    norm: float
    lost: float

    @property
    def relative_error(self) -> float:
        """Return |mean - merged| / |mean| in the Frobenius norm, the error of truncation to the rank."""
        return self.lost / self.norm if self.norm else 0.0


@dataclass(frozen=True)
class MergedAdapter:
    """Hold a merged adapter in memory.

    settings: the content of adapter_config.json. tensors: the content of adapter_model.safetensors, by name. modules:
    the result for each module. weights: of the adapters. averaged: names of full tensors (heads, biases, embeddings,
    buffers) that differ between adapters.
    """

    settings: dict[str, Any] = field(repr=False)
    tensors: dict[str, Tensor] = field(repr=False)
    modules: tuple[MergedModule, ...]
    weights: tuple[float, ...]
    averaged: tuple[str, ...] = ()

    @property
    def relative_error(self) -> float:
        """Return |mean - merged| / |mean| in the Frobenius norm over all modules together."""
        norm = math.hypot(*(module.norm for module in self.modules))
        return math.hypot(*(module.lost for module in self.modules)) / norm if norm else 0.0

    def __str__(self) -> str:
        weights = ", ".join(f"{weight:g}" for weight in self.weights)
        s = "s" * (len(self.weights) > 1)
        head = f"{len(self.weights)} adapter{s} merged with weight{s} {weights}; {self.relative_error:.2%} lost in all"
        width = max((len(module.name) for module in self.modules), default=0)
        lines = [f"{each.name:{width}}  rank {each.rank}, {each.relative_error:.2%} lost" for each in self.modules]
        averaged = [f"full tensors averaged because they differ: {', '.join(self.averaged)}"] if self.averaged else []
        return "\n".join([head, *lines, *averaged])

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the adapter atomically to a new directory, for `PeftModel.from_pretrained` and `load_model`.

        Raises ValueError if the directory exists.
        """
        write_adapter(expanded(os.fspath(directory)), self.settings, self.tensors)


def merge_adapters(
    adapters: Sequence[str | os.PathLike[str]], weights: Sequence[float] | None = None, *, rank: int | None = None
) -> MergedAdapter:
    """Compute the best approximation of rank r to sum_i w_i s_i B_i A_i in every module, over LoRA adapters i.

    Adapter i adds s_i B_i A_i to the weight of a module, with s_i = lora_alpha / r_i, or lora_alpha / sqrt(r_i) with
    rsLoRA. The approximation is in the Frobenius norm (Eckart and Young 1936). It depends on the products B_i A_i
    alone, so it is the same for an adapter written as (B Z^-1, Z A) with Z invertible; means of the factors are not.
    It is computed in float64, without forming B A. If the singular values at the cut are equal, it is not unique.

    adapters: one or more peft directories.
    weights: a number for each of the k adapters, by default 1/k. As in peft's `add_weighted_adapter` they are not
    normalized: [1, 1] adds, [1, -1] subtracts.
    rank: by default the largest rank among the adapters in the module. It is at most the size of the module and the sum
    of the adapters' ranks. An adapter without an update for a module counts as 0 there, with a UserWarning.

    Modules are named as in the base model, even if transformers has renamed them since an adapter was trained. If the
    base model is on this machine and peft is installed, every tensor of the result is loaded into it and compared.

    Full tensors (heads and other `modules_to_save`, biases, embeddings) must be in all adapters. A tensor that is the
    same in all is unchanged; others become the weighted mean, for which weights must sum to 1.

    The factors of the result are balanced, B^T B = A A^T, at scale 1 (lora_alpha = r), in the dtype of the inputs.
    `modules` has the relative error of each module, without rounding to the dtype; `save` writes the directory.

    Raises ValueError for adapters of different base models or tasks, types other than LoRA, DoRA, initializations that
    change the base (PiSSA, ...), non-finite numbers, incompatible shapes, a wrong number of weights, a rank below 1 or
    above the size of every module, and updates of modules that the base model does not have.
    """
    if not isinstance(adapters, (list, tuple)) or not adapters:
        raise ValueError(
            f"adapters must be a list of one or more directories. Found {brief(adapters)}; give a list, even of one"
        )
    weights = _checked_weights(weights, len(adapters))
    stored = [read_lora(expanded(os.fspath(each))) for each in adapters]
    _check_same_base(stored)
    first = stored[0]
    network = empty_base(first.path, first.settings, first.full_tensors)
    renamed = _renamed(stored, network)
    _warn_of_modules(renamed)
    sizes = {name: _size(name, renamed) for name in sorted({name for each in renamed for name in each.updates})}
    most = max(min(size) for size in sizes.values())
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= most):
        raise ValueError(f"rank must be an integer from 1 to {most}, the most that a module has. Found {brief(rank)}")
    tensors = _full_tensors(renamed, weights)
    modules = []
    for name, size in sizes.items():
        module, factors = _merged(name, size, renamed, weights, rank)
        modules.append(module)
        tensors |= factors
    settings = _settings(renamed, modules, network, keep_targets=renamed == stored)
    if network is not None and (base := base_of(first.path)) and find_spec("peft"):
        resize_vocabulary(network, tensors)
        attach_adapter(network, settings, tensors, base, "merged adapter for the model")
    names = renamed[0].full_tensors
    averaged = tuple(name for name in names if not _all_equal([adapter.full_tensors[name] for adapter in renamed]))
    return MergedAdapter(settings, tensors, tuple(modules), weights, averaged)


def _checked_weights(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    if weights is None:
        return (1 / count,) * count
    if not isinstance(weights, (list, tuple)) or len(weights) != count:
        raise ValueError(f"weights must be a list with a number for each of {count} adapters. Found {brief(weights)}")
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
            raise ValueError(f"weights must be finite numbers. Found {brief(weight)}")
    return tuple(map(float, weights))


def _check_same_base(adapters: Sequence[LoraAdapter]) -> None:
    first, *others = adapters
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
    """Return the base models of two adapters: directories if both are on this machine, else names."""
    local = [base_of(each.path) for each in both]
    if None not in local:
        return tuple(os.fspath(each.resolve()) for each in local if each is not None)
    return tuple(each.settings.get("base_model_name_or_path") for each in both)


def _renamed(adapters: Sequence[LoraAdapter], network: nn.Module | None) -> list[LoraAdapter]:
    """Return adapters with the current names of modules.

    Without the base model, its type is unknown. It is then the type whose renaming gives the fewest modules in all and
    leaves the names of one adapter unchanged, if there is any.
    """
    if network is not None:
        return [adapter.renamed(current_module(network)) for adapter in adapters]
    sets = [frozenset(adapter.updates) for adapter in adapters]
    fewest, best = len(frozenset().union(*sets)), None
    for rename in renamings() if len(set(sets)) > 1 else ():
        renamed = [frozenset(renamed_module(module, rename) for module in names) for names in sets]
        if len(union := frozenset().union(*renamed)) < fewest and any(map(frozenset.__eq__, renamed, sets)):
            fewest, best = len(union), rename
    if best is None:
        return list(adapters)
    return [adapter.renamed(lambda module: renamed_module(module, best)) for adapter in adapters]


def _warn_of_modules(adapters: Sequence[LoraAdapter]) -> None:
    union = {name for adapter in adapters for name in adapter.updates}
    missing = [(adapter.path, sorted(union - adapter.updates.keys())) for adapter in adapters]
    if lines := [f"{shown(path)} without {len(names)} (such as {shown(names[0])})" for path, names in missing if names]:
        warnings.warn(
            f"adapters should have updates of the same modules. Found {', '.join(lines)} of {len(union)} modules: an "
            "update that an adapter lacks counts as 0",
            UserWarning,
            stacklevel=3,
        )


def _size(name: str, adapters: Sequence[LoraAdapter]) -> tuple[int, int]:
    """Return the size of a module's updates. Raises ValueError unless they have one form in all adapters."""
    (first, mine), *others = [(adapter, adapter.updates[name]) for adapter in adapters if name in adapter.updates]
    for other, its in others:
        if (mine.A.shape[1:], mine.B.shape[0], mine.embedding) != (its.A.shape[1:], its.B.shape[0], its.embedding):
            raise ValueError(
                f"updates of {shown(name)} must be of one layer. Found {mine.size[0]} x {mine.size[1]} in "
                f"{shown(first.path)}, {its.size[0]} x {its.size[1]} in {shown(other.path)}"
            )
    return mine.size


def _merged(
    name: str, size: tuple[int, int], adapters: Sequence[LoraAdapter], weights: Sequence[float], rank: int | None
) -> tuple[MergedModule, dict[str, Tensor]]:
    """Return the result for a module, and its two factors by their names in the file."""
    updates = [adapter.updates.get(name) for adapter in adapters]
    ranks = tuple(0 if update is None else update.rank for update in updates)
    pairs = [(weight, update) for weight, update in zip(weights, updates, strict=True) if update is not None]
    kept = min(max(ranks) if rank is None else rank, *size, sum(ranks))
    B, A, norm, lost = truncated_sum([(weight * update.scale, *update.matrices()) for weight, update in pairs], kept)
    like = pairs[0][1]
    factors = [factor for _, update in pairs for factor in (update.A, update.B)]
    name_A, name_B = names_of(name, like.embedding)
    tensors = {name_A: A.reshape(kept, *like.A.shape[1:]), name_B: B.reshape(-1, kept, *like.B.shape[2:])}
    rounded = {key: _rounded(value, factors, key) for key, value in tensors.items()}
    return MergedModule(name, size, ranks, kept, norm, lost), rounded


def _full_tensors(adapters: Sequence[LoraAdapter], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return the full tensors, averaged if they differ. Raises ValueError unless all adapters have them."""
    first, *others = adapters
    for other in others:
        for name in sorted(first.full_tensors.keys() ^ other.full_tensors.keys()):
            without, having = (other, first) if name in first.full_tensors else (first, other)
            raise ValueError(
                f"full tensors, such as a head or a bias, must be in all adapters. Found {shown(name)} in "
                f"{shown(having.path)} and not in {shown(without.path)}; save both with one modules_to_save and bias"
            )
    return {name: _mean(name, [each.full_tensors[name] for each in adapters], weights) for name in first.full_tensors}


def _mean(name: str, values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    if len(shapes := {tuple(value.shape) for value in values}) > 1:
        raise ValueError(f"{shown(name)} must have one shape. Found {' and '.join(map(str, sorted(shapes)))}")
    if _all_equal(values):
        return values[0]
    if not abs(sum(weights) - 1) <= SUM_TOLERANCE:
        raise ValueError(
            f"weights must sum to 1, for {shown(name)} is a full tensor and differs between adapters. Found a sum of "
            f"{sum(weights):g}; divide them by it"
        )
    mean = sum((weight * value.double() for weight, value in zip(weights, values, strict=True)), torch.zeros(()))
    return _rounded(mean, values, name)


def _all_equal(values: Sequence[Tensor]) -> bool:
    return all(torch.equal(values[0].double(), value.double()) for value in values)


def _rounded(value: Tensor, like: Sequence[Tensor], name: str) -> Tensor:
    rounded = value.to(reduce(torch.promote_types, (each.dtype for each in like)))
    if not torch.isfinite(rounded).all():
        raise ValueError(f"{shown(name)}, merged, must be finite in {rounded.dtype}. Found a larger number")
    return rounded


def _settings(
    adapters: Sequence[LoraAdapter], modules: Sequence[MergedModule], network: nn.Module | None, *, keep_targets: bool
) -> dict[str, Any]:
    """Return the settings of the first adapter, with ranks, scales and targets of the merged one.

    The targets are unchanged if `keep_targets` and if all adapters have the same ones.
    """
    settings = dict(adapters[0].settings)
    r = max(module.rank for module in modules)
    lower = {_pattern(module.name, modules): module.rank for module in modules if module.rank < r}
    settings |= {"r": r, "lora_alpha": r, "rank_pattern": lower, "alpha_pattern": dict(lower), "use_rslora": False}
    # A merged adapter is not initialized again.
    settings |= {"init_lora_weights": True, "inference_mode": True, "loftq_config": {}}
    settings |= dict.fromkeys(("eva_config", "corda_config", "lora_ga_config"))
    if not keep_targets or any(_targets(adapter.settings) != _targets(settings) for adapter in adapters):
        settings |= dict.fromkeys(TARGETS)
        names = [module.name for module in modules]
        among = names if network is None else [name for name, _ in network.named_modules()]
        settings["target_modules"] = target_modules(names, names, among)
    return settings


def _pattern(name: str, modules: Sequence[MergedModule]) -> str:
    """Return a key for rank_pattern and alpha_pattern, which peft matches with the end of a module's name.

    It is the name itself, which other readers look up, unless that has special characters or matches another module.
    """
    is_plain = re.fullmatch(r"[\w.]+", name) is not None
    is_unique = is_plain and sum(re.search(rf"(^|\.){name}$", module.name) is not None for module in modules) == 1
    return name if is_unique else f"^{re.escape(name)}"


def _targets(settings: Mapping[str, Any]) -> list[Any]:
    """Return the settings for target modules in a comparable form: peft stores sets as lists in any order."""
    return [sorted(value, key=str) if isinstance(value := settings.get(key), list) else value for key in TARGETS]


def truncated_sum(terms: Sequence[tuple[float, Tensor, Tensor]], rank: int) -> tuple[Tensor, Tensor, float, float]:
    """Compute the best approximation B A of a given rank to sum_i c_i B_i A_i over terms (c_i, B_i, A_i).

    Shapes: B_i (n, r_i), A_i (r_i, m); rank at most n, m and r = sum_i r_i. The factors are balanced (B^T B = A A^T =
    the singular values), and the largest entry of every column of B is positive, so they depend on the products
    B_i A_i alone. Time O((n + m) r^2) and memory O((n + m) r), in float64.

    Returns B (n, rank), A (rank, m), and the Frobenius norms of the sum and of the part that truncation removes.
    """
    # The sum is [c_1 B_1 | ... | c_k B_k] times the stacked A_i, so its SVD needs no n x m matrix.
    B, A = torch.cat([c * B.double() for c, B, _ in terms], dim=1), torch.cat([A.double() for _, _, A in terms])
    left, s, right = product_svd(B, A.mT)
    root = s[:rank].sqrt()
    return left[:, :rank] * root, (right[:, :rank] * root).mT, float(s.norm()), float(s[rank:].norm())
