"""Read peft directories: attach an adapter to its base model, and check that every tensor is loaded."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.check import needs
from quotient_manifolds.files import expanded
from quotient_manifolds.load.adapter_names import (
    PREFIX,
    check_rank,
    current_names,
    is_update,
    module_setting,
    renamed_module,
    split_name,
    target_modules,
)
from quotient_manifolds.load.huggingface import (
    OWN_CODE,
    check_config,
    empty_model,
    load_pretrained,
    loading,
    read_object,
    read_tensors,
    renaming,
    shapes_in,
    without_weights,
)
from quotient_manifolds.messages import brief, first_line

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# These types consist of tensors alone. The others read tokenizers, import modules or download what their settings name.
TYPES = ("ADALORA", "IA3", "LOHA", "LOKR", "LORA")
TASKS = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "FEATURE_EXTRACTION": "AutoModel",
}
HEADS = ("classifier.weight", "score.weight", "classifier.out_proj.weight", "classification_head.out_proj.weight")


def load_directory(path: Path) -> nn.Module:
    """Return the model in a Hugging Face directory, or in a peft directory the base model with the adapter on it."""
    return load_adapter(path) if (path / SETTINGS).is_file() else load_pretrained(path)


def load_adapter(path: Path) -> nn.Module:
    """Return the peft model in a directory, in eval mode, with every parameter read from the base or the adapter.

    The adapter is not merged. Its parameters and the modules saved with it (a head) require gradients, the base does
    not. The base is the local directory that adapter_config.json names: an absolute path, or one relative to the
    working directory, the adapter's directory or its parent.

    Raises ValueError if the base is missing, if neither has a parameter of the model, or if the model lacks a parameter
    of the adapter; ImportError without peft.
    """
    settings, saved = read_adapter(path)
    base = base_directory(path, settings)
    architecture, overrides = architecture_of(settings, saved)
    replacements = {".".join((split_name(name)[0], name.rpartition(".")[2])): value for name, value in saved.items()}
    network = load_pretrained(base, architecture=architecture, settings=overrides, replacements=replacements)
    tensors = {name: saved[old] for old, name in current_names(saved, current_module(network)).items()}
    if missing := resize_vocabulary(network, tensors):
        raise ValueError(f"The adapter in {path} has another vocabulary than {base}, but lacks parameter {missing[0]}")
    model = attach_adapter(network, settings, tensors, path)
    model.directories = [path, base]  # a tokenizer or an image processor may be in either
    return model.eval()


def architecture_of(settings: Mapping[str, Any], saved: Mapping[str, Tensor]) -> tuple[str | None, dict[str, Any]]:
    """Return the class of the base model that an adapter was trained on, None if unknown, and overrides of its config.

    The override gives the base as many classes as the head saved with the adapter.
    """
    mapping = settings.get("auto_mapping")  # names the class if the task does not
    base_class = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    heads = [len(value) for name, value in saved.items() if name.endswith(HEADS) and value.ndim == 2]
    architecture = TASKS.get(str(settings.get("task_type"))) or (base_class if isinstance(base_class, str) else None)
    return architecture, {"num_labels": heads[0]} if heads else {}


def empty_base(path: Path, settings: Mapping[str, Any], saved: Mapping[str, Tensor]) -> nn.Module | None:
    """Return the base model of an adapter without its values, or None if it is not here or cannot be built."""
    base = base_of(path)
    try:
        return None if base is None else empty_model(base, *architecture_of(settings, saved))
    except (ValueError, ImportError):
        return None


def read_adapter(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the settings and the tensors in a peft directory, of any type of adapter."""
    settings = read_object(path / SETTINGS)
    if not (path / WEIGHTS).is_file():
        raise ValueError(without_weights(path))
    check_config(settings, shapes_in([path / WEIGHTS]), str(path / SETTINGS))
    return settings, read_tensors(path / WEIGHTS)


def base_of(path: Path) -> Path | None:
    """Return the directory of the base model if `path` is an adapter's and the base is on this machine, else None."""
    try:
        return base_directory(path, read_object(path / SETTINGS)) if (path / SETTINGS).is_file() else None
    except ValueError:
        return None


