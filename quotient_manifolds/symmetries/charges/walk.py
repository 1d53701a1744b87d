"""Walk through a recorded program and propose wires: the parameters that write and read each channel.

Each entry of an activation has a label, the number of its node. Labels have the layout of the memory, so that views
need no rule. The node that an entry of a result depends on follows from forward derivatives of the operation along r
and r * label. Their quotient is the label if there is one, and not an integer if there are several. Uses of parameters
have rules: a product writes new channels and reads the channels on its other side; an elementwise product is a gain. A
contraction of two activations makes one the contragredient of the other. Proposals may be wrong: charges decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from quotient_manifolds.symmetries.charges.entries import Entries, affine, numbers, repeats
from quotient_manifolds.symmetries.charges.nodes import Channels, Joins, Nodes, Tie, distinct_columns, firsts
from quotient_manifolds.symmetries.charges.uses import Gain, Lookup, Pixels, Product, Tokens, Use
from quotient_manifolds.symmetries.trace.program import Operation, substituted
from quotient_manifolds.symmetries.trace.record import Recording
from quotient_manifolds.symmetries.trace.replay import arguments, wide

_INTEGER = 1e-10
"""Tolerance within which a quotient of derivatives is an integer; weighted means come within 1e-7 by chance."""
_EPS = 1e-4
"""A positive addend below this only keeps a root away from 0 (see `arguments`)."""
_ZEROS = ("zeros", "new_zeros", "zeros_like")
_MADE_UP = ("add", "sub", "mul", "div", "maximum", "minimum")
"""Operations of two arguments for which torch fills in a missing tangent with Python code."""
_REFUSED = (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError)
Along = Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]


class Walk:
    """Hold the proposals of one walk through a recording.

    uses, gains: of weights. biases: by number of a use, the entries of theta that are added directly to its result.
    leaves: by name of a parameter that is used as an activation, the node of each entry, or 0. channels: the relations
    of all nodes that follow from the joins. joins: how nodes were joined, in order, if `keep`, which keeps all labels,
    too. skipped: by module and name, operations that could not be followed, with the reason. constants: numbers that
    are added to channels, as (operation, nodes of the result, numbers). taken: by name, the operation that takes each
    entry of a leaf, or -1 if several do. roles: nodes by the way they are computed. Nodes on the "left" of a product of
    two activations; "queries", from which the left is computed; "mixed" over tokens; "normed"; "added" to or "gated" by
    one another; "bent" by a function; "bending", its arguments; "factor", a parameter that multiplies unlabeled data.
    """

    def __init__(self, recording: Recording, *, keep: bool = False) -> None:
        self.recording, self.program = recording, recording.program
        self.entries = Entries(self.program, {name: w.shape for name, w in recording.parameters.items()})
        self.nodes = Nodes()
        self.uses: list[Use] = []
        self.gains: list[Gain] = []
        self.biases: dict[int, Tensor] = {}
        self.skipped: dict[tuple[str, str], str] = {}
        self.leaves: dict[str, Tensor] = {}
        self.taken: dict[str, Tensor] = {}
        self.constants: list[tuple[int, Tensor, Tensor]] = []
        self.occurring: dict[str, Tensor] = {}
        """Which entries of leaves are used here; longer inputs may use the others."""
        self.roles: dict[str, list[Tensor]] = {}
        self.made: list[tuple[int, int]] = []
        """After each operation, the number of nodes, and of the joins so far."""
        self._labels: dict[int, Tensor] = {}
        self._data = {self.program.layouts[number].memory for number in self.program.inputs}
        self._origins: dict[int, set[int]] = {}
        self._keep = keep
        self._zeros: set[int] = set()  # memories of zeros: their product with a weight is not recorded as a use
        self._results: dict[int, int] = {}  # by memory of a product, the number of its use
        self._generator = torch.Generator().manual_seed(7)
        self._place = 0
        last = {
            self._memory(n): place
            for place, each in enumerate(self.program.operations)
            for n in (*each.ins, *each.outs)
        }
        kept = {self._memory(n) for n in self.program.outputs}
        for place, operation in enumerate(self.program.operations):
            self._place = place
            self._step(operation)
            self.made.append((len(self.nodes), len(self.nodes.joins)))
            if keep:
                continue
            for memory in {self._memory(n) for n in (*operation.ins, *operation.outs)} - kept:
                if last[memory] == place:
                    self._labels.pop(memory, None)
        self._lengthen()
        self.joins: list[Joins] = list(self.nodes.joins) if keep else []
        self.channels: Channels = self.nodes.settled()

    # Labels

    def _memory(self, number: int) -> int:
        return self.program.layouts[number].memory

    def _value(self, number: int) -> Tensor:
        return self.recording.values[number].cpu()  # derivatives of single operations are cheap

    def labels(self, number: int) -> Tensor | None:
        """Return the node of each entry of a value, or None if it has no labels.

        A parameter that is used as an activation gets its nodes here. Unless `keep`, labels are dropped after the last
        operation that takes them, except the labels of outputs.
        """
        layout = self.program.layouts[number]
        known = self._labels.get(layout.memory)
        if known is not None:
            return None if layout.dtype.is_complex else layout.of(known)
        if not self.entries.known(number):
            return None
        return self._leaves(self.entries.of(number))

    def _leaves(self, entries: Tensor) -> Tensor:
        """Return the nodes of entries of theta, 0 for constants. Entries without a node get a new one."""
        found = torch.zeros(entries.shape, dtype=torch.long)
        low, high = (int(entries.min()), int(entries.max())) if entries.numel() else (0, -1)
        for name, start in self.entries.start.items():
            size = self.entries.shapes[name].numel()
            if start > high or start + size <= low:
                continue
            inside = (entries >= start) & (entries < start + size)
            own, fresh = entries[inside] - start, entries[inside].unique() - start
            if not len(fresh):
                continue
            nodes = self.leaves.setdefault(name, torch.zeros(size, dtype=torch.long))
            fresh = fresh[nodes[fresh] == 0]
            nodes[fresh] = self.nodes.add(len(fresh), one_tensor=False)
            taken = self.taken.setdefault(name, torch.zeros(size, dtype=torch.long))
            taken[own[taken[own] != self._place]] = -1
            taken[fresh] = self._place
            found[inside] = nodes[own]
        return found

    def _lengthen(self) -> None:
        """Give unused entries of leaves the nodes of used ones along an axis: they are positions of longer inputs."""
        partial = {name: nodes for name, nodes in self.leaves.items() if not bool(nodes.all())}
        self.occurring = {name: nodes > 0 for name, nodes in self.leaves.items()}
        used = torch.zeros(self.entries.size + 1 if partial else 0, dtype=torch.bool)  # the last for constants, -1
        moved = [*(use.entries for use in self.uses), *(gain.entries for gain in self.gains)]
        for entries in moved if partial else ():
            used[entries.reshape(-1)] = True
        for name, nodes in partial.items():
            shape, start = self.entries.shapes[name], self.entries.start[name]
            if bool(used[start : start + len(nodes)].any()):
                continue
            for axis in range(len(shape)):
                lines = nodes.view(shape).movedim(axis, 0)
                known = lines.amax(0, keepdim=True)
                wires = self.nodes.wires.eldest(torch.where(lines > 0, lines, known).reshape(-1)).view(lines.shape)
                if bool((lines > 0).any(0).all()) and bool((wires == wires[:1]).all()):
                    lines.copy_(torch.where(lines > 0, lines, known))

    def _put(self, number: int, labels: Tensor) -> None:
        layout = self.program.layouts[number]
        layout.write(self._labels.setdefault(layout.memory, torch.zeros(layout.room, dtype=torch.long)), labels)

    def _labelled(self, number: int) -> bool:
        if self._memory(number) not in self._labels:
            return False
        labels = self.labels(number)
        return labels is not None and bool(labels.any())

    def _made_of(self, numbers: Sequence[int]) -> set[int]:
        """Return nodes of the wires from which values are computed."""
        found = set[int]()
        for number in numbers:
            found |= self._origins.get(self._memory(number), set())
            if self._labelled(number):
                found.add(int(self.labels(number).max()))  # type: ignore[union-attr]
        return found

    # Operations

    def _step(self, operation: Operation) -> None:
        ins = list(dict.fromkeys(operation.ins))
        touched = [n for n in ins if self._memory(n) in self._data or self._memory(n) in self._labels]
        parameters = [n for n in ins if self.entries.known(n)]
        if not touched:
            self.entries.operations.append(operation)
        if _of_shape_alone(operation.name):
            ins, parameters = [], []
        own = {self._memory(n) for n in ins}
        outs = [n for n in operation.outs if self._memory(n) not in own]  # views share the memory of an input
        if not outs:
            return
        live = [n for n in ins if self._labelled(n)]
        if touched:
            self._data |= {self._memory(n) for n in outs}
        if operation.name in _ZEROS:
            self._zeros |= {self._memory(n) for n in outs}
        for n in outs:
            self._origins[self._memory(n)] = self._made_of(ins)
        if not (live or parameters) or not any(self.program.layouts[n].is_floating_point for n in outs):
            return
        try:
            if parameters and self._weight(operation):
                return
            if parameters and not touched and self.entries.follow(operation, self._value):
                return
            if operation.name in ("mul", "div") and parameters and live and self._gain(operation):
                return
            active = [n for n in dict.fromkeys((*live, *parameters)) if self.program.layouts[n].is_floating_point]
            passing = self._without_factor(operation, active)
            self._generic(operation, passing)
            if passing != active:
                self.nodes.solve_together(*(labels for n in active if (labels := self.labels(n)) is not None))
            if operation.func.namespace != "aten" and not any(self._labelled(n) for n in outs):
                self.skipped[operation.module, operation.name] = "each result depends on several channels"
        except _REFUSED as error:
            self.skipped[operation.module, operation.name] = str(error)[:200]

    def _weight(self, operation: Operation) -> bool:
        """Follow a product with a parameter, which reads the channels of the other factor and writes new ones."""
        if operation.name in ("mm", "bmm"):
            a, b = (ref.number for ref in operation.args[:2])
            if self.entries.known(b):
                return self._product(operation, b, a, left=False)
            return self.entries.known(a) and self._product(operation, a, b, left=True)
        if operation.name == "embedding":
            table = operation.args[0].number
            if not self.entries.known(table):
                return False
            entries, places = self.entries.view(table).T, self.entries.places(table).T
            into = torch.zeros(1, entries.shape[1], dtype=torch.long)
            (out,) = operation.outs
            written = self._read(Lookup(), table, entries, places, into)
            self._put(out, written.expand(self.program.layouts[out].shape))
            return True
        if operation.name == "convolution":
            weight = operation.args[1].number
            return self.entries.known(weight) and not self._filters(operation) and self._convolution(operation, weight)
        return False

    def _filters(self, operation: Operation) -> bool:
        """Return whether a convolution filters channels that lie along an axis of pixels, such as the values of a head.

        Each group has one input and one output, which hold several channels. Each result depends on one of these.
        """
        x, weight = (ref.number for ref in operation.args[:2])
        shape, groups = self.program.layouts[weight].shape, operation.args[8]
        if shape[0] != groups or shape[1] != 1 or not self._labelled(x):
            return False
        labels: Tensor = self.labels(x)  # type: ignore[assignment]
        wires = self.nodes.wires.eldest(labels.movedim(1, -1).reshape(-1, labels.shape[1]))
        if bool(((wires == wires.amax(0)) | (wires == 0)).all()):
            return False
        here = wide(self._value(x).detach()).contiguous()
        found, linear = self._dependence(self._derivative(operation, [x]), [here], [labels], pointwise=False)
        return linear and bool((found[0][0] > 0).all())

    def _product(self, operation: Operation, weight: int, other: int, *, left: bool) -> bool:
        (out,) = operation.outs
        if self._memory(other) in self._zeros and not self._labelled(other) and not bool(self._value(other).any()):
            self._zeros.add(self._memory(out))  # not recorded as a use: the first state of a recurrence is 0
            self._put(out, torch.zeros(self.program.layouts[out].shape, dtype=torch.long))
            return True
        labels = self.labels(other)
        if labels is None:
            labels = torch.zeros(self.program.layouts[other].shape, dtype=torch.long)
        entries, places = self.entries.view(weight), self.entries.places(weight)
        if left:
            labels = labels.mT
        else:
            entries, places = entries.mT, places.mT
        shape = self.program.layouts[out].shape
        written = torch.zeros(shape, dtype=torch.long)
        target = written.mT if left else written
        if operation.name == "mm":
            labels, entries, places, target = labels[None], entries[None], places[None], target[None]
        if repeats(entries):
            rows = labels.reshape(-1, labels.shape[-1])
            tokens: Tokens = Product(left, None)
            self._results[self._memory(out)] = len(self.uses)
            target.copy_(self._read(tokens, weight, entries[0], places[0], rows))
        else:
            for k in range(len(entries)):
                made = self._read(Product(left, k), weight, entries[k], places[k], labels[k])
                target[k] = made
        self._put(out, written)
        return True

    def _convolution(self, operation: Operation, weight: int) -> bool:
        (out,), (x, *_), turned, groups = operation.outs, operation.args, operation.args[6], operation.args[8]
        layout = self.program.layouts[out]
        labels = self.labels(x.number)
        if labels is None:
            labels = torch.zeros(self.program.layouts[x.number].shape, dtype=torch.long)
        entries, places = self.entries.view(weight).chunk(groups, 0), self.entries.places(weight).chunk(groups, 0)
        made = []
        for g, (e, p, part) in enumerate(zip(entries, places, labels.chunk(groups, 1), strict=True)):
            e, p = (e.transpose(0, 1), p.transpose(0, 1)) if turned else (e, p)
            made.append(self._read(Pixels(g, groups, len(layout.shape)), weight, e, p, part.movedim(1, -1)))
        self._put(out, torch.cat(made).view(-1, *[1] * (len(layout.shape) - 2)).expand(layout.shape))
        return True

    def _read(self, tokens: Tokens, weight: int, entries: Tensor, places: Tensor, labels: Tensor) -> Tensor:
        """Record a use of a weight that reads the last axis of labels; join channels that the same column reads."""
        rows = labels.reshape(-1, labels.shape[-1])
        into = rows.amax(0) if len(rows) else rows.new_zeros(rows.shape[1])
        self.nodes.join(into.expand_as(rows), rows)
        out = self.nodes.add(entries.shape[0])
        self.uses.append(Use(self._place, tokens, self._memory(weight), entries, places, out, into))
        return out

    def _gain(self, operation: Operation) -> bool:
        """Follow channels multiplied or divided by a parameter: the same wire in other units."""
        refs = operation.args[:2]
        if not all(hasattr(ref, "number") for ref in refs):
            return False
        first, second = (ref.number for ref in refs)
        divides = operation.name == "div"
        p, x = (second, first) if self.entries.known(second) else (first, second)
        if (divides and p == first) or not self.entries.known(p):
            return False
        if self.entries.known(x) and self._memory(x) not in self._labels:
            return False
        (out,), power = operation.outs, -1 if divides else 1
        shape = self.program.layouts[out].shape
        labels = self.labels(x)
        if labels is None:
            return False
        entries = self.entries.of(p).expand(shape).reshape(-1)
        places = numbers(self.entries.places(p).expand(shape)).reshape(-1)
        every = torch.stack([labels.expand(shape).reshape(-1), places, entries + 1])
        first_of, which = distinct_columns(every)
        before, places, entries = every[0, first_of], every[1, first_of], every[2, first_of] - 1
        after = self.nodes.add(len(first_of))
        self.nodes.join(before, after, Tie.GAIN, gain=self.nodes.add_gains(len(after)), power=power)
        self.gains.append(Gain(self._place, self._memory(p), entries, places, power, before, after))
        self._put(out, after[which].view(shape))
        return True

    def _without_factor(self, operation: Operation, live: list[int]) -> list[int]:
        """Leave out an activation that multiplies all channels of a token by one number: the other passes linearly."""
        if operation.name not in ("mul", "div") or len(live) != 2:
            return live
        layouts = self.program.layouts
        shape = layouts[operation.outs[0]].shape
        for x, factor in (live, live[::-1]):
            steps = torch.empty(layouts[factor].shape, device="meta").expand(shape).stride()
            axes = [a for a, step in enumerate(steps) if not step]
            if self.entries.known(factor) or not axes or (operation.name == "div" and operation.ins[0] == factor):
                continue
            if layouts[x].shape != shape:  # in an outer product neither factor is one number
                continue
            rest = [a for a in range(len(shape)) if a not in axes]
            label = self.labels(x)
            tokens = None if label is None else label.expand(shape).permute(*rest, *axes).flatten(len(rest))
            if tokens is not None and bool((tokens != tokens[..., :1]).any()):
                return [x]
        return live

    def _generic(self, operation: Operation, live: list[int]) -> None:
        """Follow any other operation: find the node of each live value on which each entry of a result depends."""
        outs = [n for n in operation.outs if self.program.layouts[n].is_floating_point]
        self._note_bias(operation)
        labels = [labels for n in live if (labels := self.labels(n)) is not None]
        if len(labels) != len(live):
            return
        others = [n for n in dict.fromkeys(operation.ins) if n not in live]
        alone = not any(self._memory(n) in self._data for n in others)
        scaled = affine(operation, self._constant)
        if scaled and live == [scaled[0]] and labels[0].shape == self.program.layouts[outs[0]].shape:
            self._put(outs[0], self._shifted(labels[0], *scaled[1:]))
            self._leave_origins(outs[0], live, others)
            return
        along = self._derivative(operation, live)
        here = [wide(self._value(n).detach()).contiguous() for n in live]
        pointwise = torch.Tag.pointwise in operation.func.tags
        found, linear = self._dependence(along, here, labels, pointwise)
        outside = torch.tensor(sorted(self._made_of(others)), dtype=torch.long)
        solved = self.nodes.solved.eldest
        role = self._role(operation, live, linear, alone)
        if len(outside) and bool(
            (torch.isin(solved(outside), torch.cat([solved(each.unique()) for each in labels])) & (outside > 0)).any()
        ):
            # Another operand is computed from channels solved with these, as a norm is: the result is another wire
            linear, role = False, role if role == "mixed" else "normed"
        if role == "bent":
            self.roles.setdefault("bending", []).extend(label.unique() for label in labels)
        for j, out in enumerate(outs):
            nodes = torch.stack([one[j].reshape(-1) for one in found])
            if pointwise and len(live) > 1 and not alone:  # a mask selects by chance: depend on all
                nodes = torch.stack([label.expand(self.program.layouts[out].shape).reshape(-1) for label in labels])
            if linear:
                passed = self._passed(operation, out, nodes, along, here, labels, j, alone)
                self._put(out, passed)
                self._leave_origins(out, live, others)
                if others and alone and len(outs) == 1:
                    self._note_constants(passed, self._at_zero(operation, live))
            elif operation.name in ("mm", "bmm") and len(live) == 2 and bool((nodes > 0).all(0).any()):
                self._put(out, nodes[1].view(self.program.layouts[out].shape))  # a label holds one of two indices
            elif bool(nodes.any()):
                self._put(out, self._function(nodes).view(self.program.layouts[out].shape))
            else:
                self._put(out, torch.zeros(self.program.layouts[out].shape, dtype=torch.long))
            self.roles.setdefault(role, []).append(self.labels(out).unique())  # type: ignore[union-attr]
        if len(live) > 1 and not linear and operation.name in ("mm", "bmm"):
            self._queries(*live)
            self._contract(*labels)
        if not linear or any(not bool(one[0].any()) for one in found):
            self.nodes.solve_together(*labels)
        if len(outside) and operation.name in ("mul", "div"):
            self.nodes.solve_together(*labels, outside)

    def _role(self, operation: Operation, live: list[int], linear: bool, alone: bool) -> str:
        """Return the role of the results of an operation (see `roles`), empty if it has none."""
        several = sum(not self.entries.known(n) for n in live) > 1
        if operation.name in ("mul", "div") and all(map(self.entries.known, live)) and not alone:
            return "factor"
        if operation.name in ("mm", "bmm"):
            return "mixed" if several or not alone else ""
        if linear:
            return "added" if several else ""
        return "gated" if several and operation.name == "mul" else "bent"

    def _leave_origins(self, out: int, live: Sequence[int], others: Sequence[int]) -> None:
        """Remove the wires of a linear result's own labels from the wires from which it is computed.

        If each of its entries has a label, live values contribute only their own origins, as in a selection of one.
        """
        origins, labels = self._origins[self._memory(out)], self.labels(out)
        if not origins or labels is None:
            return
        if bool((labels > 0).all()):
            origins = self._made_of(others).union(*(self._origins.get(self._memory(n), ()) for n in live))
        made = torch.tensor(sorted(origins), dtype=torch.long)
        passed = self.nodes.wires.eldest(labels.unique())
        left = made[~torch.isin(self.nodes.wires.eldest(made), passed)]
        self._origins[self._memory(out)] = set(left.tolist())

    def _constant(self, number: int) -> Tensor | None:
        """Return a value if it depends on no input and no parameter, else None."""
        memory = self._memory(number)
        varies = memory in self._data or memory in self._labels or self.entries.known(number)
        return None if varies else self._value(number)

    def _shifted(self, label: Tensor, scale: float, offset: float) -> Tensor:
        """Return the labels of scale * x + offset: the labels of x, or new ones in other units."""
        names, place = torch.unique(label, return_inverse=True)
        if scale != 1:
            new = self.nodes.add(len(names))
            self.nodes.join(names, new, const=scale)
            label = torch.where(names > 0, new, 0)[place]
        if not 0 <= offset < _EPS:
            self._note_constants(label, torch.full(label.shape, offset, dtype=torch.float64))
        return label

    def _at_zero(self, operation: Operation, live: Sequence[int]) -> Tensor:
        """Return the result of an operation with zeros in place of the live values, and all others unchanged."""

        def at(number: int) -> Tensor:
            return torch.zeros_like(wide(self._value(number))) if number in live else wide(self._value(number))

        args, kwargs = substituted((operation.args, dict(operation.kwargs)), at)
        made: Tensor = operation.func(*args, **on_processor(kwargs))
        return made

    def _note_constants(self, label: Tensor, added: Tensor) -> None:
        """Record the numbers that are added to channels, one for each channel."""
        flat, added = label.reshape(-1), added.expand(label.shape).reshape(-1)
        at = torch.nonzero(flat > 0)[:, 0]
        if not bool(added[at].any()):
            return
        names, place = torch.unique(flat[at], return_inverse=True)
        values = added[at[firsts(place, len(names))]]
        apart = torch.zeros(len(names), dtype=torch.bool)
        apart[place[added[at] != values[place]]] = True
        keep = ~apart & torch.isfinite(values) & (values != 0)
        self.constants.append((self._place, names[keep], values[keep]))

    def _note_bias(self, operation: Operation) -> None:
        """Record a parameter that is added to the result of one use, one entry for each channel."""
        if operation.name != "add" or len(operation.args) != 2 or operation.kwargs:
            return
        for a, b in (operation.args, operation.args[::-1]):
            if not (hasattr(a, "number") and hasattr(b, "number") and self.entries.known(b.number)):
                continue
            use, shape = self._results.get(self._memory(a.number)), self.program.layouts[b.number].shape
            if (
                use is None
                or not shape
                or shape[-1] != torch.Size(shape).numel()
                or shape[-1] != len(self.uses[use].out)
            ):
                continue
            self.biases[use] = self.entries.of(b.number).reshape(-1)

    def _derivative(self, operation: Operation, live: list[int]) -> Along:
        """Return a function of (points, tangents): the forward derivatives of all real results, on the CPU."""
        where = {number: k for k, number in enumerate(live)}
        others = {number: wide(self._value(number)) for number in operation.ins if number not in where}

        def constant(x: Any) -> Any:
            """Return a constant, with a zero tangent if torch would import its compiler to make one."""
            if operation.name not in _MADE_UP or not isinstance(x, Tensor) or x.is_complex():
                return x
            x = x.double().contiguous()  # a tangent cannot have the strides of an expanded tensor
            return forward_ad.make_dual(x, torch.zeros_like(x))

        def along(points: Sequence[Tensor], tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
            with forward_ad.dual_level():
                duals = [forward_ad.make_dual(x, t) for x, t in zip(points, tangents, strict=True)]

                def at(number: int) -> Any:
                    return duals[where[number]] if number in where else constant(others[number])

                args, kwargs = arguments(operation, at, generic=True)
                made = operation.func(*args, **on_processor(kwargs))
                parts = [made] if isinstance(made, Tensor) else [t for t in made if isinstance(t, Tensor)]
                pairs = [forward_ad.unpack_dual(t) for t in parts if t.is_floating_point()]
                return tuple(torch.zeros_like(x) if t is None else t for x, t in pairs)

        return along

    def _dependence(
        self, along: Along, here: list[Tensor], labels: list[Tensor], pointwise: bool
    ) -> tuple[list[list[Tensor]], bool]:
        """Return for each live value the node on which each entry of each result depends, and whether all is linear.

        Derivatives are compared at x and -1.7 x, because tanh has the same derivatives at x and -x. For an operation
        that torch tags as pointwise, the entry is known, and it is only checked whether the result depends on it.
        """

        def normal(t: Tensor) -> Tensor:
            return torch.randn(t.shape, generator=self._generator, dtype=torch.float64)

        away = [normal(t) * (0.5 + t.abs().mean()) for t in here]
        points = (away, [-1.7 * x for x in away], here)
        zero = [torch.zeros_like(t) for t in here]
        found, linear = [], True
        for k, label in enumerate(labels):
            known = torch.zeros(len(self.nodes) + 1, dtype=torch.bool).index_fill_(0, label.reshape(-1), True)
            r = normal(here[k]) * (label > 0)
            nodes: list[Tensor] | None = None
            first: tuple[Tensor, ...] | None = None
            for at in points:
                if first is not None and linear and at is here:
                    break
                one = along(at, [*zero[:k], r, *zero[k + 1 :]])
                first = one if first is None else first
                linear &= all(map(_close, first, one))
                if linear and nodes is not None:
                    continue
                if pointwise:
                    new = [torch.where(x != 0, label.expand(x.shape), 0) for x in one]
                else:
                    other = along(at, [*zero[:k], r * label, *zero[k + 1 :]])
                    new = [_quotient(x, y, known) for x, y in zip(one, other, strict=True)]
                nodes = new if nodes is None else [torch.maximum(x, y) for x, y in zip(nodes, new, strict=True)]
            found.append(nodes or [])
        return found, linear

    def _function(self, nodes: Tensor) -> Tensor:
        """Return new channels, functions of one channel of each value, to be solved together with these."""
        first, which = distinct_columns(nodes)
        pairs = nodes[:, first]
        new = self.nodes.add(pairs.shape[1])
        new[(pairs == 0).all(0)] = 0
        partners = torch.bincount(pairs.reshape(-1))
        for row in pairs:
            self.nodes.join(row, new, Tie.TOGETHER)
            alone = partners[row] == 1  # a number that multiplies many channels belongs to none
            self.nodes.join(row[alone], new[alone], Tie.ALIKE)
        wires = self.nodes.wires.eldest(torch.where(pairs > 0, pairs, pairs.amax(0)))
        sole = (wires == wires[:1]).all(0) & (new > 0)
        self.nodes.take_units(new[sole], pairs.amax(0)[sole])
        return new[which]

    def _passed(
        self,
        operation: Operation,
        out: int,
        nodes: Tensor,
        along: Along,
        here: list[Tensor],
        labels: list[Tensor],
        j: int,
        alone: bool,
    ) -> Tensor:
        """Return the labels of a linear result: summands join one wire, with other units if they are multiplied."""
        shape = self.program.layouts[out].shape
        weighted = () if self._keep else ("mm", "bmm")  # `keep` leaves experts apart, as units to permute
        sums = operation.name in ("sum", "mean", *weighted) and len(labels) == 1 and not bool(nodes.any())
        if sums and (summed := self._sums_apart(operation, labels[0], shape)) is not None:
            return summed
        label = nodes.amax(0)
        if len(nodes) > 1:
            first, which = distinct_columns(nodes)
            pairs = nodes[:, first]
            some = pairs.gather(0, torch.argsort((pairs == 0).long(), dim=0, stable=True)[:2])
            wires, tensors = self.nodes.wires.eldest(some), self.nodes.tensors.eldest(some)
            if bool(((some > 0).all(0) & (wires[0] != wires[1]) & (tensors[0] == tensors[1])).any()):
                new = self.nodes.add(pairs.shape[1])  # sums of channels of one tensor may be a rotation
                new[(pairs == 0).all(0)] = 0
                self.nodes.join(pairs, new.expand_as(pairs), Tie.ALIKE)
                return new[which].view(shape)
            self.nodes.join(pairs.amax(0).expand_as(pairs), pairs)
        elif alone:
            size = along(here, [(labels[0] > 0).double()])[j].reshape(-1)
            at = torch.nonzero((label > 0) & (size != 0))[:, 0]
            if len(at) and bool(((size[at] - 1).abs() > _INTEGER).any()):
                names, place = torch.unique(label[at], return_inverse=True)
                units = size[at[firsts(place, len(names))]]
                if bool(((units - 1).abs() > _INTEGER).any()):
                    new = self.nodes.add(len(names))
                    self.nodes.join(names, new, const=units)
                    label[at] = new[place]
            label[size == 0] = 0
        return label.view(shape)

    def _sums_apart(self, operation: Operation, label: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        """Return the labels of sums over disjoint sets of channels, such as experts or heads; None for others."""
        axes = operation.args[1] if len(operation.args) > 1 else None
        if operation.name in ("mm", "bmm"):
            second = self._labelled(operation.args[1].number)
            axes = [-2 if second else -1]
        if not axes:
            return None
        axes = [a % label.ndim for a in axes]
        rest = [a for a in range(label.ndim) if a not in axes]
        count = math.prod(label.shape[a] for a in axes)
        flat = label.permute(*rest, *axes).reshape(-1, count)
        sets = flat[:1] if bool((flat == flat[:1]).all()) else torch.unique(flat, dim=0)
        known = [each[each > 0].unique() for each in sets]  # appended zeros have no label
        of_one = len(self.nodes.tensors.eldest(known[0]).unique()) <= 1
        distinct = torch.unique(torch.cat(known), return_counts=True)[1]
        if len(sets) < 2 or of_one or bool((distinct > 1).any()):
            return None
        self.nodes.join(sets.amax(1, keepdim=True).expand_as(sets), sets)
        summed = label.amax(axes, keepdim=True)
        return summed.expand(shape) if operation.name in ("mm", "bmm") else summed.reshape(shape)

    def _queries(self, left: int, right: int) -> None:
        """Record the nodes of tensors from which the left side of a contraction is computed, but not the right."""
        tensors, made = self.nodes.tensors.of, []
        for number in (left, right):
            nodes = torch.tensor(sorted(self._made_of([number])), dtype=torch.long)
            made.append(tensors[torch.cat([nodes, self.labels(number).unique()])])  # type: ignore[union-attr]
        own = made[0][~torch.isin(made[0], made[1]) & (made[0] > 0)]
        self.roles.setdefault("queries", []).append(torch.nonzero(torch.isin(tensors, own))[:, 0])

    def _contract(self, a: Tensor, b: Tensor) -> None:
        """Follow a contraction q . k: if A acts on q, A^-T acts on k."""
        a, b = (each if each.ndim == 3 else each[None] for each in (a, b))
        if bool((a == a[..., :1]).all()) or bool((b == b[:, :1]).all()):
            return
        left, right = b[..., 0][:, None].expand_as(a), a[:, 0][..., None].expand_as(b)
        self.roles.setdefault("left", []).append(a.unique())
        one = torch.cat([a.reshape(-1), right.reshape(-1)])
        other = torch.cat([left.reshape(-1), b.reshape(-1)])
        self.nodes.join(one, other, dual=True)


def _of_shape_alone(name: str) -> bool:
    """Return whether an operation depends only on the shape and kind of a tensor, not on its values."""
    return name.startswith("new_") or name.endswith("_like")


def _close(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x, y) or torch.allclose(x, y, rtol=1e-7, atol=1e-12)


def _quotient(one: Tensor, other: Tensor, known: Tensor) -> Tensor:
    """Return other / one where it is a known label, else 0. known: for each label, whether it occurs."""
    quotient = torch.nan_to_num(other / one, 0.0, 0.0, 0.0)
    label = quotient.round().clamp(0, len(known) - 1)
    near = (quotient - label).abs() < _INTEGER * (1 + label)
    label = label.long()
    return torch.where(near & known[label], label, 0)


def on_processor(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments with the CPU in place of every device."""
    return {name: torch.device("cpu") if isinstance(v, torch.device) else v for name, v in kwargs.items()}
