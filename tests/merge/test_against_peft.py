"""Merged adapters as peft loads them, against dense matrices: peft says what each adapter adds, torch does the rest."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import quotient_manifolds as qm
from tests.nets import hugging_face, peft_files
from tests.nets.lora_files import edit, replace_tensors
from tests.refusals import one_sentence

peft = pytest.importorskip("peft")

FILE = "adapter_model.safetensors"
WEIGHTS = [0.5, 0.75, -0.25]


class Network(nn.Module):
    """A layer of every kind that LoRA of peft has an update for."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 12)
        self.first = nn.Linear(12, 10)
        self.block = nn.ModuleDict({"first": nn.Linear(10, 9)})
        self.turned = transformers.pytorch_utils.Conv1D(12, 9)
        self.image = nn.Conv2d(2, 5, 3, padding=1)
        self.point = nn.Conv2d(5, 6, 1)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.turned(torch.tanh(self.block["first"](torch.tanh(self.first(self.words(tokens))))))
        picture = hidden.reshape(len(tokens), 2, -1, 6)
        return self.head(self.point(torch.tanh(self.image(picture))).mean((2, 3)))


ALL = ["words", "first", "turned", "image", "point"]
TOKENS = torch.arange(20).reshape(4, 5)[:, :4]

KINDS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"r": 2}, {"r": 2}, {"r": 2}],
    "ranks and alphas": [{"r": 2, "lora_alpha": 3}, {"r": 4, "lora_alpha": 16}, {"r": 1}],
    "rsLoRA": [{"r": 4, "use_rslora": True}, {"r": 2}, {"r": 3, "use_rslora": True, "lora_alpha": 2}],
    "patterns": [
        {"r": 2, "rank_pattern": {"first": 3, "^turned": 1}, "alpha_pattern": {"block.first": 5}},
        {"r": 3, "alpha_pattern": {"fir.t": 7, "first": 9}, "use_rslora": True},
        {"r": 2, "rank_pattern": {"block\\.first": 4, "irst": 1}},
    ],
    "other modules": [
        {"r": 2, "target_modules": ["block.first", "words"]},
        {"r": 3, "target_modules": ["first"]},
        {"r": 1, "target_modules": "image|turned"},
    ],
    "starts": [
        {"r": 2, "init_lora_weights": "gaussian"},
        {"r": 2, "init_lora_weights": "mica", "target_modules": ["first", "words"]},
        {"r": 2, "init_lora_weights": "orthogonal", "target_modules": ["first"]},
    ],
    "trained whole": [{"r": 2, "modules_to_save": ["head"]}] * 3,
    "biases": [{"r": 2, "bias": "lora_only"}] * 3,
    "all biases": [{"r": 2, "bias": "all"}] * 3,
}


QUIET = pytest.mark.filterwarnings(
    "ignore:fan_in_fan_out is set to False:UserWarning",
    "ignore:The following rank_pattern keys did not:RuntimeWarning",
    "ignore:adapters should have updates of the same modules:UserWarning",
)


def network(dtype: torch.dtype) -> Network:
    torch.manual_seed(0)
    return Network().to(dtype).eval()


