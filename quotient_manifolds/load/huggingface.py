"""Load a model, its tokenizer and its image processor by transformers, which only this module imports.

Directories of unknown origin cannot fill the memory, use the network, or hang the process.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.check import needs
from quotient_manifolds.messages import brief, first_line

VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "tekken.json")
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
PROCESSORS = ("preprocessor_config.json", "processor_config.json")  # an older and a newer name
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
OWN_CODE = "build such a model in a function and give package.module:function"

MANY = 10_000  # classes or layers that any configuration may have; more only if the weights have as many

_LOCK = threading.RLock()


def load_pretrained(
    path: Path,
    *,
    architecture: str | None = None,
    settings: Mapping[str, Any] | None = None,
    instead: Mapping[str, Tensor] | None = None,
) -> nn.Module:
    """Return the model in a directory, every parameter read from safetensors, in eval mode.

    architecture: its class in transformers; by default the one that `architectures` in config.json names. settings:
    entries of the configuration in place of the file's. instead: values of parameters that the files may lack, or have
    in another shape.

    Raises ValueError in one sentence: no weights, pickled weights, parameters that are not in the files, far more
    layers or classes than the files have, and anything that would have to be fetched from a network.
    """
    settings, instead = settings or {}, instead or {}
    name, model_class = _checked(path, architecture, settings)
    options = {
        **LOCAL,
        **settings,
        "use_safetensors": True,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are listed, and refused below
    }
    with loading(name, path):
        model, info = model_class.from_pretrained(os.fspath(path), **options)
    mismatched = {str(key): (tuple(found), tuple(wanted)) for key, found, wanted in info.get("mismatched_keys", ())}
    if wrong := sorted(mismatched.keys() - instead.keys()):
        found, wanted = mismatched[wrong[0]]
        raise ValueError(
            f"The weights in {path} have {wrong[0]} of shape {found}, but config.json describes one of {wanted}."
        )
    if missing := sorted(set(info["missing_keys"]) - instead.keys()):
        raise ValueError(
            f"The weights in {path} lack {len(missing)} parameters of {name} (the first is {missing[0]}), "
            "which would be left at random values; save the model again with all its weights."
        )
    model.load_state_dict({key: instead[key] for key in (*info["missing_keys"], *mismatched)}, strict=False)
    return model.eval()


def empty_model(path: Path, architecture: str | None, settings: Mapping[str, Any]) -> nn.Module:
    """Return the model that load_pretrained returns, with memory that nobody has written to: of most none is used."""
    name, model_class = _checked(path, architecture, settings)
    with loading(name, path):
        config = transformers_library().AutoConfig.from_pretrained(os.fspath(path), **LOCAL, **settings)
        with torch.device("meta"):
            build = getattr(model_class, "_from_config", None) or model_class.from_config
            model = build(config)
        model.to_empty(device="cpu").tie_weights()
    return model.eval()


def _checked(path: Path, architecture: str | None, settings: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the name of the class of a directory's model, and the class, once its configuration can be trusted."""
    config = read_config(path)
    if config.get("transformers_weights") not in (None, WEIGHTS, INDEX):  # which may name pickles
        raise ValueError(f"{path / 'config.json'} must leave its weights in {WEIGHTS}. Found others named there.")
    check_config({**config, **settings}, shapes_in(_weight_files(path)), str(path / "config.json"))
    named = config.get("architectures") or ["AutoModel"]
    name: Any = architecture or (named[0] if isinstance(named, list) else named)
    return name, _model_class(name, path)


# ---- names of parameters


