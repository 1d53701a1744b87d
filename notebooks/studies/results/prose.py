"""The page's words between its tables."""

from __future__ import annotations

from textwrap import fill

from studies.diagonal.networks import Setting
from studies.diagonal.study import LARGE
from studies.diagonal.tables import where
from studies.paper import MARGIN, TAU
from studies.results.estimates import RULES
from studies.results.paper_and_here import NOTEBOOKS
from studies.results.records import Records
from studies.results.settings import DiagonalZoo
from studies.wording import signed


def _filled(text: str) -> str:
    return fill(" ".join(text.split()), 118, break_on_hyphens=False, break_long_words=False)


LEAD = """\
“Hide & Seek: Transformer Symmetries Obscure Sharpness & Riemannian Geometry Finds It” (da Silva, Dangel and Oore,
[arXiv 2505.05409](https://arxiv.org/abs/2505.05409)) beside what this package finds. `make study NAME=results`
wrote this page from the records of the studies: no number in a column “Here” is typed in, and no verdict is written
by hand."""

READING = """\
Kendall’s tau between sharpness and the gap. Below 0: sharper models generalise better. For diagonal networks a range
goes from the least to the largest tau of all settings, and the numbers in brackets are how many settings have an
interval below · around · above 0. There is no mean over settings: the grid is our choice."""

TOY = f"""\
About the scalar model of Fig. 1, Fig. 6 and App. D, where everything has a closed form and nothing an interval; the
numbers behind each verdict are in [notebook 1]({NOTEBOOKS["1"]})."""

PLOTTED = """\
**What the paper probably plotted.** For diagonal networks the paper has closed forms, derived for X′X = I: to first
order and up to constants \\|beta (beta − X′y)\\| for inv and \\|beta − X′y\\| for mix. With fewer points than
coordinates X′X has no full rank and cannot be I. In “closed form” above, the solution of least norm stands in the
place of X′y. In most settings that start from small weights these forms give the paper’s order, and for inv and mix
about its taus; no ascent of ours does. So we think that it plotted them. That is a guess: the text does not say it,
nor how many points, which scales and which rates there were.

**Why that is not the sharpness of Eq. 3.** Up to what is left of the training loss, a network differs from the
solution of least norm by a vector of the null space of X, along which the loss does not change at all. So \\|beta −
X⁺y\\| is large where a network lies far from that solution in *flat* directions: it is a distance, no rise of a loss.
The limit of Eq. 3 for small radii is the norm of the Riemannian gradient, which is in the table too; in several
settings its tau has the opposite sign of the closed form’s. At larger radii the second-order term decides, which the
closed forms leave out (inv), or count as the same for all networks (mix); and they do not know that geodesics of mix
end."""

SETTING_CLAIMS = """\
All of this is exploratory: which of these numbers to show was not fixed beforehand, and nothing is corrected for their
number. Each setting is held to the claim by its own interval over seeds, and settings are counted, not averaged.
Settings with the same number of points and seed share their data, so counts are not of independent trials. Second-order
mix is not here: its values are truncation error. Closed forms are here because the paper’s results look like theirs;
they are no sharpness."""

ORDERS = _filled(
    f"""\
By plain ascents, which are alike for all orders: the least and the largest tau of all settings and, in brackets, in
how many of them tau’s own interval lies below 0 · holds 0 · lies above 0. A setting where more than {LARGE:.0%} of
the rise is truncation error (a median, measured at the end of the second-order ascent; it stands for the first order
too) is left out: what is ranked there is no property of the metric. Second-order mix follows polynomials that grow
without bound where a coordinate of beta is nearly 0, so its median sharpness under “The radius” below grows with the
eighth power of the radius. It is no evidence on any sign. [Notebook 4]({NOTEBOOKS["4"]}) shows how it comes about."""
)

FAMILY = _filled(
    f"""\
The metrics W_t, weighted geometric means of (G′G)⁻¹ and H′H, have the symmetry for every real t: 0 is inv, 1 is mix,
½ is the Euclidean metric of the balanced pair. Diagonal networks along exact geodesics, by plain ascents, setting by
setting; second-order ones are truncation error as t nears 1 ([notebook 4]({NOTEBOOKS["4"]}))."""
)

RADIUS = _filled(
    """\
Worst-case sharpness is a rise of the loss. It grows with the first power of the radius where the gradient decides and
with the second where the Hessian does; other powers say that the loss no longer follows either. Diagonal networks:
tau is its range over the settings, with counts as above; “truncation error” marks what is no evidence."""
)

REDO = """\
    make study NAME=toy
    make study NAME=ascents
    make study NAME=diagonal
    make study NAME=pilots
    make study NAME=mnist
    make study NAME=sentiment
    make study NAME=results ARGS="--page docs/benchmarks.md"

Each study writes to `results/NAME`. What it leaves there as its record (such as `toy.json`) goes to
`notebooks/records`, from where the last command reads."""