def trained(folder: Path, seed: int, dtype: torch.dtype, **settings: Any) -> tuple[Any, Path]:
    """An adapter whose every number is random, and where it is saved."""
    model = peft.get_peft_model(network(torch.float32), peft.LoraConfig(**{"target_modules": ALL, **settings}))
    model = model.to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(torch.randn(value.shape, generator=generator, dtype=torch.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of embeddings, and of Conv1D's fan_in_fan_out
        model.save_pretrained(folder / str(seed))
    return model.eval(), folder / str(seed)


def deltas(model: Any) -> dict[str, Tensor]:
    """What peft adds to each weight, in float64 and in the weight's shape."""
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach().double()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }


def load(directory: Path, dtype: torch.dtype) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of keys that are missing or unexpected
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        return peft.PeftModel.from_pretrained(network(dtype), str(directory)).to(dtype).eval()


@QUIET
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_merged_adapters_are_the_best_of_their_rank(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    models, paths = zip(*(trained(tmp_path, seed, dtype, **each) for seed, each in enumerate(KINDS[kind])), strict=True)
    merged = qm.merge_adapters(paths, WEIGHTS)
    merged.save(tmp_path / "merged")
    loaded = load(tmp_path / "merged", dtype)
    each, found = [deltas(model) for model in models], deltas(loaded)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-11
    names = set().union(*each)
    assert set(found) == names == {module.name for module in merged.modules}
    for module in merged.modules:
        zero = torch.zeros_like(found[module.name])
        mean = torch.stack([w * own.get(module.name, zero) for w, own in zip(WEIGHTS, each, strict=True)]).sum(0)
        ranks = tuple(_rank(model, module.name) for model in models)
        assert (module.ranks, module.rank) == (ranks, max(ranks))
        matrix = mean.flatten(1)
        U, s, Vh = torch.linalg.svd(matrix, full_matrices=False)
        best = U[:, : module.rank] * s[: module.rank] @ Vh[: module.rank]
        torch.testing.assert_close(found[module.name].flatten(1), best, rtol=0, atol=tolerance * float(s[0]))
        lost = float((matrix - best).norm() / matrix.norm())
        assert module.relative_error == pytest.approx(lost, abs=1e-6)


def _rank(model: Any, name: str) -> int:
    layer = model.get_submodule(f"base_model.model.{name}")
    return int(layer.r["default"]) if hasattr(layer, "get_delta_weight") else 0


@QUIET
@pytest.mark.parametrize("kind", KINDS)
def test_the_function_is_the_base_with_the_mean_update(kind: str, tmp_path: Path) -> None:
    dtype = torch.float64
    models, paths = zip(*(trained(tmp_path, seed, dtype, **each) for seed, each in enumerate(KINDS[kind])), strict=True)
    qm.merge_adapters(paths, WEIGHTS, rank=12).save(tmp_path / "merged")  # which truncates nothing
    base = network(dtype)
    state = {name: value.clone() for name, value in base.state_dict().items()}
    dense = [model.merge_and_unload().state_dict() for model in models]
    for name, value in state.items():
        state[name] = value + sum(w * (own[name] - value) for w, own in zip(WEIGHTS, dense, strict=True))
    base.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "merged", dtype)(TOKENS), base(TOKENS), rtol=1e-9, atol=1e-9)


def test_a_merged_classifier_is_loaded_from_disk(tmp_path: Path) -> None:
    """Of a model of Hugging Face, with its head, by peft and by this package."""
    base = hugging_face.bert_classifier(tmp_path / "base")
    paths = []
    for seed in range(3):
        model = transformers.BertForSequenceClassification.from_pretrained(base)
        lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], use_rslora=True)
        adapted = peft.get_peft_model(model, lora)
        torch.manual_seed(seed)
        with torch.no_grad():
            for value in adapted.parameters():
                if value.requires_grad:
                    value.normal_(std=0.3)
        adapted.save_pretrained(tmp_path / str(seed))
        paths.append(tmp_path / str(seed))
    edit(paths[1], base_model_name_or_path="../base")  # the same directory in other words
    merged = qm.merge_adapters(paths)
    merged.save(tmp_path / "merged")
    name = "base_model.model.classifier.modules_to_save.default.weight"
    heads = [qm.load_model(path).get_parameter(name) for path in paths]
    head = qm.load_model(tmp_path / "merged").get_parameter(name)
    torch.testing.assert_close(head, torch.stack(heads).mean(0))
    assert set(merged.settings["target_modules"]) == {"query", "value"}
    edit(paths[2], base_model_name_or_path=str(hugging_face.bert_classifier(tmp_path / "twin")))
    with pytest.raises(ValueError, match=r"different base models in .*: \S+base and \S+twin"):
        qm.merge_adapters(paths)
    assert len(merged.modules) == 4
    assert 0 < merged.relative_error < 1


UNSLOTH = r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|mlp)\.(?:(?:.*?q_proj.*?|.*?v_proj.*?|.*?up_proj.*?)))"
OF_LANGUAGE: dict[str, dict[str, Any]] = {
    "the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "the head": {"target_modules": ["q_proj", "lm_head"]},
    "embeddings saved": {"target_modules": ["q_proj"], "embeddings": True},
    "more words": {"target_modules": ["q_proj"], "words": 34},
    "more words, the head": {"target_modules": ["embed_tokens", "lm_head"], "words": 34},
    "more words, one embedding": {"target_modules": ["embed_tokens"], "words": 34},  # peft saves one
    "Unsloth": {"target_modules": UNSLOTH},
}


