"""What a merge depends on, and what is refused in one sentence with nothing written. peft is not needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import quotient_manifolds as qm
from quotient_manifolds.merge import truncated_sum
from tests.nets.lora_files import PREFIX, edit, lora_directory, product, random_lora, replace_tensors
from tests.refusals import one_sentence


def refactored(directory: Path, target: Path, condition: float) -> Path:
    """Write the same adapter with factors (B Z^-1, Z A), and Z of that condition number, in the dtype of its file."""
    tensors = load_file(directory / "adapter_model.safetensors")
    factors = {}
    for place, name in enumerate(sorted(name for name in tensors if "lora_A" in name)):
        A, B = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        torch.manual_seed(place)
        Q, _ = torch.linalg.qr(torch.randn(len(A), len(A), dtype=torch.float64))
        Z = torch.logspace(0, 1, len(A), base=condition, dtype=torch.float64)[:, None] * Q
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        factors[module] = ((B.double() @ torch.linalg.inv(Z)).to(B.dtype), (Z @ A.double()).to(A.dtype))
    return lora_directory(target, factors)


def trio(folder: Path, dtype: torch.dtype = torch.float32) -> list[Path]:
    ranks: list[dict[str, int]] = [{"a": 3, "b": 2}, {"a": 2}, {"b": 4, "c": 1}]
    return [random_lora(folder / str(seed), each, seed, dtype=dtype) for seed, each in enumerate(ranks)]


APART = pytest.mark.filterwarnings("ignore:adapters should have updates of the same modules")


@APART
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_result_does_not_depend_on_the_factors(dtype: torch.dtype, tmp_path: Path) -> None:
    paths = trio(tmp_path, dtype)
    moved = [refactored(path, tmp_path / f"moved{path.name}", 1e4) for path in paths]
    for name, each in (("merged", paths), ("again", moved)):
        qm.merge_adapters(each, [0.2, 0.5, 0.3]).save(tmp_path / name)
    # Writing B Z^-1 and Z A in float32 changes their product by up to the condition number times the unit of rounding.
    tolerance = 1e4 * torch.finfo(dtype).eps
    for module in "abc":
        one, other = product(tmp_path / "merged", module), product(tmp_path / "again", module)
        assert float((one - other).norm() / one.norm()) < 10 * tolerance


def test_weights_are_taken_as_they_are(tmp_path: Path) -> None:
    first, second = (random_lora(tmp_path / str(seed), {"a": 2}, seed, dtype=torch.float64) for seed in range(2))
    merged = qm.merge_adapters([first, second], [2, -1], rank=4)
    merged.save(tmp_path / "merged")
    expected = 2 * product(first, "a") - product(second, "a")
    torch.testing.assert_close(product(tmp_path / "merged", "a"), expected, rtol=0, atol=1e-12)
    assert merged.weights == (2.0, -1.0)
    assert merged.relative_error == 0
    assert merged.settings["lora_alpha"] == merged.settings["r"] == 4


def test_a_merge_is_printed_as_a_table(tmp_path: Path) -> None:
    paths = [random_lora(tmp_path / f"of {seed}", {"a": 2, "longer": 1}, seed) for seed in range(2)]
    merged = qm.merge_adapters(paths, [0.25, 0.75])
    first, second = (each.relative_error for each in merged.modules)
    assert str(merged).splitlines() == [
        f"2 adapters merged with weights 0.25, 0.75; {merged.relative_error:.2%} lost in all",
        f"a       rank 2, {first:.2%} lost",
        f"longer  rank 1, {second:.2%} lost",
    ]
    assert merged.relative_error > 0.01


def test_keys_of_ranks_are_names_unless_they_match_another_module(tmp_path: Path) -> None:
    ranks = {"block.query": 2, "query": 1, "block.key": 1, "block.value": 3}
    merged = qm.merge_adapters([random_lora(tmp_path / "one", ranks, 0)])
    patterns = {"^query": 1, "block.query": 2, "block.key": 1}
    assert merged.settings["rank_pattern"] == merged.settings["alpha_pattern"] == patterns
    merged.save(tmp_path / "merged")
    assert [module.rank for module in qm.merge_adapters([tmp_path / "merged"]).modules] == [1, 2, 3, 1]


def test_one_adapter_is_cut_to_a_lower_rank(tmp_path: Path) -> None:
    path = random_lora(tmp_path / "one", {"a": 5}, 0)
    merged = qm.merge_adapters([str(path)], rank=2)
    s = torch.linalg.svdvals(product(path, "a"))
    assert merged.relative_error == pytest.approx(float(s[2:].norm() / s.norm()), rel=1e-6)
    assert qm.merge_adapters([path]).relative_error < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_dtype_stays(dtype: torch.dtype, tmp_path: Path) -> None:
    paths = [random_lora(tmp_path / str(seed), {"a": 2}, seed, dtype=dtype) for seed in range(2)]
    assert {value.dtype for value in qm.merge_adapters(paths).tensors.values()} == {dtype}
    paths.append(random_lora(tmp_path / "single", {"a": 2}, 3))
    widest = torch.promote_types(dtype, torch.float32)
    assert {value.dtype for value in qm.merge_adapters(paths).tensors.values()} == {widest}


def test_a_mean_of_zero_is_an_adapter(tmp_path: Path) -> None:
    path = random_lora(tmp_path / "one", {"a": 2}, 0)
    merged = qm.merge_adapters([path, path], [0.0, 0.0])
    assert merged.relative_error == 0
    assert not any(value.any() for value in merged.tensors.values())


def test_what_is_stored_whole_is_averaged(tmp_path: Path) -> None:
    heads = [torch.randn(3, 12), torch.randn(3, 12)]
    both = {"embed.weight": torch.arange(4.0)}
    paths = [
        random_lora(tmp_path / str(seed), {"a": 2}, seed, whole={"head.weight": head, **both})
        for seed, head in enumerate(heads)
    ]
    merged = qm.merge_adapters(paths, [0.25, 0.75])
    tensors = merged.tensors
    assert merged.averaged == (PREFIX + "head.weight",)
    assert f"averaged because they differ: {PREFIX}head.weight" in str(merged)
    torch.testing.assert_close(tensors[PREFIX + "head.weight"], 0.25 * heads[0] + 0.75 * heads[1])
    assert tensors[PREFIX + "embed.weight"].equal(both["embed.weight"])
    with pytest.raises(ValueError, match=r"weights must sum to 1, for .*head\.weight .* Found a sum of 2") as said:
        qm.merge_adapters(paths, [1, 1])
    assert one_sentence(str(said.value))
    same = [random_lora(tmp_path / f"same{seed}", {"a": 2}, seed, whole=both) for seed in range(2)]
    merged = qm.merge_adapters(same, [1, 1])
    assert merged.tensors[PREFIX + "embed.weight"].equal(both["embed.weight"])
    assert (merged.averaged, "averaged" in str(merged)) == ((), False)


def whole(path: Path) -> None:
    replace_tensors(path, **{PREFIX + "head.weight": torch.ones(2, 2)})


def other_sizes(path: Path) -> None:
    replace_tensors(path, "lora_", **{A_NAME: torch.ones(2, 5), B_NAME: torch.ones(12, 2)})


A_NAME, B_NAME = f"{PREFIX}a.lora_A.weight", f"{PREFIX}a.lora_B.weight"
BAD_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "NaN": (lambda p: replace_tensors(p, **{A_NAME: torch.full((2, 14), math.nan)}), "NaN or infinity in .*a.lora_A"),
    "integers": (lambda p: replace_tensors(p, **{A_NAME: torch.ones(2, 14, dtype=torch.int32)}), "torch.int32"),
    "a factor missing": (lambda p: replace_tensors(p, "lora_B"), r"lacks parameter .*a\.lora_B\.weight"),
    "the other missing": (lambda p: replace_tensors(p, "lora_A"), r"lacks parameter .*a\.lora_A\.weight"),
    "three dimensions": (lambda p: replace_tensors(p, **{A_NAME: torch.ones(2, 7, 2)}), r"shape \(2, 7, 2\)"),
    "an empty factor": (lambda p: replace_tensors(p, **{A_NAME: torch.ones(2, 0)}), r"shape \(2, 0\)"),
    "no update": (lambda p: replace_tensors(p, "lora_", x=torch.ones(1)), "has no update"),
    "ranks that differ": (lambda p: replace_tensors(p, **{A_NAME: torch.ones(3, 14)}), r"A of shape \(3, 14\) and B"),
    "another rank": (
        lambda p: edit(p, rank_pattern={}, r=5),
        "must have the rank .* states, 5. Found factors of rank 2",
    ),
    "other sizes": (other_sizes, "updates of a must be of one layer. Found 12 x 14 in .*0, 12 x 5 in .*1"),
    "a head of one": (whole, "must be in all adapters. Found .*head.weight in .*1 and not in .*0"),
    "magnitudes": (lambda p: replace_tensors(p, **{f"{PREFIX}a.lora_magnitude_vector": torch.ones(12)}), "magnitude"),
    "DoRA": (lambda p: edit(p, use_dora=True), "must be a plain LoRA adapter.* Found use_dora"),
    "biases of updates": (lambda p: edit(p, lora_bias=True), "lora_bias"),
    "tokens": (lambda p: edit(p, trainable_token_indices=[1]), "trainable_token_indices"),
    "PiSSA": (
        lambda p: edit(p, init_lora_weights="pissa_niter_4"),
        "init_lora_weights = .* which may change them; save it as plain",
    ),
    "IA3": (lambda p: edit(p, peft_type="IA3"), "must be a LoRA adapter. Found .* of kind 'IA3'"),
    "another base": (lambda p: edit(p, base_model_name_or_path="x"), "different base models in .*: None and x"),
    "another task": (lambda p: edit(p, task_type="CAUSAL_LM"), "different tasks in .*: None and CAUSAL_LM"),
    "another revision": (lambda p: edit(p, revision="old"), "different revisions of it in .*: main and old"),
    "a word for alpha": (lambda p: edit(p, alpha_pattern={}, lora_alpha="much"), "must be numbers. Found 'much'"),
    "a list of ranks": (lambda p: edit(p, rank_pattern=[1]), "must be a dict of numbers"),
    "no weights": (lambda p: (p / "adapter_model.safetensors").unlink(), "has no weights"),
    "no settings": (lambda p: (p / "adapter_config.json").unlink(), "No adapter at .*1"),
    "damaged settings": (lambda p: (p / "adapter_config.json").write_text("{"), "not valid JSON"),
    "no expression": (lambda p: edit(p, alpha_pattern={"(": 1}), "must have names of modules as keys. Found '\\('"),
    "nested repeats": (
        lambda p: edit(p, alpha_pattern={"(a+)+b": 1}),
        "alpha_pattern in .* must have names of modules",
    ),
    "an integer too large for a float": (lambda p: edit(p, alpha_pattern={}, lora_alpha=10**400), "must be numbers"),
    "damaged weights": (lambda p: (p / "adapter_model.safetensors").write_text("?"), "does not load"),
    "too large": (lambda p: edit(p, alpha_pattern={}, lora_alpha=1e200), "must be finite in torch.float32"),
}


BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"adapters": []}, "list of one or more directories"),
    "one string": ({"adapters": "0"}, "list of one or more directories"),
    "a generator": ({"adapters": (name for name in "01")}, "list of one or more directories. Found <generator"),
    "no directory": ({"adapters": ["nowhere"]}, "No adapter at nowhere"),
    "weights too few": ({"weights": [1.0]}, r"a number for each of 2 adapters. Found \[1.0\]"),
    "one number": ({"weights": 0.5}, "a number for each of 2 adapters. Found 0.5"),
    "a generator of weights": ({"weights": (0.5 for _ in "01")}, "a number for each of 2 adapters"),
    "NaN as weight": ({"weights": [1.0, math.nan]}, "must be finite numbers. Found nan"),
    "words": ({"weights": ["a", "b"]}, "must be finite numbers. Found 'a'"),
    **{
        str(rank): ({"rank": rank}, f"rank must be an integer from 1 to 12, .* Found {rank}")
        for rank in (0, 13, 1.5, True)
    },
}


REFUSALS: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    **{name: (spoil, {}, word) for name, (spoil, word) in BAD_FILES.items()},
    **{name: (lambda _: None, arguments, word) for name, (arguments, word) in BAD_CALLS.items()},
}


@pytest.mark.parametrize(("spoil", "arguments", "word"), REFUSALS.values(), ids=list(REFUSALS))
def test_bad_input_is_refused_in_one_sentence(
    spoil: Callable[[Path], object], arguments: dict[str, Any], word: str, tmp_path: Path
) -> None:
    paths = [random_lora(tmp_path / str(seed), {"a": 2}, seed) for seed in range(2)]
    spoil(paths[1])
    with pytest.raises(ValueError, match=word) as caught:
        qm.merge_adapters(**{"adapters": paths, **arguments})
    message = str(caught.value)
    assert one_sentence(message), message
    assert not message.removesuffix("...").endswith("."), message


NEVER = "(a+)+(b"  # neither an expression nor one whose time is bounded
SETTINGS: dict[str, dict[str, Any]] = {
    "targets": {"target_modules": NEVER},
    "excluded": {"exclude_modules": NEVER},
    "layers": {"layers_pattern": [NEVER]},
    "ranks": {"rank_pattern": {NEVER: 2}, "r": 5},
    "one alpha": {"alpha_pattern": {NEVER: 7}, "lora_alpha": 7},
    "whole": {"modules_to_save": [NEVER]},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_a_merge_does_not_need_are_not_read(setting: str, tmp_path: Path) -> None:
    path = random_lora(tmp_path / "one", {"a": 2}, 0)
    edit(path, **SETTINGS[setting])
    scale = 7 / 2 if setting == "one alpha" else 1
    qm.merge_adapters([path]).save(tmp_path / "merged")
    torch.testing.assert_close(product(tmp_path / "merged", "a"), scale * product(path, "a"), rtol=1e-5, atol=1e-5)


def test_adapters_of_different_modules_are_merged_with_a_warning(tmp_path: Path) -> None:
    paths = [
        random_lora(tmp_path / str(seed), dict.fromkeys(names, 2), seed) for seed, names in enumerate(("ab", "bcd"))
    ]
    expected = r"same modules\. Found \S+0 without 2 \(such as c\), \S+1 without 1 \(such as a\) of 4 modules"
    with pytest.warns(UserWarning, match=expected) as said:
        merged = qm.merge_adapters(paths)
    assert one_sentence(str(said[0].message))
    assert [module.ranks for module in merged.modules] == [(2, 0), (2, 2), (0, 2), (0, 2)]


def test_names_of_modules_are_no_expressions(tmp_path: Path) -> None:
    """A name may hold what an expression means something by."""
    names, patterns = {"a(": 2, "b": 3}, {r"a\(": 2}
    settings = {"r": 3, "lora_alpha": 3, "rank_pattern": patterns, "alpha_pattern": patterns}
    paths = [random_lora(tmp_path / str(seed), names, seed, **settings) for seed in range(2)]
    assert {module.name for module in qm.merge_adapters(paths).modules} == set(names)


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = random_lora(tmp_path / "one", {"a": 2}, 0)
    merged = qm.merge_adapters([path])
    with pytest.raises(ValueError, match=r"one must be a new directory\. Found that it exists already"):
        merged.save(path)
    with pytest.raises(ValueError, match=r"merged must be a new directory\. Found that there is no directory"):
        merged.save(tmp_path / "nowhere" / "merged")
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            merged.save(tmp_path / "merged")
    assert [*tmp_path.iterdir()] == [path]
    merged.save(tmp_path / "merged")
    assert {file.name for file in (tmp_path / "merged").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


Terms = list[tuple[float, torch.Tensor, torch.Tensor]]
SIZES = [(9, 7, [2, 3], 2), (5, 40, [3, 1, 2], 4), (6, 4, [4, 4, 4], 3), (6, 8, [1], 1), (3, 3, [5, 5], 3)]


def random_terms(n: int, m: int, ranks: list[int]) -> Terms:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    return [(float(draw(1)), draw(n, r), draw(r, m)) for r in ranks]


@pytest.mark.parametrize(("n", "m", "ranks", "rank"), SIZES)
def test_no_matrix_of_the_rank_is_closer(n: int, m: int, ranks: list[int], rank: int) -> None:
    terms = random_terms(n, m, ranks)
    B, A, norm, lost = truncated_sum(terms, rank)
    mean = torch.stack([c * left @ right for c, left, right in terms]).sum(0)
    U, s, Vh = torch.linalg.svd(mean, full_matrices=False)
    close = {"rtol": 0, "atol": 1e-10 * float(s[0])}
    torch.testing.assert_close(B @ A, U[:, :rank] * s[:rank] @ Vh[:rank], **close)
    assert norm == pytest.approx(float(mean.norm()), rel=1e-12)
    assert lost == pytest.approx(float((mean - B @ A).norm()), abs=close["atol"])
    for balanced in (B.T @ B, A @ A.T):
        torch.testing.assert_close(balanced, torch.diag(s[:rank]), **close)
    skewed = [
        (c, left * 1e8**sign, right / 1e8**sign) for sign, (c, left, right) in zip((1, -1, 0), terms, strict=False)
    ]
    for mine, its in zip((B, A), truncated_sum(skewed, rank), strict=False):  # factors depend on products alone
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-9)


def test_no_dense_matrix_is_made() -> None:
    """200,000 x 200,000 numbers would be 320 GB."""
    terms = random_terms(200_000, 200_000, [2, 2])
    B, A, _, lost = truncated_sum(terms, 4)
    assert lost == 0
    some = torch.stack([c * left[:50] @ right[:, :50] for c, left, right in terms]).sum(0)
    torch.testing.assert_close(B[:50] @ A[:, :50], some, rtol=1e-9, atol=1e-9)
