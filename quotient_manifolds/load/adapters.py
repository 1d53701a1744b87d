"""Load a Hugging Face directory: a whole model, or an adapter of peft on the base model that it names."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from quotient_manifolds.files import expanded
from quotient_manifolds.load.huggingface import (
    OWN_CODE,
    load_pretrained,
    loading,
    read_object,
    read_tensors,
    shapes_in,
    without_weights,
)
from quotient_manifolds.load.untrusted import check_config, check_patterns
from quotient_manifolds.messages import first_line

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Kinds that are tensors and nothing else: others read tokenizers, import modules or fetch what their settings name.
KINDS = ("ADALORA", "IA3", "LOHA", "LOKR", "LORA")
TASKS = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "FEATURE_EXTRACTION": "AutoModel",
}
PREFIX = "base_model.model."  # of the names in an adapter's file
HEADS = ("classifier.weight", "score.weight", "classifier.out_proj.weight", "classification_head.out_proj.weight")


def load_directory(path: Path) -> nn.Module:
    """Return the model in a Hugging Face directory, or that in a directory of peft: its base with the adapter on it.

    The adapter is not merged; it and the modules that were saved with it (a head) require gradients, the base does not.
    """
    return load_adapter(path) if (path / SETTINGS).is_file() else load_pretrained(path)


def load_adapter(path: Path) -> nn.Module:
    """Return the peft model in a directory, in eval mode, every parameter read from the base or from the adapter.

    The base is the local directory that adapter_config.json names (absolute, or relative to the working directory, to
    the adapter's or to the one above that). Raises ValueError in one sentence if there is none, if a parameter stands
    in neither, or one in the adapter has no place; ImportError without peft.
    """
    settings, saved = read_adapter(path)
    base = base_directory(path, settings)
    trained = settings.get("auto_mapping")  # the class that the adapter was trained on, where its task names none
    named = trained.get("base_model_class") if isinstance(trained, dict) else None
    heads = [len(value) for name, value in saved.items() if name.endswith(HEADS) and value.ndim == 2]
    network = load_pretrained(
        base,
        architecture=TASKS.get(str(settings.get("task_type"))) or (named if isinstance(named, str) else None),
        settings={"num_labels": heads[0]} if heads else {},  # the base gets as many classes as the head saved with it
        instead={name.removeprefix(PREFIX): value for name, value in saved.items()},
    )
    model = _with_adapter(network, path, set(saved), base)
    model.directories = [path, base]  # where a tokenizer or an image processor may be
    return model.eval()


def read_adapter(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the settings and the tensors in a directory of peft, whatever they are."""
    settings = read_object(path / SETTINGS)
    check_patterns(settings, str(path / SETTINGS))
    if not (path / WEIGHTS).is_file():
        raise ValueError(without_weights(path))
    check_config(settings, shapes_in([path / WEIGHTS]), str(path / SETTINGS))
    return settings, read_tensors(path / WEIGHTS)


def base_of(path: Path) -> Path | None:
    """Return the directory of the base model if `path` is one of an adapter, and its base is there."""
    try:
        return base_directory(path, read_object(path / SETTINGS)) if (path / SETTINGS).is_file() else None
    except ValueError:
        return None


def base_directory(path: Path, settings: Mapping[str, Any]) -> Path:
    """Return the directory of the model that an adapter belongs to, or raise ValueError saying what to do."""
    kind, named = settings.get("peft_type"), settings.get("base_model_name_or_path")
    what = f"{path} is an adapter of peft ({kind}) of {named!r}"
    if kind not in KINDS or settings.get("megatron_config") or settings.get("layer_replication"):
        raise ValueError(
            f"{what}: only {', '.join(KINDS)} on layers as they are can be loaded. Merge it, or {OWN_CODE}."
        )
    if isinstance(named, str) and named:
        written = expanded(named)
        for place in dict.fromkeys((written, path / written, path.parent / written)):
            if (place / SETTINGS).is_file():
                raise ValueError(f"{what}, which is an adapter itself: merge that one into its base first.")
            if (place / "config.json").is_file():
                return place
    raise ValueError(
        f"{what}, which is no directory of a model on this machine, and nothing is ever downloaded: put the base model "
        f"into a directory and its path as base_model_name_or_path into {SETTINGS}, or {OWN_CODE}."
    )


def _with_adapter(network: nn.Module, path: Path, saved: set[str], base: Path) -> Any:
    try:
        from peft import PeftModel
        from peft.utils import get_peft_model_state_dict
    except ImportError as error:
        raise ImportError(
            f'{path} is an adapter of {base}, which needs the peft library: pip install "quotient-manifolds[peft]".'
        ) from error
    with warnings.catch_warnings(), loading("adapter", path):
        warnings.simplefilter("ignore")  # of what peft calls in transformers, and of what is looked at below
        try:
            model = PeftModel.from_pretrained(network, os.fspath(path), is_trainable=True)
            wanted = set(get_peft_model_state_dict(model, save_embedding_layers=False))
        except KeyError as error:  # peft looks up each parameter that it expects
            raise ValueError(f"it lacks parameter {first_line(error)}.") from error
    for odd, verb in ((sorted(wanted - saved), "lacks"), (sorted(saved - wanted), "has the unexpected")):
        if odd:
            raise ValueError(f"The adapter in {path} {verb} parameter {odd[0]} (one of {len(odd)}).")
    return model