@pytest.mark.parametrize("kind", OF_LANGUAGE)
def test_adapters_of_language_models_are_merged(kind: str, tmp_path: Path) -> None:
    """An adapter and its double have the mean of what each adds: 1.5 of the one."""
    base = peft_files.language(tmp_path / "base")
    peft_files.trained(base, tmp_path / "one", task_type="CAUSAL_LM", **OF_LANGUAGE[kind])
    peft_files.trained(base, tmp_path / "other", task_type="CAUSAL_LM", lora_alpha=16, **OF_LANGUAGE[kind])
    peft_files.trained(base, tmp_path / "mean", task_type="CAUSAL_LM", lora_alpha=12, **OF_LANGUAGE[kind])
    if "words" in OF_LANGUAGE[kind]:  # new rows are random
        same = {name: value for name, value in load_file(tmp_path / "one" / FILE).items() if ".lora_" not in name}
        for name in ("other", "mean"):
            replace_tensors(tmp_path / name, **same)
    qm.merge_adapters([tmp_path / "one", tmp_path / "other"]).save(tmp_path / "merged")
    if kind == "more words, one embedding":
        return
    merged, mean = (peft_files.logits(qm.load_model(tmp_path / name)) for name in ("merged", "mean"))
    torch.testing.assert_close(merged, mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("base_is", ["here", "elsewhere"])
@pytest.mark.parametrize("targets", [["q_proj"], r".*language_model\..*(q|v)_proj"], ids=["names", "expression"])
def test_adapters_trained_before_and_after_modules_were_renamed(base_is: str, targets: Any, tmp_path: Path) -> None:
    base = peft_files.vision_language(tmp_path / "base")
    for seed, name in enumerate(("then", "now")):
        peft_files.trained(base, tmp_path / name, seed=seed, target_modules=targets, modules_to_save=["lm_head"])
        if base_is == "elsewhere":
            edit(tmp_path / name, base_model_name_or_path="somebody/model")
    state = base.state_dict()
    dense = [_on(base, tmp_path / name).merge_and_unload().state_dict() for name in ("then", "now")]
    peft_files.rename(tmp_path / "then", peft_files.before_the_renaming)
    merged = qm.merge_adapters([tmp_path / "then", tmp_path / "now"], rank=4)
    count = len(qm.merge_adapters([tmp_path / "now"]).modules)
    assert [module.ranks for module in merged.modules] == [(2, 2)] * count
    merged.save(tmp_path / "merged")
    found = peft_files.logits(_on(base, tmp_path / "merged"))
    base.load_state_dict({name: (dense[0][name] + dense[1][name]) / 2 for name in state})
    torch.testing.assert_close(found, peft_files.logits(base), rtol=1e-4, atol=1e-5)


def _on(base: nn.Module, directory: Path) -> Any:
    """An adapter on a copy of the base, by peft alone, which warns of names that it does not find."""
    network = copy.deepcopy(base)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return peft.PeftModel.from_pretrained(network, str(directory)).eval()


def test_experts_are_refused(tmp_path: Path) -> None:
    base = peft_files.experts(tmp_path / "base")
    peft_files.trained(base, tmp_path / "one", target_modules=[], target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(ValueError, match=r"must be a plain LoRA adapter.* Found target_parameters") as said:
        qm.merge_adapters([tmp_path / "one"])
    assert one_sentence(str(said.value))


def test_a_merge_that_does_not_arrive_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = peft_files.language(tmp_path / "base")
    peft_files.trained(base, tmp_path / "one", target_modules=["q_proj"])
    peft_files.rename(tmp_path / "one", lambda name: name.replace("layers.1", "layers.7"))
    with pytest.raises(ValueError, match=r"unexpected parameter .*layers\.7\..*lora_A") as said:
        qm.merge_adapters([tmp_path / "one"])
    assert one_sentence(str(said.value))
    monkeypatch.setitem(sys.modules, "peft", None)  # without it there is nothing to see it in
    assert len(qm.merge_adapters([tmp_path / "one"]).modules) == 2


def test_values_that_do_not_arrive_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = peft_files.language(tmp_path / "base")
    peft_files.trained(base, tmp_path / "one", task_type="CAUSAL_LM", target_modules=["q_proj"])
    put = peft.PeftModel.load_state_dict
    monkeypatch.setattr(
        peft.PeftModel,
        "load_state_dict",
        lambda self, state, **options: put(self, {name: value + 1 for name, value in state.items()}, **options),
    )
    with pytest.raises(ValueError, match=r"merged adapter .*base must be loaded unchanged") as said:
        qm.merge_adapters([tmp_path / "one"])
    assert one_sentence(str(said.value))
