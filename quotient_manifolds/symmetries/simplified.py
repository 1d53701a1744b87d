"""Write a recorded run anew: what changes nothing is a copy, and a LayerNorm that is written out is one operation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quotient_manifolds.symmetries.operations import Key, Operation, is_plain, key


def simplified(operations: Iterable[Operation], params: Iterable[Tensor], outputs: Iterable[Tensor]) -> list[Operation]:
    """Return the operations of a run with `outputs`, so that the same computation looks the same."""
    return _with_norms(list(_without_idle(operations, params)), {key(output) for output in outputs})


def _without_idle(operations: Iterable[Operation], params: Iterable[Tensor]) -> Iterator[Operation]:
    """Yield the operations, copies in place of those that multiply by 1, or mask nothing, on these inputs.

    What a parameter has made 1, such as a gain, is none of these.
    """
    learned = {key(w) for w in params}
    for operation in operations:
        passed = None if operation.is_view else _passed_on(operation, learned)
        if any(key(tensor) in learned for tensor in operation.inputs):
            learned.update(key(tensor) for tensor in operation.outputs)
        if passed is None:
            yield operation
        elif key(passed) != key(operation.outputs[0]):  # else it was in place, and nothing happened
            yield Operation("clone", torch.ops.aten.clone.default, (passed,), {}, operation.outputs)


def _passed_on(operation: Operation, learned: Set[Key]) -> Tensor | None:
    """Return the tensor that an operation answers with as it was given, if it is a product or a mask that does so."""
    name, given = operation.name.removesuffix("_"), operation.inputs
    if name == "masked_fill" and len(given) >= 2 and given[0].shape == operation.outputs[0].shape:
        return given[0] if key(given[1]) not in learned and not bool(given[1].any()) else None
    if name == "constant_pad_nd" and not any(operation.arguments[1]):
        return given[0]
    if name != "mul" or len(given) != 2:
        return None
    for x, factor in (given, given[::-1]):
        if x.shape == operation.outputs[0].shape and key(factor) not in learned and bool((factor == 1).all()):
            return x
    return None


# ---- norms that are written out

_OF_LENGTHS = frozenset(("add", "sub", "mul", "div", "pow", "sqrt", "rsqrt", "reciprocal", "clamp", "clamp_min"))
_OVER_CHANNELS = {  # roles of what is taken over all channels of x, of x less its mean, and of the square of that
    ("", "mean"): ("mean",),
    ("", "var_mean"): ("length", "mean"),
    **{(of, name): ("length",) for of in ("", "centred") for name in ("var", "std")},
    **{("square", name): ("length",) for name in ("mean", "sum")},
}
_Role = tuple[str, Key]  # of a tensor in a norm: "mean", "centred", "square", "length" or "answer"; and what it is of


@dataclass(eq=False)
class _WrittenNorm:
    """Hold what computes x less its mean over a function of its length: the answers, and all that comes between."""

    x: Tensor
    answers: list[Operation] = field(default_factory=list)
    inner: list[Operation] = field(default_factory=list)

    def is_whole(self, users: Mapping[Key, list[Operation]], outputs: Set[Key]) -> bool:
        """Return whether nothing else uses what comes between, so that the answers are all there is."""
        own = {id(operation) for operation in (*self.inner, *self.answers)}
        between = {key(output) for operation in self.inner for output in operation.outputs}
        alone = all(id(user) in own for each in between for user in users.get(each, []))
        return bool(self.answers) and alone and outputs.isdisjoint(between)

    def joined(self, answer: Operation) -> Operation:
        """Return the LayerNorm without a gain that gives an answer; whatever its eps is."""
        given = (self.x, [self.x.shape[-1]], None, None, 0.0)
        return Operation("native_layer_norm", torch.ops.aten.native_layer_norm.default, given, {}, answer.outputs)


def _with_norms(operations: Sequence[Operation], outputs: Set[Key]) -> list[Operation]:
    """Return the operations, with LayerNorms over the last axis in the place of those that write them out."""
    roles: dict[Key, _Role] = {}
    open_norms: dict[Key, _WrittenNorm] = {}
    norms: list[_WrittenNorm] = []
    users: dict[Key, list[Operation]] = {}
    for operation in operations:
        for used in {key(tensor) for tensor in operation.inputs}:
            users.setdefault(used, []).append(operation)
        found = _roles(operation, roles)
        written = set() if operation.is_view else {key(output) for output in operation.outputs}
        for x in written & open_norms.keys():  # in place
            del open_norms[x]
            roles = {each: role for each, role in roles.items() if role[1] != x}
        for output, (role, x) in zip(operation.outputs, found, strict=False):
            if x not in open_norms:
                open_norms[x] = _WrittenNorm(operation.inputs[0])
                norms.append(open_norms[x])
            roles[key(output)] = role, x
            its = open_norms[x].answers if role == "answer" else open_norms[x].inner
            its += [operation] * (operation not in its)
    whole = [norm for norm in norms if norm.is_whole(users, outputs)]
    joined = {id(answer): norm.joined(answer) for norm in whole for answer in norm.answers}
    inner = {id(operation) for norm in whole for operation in norm.inner}
    return [joined.get(id(operation), operation) for operation in operations if id(operation) not in inner]


def _roles(operation: Operation, roles: Mapping[Key, _Role]) -> Sequence[_Role]:
    """Return the roles of what an operation gives, as far as they are known."""
    name, given = operation.name, operation.inputs
    if not given or len(given) > 2 or not operation.outputs:
        return ()
    its = [roles.get(key(tensor), ("", key(tensor))) for tensor in given]
    known, same = tuple(role for role, _ in its), len({x for _, x in its}) == 1
    x, whole = its[0][1], operation.outputs[0].shape == given[0].shape
    if len(given) == 1 and _is_over_channels(operation):
        return [(role, x) for role in _OVER_CHANNELS.get((known[0], name), ())]
    if known == ("", "mean"):
        return [("centred", x)] if name == "sub" and same and is_plain(operation) else ()
    if known in (("centred",), ("centred", "centred")) and whole and same:
        squared = (name == "pow" and operation.arguments[1] == 2) or (name == "mul" and len(given) == 2)
        return [("square" if squared else "centred", x)] if squared or operation.is_view else ()
    if known == ("length",) and whole:
        return [("length", x)] if name in _OF_LENGTHS or operation.is_view else ()
    scaled = known == ("centred", "length") or (known == ("length", "centred") and name == "mul")
    return [("answer", x)] if scaled and same and name in ("mul", "div") else ()


def _is_over_channels(operation: Operation) -> bool:
    """Return whether a mean or variance is over the last axis, which is kept with one entry."""
    x, out = operation.inputs[0], operation.outputs[0]
    return x.ndim > 1 and x.shape[-1] > 1 and out.shape == (*x.shape[:-1], 1)