def renaming(network: Any) -> Callable[[str], str]:
    """Return the function from names of parameters in earlier versions of transformers to those in a network."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before version 5
        return lambda name: name
    return _renames(get_model_conversion_mapping(network))


def renamings() -> Iterator[Callable[[str], str]]:
    """Yield such a function for each type of model that transformers knows, of models with a head."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:
        return
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    for kind, inside in MODEL_MAPPING_NAMES.items():
        steps, inner = (get_checkpoint_conversion_mapping(each) or () for each in (kind, inside))
        for step in inner:  # as get_model_conversion_mapping has those of the model inside the one with a head
            step.scope_prefix, step.base_model_prefix = "", "model"
        if steps or inner:
            yield _renames([*steps, *inner])


def _renames(steps: Iterable[Any]) -> Callable[[str], str]:
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renaming = [step for step in steps if isinstance(step, WeightRenaming)]
    return lambda name: rename_source_key(name, renaming, [])[0]


@contextmanager
def loading(what: str, path: Path) -> Iterator[None]:
    """Refuse every network request inside the block, and say in one ValueError why `what` does not load.

    The report of transformers on parameters that are missing is silenced, for they are checked.
    """
    logging = transformers_library().logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with no_network():
            yield
    except Exception as error:  # transformers and peft raise a dozen kinds, from KeyError to safetensors' own
        if asked_network(error):
            raise ValueError(
                f"The {what} in {path} needs what is not there (a backbone or a kernel that its configuration "
                f"names), and nothing is ever fetched from a network: save it again with all it needs, or {OWN_CODE}."
            ) from error
        raise ValueError(f"The {what} in {path} does not load: {first_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)


def _model_class(name: Any, path: Path) -> Any:
    """Return the model class of that name; any other object of transformers counts as unknown."""
    transformers = transformers_library()
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    models = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    if not models and not hasattr(found, "_model_mapping"):
        raise ValueError(
            f"{path} holds a {brief(name)}, which transformers {transformers.__version__} does not know; code stored "
            f"beside the weights is never run, so {OWN_CODE}."
        )
    return found


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of config.json in a model's directory."""
    if not path.is_dir():
        raise ValueError(
            f"No model at {path}: expected a directory with config.json and safetensors weights, or "
            "package.module:function. Nothing is downloaded: save a model of the Hugging Face Hub first, by "
            "its class's from_pretrained(name) and save_pretrained(directory)."
        )
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} is no Hugging Face model: it has no config.json.")
    config = read_object(path / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ValueError(f"{path / 'config.json'} does not say which model_type this is.")
    return config


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError for what is none, for NaN, and for a byte order mark."""
    try:
        content = file.read_text(encoding="utf-8")
        record = json.loads(content.removeprefix("\ufeff"), parse_constant=_constant)
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {first_line(error)}.") from error
    if not isinstance(record, dict):
        raise ValueError(f"{file} must hold one JSON object. Found {type(record).__name__}.")
    if content.startswith("\ufeff"):  # transformers and peft, which read it again, refuse that
        raise ValueError(f"{file} must be UTF-8 without a byte order mark. Found one at its start; save it without.")
    return record


def _constant(name: str) -> float:
    """Return an infinite number, as Mamba's limits are. Raises ValueError for NaN."""
    if name == "NaN":
        raise ValueError("a number must not be NaN. Found NaN")
    return float(name)


def _weight_files(path: Path) -> list[Path]:
    """Return model.safetensors, or every shard that an index names: all of them must lie in the directory itself."""
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    if not (path / INDEX).is_file():
        raise ValueError(without_weights(path))
    weight_map = read_object(path / INDEX).get("weight_map")
    shards = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
    for shard in shards:
        if not shard.endswith(".safetensors") or Path(shard).name != shard or not (path / shard).is_file():
            raise ValueError(f"{path / INDEX} must name files of safetensors beside it. Found {brief(shard)}.")
    return [path / shard for shard in shards]


def without_weights(path: Path) -> str:
    """Return what to say of a directory in which weights were expected as safetensors."""
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in path.glob(pattern))
    if pickles:
        return (
            f"{path} has pickled weights only ({pickles[0]}), and unpickling can run any code: convert them where you "
            "trust them, with model.save_pretrained(directory, safe_serialization=True), and give that directory."
        )
    return f"{path} has no weights: expected {WEIGHTS}, or adapter_model.safetensors of an adapter."


