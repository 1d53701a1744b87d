"""Load a model, its tokenizer and its image processor by transformers, which only this module imports, offline."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.load.untrusted import TooLarge, asked_network, at_most, check_config, check_regular, no_network
from quotient_manifolds.load.weights import Shapes, shapes_in, shapes_of
from quotient_manifolds.messages import brief, first_line, shown

VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "tekken.json")
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
PROCESSORS = ("preprocessor_config.json", "processor_config.json")  # an older and a newer name
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
OWN_CODE = "build such a model in a function and give package.module:function"


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

    Raises ValueError in one sentence: no weights, pickled weights, parameters that are not in the files, a model far
    larger than the files, and anything that would have to be fetched from a network.
    """
    settings, instead, where = settings or {}, instead or {}, shown(path / "config.json")
    config = read_config(path)
    check_regular(path)
    if config.get("transformers_weights") not in (None, "model.safetensors", "model.safetensors.index.json"):
        raise ValueError(f"{where} names weights of its own: expected model.safetensors.")
    shapes = shapes_in(_weight_files(path))
    check_config({**config, **settings}, shapes, where)
    name = architecture or _architecture(config, path)
    model_class = _model_class(name, path)
    options = {
        **LOCAL,
        **settings,
        "use_safetensors": True,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are listed, and refused below
    }
    with loading(name, path), at_most(shapes, where), _quiet(architecture is not None):
        model, info = model_class.from_pretrained(os.fspath(path), **options)
    unread = _unread(info, instead, name, path)
    model.load_state_dict({key: instead[key] for key in unread}, strict=False)
    return model.eval()


def _unread(info: Mapping[str, Any], instead: Mapping[str, Tensor], name: str, path: Path) -> set[str]:
    """Return the parameters that were not read from the files; ValueError if one of them has no value `instead`."""
    mismatched = {str(key): (tuple(found), tuple(wanted)) for key, found, wanted in info.get("mismatched_keys", ())}
    if wrong := sorted(mismatched.keys() - instead.keys()):
        found, wanted = mismatched[wrong[0]]
        raise ValueError(
            f"The weights in {shown(path)} have {wrong[0]} of shape {found}, but config.json describes one of {wanted}."
        )
    if missing := sorted(set(info["missing_keys"]) - instead.keys()):
        raise ValueError(
            f"The weights in {shown(path)} lack {len(missing)} parameters of {name} (the first is {missing[0]}), "
            "which would be left at random values; save the model again with all its weights."
        )
    return {*info["missing_keys"], *mismatched}


@contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    """Silence the report of transformers on missing parameters, where some are expected and checked here."""
    logging = _transformers().logging
    before = logging.get_verbosity()
    if quiet:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def loading(what: str, path: Path) -> Iterator[None]:
    """Refuse every network request inside the block, and say in one ValueError why `what` does not load."""
    try:
        with no_network():
            yield
    except TooLarge:
        raise
    except Exception as error:  # transformers and peft raise a dozen kinds, from KeyError to safetensors' own
        if asked_network(error):
            raise ValueError(
                f"The {what} in {shown(path)} needs what is not there (a backbone or a kernel that its configuration "
                f"names), and nothing is ever fetched from a network: save it again with all it needs, or {OWN_CODE}."
            ) from error
        raise ValueError(f"The {what} in {shown(path)} does not load: {first_line(error)}") from error


