"""Find the symmetries of a model: every module against a table of layouts, first match wins, no silent skips."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from torch import nn

from quotient_manifolds.messages import first_line
from quotient_manifolds.symmetries.attention import found_in
from quotient_manifolds.symmetries.canonical import find_freedoms
from quotient_manifolds.symmetries.checks import check_all, check_eval, check_model, check_weights
from quotient_manifolds.symmetries.detect import behaves_like_attention, looks_like_attention
from quotient_manifolds.symmetries.freedom import Freedom
from quotient_manifolds.symmetries.known_attention import LAYOUTS
from quotient_manifolds.symmetries.layout import Layout, Unrecognised
from quotient_manifolds.symmetries.lora import ADAPTER, lora
from quotient_manifolds.symmetries.norm_constant import find_norm_constants
from quotient_manifolds.symmetries.norm_scale import NormScale
from quotient_manifolds.symmetries.outputs import Evaluate, first_examples
from quotient_manifolds.symmetries.pair import SymmetricPair
from quotient_manifolds.symmetries.symmetries import Match, Matcher, Refused, Symmetries
from quotient_manifolds.symmetries.trace import Trace
from quotient_manifolds.symmetries.traced_pairs import ATTENTION, find_pairs
from quotient_manifolds.symmetries.translations import Translation
from quotient_manifolds.symmetries.two_layers import BOTTLENECK, GATED, RELU, bottleneck, neurons

MATCHERS: tuple[Matcher, ...] = (lora,)
"""Everything else: asked about every module of a model, whatever attention it is part of. `bottleneck` and `neurons`
find what measures of attention leave alone: name them to have them."""

_KINDS: Mapping[Matcher, tuple[str, ...]] = {lora: (ADAPTER,), neurons: (RELU, GATED), bottleneck: (BOTTLENECK,)}
"""What a recorded run tells in the place of a matcher."""


def find_symmetries(
    model: nn.Module,
    batch: Any = None,
    *,
    evaluate: Evaluate | None = None,
    layouts: Sequence[Layout] | None = None,
    matchers: Sequence[Matcher] | None = None,
) -> Symmetries:
    """Return the symmetric pairs of `model`, its translations, the parameters in no pair, and what was refused.

    batch: inputs as `prove_symmetries` takes them, `evaluate` likewise: sequences of several tokens. With them all is
    found in a recorded run on the first examples, whatever the classes are called: the pairs, and the freedoms, what
    norms and the streams they read leave free. The model is in eval mode then. Without them, or where the model does
    not run in float64, pairs are those of classes that are known, and there are no freedoms.
    layouts: where attention classes keep their projections, asked in this order; `LAYOUTS` if not given. With one of
    your own in front, (mine, *LAYOUTS), your attention is found by it: docs/own_attention.md shows how.
    matchers: what else to look for; `MATCHERS` if not given.

    A module used twice is found once, under its first name. A model without attention has no pairs, which is no error.
    A subclass that changes no method of a class in `layouts` is found as that class is. What may be attention and is
    not known is in `unrecognised`: by the name of its class, by projections named for queries, keys and values, or
    because its forward pass, as far as its source tells, multiplies by a softmax or calls an attention kernel.
    TypeError for anything but a module; ValueError if a parameter of recognised attention has no values, is quantised,
    sparse, complex, NaN or infinite.
    """
    check_model(model)
    layouts = LAYOUTS if layouts is None else layouts
    matchers = MATCHERS if matchers is None else matchers
    check_all("layouts", layouts, lambda each: isinstance(each, Layout), "Layout, such as (mine, *LAYOUTS)")
    check_all("matchers", matchers, callable, "functions, such as (*MATCHERS, mine)")
    modules = dict(model.named_modules())
    names, users = _parameters(modules)
    traced, freedoms, others = (None, (), ()) if batch is None else _traced(model, batch, evaluate, matchers)
    if traced is not None:  # all but what is declared by hand
        layouts = tuple(each for each in layouts if each not in LAYOUTS)
        matchers = tuple(each for each in matchers if each not in _KINDS)
    found: list[Match] = []
    reasons: dict[str, str] = {}  # module name -> why it was refused
    settled: set[str] = set()
    for name, module in modules.items():
        found += [each for matcher in matchers if (each := matcher(module, name, names)) is not None]
        if not settled.isdisjoint(_lineage(name)):
            continue
        try:
            attention = _match(layouts, module, name, names)
        except Unrecognised as refusal:
            reasons[name] = f"{_label(name, module)}: {refusal}"
            settled.add(name)
            continue
        if attention is not None:
            found.append(attention)
            settled.add(name)
    if traced is not None:
        check_weights(dict(model.named_parameters()), {name for pair in traced.pairs for name in pair.names})
        taken = {name for each in found for pair in each.pairs for name in pair.names}
        found.append(replace(traced, pairs=tuple(pair for pair in traced.pairs if taken.isdisjoint(pair.names))))
        settled |= _followed(modules, traced)
    reasons |= _unmatched(modules, settled)
    pairs, tied = _without_ties(users, [pair for each in found for pair in each.pairs])
    translations = _translations(users, pairs, [shift for each in found for shift in each.translations])
    touched = {name for pair in pairs for name in pair.names}
    rest = tuple(name for name in names.values() if name not in touched)
    refused = (*(refusal for each in found for refusal in each.refused), *others)
    return Symmetries(tuple(pairs), rest, (*reasons.values(), *tied), refused, translations, freedoms)


_Traced = tuple[Match | None, tuple[Freedom, ...], tuple[Refused, ...]]


def _traced(model: nn.Module, batch: Any, evaluate: Evaluate | None, matchers: Sequence[Matcher]) -> _Traced:
    """Return the pairs and what else is free in a recorded run, and what is refused; where there is none, why."""
    check_eval(model)
    kinds = {*ATTENTION, *(kind for matcher in matchers for kind in _KINDS.get(matcher, ()))}
    match, reason, refusals = None, "", list[Refused]()
    for some in (*first_examples(batch), batch):
        try:
            trace = Trace(model, some, evaluate)
        except RUN_ERRORS as error:
            reason = f"it does not run on these inputs in float64: {first_line(error)}"
            continue
        try:
            match = find_pairs(trace).of_kinds(kinds)
        except RUN_ERRORS as error:
            refusals = [Refused("the model", "pairs", f"what it computes is not understood: {first_line(error)}")]
        try:
            found, refused = find_freedoms(trace, {name for pair in (match or Match()).pairs for name in pair.names})
        except RUN_ERRORS as error:  # an operation that is called as nobody thought of
            reason = f"what it computes is not understood: {type(error).__name__}: {first_line(error)}"
            break
        found = _with_constants(trace, match, found)
        idle = {each: name for each in found if (name := trace.idle_like(each.names))}
        if not idle or some is batch:
            why = "did not run, and may be part of it: give inputs that go everywhere"
            unsure = (Refused(each.name, each.kind, f"{name} {why}") for each, name in idle.items())
            return match, tuple(each for each in found if each not in idle), (*refusals, *refused, *unsure)
    return match, (), (*refusals, Refused("the model", "norm", reason))


def _with_constants(trace: Trace, match: Match | None, found: tuple[Freedom, ...]) -> tuple[Freedom, ...]:
    """Return the freedoms with the constants of keys and values; those of values go on to biases that are folded later.

    They are folded next to the norms.
    """
    norms = [index for index, each in enumerate(found) if isinstance(each, NormScale)]
    constants = find_norm_constants(trace, match.pairs, found) if match and norms else ()
    after = max(norms, default=-1) + 1
    return (*found[:after], *constants, *found[after:])


def _followed(modules: Mapping[str, nn.Module], traced: Match) -> set[str]:
    """Return the modules that hold parameters of attention's pairs, and the attention around them; refused ones too."""
    owners = {name.rpartition(".")[0] for pair in traced.pairs if pair.kind in ATTENTION for name in pair.names}
    owners |= {each.name.removesuffix(each.kind).rstrip() for each in traced.refused if each.kind in ATTENTION}
    owners = {owner for owner in owners if owner in modules}
    around = {above for owner in owners for above in _lineage(owner) if looks_like_attention(modules[above])}
    return owners | around


