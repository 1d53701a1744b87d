"""Directories of peft: the base that they name with the adapter on it, head included, or what to do about it."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from quotient_manifolds.compare.identity import files_fingerprint, model_hash
from quotient_manifolds.load import DataSource, find_checkpoints, load_checkpoint, load_model
from quotient_manifolds.load.text import known_classes
from quotient_manifolds.merge import merge_adapters
from quotient_manifolds.symmetries import example_inputs
from tests.nets import hugging_face, peft_files
from tests.nets.lora_files import edit, lora_directory, replace_tensors
from tests.nets.peft_files import rename
from tests.refusals import one_sentence

peft = pytest.importorskip("peft")


def same(model: nn.Module, other: nn.Module) -> bool:
    inputs = example_inputs(other)
    with torch.no_grad():
        return torch.equal(model(**inputs).logits, other(**inputs).logits)


@pytest.mark.parametrize("task", ["SEQ_CLS", None])
def test_adapter_and_head_are_read_exactly(task: str | None, tmp_path: Path) -> None:
    saved = {} if task else {"modules_to_save": ["classifier"]}
    model, directory = peft_files.classifier(tmp_path, task_type=task, **saved)
    loaded = load_model(directory)
    assert same(model, loaded)
    assert not loaded.training
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert {name for name, value in loaded.named_parameters() if value.requires_grad} == trained
    assert known_classes(loaded)[0] == 3
    assert model_hash(loaded) == model_hash(load_model(directory))  # nothing in it is random


def test_the_base_may_have_no_head_or_one_of_other_classes(tmp_path: Path) -> None:
    model, directory = peft_files.classifier(tmp_path)
    file = tmp_path / "base" / "model.safetensors"
    body = {name: value for name, value in load_file(file).items() if not name.startswith("classifier")}
    for head in ({}, {"classifier.weight": torch.zeros(5, 32), "classifier.bias": torch.zeros(5)}):
        save_file({**body, **head}, file, metadata={"format": "pt"})
        assert same(model, load_model(directory))


def test_where_the_base_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, directory = peft_files.classifier(tmp_path)
    for named in ("base", "../base", str(tmp_path / "base")):
        edit(directory, base_model_name_or_path=named)
        assert same(model, load_model(directory))
    edit(directory, base_model_name_or_path="here")
    (tmp_path / "base").rename(tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    assert same(model, load_model("adapter"))


def test_tokenizer_of_the_adapter_or_of_the_base(tmp_path: Path) -> None:
    _, directory = peft_files.classifier(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"text": "good film", "label": 1}\n{"text": "bad", "label": 2}\n')
    source = DataSource(tmp_path / "data.jsonl")
    (batch,) = source.batches(load_model(directory))
    assert batch["input_ids"].tolist() == [[2, 5, 8, 3], [2, 6, 3, 0]]
    tokens = hugging_face.VOCABULARY[:5] + hugging_face.VOCABULARY[:4:-1]
    transformers.BertTokenizerFast(vocab={token: i for i, token in enumerate(tokens)}).save_pretrained(directory)
    (batch,) = source.batches(load_model(directory))
    assert batch["input_ids"][0].tolist() == [2, 10, 7, 3]


def test_a_zoo_of_adapters(tmp_path: Path) -> None:
    model, directory = peft_files.classifier(tmp_path)
    (checkpoint,) = find_checkpoints(["adapter"], "huggingface", tmp_path)
    assert same(model, load_checkpoint(checkpoint))
    before = files_fingerprint(directory)
    (tmp_path / "base" / "model.safetensors").touch()
    assert files_fingerprint(directory) != before


UNSLOTH = (  # as Unsloth writes it for language layers
    r"(?:.*?(?:vision|image|visual|patch|embed|encoder|encode|pixel).*?(?:self_attn|attention).*?(?:q_proj|k_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:q_proj|v_proj|up_proj)))"
)
FILES: dict[str, dict[str, Any]] = {
    "the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "the head": {"target_modules": ["q_proj", "lm_head"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "embeddings saved": {"target_modules": ["q_proj"], "embeddings": True},
    "more words": {"target_modules": ["q_proj"], "words": 34},
    "fewer words": {"target_modules": ["q_proj"], "words": 26},
    "more words, embeddings": {"target_modules": ["embed_tokens", "lm_head"], "words": 34},
    "more words, trained whole": {
        "target_modules": ["q_proj"], "words": 34, "modules_to_save": ["embed_tokens", "lm_head"]
    },
    "Unsloth": {"target_modules": UNSLOTH},
    "all-linear": {"target_modules": "all-linear"},
    "layers": {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "excluded": {"target_modules": r".*_proj", "exclude_modules": r".*(q|k|up)_proj"},
    "patterns": {
        "target_modules": ["q_proj", "v_proj"], "rank_pattern": {r".*\.1\.self_attn.q_proj": 3},
        "alpha_pattern": {"layers.0.self_attn.q_proj": 5, "v_proj": 3}, "use_rslora": True,
    },
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 4]},
    "IA3": {
        "kind": peft.IA3Config,
        "target_modules": r".*\.(k_proj|v_proj|down_proj)",
        "feedforward_modules": r".*\.down_proj",
    },
    "LoHa": {"kind": peft.LoHaConfig, "r": 2, "target_modules": r".*\.(q|v)_proj", "rank_pattern": {"v_proj": 3}},
    "LoKr": {"kind": peft.LoKrConfig, "r": 2, "target_modules": r".*\.(q|v)_proj", "alpha_pattern": {"v_proj": 3}},
    "AdaLoRA": {"kind": peft.AdaLoraConfig, "total_step": 9, "target_modules": r".*\.(q|v)_proj"},
}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("file", FILES)
def test_what_peft_writes_is_read(file: str, tied: bool, tmp_path: Path) -> None:
    model = peft_files.trained(
        peft_files.language(tmp_path / "base", tied=tied), tmp_path / "adapter", task_type="CAUSAL_LM", **FILES[file]
    )
    loaded = load_model(tmp_path / "adapter")
    assert peft_files.logits(loaded).equal(peft_files.logits(model))
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert {name for name, value in loaded.named_parameters() if value.requires_grad} == trained
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft says when it saves embeddings
        loaded.save_pretrained(tmp_path / "again", save_embedding_layers=FILES[file].get("embeddings", "auto"))
    assert peft_files.logits(load_model(tmp_path / "again")).equal(peft_files.logits(model))


def test_rows_of_a_larger_vocabulary_that_peft_did_not_save_are_missed(tmp_path: Path) -> None:
    base, settings = peft_files.language(tmp_path / "base"), {"target_modules": ["embed_tokens"], "words": 34}
    peft_files.trained(base, tmp_path / "adapter", task_type="CAUSAL_LM", **settings)
    with pytest.raises(
        ValueError, match=r"another vocabulary than .*base, but lacks parameter .*lm_head\.weight$"
    ) as caught:
        load_model(tmp_path / "adapter")
    assert one_sentence(str(caught.value))
    model = peft_files.trained(
        peft_files.language(tmp_path / "base", tied=True), tmp_path / "tied", task_type="CAUSAL_LM", **settings
    )
    assert peft_files.logits(load_model(tmp_path / "tied")).equal(peft_files.logits(model))


def test_experts_are_read(tmp_path: Path) -> None:
    base = peft_files.experts(tmp_path / "base")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    settings = {"target_modules": ["q_proj"], "target_parameters": parameters, "rank_pattern": {"down_proj": 3}}
    model = peft_files.trained(base, tmp_path / "adapter", task_type="CAUSAL_LM", **settings)
    assert peft_files.logits(load_model(tmp_path / "adapter")).equal(peft_files.logits(model))


def test_experts_that_were_modules_are_read(tmp_path: Path) -> None:
    """Before version 5 of transformers each expert of Mixtral was a module, and had factors of its own."""
    peft_files.experts(tmp_path / "base")
    factors = {}
    for layer in range(2):
        stem = f"model.layers.{layer}"
        factors[f"{stem}.self_attn.q_proj"] = (torch.randn(16, 2), torch.randn(2, 16))
        for expert in range(3):
            for name, n, m in (("w1", 24, 16), ("w2", 16, 24), ("w3", 24, 16)):
                factors[f"{stem}.block_sparse_moe.experts.{expert}.{name}"] = (torch.randn(n, 2), torch.randn(2, m))
    settings = {"target_modules": ["q_proj", "w1", "w2", "w3"], "r": 2, "lora_alpha": 3, "task_type": "CAUSAL_LM"}
    plain = {"rank_pattern": {}, "alpha_pattern": {}, "base_model_name_or_path": str(tmp_path / "base")}
    lora_directory(tmp_path / "adapter", factors, **settings, **plain)
    base = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "base")
    expected = {name: value.clone() for name, value in base.state_dict().items()}
    for layer in range(2):
        stem = f"model.layers.{layer}"
        expected[f"{stem}.self_attn.q_proj.weight"] += 1.5 * _product(factors[f"{stem}.self_attn.q_proj"])
        for expert in range(3):
            first, down, last = (
                1.5 * _product(factors[f"{stem}.block_sparse_moe.experts.{expert}.w{each}"]) for each in (1, 2, 3)
            )
            expected[f"{stem}.mlp.experts.gate_up_proj"][expert] += torch.cat([first, last])
            expected[f"{stem}.mlp.experts.down_proj"][expert] += down
    base.load_state_dict(expected)
    loaded = load_model(tmp_path / "adapter")
    torch.testing.assert_close(peft_files.logits(loaded), peft_files.logits(base.eval()), rtol=1e-4, atol=1e-5)


def _product(factors: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return factors[0] @ factors[1]


@pytest.mark.parametrize("settings", [{}, {"modules_to_save": ["lm_head"]}], ids=["plain", "head"])
def test_names_of_a_former_structure_are_those_of_the_model(settings: dict[str, Any], tmp_path: Path) -> None:
    base = peft_files.vision_language(tmp_path / "base")
    model = peft_files.trained(base, tmp_path / "adapter", target_modules=["q_proj", "v_proj"], **settings)
    rename(tmp_path / "adapter", peft_files.before_the_renaming)
    assert any(".language_model.model." in name for name in load_file(tmp_path / "adapter/adapter_model.safetensors"))
    assert peft_files.logits(load_model(tmp_path / "adapter")).equal(peft_files.logits(model))


PATTERNS: dict[str, Any] = {
    "target_modules": "(", "exclude_modules": "(", "layers_pattern": ["("], "rank_pattern": {"(": 2},
    "alpha_pattern": {"(": 8}, "modules_to_save": ["(", "classifier"],
}  # fmt: skip


@pytest.mark.parametrize("setting", PATTERNS)
def test_no_pattern_of_a_stranger_is_evaluated(setting: str, tmp_path: Path) -> None:
    """Whoever evaluates these finds that they are no expressions."""
    model, directory = peft_files.classifier(tmp_path)
    edit(directory, **{setting: PATTERNS[setting]})
    assert same(model, load_model(directory))


KEYS = [
    "first", "^first", "block.first", r"block\.first", "fir.t", "irst", "^block", "b", ".*first", r".*\.first",
    r"block\.\d\.first", r"^block\.\d+\.first$", "block.*first", "block.+first", "second|first", "", "a_b", ".*", "f",
]  # fmt: skip
MODULES = ["first", "block.first", "block.3.first", "block.12.first", "blockXfirst", "a.block", "first.b", "a_b", "x.f"]


@pytest.mark.parametrize("key", KEYS)
def test_keys_mean_what_they_mean_to_peft(key: str) -> None:
    from peft.utils.other import get_pattern_key

    from quotient_manifolds.load.adapter_names import key_matches

    for module in MODULES:
        assert key_matches(key, module) is (get_pattern_key([key], module) == key)


@pytest.mark.parametrize("key", ["(a|b)", "a{2}", "[qv]_proj", "a*", "(", "a\\", r"\w", r"(?!a)b", r"(a)\1", "a**", 3])
def test_other_keys_are_refused(key: Any) -> None:
    from quotient_manifolds.load.adapter_names import key_matches

    assert key_matches(key, "a") is None


@pytest.mark.parametrize("lost", ["lora_A", "base_layer", "modules_to_save"])
def test_what_does_not_arrive_is_seen(lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = peft_files.language(tmp_path / "base")
    settings = {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}
    peft_files.trained(base, tmp_path / "adapter", task_type="CAUSAL_LM", **settings)
    put = peft.PeftModel.load_state_dict

    def spoiled(self: Any, state: dict[str, Any], **options: Any) -> Any:
        name = next(name for name in sorted(state) if lost in name)
        return put(self, {**state, name: state[name] + 1}, **options)

    monkeypatch.setattr(peft.PeftModel, "load_state_dict", spoiled)
    with pytest.raises(ValueError, match=r"must be loaded unchanged. Found other values of .*") as caught:
        load_model(tmp_path / "adapter")
    assert one_sentence(str(caught.value))


def test_a_file_that_has_a_layer_under_two_names_is_refused(tmp_path: Path) -> None:
    base = peft_files.vision_language(tmp_path / "base")
    peft_files.trained(base, tmp_path / "adapter", target_modules=["q_proj"])
    file = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    former = {peft_files.before_the_renaming(name): value + 1 for name, value in file.items()}
    replace_tensors(tmp_path / "adapter", **former)
    for function in (load_model, lambda path: merge_adapters([path])):
        with pytest.raises(ValueError, match=r"must hold each tensor once\. Found .*q_proj\.lora_A.* and ") as caught:
            function(tmp_path / "adapter")
        assert one_sentence(str(caught.value))


def test_absent_peft_names_the_base_and_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, directory = peft_files.classifier(tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r'adapter is an adapter of .*base, .* "quotient-manifolds\[peft\]"\.'):
        load_model(directory)
