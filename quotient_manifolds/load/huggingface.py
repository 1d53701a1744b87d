"""Load a model, its tokenizer and its image processor by transformers, which only this module imports.

A directory of unknown origin cannot exhaust the memory, use the network or hang the process.
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

MANY = 10_000  # A configuration may have this many classes or layers, and more only if its weights have as many.

_LOCK = threading.RLock()


def load_pretrained(
    path: Path,
    *,
    architecture: str | None = None,
    settings: Mapping[str, Any] | None = None,
    replacements: Mapping[str, Tensor] | None = None,
) -> nn.Module:
    """Return the model in a directory, every parameter read from safetensors, in eval mode.

    architecture: its class in transformers; by default the one in `architectures` of config.json. settings: entries
    that override the configuration. replacements: values of parameters that the files lack or have in another shape.

    Raises ValueError for missing or pickled weights, parameters that are not in the files, far more layers or classes
    than the files have, and anything that would have to be downloaded.
    """
    settings, replacements = settings or {}, replacements or {}
    name, model_class = _checked_class(path, architecture, settings)
    options = {
        **LOCAL,
        **settings,
        "use_safetensors": True,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are listed, and refused below
    }
    with loading(name, path):
        model, info = model_class.from_pretrained(os.fspath(path), **options)
    mismatched = {str(key): (tuple(stored), tuple(wanted)) for key, stored, wanted in info.get("mismatched_keys", ())}
    if wrong := sorted(mismatched.keys() - replacements.keys()):
        stored, wanted = mismatched[wrong[0]]
        raise ValueError(
            f"The weights in {path} have {wrong[0]} of shape {stored}, but config.json describes one of {wanted}"
        )
    if missing := sorted(set(info["missing_keys"]) - replacements.keys()):
        raise ValueError(
            f"The weights in {path} must have every parameter of {name}. Found {len(missing)} missing (the first is "
            f"{missing[0]}), which would stay random; save the model again with all its weights"
        )
    model.load_state_dict({key: replacements[key] for key in (*info["missing_keys"], *mismatched)}, strict=False)
    return model.eval()


def empty_model(path: Path, architecture: str | None, settings: Mapping[str, Any]) -> nn.Module:
    """Return the model of `load_pretrained` with uninitialized parameters, most of which occupy no physical memory."""
    name, model_class = _checked_class(path, architecture, settings)
    with loading(name, path):
        config = transformers_library().AutoConfig.from_pretrained(os.fspath(path), **LOCAL, **settings)
        with torch.device("meta"):
            build = getattr(model_class, "_from_config", None) or model_class.from_config
            model = build(config)
        model.to_empty(device="cpu").tie_weights()
    return model.eval()


def _checked_class(path: Path, architecture: str | None, settings: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the name of a directory's model class, and the class, once its configuration can be trusted."""
    config = read_config(path)
    if config.get("transformers_weights") not in (None, WEIGHTS, INDEX):  # other files may be pickles
        raise ValueError(f"{path / 'config.json'} must leave its weights in {WEIGHTS}. Found transformers_weights")
    check_config({**config, **settings}, shapes_in(_weight_files(path)), str(path / "config.json"))
    listed = config.get("architectures") or ["AutoModel"]
    name: Any = architecture or (listed[0] if isinstance(listed, list) else listed)
    return name, _model_class(name, path)


# ---- names of parameters


def renaming(network: Any) -> Callable[[str], str]:
    """Return the function from parameter names in earlier versions of transformers to names in a network."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before version 5
        return lambda name: name
    return _renaming_by(get_model_conversion_mapping(network))


def renamings() -> Iterator[Callable[[str], str]]:
    """Yield the renaming of each type of model that transformers knows, for models with a head."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:
        return
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    for kind, inside in MODEL_MAPPING_NAMES.items():
        steps, inner = (get_checkpoint_conversion_mapping(each) or () for each in (kind, inside))
        for step in inner:  # get_model_conversion_mapping treats the model inside a model with a head like this
            step.scope_prefix, step.base_model_prefix = "", "model"
        if steps or inner:
            yield _renaming_by([*steps, *inner])


def _renaming_by(steps: Iterable[Any]) -> Callable[[str], str]:
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renaming = [step for step in steps if isinstance(step, WeightRenaming)]
    return lambda name: rename_source_key(name, renaming, [])[0]