def base_directory(path: Path, settings: Mapping[str, Any]) -> Path:
    """Return the directory of an adapter's base model. Raises ValueError if it cannot be loaded or is not here."""
    kind, base = settings.get("peft_type"), settings.get("base_model_name_or_path")
    subject = f"{path} is an adapter of peft ({kind}) of {base!r}"
    if kind not in TYPES or settings.get("megatron_config") or settings.get("layer_replication"):
        raise ValueError(
            f"{subject}, but only {', '.join(TYPES)} on unchanged layers can be loaded; merge it, or {OWN_CODE}"
        )
    if isinstance(base, str) and base:
        for folder in dict.fromkeys((expanded(base), path / expanded(base), path.parent / expanded(base))):
            if (folder / SETTINGS).is_file():
                raise ValueError(f"{subject}, which is an adapter itself; merge that one into its base first")
            if (folder / "config.json").is_file():
                return folder
    raise ValueError(
        f"{subject}, which is no directory of a model on this machine, and nothing is ever downloaded; put the base "
        f"model into a directory and its path as base_model_name_or_path into {SETTINGS}, or {OWN_CODE}"
    )


def current_module(network: nn.Module) -> Callable[[str], str]:
    """Return the function from the name of a module in a file to its name in the network.

    transformers renames names of its earlier versions if the network does not have them.
    """
    names, rename = {name for name, _ in network.named_modules()}, renaming(network)

    def current(module: str) -> str:
        renamed = module if module in names else renamed_module(module, rename)
        return renamed if renamed in names else module

    return current


def attach_adapter(
    network: nn.Module, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path, what: str = "adapter"
) -> Any:
    """Return the peft model of a network and an adapter, whose tensors are named like the network's modules.

    Modules and ranks are taken from the tensors. Raises ValueError about `what` in `path` if the tensors lack a
    parameter of the adapter, or if the model does not hold each of them with its values afterwards.
    """
    with needs(f"{path} is an {what} of {getattr(network, 'name_or_path', None)}, which", "peft", "peft"):
        from peft import PeftConfig, get_peft_model
        from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
    with warnings.catch_warnings(), loading(what, path):
        # peft calls deprecated functions of transformers, and reports missing keys, which are checked below.
        warnings.simplefilter("ignore")
        config = PeftConfig.from_peft_type(**_explicit(settings, tensors, network, str(path / SETTINGS)))
        model = get_peft_model(network, config)
        config.base_model_name_or_path = settings.get("base_model_name_or_path")
        try:
            set_peft_model_state_dict(model, dict(tensors))
        except KeyError as error:  # peft looks up each parameter that it expects
            raise ValueError(f"it lacks parameter {first_line(error)}") from error
        expected = _converted(model, config, tensors)
        loaded = get_peft_model_state_dict(model, save_embedding_layers=False)
    _check_loaded(model, loaded, expected, f"{what} in {path}")
    # PeftModel.load_adapter ends with this cast. AdaLoRA needs it, because it creates new matrices.
    if hasattr(model.base_model, "_cast_adapter_dtype"):
        model.base_model._cast_adapter_dtype(adapter_name="default", autocast_adapter_dtype=True)
    return model


