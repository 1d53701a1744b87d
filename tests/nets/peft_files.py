"""Adapters as peft writes them, every number random, on small random models of transformers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.nets import hugging_face

peft = pytest.importorskip("peft")

TEXT: dict[str, Any] = {
    "vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
PICTURE: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8, "projection_dim": 16,
}  # fmt: skip
TOKENS = torch.arange(12).reshape(2, 6)


def classifier(folder: Path, *, classes: int = 3, head: str = "classifier", **options: Any) -> tuple[nn.Module, Path]:
    """A BERT with an adapter and a head of its own, every number random; and the directory it is saved in."""
    base = hugging_face.bert_classifier(folder / "base", num_labels=classes)
    network = transformers.BertForSequenceClassification.from_pretrained(base)
    settings = {"r": 2, "target_modules": ["query", "value"], "task_type": "SEQ_CLS", **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft calls what transformers has renamed
        model = peft.get_peft_model(network, peft.LoraConfig(**settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                value.normal_()
    model.save_pretrained(folder / "adapter")
    return model.eval(), folder / "adapter"


def language(folder: Path, *, tied: bool = False) -> nn.Module:
    """A decoder, whose head may be its embedding."""
    config = transformers.LlamaConfig(**TEXT, tie_word_embeddings=tied)
    return _saved(transformers.LlamaForCausalLM, config, folder)


def vision_language(folder: Path) -> nn.Module:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**PICTURE),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=29,
    )
    return _saved(transformers.LlavaForConditionalGeneration, config, folder)


def experts(folder: Path) -> nn.Module:
    config = transformers.MixtralConfig(**TEXT, num_local_experts=3, num_experts_per_tok=2)
    return _saved(transformers.MixtralForCausalLM, config, folder)


def _saved(kind: Any, config: Any, folder: Path) -> nn.Module:
    torch.manual_seed(0)
    model = kind(config)
    model.save_pretrained(folder)
    return model.eval()


def trained(
    base: nn.Module, folder: Path, *, seed: int = 1, words: int | None = None, embeddings: Any = "auto", **settings: Any
) -> nn.Module:
    """The model beside `folder`, in "base", with an adapter saved in it; `words` resizes the vocabulary before."""
    network = type(base).from_pretrained(folder.parent / "base")  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what peft and transformers think of these settings
        if words:
            network.resize_token_embeddings(words, mean_resizing=False)
        kind = settings.pop("kind", peft.LoraConfig)
        if kind is peft.LoraConfig:
            settings = {"r": 2, **settings}
        torch.manual_seed(seed)
        model = peft.get_peft_model(network, kind(**settings))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for value in model.parameters():
                if value.requires_grad:
                    value.add_(0.3 * torch.randn(value.shape, generator=generator))
        model.save_pretrained(folder, save_embedding_layers=embeddings)
    return model.eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def rename(folder: Path, change: Callable[[str], str]) -> None:
    """Give the tensors in an adapter's file other names."""
    file = folder / "adapter_model.safetensors"
    save_file({change(name): value for name, value in load_file(file).items()}, file, metadata={"format": "pt"})


def before_the_renaming(name: str) -> str:
    """What a tensor of a vision-language model was called before transformers 4.52."""
    prefix = "base_model.model."
    for now, then in (
        ("model.language_model.", "language_model.model."),
        ("model.vision_tower.", "vision_tower."),
        ("lm_head.", "language_model.lm_head."),
    ):
        if name.startswith(prefix + now):
            return prefix + then + name.removeprefix(prefix + now)
    return name