def transformers_library() -> ModuleType:
    """Return the module transformers, or say in an ImportError how it is installed."""
    with needs("A Hugging Face model", "transformers", "transformers"):
        import transformers
    return transformers


def tokenizer_files(path: Path) -> list[Path]:
    """Return the files of a directory that decide its tokens: the vocabulary and the settings of the tokenizer."""
    return [file for pattern in (*VOCABULARIES, *TOKENIZER_SETTINGS) for file in path.glob(pattern)]


def has_tokenizer(path: Path) -> bool:
    """Return whether a directory has a vocabulary: without one, transformers builds a tokenizer that knows no word."""
    return any(file for pattern in VOCABULARIES for file in path.glob(pattern))


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer in a directory."""
    if not has_tokenizer(path):
        raise ValueError(f"{path} has no tokenizer: expected tokenizer.json or a vocabulary beside the weights.")
    with loading("tokenizer", path):
        return transformers_library().AutoTokenizer.from_pretrained(os.fspath(path), **LOCAL)


def has_image_processor(path: Path) -> bool:
    """Return whether a directory says how pictures are prepared for its model."""
    old, new = (path / name for name in PROCESSORS)
    return old.is_file() or (new.is_file() and "image_processor" in read_object(new))


def load_image_processor(path: Path) -> Any:
    """Return transformers' image processor of a directory: always the one that computes with Pillow and NumPy.

    The one for torchvision resizes a little differently, and values must not depend on what else is installed.
    """
    transformers = transformers_library()
    modern = int(transformers.__version__.split(".")[0]) >= 5
    backend: dict[str, Any] = {"backend": "pil"} if modern else {"use_fast": False}
    with loading("image processor", path):
        return transformers.AutoImageProcessor.from_pretrained(os.fspath(path), **LOCAL, **backend)


# ---- directories of unknown origin


def check_config(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise ValueError if `config` has far more classes, layers or ranks than the weights, whose shapes these are.

    Called before an object of the configuration is made: labels of classes and settings of layers can fill the memory.
    """
    most = max(MANY, len(shapes), *(size for shape in shapes.values() for size in shape))
    for name, value in config.items():
        counts = name in ("num_labels", "r") or "layer" in name
        if counts and isinstance(value, (int, float)) and value > most:
            raise ValueError(f"{name} in {where} must be at most {most}, as large as its weights are. Found {value}.")


@contextmanager
def no_network() -> Iterator[None]:
    """Make huggingface_hub refuse every request inside the block; threads take turns, for its switch is global.

    Libraries ask it for what a configuration names and a directory lacks: a backbone, a kernel, a list of files.
    """
    from huggingface_hub import constants, utils

    renew = getattr(utils, "reset_sessions", lambda: None)  # before 1.0, sessions keep the switch as it stood
    with _LOCK:
        before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
        renew()
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before
            renew()


def asked_network(error: BaseException | None) -> bool:
    """Return whether an error, or one that it arose from, is a request that `no_network` refused."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    while error is not None and not isinstance(error, OfflineModeIsEnabled):
        error = error.__cause__ or error.__context__
    return error is not None


# ---- files of safetensors


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open a file of safetensors; whatever fails inside becomes one ValueError."""
    with needs(f"{file}", "safetensors", "transformers"):
        from safetensors import safe_open
    try:
        with safe_open(file, framework="pt") as weights:
            yield weights
    except ValueError:
        raise
    except Exception as error:  # safetensors' own kind, or the system's
        raise ValueError(f"{file} does not load: {first_line(error)}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name, on the CPU."""
    with opened(path) as weights:
        return {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118


def shapes_in(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor in files; only their headers are read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with opened(file) as weights:
            shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    return shapes