def rules() -> str:
    """Return how a verdict comes about."""
    words = {name: rule.words for name, rule in RULES.items()}
    return f"""\
A claim is a statement about a number, and the number’s 95 % interval in one setting speaks **for it**, **against it**,
or leaves it **not decided at this n**. “{words["above"]}” and “{words["below"]}”: for it where the whole interval is on
that side of 0, against it where all of it is on the other. “{words["small"]}”: for it where the whole interval is
inside, against it where it is outside. {MARGIN:g} is the largest difference between inv and mix in the paper’s Table 1,
which the paper calls small. The terms of a difference are resampled with the same seeds. A claim about where adaptive
sharpness correlates is not decided where its own interval holds 0. Verdicts are about the settings here, not about
the paper’s."""


def different(records: Records) -> str:
    """Return what is not as in the paper."""
    return f"""\
- **Vision and language.** Not CLIP on ImageNet and BERT-base on MNLI, which were not at hand, but small vision
  transformers on MNIST and BERTs of 22.7 million parameters on film
  reviews{_measured(records)}: another question, of which the answer says nothing about the paper’s own zoos.
  [full_scale.md](full_scale.md) has those, ready to run.
- **Diagonal networks.** As in the paper where it says how: dimension 200, 90 % zeros, 50 networks trained to a loss of
  1e-5. It does not say how many points of data, which initial scales and which learning rates. {_grid(records)}
- **Radii, steps and restarts** of the ascent are not in the paper. Ours were fixed before any correlation was looked
  at, those of transformers by the rise of the loss in pilot models ([MNIST](records/mnist/pilots.json), [film
  reviews](records/sentiment/pilots.json)); “Here” is at the middle one of three radii, unless another is named.
- **Intervals** (95 %) are percentile bootstraps: over models of one zoo; for diagonal networks over seeds, each with
  data and networks of its own. The paper gives none.
- tau is tau-b here and tau-a there; without ties they are equal.
- The gap is test error minus training error; for diagonal networks, which all have the same training loss, it is the
  test loss."""


def _measured(records: Records) -> str:
    return " (designed, not measured yet)" if records.sentiment is None else ""


def _grid(records: Records) -> str:
    if records.diagonal is None:
        return "Here it is a grid of settings."
    plan = records.diagonal.study.plan
    size = f"{len(plan.settings)} settings with {plan.seeds} seeds each"
    return f"Here it is a grid\n  of {size}, and each setting is reported for itself."


def thorough(zoo: DiagonalZoo | None) -> str:
    """Say how far ascents came, and which taus are by thorough ones."""
    if zoo is None:
        return ""
    plan = zoo.study.plan
    return f"""\
**The ascents had not converged.** So in the tables above adaptive sharpness, and both metrics along exact geodesics,
are by thorough ascents in every cell: {plan.thorough_steps} steps from the network, from {plan.thorough_restarts}
random points of the sphere and from the best single coordinate. The plain ones, of {plan.steps} steps from the network,
stand behind all other radii, orders of geodesics and members of the family. What plain ascents found of the best that
is known, over networks and cells: the median and the least; tau by both, as its range over the settings; and how far
tau changes at most in one cell."""


def by_setting(zoo: DiagonalZoo | None) -> str:
    """Return in which settings taus lie in the order of the paper's Table 1, and by what."""
    if zoo is None:
        return ""
    total, radius = len(zoo.settings), f"{zoo.middle:g}"
    ordered = {how: [each for each in zoo.settings if zoo.ordered(each, how)] for how in ("closed", "exact")}
    paper = ", ".join(f"{signed(tau)} ({name})" for name, tau in TAU["diagonal"].items())
    lines = "\n".join(f"- {_ordered(zoo, each)}" for each in ordered["closed"])
    taus = f"""\
Kendall’s tau with the test loss at radius {radius}: its mean over {zoo.count} seeds and their interval; closed forms
and gradient norms have no radius. The paper has {paper}.
With its closed forms means have that order in {len(ordered["closed"])} of {total} settings, with the maximum of Eq. 3
along exact geodesics in {len(ordered["exact"])} of {total}.{" With closed forms:" if lines else ""}"""
    figure = """\
The figure has the settings in the order of the table: medians over seeds, thick lines from the 10th to the 90th
percentile, thin ones from the least to the largest seed."""
    return "\n\n".join(part for part in (taus, lines, figure) if part)


def _ordered(zoo: DiagonalZoo, setting: Setting) -> str:
    points, scales, rates = where(setting)
    taus = [f"{name.split()[0]} {zoo.tau(setting, name)}" for name in ("adaptive", "inv closed", "mix closed")]
    return f"{points} points, scales {scales}, rates {rates}:\n  {', '.join(taus)}"