def _match(layouts: Sequence[Layout], module: nn.Module, name: str, names: Mapping[int, str]) -> Match | None:
    """Return what the first layout that fits finds; None if none is for the module's class or its ancestors."""
    named: list[Layout] = []
    for cls in type(module).__mro__:
        named = [layout for layout in layouts if layout.names_class(cls)]
        if named:
            break
    if not named:
        return None
    changed = _changed(type(module), cls)
    if changed:
        raise Unrecognised(f"it is a {cls.__name__} with another {changed}, and no known layout is for that")
    for layout in named:
        if layout.fits(module):
            return found_in(layout, module, name, names)
    if any("base_layer" in path for path, _ in module.named_parameters()):
        raise Unrecognised(
            "its projections carry adapters: merge them into the weights (merge_and_unload of peft) to have its pairs"
        )
    missing = next((f": it has no {path!r}" for layout in named for path in layout.missing(module)), "")
    raise Unrecognised(f"its projections are not where this class is known to keep them{missing}")


RUN_ERRORS = (RuntimeError, TypeError, IndexError, KeyError, ValueError, AttributeError, NotImplementedError)
_HARMLESS = frozenset({"extra_repr", "reset_parameters", "_reset_parameters", "train", "eval"})


def _changed(cls: type, ancestor: type) -> str:
    """Return the first method of the ancestor that a class below it defines anew; not to initialise or print."""
    below = cls.__mro__[: cls.__mro__.index(ancestor)]
    own = (
        name for each in below for name, value in vars(each).items() if callable(value) or isinstance(value, property)
    )
    methods = (name for name in own if name == "__call__" or not name.startswith("__"))
    return next((name for name in methods if name not in _HARMLESS and hasattr(ancestor, name)), "")


