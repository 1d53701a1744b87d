"""Read and write directories of peft: an adapter on the base model that it names, and LoRA's updates alone."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.check import needs
from quotient_manifolds.files import expanded, new_directory
from quotient_manifolds.load.huggingface import (
    OWN_CODE,
    check_config,
    check_patterns,
    load_pretrained,
    loading,
    read_object,
    read_tensors,
    shapes_in,
    without_weights,
)
from quotient_manifolds.messages import brief, first_line

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
# What follows the module's name in the names of its two factors: of layers, and of embeddings.
FACTORS = ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B"))
# Settings of peft with which the weight of a module does not become W + scale B A.
OTHER_FUNCTIONS = (
    *("use_dora", "lora_bias", "use_qalora", "alora_invocation_tokens", "arrow_config", "kasa_config"),
    *("monteclora_config", "use_bdlora", "target_parameters", "trainable_token_indices", "layer_replication"),
    *("megatron_config", "ensure_weight_tying"),
)
# With other starts (pissa, olora, corda, loftq, ...) peft changes the base weight when it loads the adapter.
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


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
    with needs(f"{path} is an adapter of {base}, which", "peft", "peft"):
        from peft import PeftModel
        from peft.utils import get_peft_model_state_dict
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


# ---- the updates of LoRA, without peft and without the base


@dataclass(frozen=True)
class LowRankUpdate:
    """Hold the update scale * B A of one module's weight, its factors shaped as they are stored.

    B (n, r) and A (r, m); of a convolution B (n, r, 1, ...) and A (r, channels, height, ...); of an embedding the
    update is the transpose, with m the number of tokens.
    """

    B: Tensor
    A: Tensor
    scale: float
    embedding: bool = False

    @property
    def rank(self) -> int:
        return self.A.shape[0]

    @property
    def size(self) -> tuple[int, int]:
        """Return (n, m), the size of the update as a matrix."""
        return self.B.shape[0], math.prod(self.A.shape[1:])

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return B (n, r) and A (r, m) as matrices."""
        return self.B.reshape(self.B.shape[0], -1), self.A.reshape(self.rank, -1)


@dataclass(frozen=True)
class LoraAdapter:
    """Hold what is in a directory of a LoRA adapter: settings, update of each module, tensors that are stored whole.

    `whole` has heads (modules_to_save), biases and embeddings, by their names in the file.
    """

    path: Path
    settings: dict[str, Any]
    updates: dict[str, LowRankUpdate]
    whole: dict[str, Tensor]


def read_lora(path: Path) -> LoraAdapter:
    """Return the LoRA adapter in a directory of peft, with the scale of each update worked out as peft does it.

    Raises ValueError in one sentence for anything but plain LoRA, for a factor without partner, for shapes that do not
    fit, and for numbers that are not finite.
    """
    if not (path / SETTINGS).is_file():
        raise ValueError(f"No adapter at {path}: expected a directory with {SETTINGS} and {WEIGHTS}.")
    settings, tensors = read_adapter(path)
    start = settings.get("init_lora_weights", True)
    if settings.get("peft_type") != "LORA":
        raise ValueError(f"{path} is an adapter of peft of kind {settings.get('peft_type')!r}: expected LORA.")
    if other := [name for name in OTHER_FUNCTIONS if settings.get(name) not in (None, False, [], {})]:
        raise ValueError(f"{path} is no plain LoRA adapter, whose updates add up: it has {other[0]}.")
    if start not in PLAIN_STARTS:
        raise ValueError(
            f"{path} was started with init_lora_weights = {brief(start)}, which may change the base weights "
            "too: save it as plain LoRA, by save_pretrained with path_initial_model_for_weight_conversion."
        )
    file = path / WEIGHTS
    for name, value in tensors.items():
        if not value.is_floating_point() or value.dtype.itemsize < 2:
            raise ValueError(
                f"{file} must hold floating-point numbers of 16 bits or more. Found {name} in {value.dtype}."
            )
        if not torch.isfinite(value).all():
            raise ValueError(f"{file} has NaN or infinity in {name}.")
    updates: dict[str, LowRankUpdate] = {}
    for embedding, ends in enumerate(FACTORS):
        stems = [{name.removesuffix(end) for name in tensors if name.endswith(end)} for end in ends]
        for stem in sorted(stems[0] ^ stems[1]):
            raise ValueError(f"{file} lacks parameter {stem + ends[stem in stems[0]]}.")
        for stem in sorted(stems[0]):
            A, B = (tensors[stem + end] for end in ends)
            module = stem.removeprefix(PREFIX)
            convolution = B.ndim > 2 and A.ndim == B.ndim and set(B.shape[2:]) == {1}
            if not (A.ndim == B.ndim == 2 or convolution) or A.shape[0] != B.shape[1] or not A.numel() * B.numel():
                raise ValueError(
                    f"{file} has A of shape {tuple(A.shape)} and B of shape {tuple(B.shape)} for {module}: expected "
                    "(r, m) and (n, r), or those of a convolution without groups."
                )
            updates[module] = LowRankUpdate(B, A, _scale(module, A.shape[0], settings, path), bool(embedding))
    if not updates:
        raise ValueError(f"{file} has no update: expected tensors named ...lora_A.weight.")
    paired = {key for module, update in updates.items() for key in names_of(module, update.embedding)}
    whole = {name: value for name, value in tensors.items() if name not in paired}
    if odd := sorted(name for name in whole if ".lora_" in name or ".token_adapter" in name):
        raise ValueError(f"{file} has {odd[0]}, which is no part of plain LoRA (of DoRA, for example).")
    return LoraAdapter(path, settings, updates, whole)


def names_of(module: str, embedding: bool) -> tuple[str, str]:
    """Return the names of A and B of a module in an adapter's file."""
    A, B = FACTORS[embedding]
    return f"{PREFIX}{module}{A}", f"{PREFIX}{module}{B}"


def write_adapter(directory: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write an adapter of peft to a new directory, which is complete or not there at all.

    Raises ValueError unless `directory` is new, in one that exists.
    """
    from safetensors.torch import save_file

    with new_directory(directory) as fresh:
        (fresh / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        plain = {name: value.contiguous() for name, value in tensors.items()}
        save_file(plain, os.fspath(fresh / WEIGHTS), metadata={"format": "pt"})


def _scale(module: str, rank: int, settings: Mapping[str, Any], path: Path) -> float:
    """Return alpha / r or, with rsLoRA, alpha / sqrt(r), as peft's LoraLayer.update_layer has it."""
    r = _matched(module, "rank_pattern", settings.get("r", 8), settings, path)
    alpha = _matched(module, "alpha_pattern", settings.get("lora_alpha", 8), settings, path)
    if r != rank:
        raise ValueError(f"{path} has factors of rank {rank} for {module}, but {SETTINGS} says {r:g}.")
    return alpha / math.sqrt(r) if settings.get("use_rslora") else alpha / r


def _matched(module: str, pattern: str, default: Any, settings: Mapping[str, Any], path: Path) -> float:
    """Return the value of the first key that matches the end of the module's name, as peft's get_pattern_key has it."""
    given = settings.get(pattern) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{pattern} in {path / SETTINGS} must be a dict of numbers. Found {brief(given)}.")
    try:
        value = next((own for key, own in given.items() if re.match(rf"(.*\.)?({key})$", module)), default)
    except re.error as error:
        raise ValueError(f"{pattern} in {path / SETTINGS} has a key that is no regular expression: {error}.") from error
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"Rank and alpha in {path / SETTINGS} must be numbers. Found {brief(value)}.")
    return value
