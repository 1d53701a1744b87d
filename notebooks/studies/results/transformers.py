"""The sections on the two zoos of transformers, and the first sentences of the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from textwrap import fill
from typing import Final

import numpy as np

from quotient_manifolds.compare import Comparison
from studies.results.claims import said
from studies.results.estimates import RULES, Estimate
from studies.results.settings import DiagonalZoo
from studies.results.zoo_tables import (
    GAP,
    LOSS_GAP,
    MAIN,
    PARTS,
    WORST,
    Zoo,
    agreement_table,
    along_table,
    convergence_table,
    gaps_table,
    parts_table,
    radius_table,
    ranking_table,
    values_table,
)
from studies.wording import percent
from studies.zoos.catalogue import COMPETITORS
from studies.zoos.convergence import Convergence
from studies.zoos.ranking import Term

GAPS: Final = {
    "films (own source)": "error_gap",
    "products": "products_error_gap",
    "editorials": "editorials_error_gap",
    "tweets": "tweets_error_gap",
}
AGREEING: Final = (*MAIN, "adaptive, released ascent", "inv, pairs with biases as rows", "inv, gradient norm", "margin")
NOISES: Final = (0.0, 0.2, 0.4)
SEEDS: Final = (1, 2, 3)


def mnist_zoo(comparison: Comparison) -> Zoo:
    """Return the full factorial zoo of vision transformers."""
    along = ("points", "noise", "shift", "learning_rate", "weight_decay")
    return Zoo(comparison, (*along, "seed"), along, ("points", "noise", "shift"))


def sentiment_zoo(comparison: Comparison, group: str) -> Zoo:
    """Return one of the two groups of BERTs: those of the factorial design, or those that differ by seed alone."""
    rows = tuple(row for row in comparison.rows if row.scores["group"] == group)
    along = ("learning_rate", "batch_size", "dropout", "epochs")
    chosen = Comparison(**{**vars(comparison), "rows": rows})
    return Zoo(chosen, along, along, ())


def primary(zoo: Zoo) -> str:
    """Say what was compared first, as the spec fixed it, and how that went."""
    found = zoo.difference("inv", "adaptive")
    taus = {name: zoo.design.granulated(zoo.catalogue.middle(name), GAP, zoo.along) for name in ("inv", "adaptive")}
    return (
        "The primary comparison, fixed before the zoo was measured: |Psi| of inv minus |Psi| of adaptive sharpness, "
        f"both at their middle radius, is {found}. The paper’s claim that it is above 0 {_verdict(found)}. Psi "
        f"itself is {taus['inv']} for inv and {taus['adaptive']} for adaptive sharpness."
    )


def _verdict(found: Estimate | None) -> str:
    return {
        "for it": "is borne out by this zoo",
        "against it": "is contradicted by this zoo",
        "not decided at this n": "is not decided by this zoo",
        "not run": "was not asked",
    }[RULES["above"].verdict(found)]


def mnist_section(zoo: Zoo, converged: Convergence | None) -> Iterator[str]:
    """Yield the section on vision transformers, part by part."""
    rows, losses, errors = (zoo.design.column(name) for name in (GAP, "train_loss", "train_error"))
    count = zoo.design.models
    yield _paragraph(
        f"{count} vision transformers (2 layers, 3 heads of 16, 41,770 parameters) on MNIST: every combination of "
        "100 or 250 training images, 0, 20 or 40 % of labels replaced, shifts by up to a pixel or none, learning "
        "rates of AdamW of 1e-4, 1e-3 and 1e-2, weight decay 0 or 0.1, and three seeds of data and weights. Each "
        "was trained until its loss on its own, noisy labels, without shifts, fell below 0.1 nats: they ended at "
        f"{losses.min():.3f} to {losses.max():.3f}, with training errors of up to {100 * errors.max():.1f} %. The "
        "gap is the error on 3000 other images minus the training error; both are of labels as noisy, in "
        f"expectation exactly. It goes from {rows.min():.3f} to {rows.max():.3f}. Sharpness is that of the first 100 "
        "training images with their noisy labels, by ascents of 15 steps."
    )
    yield _paragraph(
        "“Pooled” is Kendall’s tau-b with the gap in error over all pairs of models. “Within cells” takes only "
        "pairs of the same number of images, share of noise and augmentation: there, models differ in learning "
        "rate, weight decay and seed. “Granulated” is the mean, over the five factors, of tau over the pairs that "
        "differ in that factor alone (Jiang et al., 2020); it is called Psi below. “Partial” holds all five factors "
        "fixed at once (Kendall’s partial tau). The last column is with the gap in loss, which counts how sure a "
        "model is where it is wrong. Intervals (95 %) are bootstraps over models, the same for all numbers. All but "
        "the primary comparison is exploratory, and no interval is corrected for their number; nor does one know "
        "that models of one seed have data in common, which is why there is a table by seed. inv and mix are "
        "divided by all symmetries that are found and proved; “pairs with biases as rows” is what the paper divides "
        "by."
    )
    yield _paragraph(f"**{primary(zoo)}**")
    yield ranking_table(zoo)
    yield "By label noise, within cells:"
    yield values_table(zoo, (*WORST, *COMPETITORS.values()), "noise", NOISES)
    yield "Over the pairs that differ in one factor alone:"
    yield along_table(zoo, (*WORST, *COMPETITORS.values()))
    yield "By seed of the data, within cells:"
    yield values_table(zoo, MAIN, "seed", SEEDS)
    yield "By radius:"
    yield radius_table(zoo)
    yield _paragraph(
        "What each part of a measure adds, on the models of the first seed: the order of geodesics at radii where "
        "those of second order have a median reach of 0.4 over the pilots, which is where truncation shows; the "
        "ball’s norm; the relaxation of the metric. Values beyond reach are of truncated geodesics that may be far "
        "from the exact ones."
    )
    yield parts_table(zoo)
    yield "How measures agree: Kendall’s tau-b between them, within cells."
    yield agreement_table(zoo, AGREEING)
    yield from _converged(converged)


def sentiment_section(seeds: Zoo, settings: Zoo, converged: Convergence | None) -> Iterator[str]:
    """Yield the section on BERTs, part by part."""
    errors = {
        name: np.concatenate([zoo.design.column(column) for zoo in (seeds, settings)])
        for name, column in (("train", "train_error"), ("test", "test_error"))
    }
    yield _paragraph(
        "all-MiniLM-L6-v2, a BERT of 22.7 million parameters, fine-tuned with a new classifier on 256 film reviews "
        f"to say whether people rated them above 0. {seeds.design.models} models differ by their seed alone "
        f"(classifier, order, dropout), as the paper’s do; {settings.design.models} by learning rate (5e-5 to 4e-4), "
        "batch size (8, 32), dropout (0, 0.1) and epochs (4, 12), a seed each. Training errors are up to "
        f"{100 * errors['train'].max():.1f} %, errors on 1500 other film reviews {100 * errors['test'].min():.1f} % "
        f"to {100 * errors['test'].max():.1f} %. Gaps are those on film reviews, and on 500 sentences on products, "
        "300 from editorials and 500 tweets, each rated by twenty people. Sharpness is that of the first 32 "
        "training sentences, by ascents of 10 steps, at the middle of three radii. Three weights of the embedding are "
        "exactly 0, and one is enough to switch off the projection of the released ascent in l2 (its division 0 / 0): "
        "its rows are of moves that leave the ball, here and in what follows."
    )
    everywhere = seeds.design.everywhere
    found = seeds.plain_difference("inv", "adaptive", GAP, everywhere)
    compared = (
        "The primary comparison, fixed before the zoo was measured: |tau| of inv minus |tau| of adaptive sharpness "
        f"with the gap on film reviews, over the models that differ by seed alone, is {found}. The paper’s claim "
        f"that it is above 0 {_verdict(found)}."
    )
    yield _paragraph(f"**{compared}**")
    names = (*WORST, *(name for name in seeds.measures if name not in WORST))
    yield "Models that differ by seed alone, Kendall’s tau-b with each gap:"
    yield gaps_table(seeds, names, GAPS, everywhere)
    if settings.design.models > 1:
        yield "Models of the factorial design:"
        yield gaps_table(settings, names, GAPS, settings.design.everywhere)
        yield "Over the pairs of these that differ in one factor alone, with the gap on film reviews:"
        yield along_table(settings, WORST)
    yield "By radius, models that differ by seed alone:"
    yield radius_table(seeds)
    yield from _converged(converged)


def _converged(found: Convergence | None) -> Iterator[str]:
    if found is not None:
        models = len({climb.model for climb in found.climbs})
        yield _paragraph(
            f"Had the ascents converged? For {models} models drawn from the zoo, what its ascents found over what "
            "longer ones found, which also start at two random points in the last column: the median over models, "
            "and the least."
        )
        yield convergence_table(found)


def _paragraph(text: str) -> str:
    return fill(text, 118, break_on_hyphens=False, break_long_words=False)


def in_short(mnist: Zoo | None, sentiment: tuple[Zoo, Zoo] | None, diagonal: DiagonalZoo | None) -> str:
    """Return a list of what holds, what does not and what was not decided in the zoos that were run."""
    texts = [
        *([] if mnist is None else _of_mnist(mnist)),
        *([] if sentiment is None else _of_sentiment(*sentiment)),
        *([] if diagonal is None else _of_diagonal(diagonal)),
    ]
    return "\n".join(
        fill(text, 118, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
        for text in texts
    )


def _of_mnist(zoo: Zoo) -> Iterator[str]:
    within = {name: zoo.design.tau(column, GAP, zoo.within) for name, column in zoo.measures.items()}
    in_loss = {name: zoo.design.tau(zoo.measures[name], LOSS_GAP, zoo.within) for name in MAIN}
    yield (
        f"Among {zoo.design.models} vision transformers on MNIST that differ in how they were trained on the same "
        f"task, tau with the gap in error is {_list(within, MAIN)}: {_signs(within, MAIN)}; with the gap in loss it "
        f"is {_list(in_loss, MAIN)}: {_signs(in_loss, MAIN)}."
    )
    yield primary(zoo)
    by_noise = {
        percent(noise): zoo.design.tau(zoo.measures["inv"], GAP, zoo.within & zoo.design.where(noise=noise))
        for noise in NOISES
    }
    yield (
        f"By label noise ({', '.join(by_noise)}), tau of inv on the same task is {_list(by_noise, by_noise)}: "
        f"{_signs(by_noise, by_noise)}."
    )
    wide, narrow = "inv", "inv, pairs with biases as rows"
    fibre = zoo.plain_difference(wide, narrow, GAP, zoo.within)
    yield (
        "Dividing by the whole fibre in place of what the paper divides by changes |tau| of inv on the same task by "
        f"{fibre}, {_said_sign(fibre)}."
    )
    free = [name for name in COMPETITORS.values() if name in within]
    best = max(free, key=lambda name: _size(within[name]))
    beaten = zoo.plain_difference("inv", best, GAP, zoo.within)
    freely = {name: zoo.design.tau(zoo.measures[name], LOSS_GAP, zoo.within) for name in free}
    surest = max(free, key=lambda name: _size(freely[name]))
    left = freely[COMPETITORS["train_loss"]]
    yield (
        f"Of what costs nothing ({', '.join(free)}) the strongest is {best}, tau {within[best]} on the same task; "
        f"|tau| of inv minus its |tau| is {beaten}, {_said_sign(beaten)}. With the gap in loss it is {surest}, "
        f"{freely[surest]}; even the training loss, which was to be the same for all, has {left}."
    )
    yield _of_parts(zoo)


def _of_parts(zoo: Zoo) -> str:
    parts = []
    for metric, (whole, first, exact) in PARTS.items():
        radius = next(iter(zoo.catalogue.labels[first]))
        labels = [zoo.catalogue.labels[name][radius] for name in (first, exact, whole)]
        values = [zoo.design.column(label) for label in labels]
        apart = [100 * float(np.nanmedian(np.abs(value / values[2] - 1))) for value in values[:2]]
        pairs = zoo.within & np.logical_and.outer(*(2 * [~np.isnan(values[0])]))
        minus = zoo.design.estimate([Term(label, GAP, pairs) for label in labels[:2]], lambda a, b: b - a)
        parts.append(
            f"for {metric} at radius {radius:g} first order and exact geodesics are {apart[0]:.2g} % and "
            f"{apart[1]:.2g} % from second order in value, and tau along exact geodesics minus that of first order "
            f"is {minus}"
        )
    return f"Where truncation shows, curvature counts for this much: {'; '.join(parts)}."


def _of_sentiment(seeds: Zoo, settings: Zoo) -> Iterator[str]:
    everywhere = seeds.design.everywhere
    found = seeds.plain_difference("inv", "adaptive", GAP, everywhere)
    taus = {name: seeds.design.tau(seeds.measures[name], GAP, everywhere) for name in MAIN}
    yield (
        f"Among {seeds.design.models} BERTs on film reviews that differ by their seed alone, as the paper’s do, tau "
        f"with the gap is {_list(taus, MAIN)}: {_signs(taus, MAIN)}."
    )
    yield (
        "There |tau| of inv minus |tau| of adaptive sharpness, the primary comparison, fixed before anything was "
        f"measured, is {found}: the paper’s claim that it is above 0 {_verdict(found)}."
    )
    gaps = {words: seeds.design.tau(seeds.measures["inv"], gap, everywhere) for words, gap in GAPS.items()}
    yield f"tau of inv by where the test sentences come from is {_list(gaps, gaps)}: {_signs(gaps, gaps)}."
    if settings.design.models > 1:
        everywhere, loss = settings.design.everywhere, COMPETITORS["train_loss"]
        taus = {name: settings.design.tau(settings.measures[name], GAP, everywhere) for name in (*MAIN, loss)}
        yield (
            f"Among {settings.design.models} BERTs that differ by learning rate, batch size, dropout and epochs, and "
            f"so in how far they were trained, it is {_list(taus, MAIN)}: {_signs(taus, MAIN)}. What is left of the "
            f"training loss alone has {taus[loss]}."
        )


def _of_diagonal(zoo: DiagonalZoo) -> Iterator[str]:
    closed, exact = (sum(zoo.ordered(each, how) for each in zoo.settings) for how in ("closed", "exact"))
    names = ("adaptive", "inv exact", "mix exact", "|beta|_1")
    ranges = ", ".join(f"{zoo.spread(name)} for {said(name)}" for name in names).replace("|", "\\|")
    yield (
        f"On diagonal networks the paper’s order (adaptive, inv, mix, each further below 0) is there in {closed} of "
        f"{len(zoo.settings)} settings with its closed forms, which are no sharpness, and in {exact} with the "
        f"maximum of Eq. 3 by thorough ascents: over the settings, tau is {ranges} (in brackets, how many intervals "
        "lie below · around · above 0)."
    )


def _size(found: Estimate | None) -> float:
    return 0.0 if found is None else abs(found.value)


def _list(taus: Mapping[str, Estimate | None], names: Iterable[str]) -> str:
    return ", ".join(f"{taus[name]} ({name})" for name in names)


def _signs(taus: Mapping[str, Estimate | None], names: Iterable[str]) -> str:
    """Say how many intervals are where."""
    signs = [tau.sign for name in names if (tau := taus[name]) is not None]
    words = {1: "above 0", -1: "below 0", 0: "around 0"}
    told = [f"{signs.count(sign)} {word}" for sign, word in words.items() if sign in signs]
    return f"of {len(signs)} intervals {', '.join(told)}"


def _said_sign(found: Estimate | None) -> str:
    return "not defined" if found is None else {1: "above 0", -1: "below 0", 0: "not told from 0"}[found.sign]