def _unmatched(modules: Mapping[str, nn.Module], settled: Set[str]) -> dict[str, str]:
    """Return what looks or behaves like attention and owns parameters, apart from settled modules and what is in them.

    Of those that look like it, the innermost of each chain; what only behaves like it has matrices of its own.
    """
    unsettled = {name: module for name, module in modules.items() if settled.isdisjoint(_lineage(name))}
    around_settled = {above for name in settled for above in _lineage(name)}  # a block is called after its attention
    looks = [name for name, module in unsettled.items() if name not in around_settled and looks_like_attention(module)]
    around = {above for name in looks for above in _lineage(name) if above != name}
    reasons = {name: "no known layout is for this class" for name in looks if name not in around}
    taken = {modules[name] for name in (*settled, *reasons)}  # whose matrices are no other module's
    inside = {name for name in unsettled if not reasons.keys().isdisjoint(_lineage(name))}
    for name, module in unsettled.items():
        if name not in inside and (sign := behaves_like_attention(module, taken)):
            reasons[name] = f"may be attention ({sign} in its forward pass), and no known layout is for this class"
    return {name: f"{_label(name, unsettled[name])}: {reasons[name]}" for name in unsettled if name in reasons}


def _parameters(modules: Mapping[str, nn.Module]) -> tuple[dict[int, str], dict[str, list[str]]]:
    """Return the first name of each parameter by its id, and all of its names by the first.

    The modules are asked, for some (peft's attention) make new objects of their parameters whenever one asks.
    """
    names: dict[int, str] = {}
    users: dict[str, list[str]] = {}
    for prefix, module in modules.items():
        for name, value in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            users.setdefault(names.setdefault(id(value), name), []).append(name)
    return names, users


def _translations(
    users: Mapping[str, list[str]], pairs: Iterable[SymmetricPair], claimed: Iterable[Translation]
) -> tuple[Translation, ...]:
    """Return those of pairs that are left whose biases nothing else uses; a tied bias stays a row of its pair."""
    kept = {pair.name for pair in pairs}
    return tuple(
        translation
        for translation in claimed
        if translation.pair in kept and all(len(users[name]) == 1 for name in translation.moved)
    )


def _without_ties(users: Mapping[str, list[str]], pairs: list[SymmetricPair]) -> tuple[list[SymmetricPair], list[str]]:
    """Drop pairs whose parameters another module or an earlier pair uses too: moving them would move both."""
    kept: list[SymmetricPair] = []
    refused: list[str] = []
    owners: dict[tuple[str, object], str] = {}
    for pair in pairs:
        places = [(view.name, getattr(view, "span", view)) for view in pair.views]
        tied = [(name, other) for name in pair.names for other in users[name] if other != name]
        shared = [place for index, place in enumerate(places) if place in owners or place in places[:index]]
        if tied:
            refused.append(f"{pair.name}: parameter {tied[0][0]!r} is tied to {tied[0][1]!r}")
        elif shared:
            refused.append(f"{pair.name}: parameter {shared[0][0]!r} plays two parts")
        else:
            kept.append(pair)
            owners |= dict.fromkeys(places, pair.name)
    return kept, refused


def _lineage(name: str) -> Iterator[str]:
    """Yield the name of a module and of all modules around it, the model's "" last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _label(name: str, module: nn.Module) -> str:
    return f"{name or '(the model)'} ({type(module).__name__})"