@contextmanager
def loading(what: str, path: Path) -> Iterator[None]:
    """Refuse every network request inside the block, and turn any error into a ValueError that says why.

    Silences transformers' report on missing parameters, which are checked here.
    """
    logging = transformers_library().logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with no_network():
            yield
    except Exception as error:  # transformers and peft raise a dozen types, from KeyError to safetensors' own
        if asked_network(error):
            raise ValueError(
                f"The {what} in {path} must be complete, for nothing is ever downloaded. Found a request for a file "
                f"that is not there (such as a backbone or a kernel); save it again with all it needs, or {OWN_CODE}"
            ) from error
        raise ValueError(f"The {what} in {path} does not load: {first_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)


def _model_class(name: Any, path: Path) -> Any:
    """Return the model class of that name; any other object of transformers counts as unknown."""
    transformers = transformers_library()
    model_class = getattr(transformers, name, None) if isinstance(name, str) else None
    is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    if not is_model and not hasattr(model_class, "_model_mapping"):
        raise ValueError(
            f"{path} holds a {brief(name)}, which transformers {transformers.__version__} does not know; code stored "
            f"beside the weights is never run, so {OWN_CODE}"
        )
    return model_class


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of config.json in a model's directory."""
    if not path.is_dir():
        raise ValueError(
            f"No model at {path}: expected a directory with config.json and safetensors weights, or "
            "package.module:function. Nothing is downloaded: save a model of the Hugging Face Hub first, by "
            "its class's from_pretrained(name) and save_pretrained(directory)"
        )
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} must be a Hugging Face model. Found no config.json in it")
    config = read_object(path / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ValueError(f"{path / 'config.json'} must state a model_type. Found {brief(config.get('model_type'))}")
    return config


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError for any other content, for NaN, and for a byte order mark."""
    try:
        content = file.read_text(encoding="utf-8")
        record = json.loads(content.removeprefix("\ufeff"), parse_constant=_constant)
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {first_line(error)}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{file} must hold one JSON object. Found {type(record).__name__}")
    if content.startswith("\ufeff"):  # transformers and peft read the file again, and refuse it
        raise ValueError(f"{file} must be UTF-8 without a byte order mark. Found one at its start; save it without")
    return record


def _constant(name: str) -> float:
    """Return plus or minus infinity, which Mamba's configuration has. Raises ValueError for NaN."""
    if name == "NaN":
        raise ValueError("a number must not be NaN. Found NaN")
    return float(name)


def _weight_files(path: Path) -> list[Path]:
    """Return model.safetensors, or every shard that an index names; all must be in the directory itself."""
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    if not (path / INDEX).is_file():
        raise ValueError(without_weights(path))
    weight_map = read_object(path / INDEX).get("weight_map")
    shards = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
    for shard in shards:
        if not shard.endswith(".safetensors") or Path(shard).name != shard or not (path / shard).is_file():
            raise ValueError(f"{path / INDEX} must name safetensors files beside it. Found {brief(shard)}")
    return [path / shard for shard in shards]


def without_weights(path: Path) -> str:
    """Return the error message for a directory without safetensors weights."""
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in path.glob(pattern))
    if pickles:
        return (
            f"{path} has pickled weights only ({pickles[0]}), and unpickling can run any code; convert them if you "
            "trust them, with model.save_pretrained(directory, safe_serialization=True), and give that directory"
        )
    return f"{path} has no weights: expected {WEIGHTS}, or adapter_model.safetensors of an adapter"


def transformers_library() -> ModuleType:
    """Return the module transformers, or raise an ImportError that says how to install it."""
    with needs("A Hugging Face model", "transformers", "transformers"):
        import transformers
    return transformers


def tokenizer_files(path: Path) -> list[Path]:
    """Return the files of a directory on which its tokens depend: the vocabulary and the tokenizer's settings."""
    return [file for pattern in (*VOCABULARIES, *TOKENIZER_SETTINGS) for file in path.glob(pattern)]


def has_tokenizer(path: Path) -> bool:
    """Return whether a directory has a vocabulary; without one, transformers builds a tokenizer with no words."""
    return any(file for pattern in VOCABULARIES for file in path.glob(pattern))


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer in a directory."""
    if not has_tokenizer(path):
        raise ValueError(f"{path} has no tokenizer: expected tokenizer.json or a vocabulary beside the weights")
    with loading("tokenizer", path):
        return transformers_library().AutoTokenizer.from_pretrained(os.fspath(path), **LOCAL)


def has_image_processor(path: Path) -> bool:
    """Return whether a directory has settings of an image processor."""
    old, new = (path / name for name in PROCESSORS)
    return old.is_file() or (new.is_file() and "image_processor" in read_object(new))


def load_image_processor(path: Path) -> Any:
    """Return the image processor of a directory that computes with Pillow and NumPy.

    The one of torchvision resizes slightly differently, and values must not depend on which packages are installed.
    """
    transformers = transformers_library()
    modern = int(transformers.__version__.split(".")[0]) >= 5
    backend: dict[str, Any] = {"backend": "pil"} if modern else {"use_fast": False}
    with loading("image processor", path):
        return transformers.AutoImageProcessor.from_pretrained(os.fspath(path), **LOCAL, **backend)


# ---- directories of unknown origin


def check_config(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise ValueError if `config` has far more classes, layers or ranks than weights of these shapes.

    Called before an object of the configuration is created, whose labels and layer settings could exhaust the memory.
    """
    most = max(MANY, len(shapes), *(size for shape in shapes.values() for size in shape))
    for name, value in config.items():
        is_count = name in ("num_labels", "r") or "layer" in name
        if is_count and isinstance(value, (int, float)) and value > most:
            raise ValueError(f"{name} in {where} must be at most {most}, as large as its weights are. Found {value}")


@contextmanager
def no_network() -> Iterator[None]:
    """Make huggingface_hub refuse every request inside the block.

    Libraries request files that a configuration names and a directory lacks: a backbone, a kernel, a list of files.
    The switch is global, so threads take turns.
    """
    from huggingface_hub import constants, utils

    renew = getattr(utils, "reset_sessions", lambda: None)  # before 1.0, a session keeps the value it was opened with
    with _LOCK:
        before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
        renew()
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before
            renew()


def asked_network(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is a request that `no_network` refused."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    while error is not None and not isinstance(error, OfflineModeIsEnabled):
        error = error.__cause__ or error.__context__
    return error is not None


# ---- safetensors files


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file; any error inside becomes a ValueError."""
    with needs(f"{file}", "safetensors", "transformers"):
        from safetensors import safe_open
    try:
        with safe_open(file, framework="pt") as weights:
            yield weights
    except ValueError:
        raise
    except Exception as error:  # safetensors raises its own type, or an OSError
        raise ValueError(f"{file} does not load: {first_line(error)}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name, on the CPU."""
    with opened(path) as weights:
        return {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118


def shapes_in(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor in the files, from their headers alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with opened(file) as weights:
            shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    return shapes
