"""The page's words between its tables."""

from __future__ import annotations

from studies.bert.zoo import FULL
from studies.paper import MARGIN
from studies.results.estimates import RULES
from studies.results.paper_and_here import NOTEBOOKS
from studies.results.records import Records
from studies.results.zoos import Zoo

LEAD = """\
“Hide & Seek: Transformer Symmetries Obscure Sharpness & Riemannian Geometry Finds It” (da Silva, Dangel and Oore,
[arXiv 2505.05409](https://arxiv.org/abs/2505.05409)) beside what this package finds. `make study NAME=results`
wrote this page from the records of the studies: no number in a column “Here” is typed in, and no verdict is written
by hand."""

READING = """\
Kendall’s tau between sharpness and the gap, with its interval and the number of models or seeds. Below 0: sharper
models generalise better. inv and mix are followed along second-order geodesics where nothing else is said."""

TOY = f"""\
About the scalar model of Fig. 1, Fig. 6 and App. D, where everything has a closed form and nothing an interval; the
numbers behind each verdict are in [notebook 1]({NOTEBOOKS["1"]})."""

ORDERS = """\
The mean of tau over the settings with its interval over seeds; under it, in how many settings tau’s own interval lies
below 0 · holds 0 · lies above 0."""

REFERENCES = """\
For X′X = I the paper has closed forms to first order, \\|beta (beta − X′y)\\| for inv and \\|beta − X′y\\| for mix, up
to constants. Here X′X is not I; with the solution of least norm in the place of X′y:"""

FAMILY = f"""\
The metrics W_t, weighted geometric means of (G′G)⁻¹ and H′H, have the symmetry for every real t: 0 is inv, 1 is mix,
½ is the Euclidean metric of the balanced pair. All along second-order geodesics, but for the last column; for the exact
ones of diagonal networks see also [notebook 4]({NOTEBOOKS["4"]})."""

RADIUS = """\
Worst-case sharpness is a rise of the loss. It grows with the first power of the radius where the gradient decides and
with the second where the Hessian does; other powers say that the loss no longer follows either."""

REDO = """\
    make study NAME=toy
    make study NAME=ascents
    make study NAME=diagonal
    make study NAME=vit
    make study NAME=bert
    make study NAME=results ARGS="--page docs/benchmarks.md"

Each study writes to `results/NAME`. What it leaves there as its record (`toy.json`, `diagonal.json`, `record/`) goes to
`notebooks/records`, from where the last command reads."""


def rules() -> str:
    """Return how a verdict comes about."""
    words = {name: rule.words for name, rule in RULES.items()}
    return f"""\
A claim is a statement about a number, and the number’s 95 % interval decides. “{words["above"]}”, “{words["below"]}”
and “{words["large"]}”: it **holds** where the whole interval is on that side of the limit, and **does not hold here**
where all of it is on the other. “{words["small"]}”: holds where the whole interval is inside, does not where it is
outside. “{words["apart"]}”: holds where 0 is not in the interval, does not where the interval lies within ±{MARGIN:g}.
Everything else is **not decided at this n**. {MARGIN:g} is the largest difference between inv and mix in the paper’s
Table 1, which the paper calls small. The terms of a difference or product are resampled with the same models or seeds.
A claim about where adaptive sharpness correlates is not decided where its own interval holds 0. The verdicts stand
side by side without a correction for their number."""


def different(records: Records) -> str:
    """Return what is not as in the paper."""
    return f"""\
- **Vision.** Not CLIP on ImageNet, but {_number(records.vit)} small vision transformers fine-tuned on 256 of
  scikit-learn’s digits.
- **Language.** Not BERT-base on MNLI, but {_number(records.bert)} BERTs of 22.7 million parameters, fine-tuned on pairs
  of sentences made from templates; sharpness on 24 of those, with ascents of 10 steps. Of
  {FULL.models} that were trained, those that had not learned their training pairs (an error above {FULL.learned:g}) are
  left out. That rule was set when training errors, but no correlations, were known.
- **Diagonal networks.** As in the paper where it says how: dimension 200, 90 % zeros, 50 networks trained to a loss of
  1e-5. It does not say how many points of data, which initial scales and which learning rates. {_grid(records)}
- **Radii, steps and restarts** of the ascent are not in the paper. Ours were fixed before any correlation was looked
  at; “Here” is at the middle one of three radii, unless another is named.
- **Intervals** (95 %) are percentile bootstraps: over the models of one zoo with one set of data; for diagonal networks
  over seeds, each with data and networks of its own, which says something else. The paper gives none.
- tau is tau-b here and tau-a there; without ties they are equal.
- The gap is test error minus training error; for diagonal networks, which all have the same training loss, it is the
  test loss.

What is found on the two zoos of transformers does not say that the paper’s figures for CLIP and MNLI are wrong: it is
what the same measures say elsewhere. [full_scale.md](full_scale.md) has the paper’s own zoos, ready to run."""


def _number(zoo: Zoo | None) -> str:
    return "a number of" if zoo is None else str(zoo.count)


def _grid(records: Records) -> str:
    if records.diagonal is None:
        return "Here it is a grid of settings."
    plan = records.diagonal.study.plan
    size = f"{len(plan.settings)} settings with {plan.seeds} seeds each"
    return f"Here it is a grid\n  of {size}, and tau is its mean over the grid."
