"""Hold what moving along symmetries did to a model's output, and judge what that shows."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from quotient_manifolds.symmetries.symmetries import Symmetries, text_table

Verdict = Literal["proved", "refuted", "inconclusive"]

MARGIN = 100.0  # a move may change the output by this often the rounding noise, times its condition number
CONTROL_TO_NOISE = 1e3  # the control must stand out of the noise this often, or the inputs do not exercise the pair
NEGLIGIBLE = 1e-9  # part of the control: rounding too, where weights are so badly scaled that the noise varies
SEPARATION = 1e-2  # a move that changes the output by more than this part of the control is no symmetry


@dataclass(frozen=True)
class PairProof:
    """Record what one pair, translation or freedom did to the output: changes are relative to the largest output.

    changes: per condition number of the group element (for a translation, per size), the largest change over the
    trials; control: the change when G alone is moved (for a translation, when the value bias moves and the output bias
    does not, or when the keys move otherwise); noise: the model's own rounding noise.
    """

    pair: str
    group: str
    changes: tuple[tuple[float, float], ...]
    control: float
    noise: float
    verdict: Verdict
    reason: str = ""

    @classmethod
    def judged(
        cls, name: str, group: str, changes: tuple[tuple[float, float], ...], control: float, noise: float
    ) -> PairProof:
        """Judge: proved if every change is rounding and far below the control, refuted if one is like the control."""

        def verdict(verdict: Verdict, reason: str = "") -> PairProof:
            return cls(name, group, changes, control, noise, verdict, reason)

        if not control >= CONTROL_TO_NOISE * noise:
            lost = "is lost in rounding noise" if control else "changes nothing (is the other side 0?)"
            return verdict("inconclusive", f"these inputs hardly see the pair: moving one side alone {lost}")
        rounding = _is_rounding(changes, control, noise)
        # Written so that NaN, which compares as False, is never small.
        small = max(change for _, change in changes) <= SEPARATION * control
        if rounding and small:
            return verdict("proved")
        if not rounding and not small:
            return verdict("refuted", "a group element changes the output like moving one side alone")
        reason = "the output changes more than rounding explains, far less than moving one side alone"
        return verdict("inconclusive", reason)

    @property
    def holds(self) -> bool:
        """Return whether the output stayed within rounding, be it that these inputs see the pair or not."""
        return _is_rounding(self.changes, self.control, self.noise)

    @property
    def change(self) -> float:
        """Return the largest change."""
        return max(change for _, change in self.changes)


def _is_rounding(changes: tuple[tuple[float, float], ...], control: float, noise: float) -> bool:
    least = NEGLIGIBLE * control if math.isfinite(control) else 0.0
    return all(change <= max(MARGIN * condition * noise, least) for condition, change in changes)


@dataclass(frozen=True)
class Proof:
    """Collect the proofs of all pairs, translations and freedoms of a model.

    all_proved: whether there is at least one, and every one is proved. Where nothing was claimed nothing is shown, so
    it is False of an empty proof; nor does it speak of modules that were not recognised or were refused.
    """

    pairs: tuple[PairProof, ...]
    noise: float
    seed: int
    translations: tuple[PairProof, ...] = ()
    freedoms: tuple[PairProof, ...] = ()

    @property
    def claims(self) -> tuple[PairProof, ...]:
        """Return the proofs of pairs, translations and freedoms, in this order."""
        return (*self.pairs, *self.translations, *self.freedoms)

    @property
    def all_proved(self) -> bool:
        """Return whether something was claimed, and all of it is proved."""
        return bool(self.claims) and all(proof.verdict == "proved" for proof in self.claims)

    def proved(self, symmetries: Symmetries) -> Symmetries:
        """Return what is left of `symmetries` without those this proof refutes or cannot tell."""
        good = {proof.pair for proof in self.claims if proof.verdict == "proved"}
        claimed = [each.name for each in symmetries.pairs]
        claimed += [each.name for each in symmetries.translations] + [each.name for each in symmetries.freedoms]
        return symmetries.without(set(claimed) - good)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {
            "pairs": [{**asdict(proof), "change": proof.change} for proof in self.pairs],
            "translations": [{**asdict(proof), "change": proof.change} for proof in self.translations],
            "freedoms": [{**asdict(proof), "change": proof.change} for proof in self.freedoms],
            "noise": self.noise,
            "seed": self.seed,
            "all_proved": self.all_proved,
        }

    def __str__(self) -> str:
        if not self.claims:
            return "no symmetric pairs to prove"
        rows = [
            (
                proof.pair,
                proof.group,
                f"{proof.change:.1e}",
                f"{proof.control:.1e}",
                f"{proof.verdict}: {proof.reason}" if proof.reason else proof.verdict,
            )
            for proof in self.claims
        ]
        header = ("symmetric pair", "group", "output change", "one side only", "verdict")
        return f"{text_table(header, rows)}\n\nrounding noise of the model {self.noise:.1e}, all relative to the output"
