"""Read directories of peft: an adapter on the base model that it names, every tensor of the file seen to arrive."""

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
    is_update,
    present_names,
    renamed_module,
    split,
    targets,
    value_of,
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
    architecture, own = choices(settings, saved)
    stored = {".".join((split(name)[0], name.rpartition(".")[2])): value for name, value in saved.items()}
    network = load_pretrained(base, architecture=architecture, settings=own, instead=stored)
    tensors = {name: saved[old] for old, name in present_names(saved, present_module(network)).items()}
    if missing := resize(network, tensors):
        raise ValueError(f"The adapter in {path} has another vocabulary than {base}, but lacks parameter {missing[0]}.")
    model = attached(network, settings, tensors, path)
    model.directories = [path, base]  # where a tokenizer or an image processor may be
    return model.eval()


def choices(settings: Mapping[str, Any], saved: Mapping[str, Tensor]) -> tuple[str | None, dict[str, Any]]:
    """Return the class of the base model that an adapter was trained on, None if it does not say, and its settings."""
    trained = settings.get("auto_mapping")  # the class, where the task names none
    named = trained.get("base_model_class") if isinstance(trained, dict) else None
    heads = [len(value) for name, value in saved.items() if name.endswith(HEADS) and value.ndim == 2]
    architecture = TASKS.get(str(settings.get("task_type"))) or (named if isinstance(named, str) else None)
    # The base gets as many classes as the head saved with it.
    return architecture, {"num_labels": heads[0]} if heads else {}


def empty_base(path: Path, settings: Mapping[str, Any], saved: Mapping[str, Tensor]) -> nn.Module | None:
    """Return the base model of an adapter without its values; None if it is not here, or not one of transformers."""
    base = base_of(path)
    try:
        return None if base is None else empty_model(base, *choices(settings, saved))
    except (ValueError, ImportError):
        return None


