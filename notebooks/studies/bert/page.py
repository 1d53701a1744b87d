"""The page of the study of BERTs: what was found, beside what the paper found on MNLI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quotient_manifolds.report import Page
from studies.bert.spec import PLAN
from studies.zoo_page import ZooPage
from studies.zoo_study import Cost

if TYPE_CHECKING:
    from quotient_manifolds.compare import Comparison

BERT = ZooPage(
    title="BERTs fine-tuned on sentences that heuristics mistake",
    zoo=(
        "all-MiniLM-L6-v2, a BERT of 6 layers with 12 heads of 32 (22.7 million parameters), is fine-tuned with a new "
        "classifier to say whether one sentence entails another, on 240 pairs from 24 templates. In all of them the "
        "second has only words of the first, is a stretch of it, or is one of its clauses, and half of them are not "
        "entailed. The 480 test pairs have other nouns and verbs: half are of the same templates, half of 12 others. "
        "At random: learning rate (5e-5 to 5e-4), weight decay (1e-4 to 1), batch size (8, 16, 32), label smoothing "
        "(0, 0.1), dropout (0, 0.1, 0.2), share of warm-up (0, 0.1, 0.3), lower layers left as they are (0, 2), epochs "
        "(4, 8, 12) and seed. Of 28 models those that came to answer all training pairs alike are left out. Sharpness "
        "is measured on the first 24 training pairs, one of each template, in ascents of 10 steps; errors, losses and "
        "gaps are those of all pairs."
    ),
    plan=PLAN,
    given={"learning_rate": "learning rate"},
    paper={"adaptive": "0.06", "inv": "0.28", "mix": "0.38"},  # [paper, Table 1: BERT on MNLI]
    paper_models="35 BERTs on MNLI",
)


def bert_page(comparison: Comparison, costs: tuple[Cost, ...], *, fast: bool = False) -> Page:
    """All that the study says."""
    return BERT.page(comparison, costs, fast=fast)
