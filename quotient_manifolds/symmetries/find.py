"""Find the symmetries of a model: every module against a table of layouts, first match wins, no silent skips."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from torch import nn

from quotient_manifolds.messages import first_line
from quotient_manifolds.symmetries.attention import found_in
from quotient_manifolds.symmetries.canonical import find_freedoms
from quotient_manifolds.symmetries.checks import check_all, check_eval, check_model
from quotient_manifolds.symmetries.detect import behaves_like_attention, looks_like_attention
from quotient_manifolds.symmetries.freedom import Freedom
from quotient_manifolds.symmetries.known_attention import LAYOUTS
from quotient_manifolds.symmetries.layout import Layout, Unrecognised
from quotient_manifolds.symmetries.lora import lora
from quotient_manifolds.symmetries.outputs import Evaluate, first_examples
from quotient_manifolds.symmetries.pair import SymmetricPair
from quotient_manifolds.symmetries.symmetries import Match, Matcher, Refused, Symmetries
from quotient_manifolds.symmetries.trace import Trace
from quotient_manifolds.symmetries.translations import Translation

MATCHERS: tuple[Matcher, ...] = (lora,)
"""Everything else: asked about every module of a model, whatever attention it is part of. `bottleneck` and `neurons`
find what measures of attention leave alone: name them to have them."""


def find_symmetries(
    model: nn.Module,
    batch: Any = None,
    *,
    evaluate: Evaluate | None = None,
    layouts: Sequence[Layout] | None = None,
    matchers: Sequence[Matcher] | None = None,
) -> Symmetries:
    """Return the symmetric pairs of `model`, its translations, the parameters in no pair, and what was refused.

    batch: inputs as `prove_symmetries` takes them, `evaluate` likewise. With them the result also holds the freedoms,
    what norms and the streams they read leave free, which are found in a recorded run on the first examples; without
    them there are none. The model is in eval mode then.
    layouts: where attention classes keep their projections, asked in this order; `LAYOUTS` if not given. With one of
    your own in front, (mine, *LAYOUTS), the model's own attention is found too: docs/own_attention.md shows how.
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
    reasons |= _unmatched(modules, settled)
    pairs, tied = _without_ties(users, [pair for each in found for pair in each.pairs])
    translations = _translations(users, pairs, [shift for each in found for shift in each.translations])
    touched = {name for pair in pairs for name in pair.names}
    rest = tuple(name for name in names.values() if name not in touched)
    freedoms, others = ((), ()) if batch is None else _traced(model, batch, evaluate, touched)
    refused = (*(refusal for each in found for refusal in each.refused), *others)
    return Symmetries(tuple(pairs), rest, (*reasons.values(), *tied), refused, translations, freedoms)


def _traced(
    model: nn.Module, batch: Any, evaluate: Evaluate | None, moved: Set[str]
) -> tuple[tuple[Freedom, ...], tuple[Refused, ...]]:
    """Return what a recorded run shows to be free, and what is refused; where the model does not run so, why."""
    check_eval(model)
    reason = ""
    for some in (*first_examples(batch), batch):
        try:
            trace = Trace(model, some, evaluate)
        except RUN_ERRORS as error:
            reason = f"it does not run in float64: {first_line(error)}"
            continue
        try:
            found, refused = find_freedoms(trace, moved)
        except RUN_ERRORS as error:  # an operation that is called as nobody thought of
            reason = f"what it computes is not understood: {type(error).__name__}: {first_line(error)}"
            break
        idle = {each: name for each in found if (name := trace.idle_like(each.names))}
        if not idle or some is batch:
            why = "did not run, and may be part of it: give inputs that go everywhere"
            unsure = (Refused(each.name, each.kind, f"{name} {why}") for each, name in idle.items())
            return tuple(each for each in found if each not in idle), (*refused, *unsure)
    return (), (Refused("the model", "norm", reason),)


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
