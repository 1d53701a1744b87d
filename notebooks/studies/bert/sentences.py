"""Pairs of sentences that shallow heuristics mistake: does the first entail the second?

A heuristic takes for entailed all whose words are in the premise (overlap), or a stretch of it (subsequence), or a
clause of it (constituent), as McCoy et al. (2019) have it; here each is right about half of its templates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import final

import numpy as np

from quotient_manifolds.files import write_text

ENTAILED, NOT_ENTAILED = 0, 1


@final
@dataclass(frozen=True)
class Template:
    """Hold sentences with slots: a, b, c are three persons, {clause} stands for the hypothesis."""

    heuristic: str
    entailed: bool
    held_out: bool  # not in the training data
    premise: str
    hypothesis: str

    def fill(self, words: Mapping[str, str]) -> Pair:
        hypothesis = self.hypothesis.format_map(words)
        premise = self.premise.format_map({**words, "clause": hypothesis})
        return Pair(_sentence(premise), _sentence(hypothesis), ENTAILED if self.entailed else NOT_ENTAILED, self)

    @property
    def slots(self) -> tuple[str, ...]:
        """Return the slots in order, each once."""
        found = (name for text in (self.premise, self.hypothesis) for _, name, _, _ in Formatter().parse(text))
        return tuple(dict.fromkeys(name for name in found if name and name != "clause"))


@final
@dataclass(frozen=True)
class Pair:
    """Hold a premise, a hypothesis and whether it follows."""

    premise: str
    hypothesis: str
    label: int
    template: Template


_DID = "the {a} {did} the {b}"

# heuristic, entailed, held out: premise and hypothesis of each template
_TEMPLATES: dict[tuple[str, bool, bool], tuple[tuple[str, str], ...]] = {
    ("overlap", True, False): (
        ("the {a} was {did} by the {b}", "the {b} {did} the {a}"),
        ("it was the {a} who {did} the {b}", _DID),
        ("the {a} {did} the {c} and the {b}", _DID),
        ("the {a} {met} the {b}", "the {b} {met} the {a}"),
    ),
    ("overlap", True, True): (
        ("the {a} who the {b} {did} {slept}", "the {b} {did} the {a}"),
        ("the {a}, like the {c}, {did} the {b}", _DID),
    ),
    ("overlap", False, False): (
        ("the {b} {did} the {a}", _DID),
        ("the {a} was {did} by the {b}", _DID),
        ("it was the {a} who the {b} {did}", _DID),
        ("the {a} and the {b} {did} the {c}", _DID),
    ),
    ("overlap", False, True): (
        ("the {a} who the {b} {did} {slept}", _DID),
        ("the {a} {did} the {c} beside the {b}", _DID),
    ),
    ("subsequence", True, False): (
        ("the {a} {did} the {b} {there}", _DID),
        ("the {a} {did} the {b} and {slept}", _DID),
        ("the {a} {did} the {b} who {slept}", _DID),
        ("the {a} and the {b} {slept}", "the {b} {slept}"),
    ),
    ("subsequence", True, True): (
        ("the {a} {did} the {b} without a word", _DID),
        ("not only the {a} but also the {b} {slept}", "the {b} {slept}"),
    ),
    ("subsequence", False, False): (
        ("the {kin} of the {a} {did} the {b}", _DID),
        ("neither the {a} nor the {b} {slept}", "the {b} {slept}"),
        ("the {a} beside the {b} {slept}", "the {b} {slept}"),
        ("the {a} who {did} the {b} {slept}", "the {b} {slept}"),
    ),
    ("subsequence", False, True): (
        ("the {a} {did} by the {b} {slept}", "the {b} {slept}"),
        ("everyone but the {a} {did} the {b}", _DID),
    ),
    ("constituent", True, False): (
        ("because {clause}, the {c} {slept}", _DID),
        ("the {c} {knew} that {clause}", _DID),
        ("the {c} {slept}, and {clause}", _DID),
        ("{luckily}, {clause}", _DID),
    ),
    ("constituent", True, True): (
        ("after {clause}, the {c} {slept}", _DID),
        ("it is a pity that {clause}", _DID),
    ),
    ("constituent", False, False): (
        ("if {clause}, the {c} {slept}", _DID),
        ("the {c} {believed} that {clause}", _DID),
        ("the {c} {slept}, or {clause}", _DID),
        ("{perhaps}, {clause}", _DID),
    ),
    ("constituent", False, True): (
        ("unless {clause}, the {c} {slept}", _DID),
        ("it is a lie that {clause}", _DID),
    ),
}
TEMPLATES = tuple(Template(*kind, *texts) for kind, several in _TEMPLATES.items() for texts in several)

# by slot: the words of the training pairs, and those of the test pairs; a, b and c are persons
WORDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "person": (
        ("nurse", "pilot", "baker", "tailor", "sailor", "painter", "farmer", "poet", "guard", "clerk", "miner", "chef"),
        ("surgeon", "gardener", "plumber", "captain", "dancer", "critic", "barber", "monk", "hunter", "drummer"),
    ),
    "did": (
        ("thanked", "greeted", "followed", "praised", "watched", "blamed", "hired", "pushed"),
        ("helped", "mocked", "trusted", "chased", "invited", "ignored", "kicked"),
    ),
    "slept": (
        ("slept", "laughed", "left", "sneezed", "waited", "smiled"),
        ("danced", "coughed", "arrived", "shouted", "yawned"),
    ),
    "met": (("met", "married", "resembled"), ("dated", "divorced")),
    "there": (
        ("at the station", "in the kitchen", "on the bridge", "in the garden"),
        ("at the harbour", "in the tunnel", "on the roof"),
    ),
    "kin": (("brother", "aunt", "rival", "boss"), ("cousin", "widow", "friend")),
    "knew": (("knew", "noticed", "remembered"), ("realized", "forgot")),
    "believed": (("believed", "hoped", "claimed"), ("suspected", "feared")),
    "luckily": (("luckily", "sadly", "of course"), ("thankfully", "in fact")),
    "perhaps": (("perhaps", "supposedly", "in my dream"), ("maybe", "allegedly")),
}


def training_pairs(each: int, seed: int) -> list[Pair]:
    """Return `each` pairs of every template that is not held out, all different, with the words for training.

    A round of all templates follows the other, so that any stretch of whole rounds is as balanced as the whole.
    """
    return _rounds([each for each in TEMPLATES if not each.held_out], each, 0, np.random.default_rng([seed, 0]))


def test_pairs(each: int, seed: int) -> list[Pair]:
    """Return pairs in words that no training pair has: half of them of training templates, half of those held out.

    each: pairs of a training template; one held out, of which there are half as many, has twice as many.
    """
    draw = np.random.default_rng([seed, 1])
    known, new = ([one for one in TEMPLATES if one.held_out is held_out] for held_out in (False, True))
    return _rounds(known, each, 1, draw) + _rounds(new, 2 * each, 1, draw)


def write_pairs(path: Path, pairs: Sequence[Pair]) -> None:
    """Write JSON lines with text, text_pair and label, unless they are there."""
    text = "".join(map(_line, pairs))
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)


def _line(pair: Pair) -> str:
    return json.dumps({"text": pair.premise, "text_pair": pair.hypothesis, "label": pair.label}) + "\n"


def _rounds(templates: Sequence[Template], rounds: int, words: int, draw: np.random.Generator) -> list[Pair]:
    found: dict[tuple[str, str], Pair] = {}
    for _ in range(rounds):
        for template in templates:
            pair = next(
                pair for pair in _fillings(template, words, draw) if (pair.premise, pair.hypothesis) not in found
            )
            found[pair.premise, pair.hypothesis] = pair
    return list(found.values())


def _fillings(template: Template, words: int, draw: np.random.Generator) -> Iterator[Pair]:
    """Yield random fillings without end."""
    while True:
        people = draw.choice(WORDS["person"][words], size=3, replace=False)
        chosen = dict(zip("abc", map(str, people), strict=True))
        chosen |= {slot: str(draw.choice(WORDS[slot][words])) for slot in template.slots if slot in WORDS}
        yield template.fill(chosen)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