def _architecture(config: Mapping[str, Any], path: Path) -> str:
    names = config.get("architectures") or ["AutoModel"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ValueError(
            f"architectures in {shown(path / 'config.json')} must be a list of names, found {brief(names)}."
        )
    return names[0]


def _model_class(name: str, path: Path) -> Any:
    """Return the model class of that name; any other object of transformers counts as unknown."""
    transformers = _transformers()
    found = getattr(transformers, name, None)
    models = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    wants_more = str(getattr(found, "__module__", "")).startswith("transformers.utils.dummy")  # says itself what
    if not models and not wants_more and not hasattr(found, "_model_mapping"):
        raise ValueError(
            f"{shown(path)} holds a {name}, which transformers {transformers.__version__} does not know; code stored "
            f"beside the weights is never run, so {OWN_CODE}."
        )
    return found


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of config.json in a model's directory."""
    if not path.is_dir():
        raise ValueError(
            f"No model at {shown(path)}: expected a directory with config.json and safetensors weights, "
            "or package.module:function."
        )
    if not (path / "config.json").is_file():
        raise ValueError(f"{shown(path)} is no Hugging Face model: it has no config.json.")
    config = read_object(path / "config.json")
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise ValueError(f"{shown(path / 'config.json')} does not say which model_type this is.")
    return config


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{shown(file)} is not valid JSON: {first_line(error)}.") from error
    if not isinstance(record, dict):
        raise ValueError(f"{shown(file)} must hold one JSON object, found {type(record).__name__}.")
    return record


def _weight_files(path: Path) -> list[Path]:
    """Return model.safetensors, or every shard that an index names: all of them must lie in the directory itself."""
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{shown(index)} has no weight_map: expected the shard of each parameter.")
        shards = sorted(set(map(str, weight_map.values())))
        for shard in shards:
            if not shard.endswith(".safetensors") or Path(shard).name != shard:
                raise ValueError(
                    f"{shown(index)} names {brief(shard)} as a shard: expected files of safetensors beside it."
                )
            if not (path / shard).is_file():
                raise ValueError(f"{shown(path)} is incomplete: {index.name} names {shard}, which is not there.")
        return [path / shard for shard in shards]
    raise ValueError(without_weights(path))


def without_weights(path: Path) -> str:
    """Return what to say of a directory in which weights were expected as safetensors."""
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in path.glob(pattern))
    if pickles:
        return (
            f"{shown(path)} has pickled weights only ({shown(pickles[0])}), and unpickling can run any code: convert "
            "them where you trust them, with model.save_pretrained(directory, safe_serialization=True), and give that "
            "directory."
        )
    return f"{shown(path)} has no weights: expected model.safetensors, or adapter_model.safetensors of an adapter."


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            'Hugging Face models need the transformers library: pip install "quotient-manifolds[transformers]".'
        ) from error
    return transformers


def shapes_described(architecture: str, config: Mapping[str, Any]) -> Shapes:
    """Return name and shape of every parameter of the model that a configuration describes, without making it."""
    transformers = _transformers()
    model_class = getattr(transformers, architecture)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**config))
    return shapes_of(model.state_dict())


def tokenizer_files(path: Path) -> list[Path]:
    """Return the files of a directory that decide its tokens: the vocabulary and the settings of the tokenizer."""
    return [file for pattern in (*VOCABULARIES, *TOKENIZER_SETTINGS) for file in path.glob(pattern)]


def has_tokenizer(path: Path) -> bool:
    """Return whether a directory has a vocabulary: without one, transformers builds a tokenizer that knows no word."""
    return any(file for pattern in VOCABULARIES for file in path.glob(pattern))


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer in a directory."""
    if not has_tokenizer(path):
        raise ValueError(f"{shown(path)} has no tokenizer: expected tokenizer.json or a vocabulary beside the weights.")
    check_regular(path)
    with loading("tokenizer", path):
        return _transformers().AutoTokenizer.from_pretrained(os.fspath(path), **LOCAL)


def has_image_processor(path: Path) -> bool:
    """Return whether a directory says how pictures are prepared for its model."""
    old, new = (path / name for name in PROCESSORS)
    return old.is_file() or (new.is_file() and "image_processor" in read_object(new))


def load_image_processor(path: Path) -> Any:
    """Return transformers' image processor of a directory: always the one that computes with Pillow and NumPy.

    The one for torchvision resizes a little differently, and values must not depend on what else is installed.
    """
    for file in (path / name for name in PROCESSORS):
        content = read_object(file) if file.is_file() else {}
        nested = content.get("image_processor")
        maps = [each.get("auto_map") for each in (content, nested) if isinstance(each, dict)]
        if any("AutoImageProcessor" in each or "AutoFeatureExtractor" in each for each in filter(None, maps)):
            raise ValueError(
                f"{shown(file)} leaves pictures to code that is stored beside the weights, and such is never run; give "
                "size, mean and std."
            )
    transformers = _transformers()
    modern = int(transformers.__version__.split(".")[0]) >= 5
    backend: dict[str, Any] = {"backend": "pil"} if modern else {"use_fast": False}
    check_regular(path)
    with loading("image processor", path):
        return transformers.AutoImageProcessor.from_pretrained(os.fspath(path), **LOCAL, **backend)