def read_adapter(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the settings and the tensors in a directory of peft, whatever they are."""
    settings = read_object(path / SETTINGS)
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


def present_module(network: nn.Module) -> Callable[[str], str]:
    """Return the function from the name of a module in a file to its name in the network.

    A name that the network does not have is one of an earlier version of transformers, whose own renamings tell the
    present one.
    """
    names, rename = {name for name, _ in network.named_modules()}, renaming(network)

    def present(module: str) -> str:
        found = module if module in names else renamed_module(module, rename)
        return found if found in names else module

    return present


def attached(
    network: nn.Module, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path, what: str = "adapter"
) -> Any:
    """Return the peft model of a network and an adapter, whose tensors have names of the network.

    peft is told modules and ranks that the tensors have. Raises ValueError in one sentence, on `what` in `path`, if a
    parameter of the adapter is not among the tensors, or one of them is not in the model afterwards, with its values.
    """
    with needs(f"{path} is an {what} of {getattr(network, 'name_or_path', None)}, which", "peft", "peft"):
        from peft import PeftConfig, get_peft_model
        from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
    with warnings.catch_warnings(), loading(what, path):
        warnings.simplefilter("ignore")  # of what peft calls in transformers, and of what is looked at below
        config = PeftConfig.from_peft_type(**_resolved(settings, tensors, network, str(path / SETTINGS)))
        model = get_peft_model(network, config)
        config.base_model_name_or_path = settings.get("base_model_name_or_path")
        try:
            set_peft_model_state_dict(model, dict(tensors))
        except KeyError as error:  # peft looks up each parameter that it expects
            raise ValueError(f"it lacks parameter {first_line(error)}.") from error
        expected = _converted(model, config, tensors)
        own = get_peft_model_state_dict(model, save_embedding_layers=False)
    _check_arrival(model, own, expected, f"{what} in {path}")
    if hasattr(model.base_model, "_cast_adapter_dtype"):  # as PeftModel.load_adapter ends: AdaLoRA makes new matrices
        model.base_model._cast_adapter_dtype(adapter_name="default", autocast_adapter_dtype=True)
    return model


def _check_arrival(model: nn.Module, own: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    state = model.state_dict()
    unnamed = {".".join(part for part in name.split(".") if part != "default"): value for name, value in state.items()}
    arrived = {**state, **unnamed, **own}
    for odd, verb in (
        (sorted(own.keys() - expected.keys()), "lacks"),
        (sorted(expected.keys() - arrived.keys()), "has the unexpected"),
    ):
        if odd:
            raise ValueError(f"The {what} {verb} parameter {odd[0]} (one of {len(odd)}).")
    for name, value in expected.items():
        found = arrived[name]
        if found.shape != value.shape or not torch.allclose(found, value.to(found), rtol=0, atol=0, equal_nan=True):
            raise ValueError(
                f"Every tensor of the {what} must arrive in the model. Found other values of {name} in it: "
                f"load it on another version of peft or transformers, or {OWN_CODE}."
            )


def _converted(model: Any, config: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors as peft puts them into the model: it stacks experts that were modules of their own."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
    except ImportError:  # of versions that convert nothing
        return tensors
    converted: dict[str, Tensor] = convert_peft_adapter_state_dict_for_transformers(model, config, dict(tensors))
    return converted


def resize(network: Any, tensors: Mapping[str, Tensor]) -> list[str]:
    """Give a network the vocabulary of an adapter that has its embeddings in another size.

    Returns the parameters with new rows that the adapter does not have.
    """
    try:
        both = (network.get_input_embeddings(), network.get_output_embeddings())
    except NotImplementedError:  # of a network without words
        return []
    rows = {
        name: module.weight
        for name, module in network.named_modules()
        if any(module is each for each in both) and isinstance(getattr(module, "weight", None), Tensor)
    }
    whole = {name: value for name, value in tensors.items() if name.endswith("weight") and not is_update(name)}
    words = {split(name)[0]: len(value) for name, value in whole.items() if split(name)[0] in rows}
    if len({*words.values()}) != 1 or all(len(rows[name]) == size for name, size in words.items()):
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of new rows, which the adapter has
        network.resize_token_embeddings(*set(words.values()), mean_resizing=False)
    return [f"{PREFIX}{name}.weight" for name, row in rows.items() if not any(row is rows[other] for other in words)]


# ---- settings in which peft finds no stranger's expression


def _resolved(
    settings: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    network: nn.Module,
    where: str,
) -> dict[str, Any]:
    """Return the settings with modules and ranks as the tensors have them, in place of expressions."""
    names = [name for name, _ in network.named_modules() if name]
    parameters = _targeted_parameters(settings, network)
    modules = {split(name)[0] for name in tensors if is_update(name)} - set(parameters.values())
    present = present_module(network)
    resolved = {key: value for key, value in settings.items() if key != "runtime_config"} | {"inference_mode": False}
    resolved["target_modules"] = targets(settings.get("target_modules"), modules, names)
    resolved |= {key: None for key in ("exclude_modules", "layers_to_transform", "layers_pattern") if key in settings}
    if whole := settings.get("modules_to_save"):
        ends = [
            key if any(name.endswith(key) for name in names) else present(key)
            for key in map(str, [whole] if isinstance(whole, str) else whole)
        ]
        resolved["modules_to_save"] = [key for key in ends if any(name.endswith(key) for name in names)]
    if settings.get("peft_type") == "IA3":
        resolved["feedforward_modules"] = _feedforward(settings, tensors, where)
    elif settings.get("peft_type") == "ADALORA":
        resolved["alpha_pattern"] = {}  # which it does not read
        for key in settings.get("rank_pattern") or ():
            if not re.fullmatch(r"[\w.]+", str(key)):
                raise ValueError(f"rank_pattern in {where} must have names of parameters as keys. Found {brief(key)}.")
    else:
        resolved |= _ranks_and_alphas(settings, tensors, [*modules, *parameters], where)
    return resolved


def _targeted_parameters(settings: Mapping[str, Any], network: nn.Module) -> dict[str, str]:
    """Return the module of each parameter that has an update itself, as those of experts."""
    given = settings.get("target_parameters")
    keys = tuple(str(key) for key in given) if isinstance(given, list) else ()
    own = ((f"{name}.{each}", name) for name, module in network.named_modules() for each in module._parameters)
    return {name: module for name, module in own if name in keys or name.endswith(tuple(f".{key}" for key in keys))}


def _ranks_and_alphas(
    settings: Mapping[str, Any], tensors: Mapping[str, Tensor], keys: list[str], where: str
) -> dict[str, Any]:
    """Return settings that give each module by its whole name its rank, which its factors have, and its alpha."""
    shown = "lora_alpha" if settings.get("peft_type") == "LORA" else "alpha"
    defaults = {"rank_pattern": settings.get("r", 8), "alpha_pattern": settings.get(shown, 8)}
    ends = ("lora_A.weight", "lora_embedding_A")
    ranks = {split(name)[0]: len(value) for name, value in tensors.items() if split(name)[1] in ends}
    found: dict[str, dict[str, float]] = {pattern: {} for pattern in defaults}
    for key in keys:
        if key in ranks:
            check_rank(key, ranks[key], settings, where)
        for pattern, default in defaults.items():
            known = ranks.get(key) if pattern == "rank_pattern" else None
            value = value_of(key, settings, pattern, default, where) if known is None else known
            if value != default:
                found[pattern][f"^{re.escape(key)}"] = value
    return dict(found)


def _feedforward(settings: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> list[str]:
    """Return the modules whose inputs IA3 scales, the others' outputs: their vectors are rows, and not columns."""
    given = settings.get("feedforward_modules") or []
    if not isinstance(given, str):
        return [str(key) for key in given]
    vectors = {split(name)[0]: value for name, value in tensors.items() if is_update(name)}
    if odd := [name for name, value in vectors.items() if value.ndim != 2]:
        raise ValueError(
            f"feedforward_modules in {where} must be a list of names where convolutions are scaled. Found {odd[0]}."
        )
    return sorted(name for name, value in vectors.items() if len(value) == 1)
