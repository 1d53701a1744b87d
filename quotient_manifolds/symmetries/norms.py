"""Find gains and biases of norms that the layers which read the norm can hold just as well."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quotient_manifolds.symmetries.freedom import Freedom
from quotient_manifolds.symmetries.gain_products import find_gain_products
from quotient_manifolds.symmetries.linear_scale import LinearScale
from quotient_manifolds.symmetries.norm_scale import NormScale
from quotient_manifolds.symmetries.norm_uses import NormUse, norm_uses, not_followed
from quotient_manifolds.symmetries.post_norm import find_norm_shift, find_unseen, lone_biases
from quotient_manifolds.symmetries.symmetries import Refused
from quotient_manifolds.symmetries.trace import Trace


def find_norms(trace: Trace, linear_scales: Iterable[LinearScale] = ()) -> tuple[list[Freedom], list[Refused]]:
    """Return what is free in norms and the layers that read them, and the gains that are not, with the reason.

    linear_scales: gains after linear maps, which are taken if no layer that reads them can hold them.
    """
    found: list[Freedom] = []
    reasons: dict[str, str] = {}
    scaled = set[str]()
    biases = lone_biases(trace)
    kept: list[NormUse] = []
    for use in norm_uses(trace):
        result = _norm_scale(trace, use) if use.gain else "it has no gain"
        if isinstance(result, NormScale):
            found.append(result)
            scaled.add(use.gain)
            continue
        if use.gain:
            reasons[use.gain] = result
        kept.append(use)
        found += [*find_norm_shift(trace, use, biases), *find_unseen(trace, use)]
    found += find_gain_products(trace, kept)
    for scale in linear_scales:
        if scale.gain not in scaled:
            scaled.add(scale.gain)
            reasons.pop(scale.gain, None)
            found.append(scale)
    for operation in trace.operations:
        for gain, reason in not_followed(trace, operation):
            if gain not in scaled:
                reasons.setdefault(gain, reason)
    return found, [Refused(gain, NormScale.kind, reason) for gain, reason in reasons.items()]


def _norm_scale(trace: Trace, use: NormUse) -> NormScale | str:
    """Return the norm with all that read it, or why it has to keep its gain."""
    if use.obstacles:
        return use.obstacles[0]
    if not use.readings:
        return "nothing reads it"
    readers = tuple(reading.reader for reading in use.readings)
    known = use.operations.union(*(reading.operations for reading in use.readings))
    parts = [(name, torch.arange(trace.params[name].numel())) for name in (use.gain, use.bias) if name]
    parts += [part for reader in readers for part in reader.parts]
    tied = trace.used_besides(parts, known)
    return tied or NormScale(use.gain, use.bias, readers, use.centred, use.size, use.offset)