def _check_loaded(model: nn.Module, loaded: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    state = model.state_dict()
    unnamed = {".".join(part for part in name.split(".") if part != "default"): value for name, value in state.items()}
    values = {**state, **unnamed, **loaded}
    for names, verb in (
        (sorted(loaded.keys() - expected.keys()), "lacks"),
        (sorted(expected.keys() - values.keys()), "has the unexpected"),
    ):
        if names:
            raise ValueError(f"The {what} {verb} parameter {names[0]} (one of {len(names)})")
    for name, wanted in expected.items():
        value = values[name]
        if value.shape != wanted.shape or not torch.allclose(value, wanted.to(value), rtol=0, atol=0, equal_nan=True):
            raise ValueError(
                f"Every tensor of the {what} must be loaded unchanged. Found other values of {name} in the model; "
                f"use another version of peft or transformers, or {OWN_CODE}"
            )


def _converted(model: Any, config: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors as peft puts them into the model: it stacks experts that were separate modules."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
    except ImportError:  # earlier versions convert nothing
        return tensors
    converted: dict[str, Tensor] = convert_peft_adapter_state_dict_for_transformers(model, config, dict(tensors))
    return converted


def resize_vocabulary(network: Any, tensors: Mapping[str, Tensor]) -> list[str]:
    """Resize the embeddings of a network to those in an adapter; return the resized parameters that it lacks."""
    try:
        embeddings = (network.get_input_embeddings(), network.get_output_embeddings())
    except NotImplementedError:  # the network has no tokens
        return []
    rows = {
        name: module.weight
        for name, module in network.named_modules()
        if any(module is embedding for embedding in embeddings) and isinstance(getattr(module, "weight", None), Tensor)
    }
    full = {
        split_name(name)[0]: value for name, value in tensors.items() if name.endswith("weight") and not is_update(name)
    }
    sizes = {name: len(value) for name, value in full.items() if name in rows}
    if len({*sizes.values()}) != 1 or all(len(rows[name]) == size for name, size in sizes.items()):
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns that new rows are random; the adapter replaces them
        network.resize_token_embeddings(*set(sizes.values()), mean_resizing=False)
    return [f"{PREFIX}{name}.weight" for name, row in rows.items() if not any(row is rows[other] for other in sizes)]


# ---- settings without regular expressions, which peft would evaluate


def _explicit(
    settings: Mapping[str, Any], tensors: Mapping[str, Tensor], network: nn.Module, where: str
) -> dict[str, Any]:
    """Return the settings with regular expressions replaced by the names and ranks of the modules in the tensors."""
    names = [name for name, _ in network.named_modules() if name]
    parameters = _target_parameters(settings, network)
    modules = {split_name(name)[0] for name in tensors if is_update(name)} - set(parameters.values())
    current = current_module(network)
    explicit = {key: value for key, value in settings.items() if key != "runtime_config"} | {"inference_mode": False}
    explicit["target_modules"] = target_modules(settings.get("target_modules"), modules, names)
    explicit |= {key: None for key in ("exclude_modules", "layers_to_transform", "layers_pattern") if key in settings}
    if saved := settings.get("modules_to_save"):
        keys = map(str, [saved] if isinstance(saved, str) else saved)
        ends = [key if any(name.endswith(key) for name in names) else current(key) for key in keys]
        explicit["modules_to_save"] = [end for end in ends if any(name.endswith(end) for name in names)]
    if settings.get("peft_type") == "IA3":
        explicit["feedforward_modules"] = _feedforward_modules(settings, tensors, where)
    elif settings.get("peft_type") == "ADALORA":
        explicit["alpha_pattern"] = {}  # AdaLoRA does not read it
        for key in settings.get("rank_pattern") or ():
            if not re.fullmatch(r"[\w.]+", str(key)):
                raise ValueError(f"rank_pattern in {where} must have names of parameters as keys. Found {brief(key)}")
    else:
        explicit |= _ranks_and_alphas(settings, tensors, [*modules, *parameters], where)
    return explicit


def _target_parameters(settings: Mapping[str, Any], network: nn.Module) -> dict[str, str]:
    """Return the module of each parameter that has an update of its own, such as stacked experts."""
    setting = settings.get("target_parameters")
    keys = tuple(str(key) for key in setting) if isinstance(setting, list) else ()
    ends = tuple(f".{key}" for key in keys)
    all_of_them = ((f"{name}.{each}", name) for name, module in network.named_modules() for each in module._parameters)
    return {name: module for name, module in all_of_them if name in keys or name.endswith(ends)}


def _ranks_and_alphas(
    settings: Mapping[str, Any], tensors: Mapping[str, Tensor], modules: list[str], where: str
) -> dict[str, Any]:
    """Return rank_pattern and alpha_pattern with the full name of each module, ranks taken from its factors."""
    alpha = "lora_alpha" if settings.get("peft_type") == "LORA" else "alpha"
    defaults = {"rank_pattern": settings.get("r", 8), "alpha_pattern": settings.get(alpha, 8)}
    ends = ("lora_A.weight", "lora_embedding_A")
    ranks = {split_name(name)[0]: len(value) for name, value in tensors.items() if split_name(name)[1] in ends}
    patterns: dict[str, dict[str, float]] = {pattern: {} for pattern in defaults}
    for module in modules:
        if module in ranks:
            check_rank(module, ranks[module], settings, where)
        for pattern, default in defaults.items():
            rank = ranks.get(module) if pattern == "rank_pattern" else None
            value = module_setting(module, settings, pattern, default, where) if rank is None else rank
            if value != default:
                patterns[pattern][f"^{re.escape(module)}"] = value
    return dict(patterns)


def _feedforward_modules(settings: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> list[str]:
    """Return the modules whose inputs IA3 scales: their vectors are rows; vectors that scale outputs are columns."""
    setting = settings.get("feedforward_modules") or []
    if not isinstance(setting, str):
        return [str(key) for key in setting]
    vectors = {split_name(name)[0]: value for name, value in tensors.items() if is_update(name)}
    if others := [name for name, value in vectors.items() if value.ndim != 2]:
        raise ValueError(
            f"feedforward_modules in {where} must be a list of names if convolutions are scaled. Found {others[0]}"
        )
    return sorted(name for name, value in vectors.items() if len(value) == 1)
