"""BERT classifiers of google-research/bert: TensorFlow-1 checkpoints, converted once to a Hugging Face directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quotient_manifolds.load.bundle import VariableReader, bundle_of, content_hash, open_bundle, read_variable
from quotient_manifolds.load.huggingface import load_pretrained, read_object, shapes_of
from quotient_manifolds.load.names import first_line
from quotient_manifolds.load.weights import check_names, check_shapes, read_tensors

ARCHITECTURE = "BertForSequenceClassification"
CONVERSION = 1  # raise when what is written changes: older conversions are then made anew
HEAD_WIDTH = 64
# The order of MNLI's classes in google-research/bert (and so in McCoy, Min and Linzen, 2020).
MNLI_LABELS = ("contradiction", "entailment", "neutral")
SKIPPED = re.compile(r".*/adam_[mv]|global_step")  # the optimizer's, not the model's
LAST = {"kernel": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}


def load_bert(path: Path, cache: Path | None = None) -> nn.Module:
    """The classifier in a TensorFlow checkpoint, in eval mode, by way of its conversion.

    path: the checkpoint's prefix (dir/model.ckpt-3), one of its files, or a directory with no other.
    """
    prefix = bundle_of(path)
    if prefix is None:
        raise ValueError(
            f"There is no TensorFlow checkpoint {path}: expected its .index file, or a directory with one."
        )
    return load_pretrained(convert_bert(prefix, cache))


def convert_bert(prefix: Path, cache: Path | None = None) -> Path:
    """The Hugging Face directory of a TensorFlow checkpoint, made if it is not there, beside it or in `cache`.

    The directory is called after the checkpoint and a hash of its content, and appears when it is complete and every
    parameter in it has been compared with its source. vocab.txt and bert_config.json (for the number of heads, else
    they are 64 wide) are taken from the checkpoint's directory or the one above.

    Raises ValueError naming the variable that has no place in the model, the parameter that has no variable, or the one
    of another shape; and where the directory cannot be written.
    """
    beside = {name: _beside(prefix, name) for name in ("vocab.txt", "bert_config.json")}
    identity = content_hash(prefix, *filter(None, beside.values()))
    home = cache or prefix.parent
    directory = home / f"{prefix.name}-{identity[:12]}-{CONVERSION}"
    if directory.is_dir():
        return directory
    reader = open_bundle(prefix)
    tensors, skipped = _tensors(reader, prefix)
    config = _config(tensors, prefix, beside["bert_config.json"])
    _check_against_model(tensors, config, prefix)
    unfinished = home / f".unfinished-{directory.name}-{uuid.uuid4().hex[:8]}"
    try:
        _write(unfinished, tensors, config, beside["vocab.txt"], {"source": prefix.name, "skipped": skipped})
        _compare(unfinished / "model.safetensors", reader, prefix)
        _publish(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def _beside(prefix: Path, name: str) -> Path | None:
    places = (prefix.parent / name, prefix.parent.parent / name)
    return next((place for place in places if place.is_file()), None)


def parameter_name(variable: str) -> str:
    """bert/encoder/layer_0/output/dense/kernel -> bert.encoder.layer.0.output.dense.weight, and so on."""
    if variable in ("output_weights", "output_bias"):
        return {"output_weights": "classifier.weight", "output_bias": "classifier.bias"}[variable]
    *path, last = variable.split("/")
    last = f"{last}.weight" if last.endswith("_embeddings") else LAST.get(last, last)
    return ".".join([re.sub(r"^layer_(\d+)$", r"layer.\1", part) for part in path] + [last])


def _values(reader: VariableReader, variable: str, prefix: Path) -> Any:
    """The variable as the parameter it becomes: float32, a kernel (in, out) transposed, output_weights not."""
    value = np.asarray(read_variable(reader, variable, prefix))
    if value.dtype.kind != "f":
        raise ValueError(f"{prefix} has {variable} of dtype {value.dtype}, expected floating point numbers.")
    return (value.T if variable.endswith("/kernel") else value).astype(np.float32)


def _model_variables(reader: VariableReader) -> tuple[list[str], list[str]]:
    names = sorted(reader.get_variable_to_shape_map())
    skipped = [name for name in names if SKIPPED.fullmatch(name)]
    return [name for name in names if not SKIPPED.fullmatch(name)], skipped


def _tensors(reader: VariableReader, prefix: Path) -> tuple[dict[str, Tensor], list[str]]:
    used, skipped = _model_variables(reader)
    arrays = {parameter_name(name): np.ascontiguousarray(_values(reader, name, prefix)) for name in used}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}, skipped


def _config(tensors: Mapping[str, Tensor], prefix: Path, given: Path | None) -> dict[str, Any]:
    """config.json of the classifier whose parameters have these shapes."""

    def rows(name: str) -> int:
        if name not in tensors or tensors[name].ndim != 2:
            raise ValueError(f"{prefix} is no BERT classifier of google-research/bert: it has no matrix {name}.")
        return len(tensors[name])

    width = rows("bert.pooler.dense.weight")
    heads = read_object(given).get("num_attention_heads") if given else width // HEAD_WIDTH
    if not isinstance(heads, int) or heads < 1 or width % heads:
        raise ValueError(
            f"{prefix} is {width} wide, which does not make {heads!r} heads; put its bert_config.json beside it."
        )
    classes = rows("classifier.weight")
    labels = MNLI_LABELS if classes == len(MNLI_LABELS) else [f"LABEL_{i}" for i in range(classes)]
    layers = {found[1] for name in tensors if (found := re.match(r"bert\.encoder\.layer\.(\d+)\.", name))}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "bert",
        "vocab_size": rows("bert.embeddings.word_embeddings.weight"),
        "max_position_embeddings": rows("bert.embeddings.position_embeddings.weight"),
        "type_vocab_size": rows("bert.embeddings.token_type_embeddings.weight"),
        "hidden_size": width,
        "num_hidden_layers": len(layers),
        "num_attention_heads": heads,
        "intermediate_size": rows("bert.encoder.layer.0.intermediate.dense.weight"),
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-12,
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }


def _check_against_model(tensors: Mapping[str, Tensor], config: dict[str, Any], prefix: Path) -> None:
    wanted = shapes_of(ARCHITECTURE, config)
    check_names(tensors, wanted, f"{prefix}, read as a BERT classifier,")
    check_shapes({name: tuple(value.shape) for name, value in tensors.items()}, wanted, str(prefix))


def _write(
    directory: Path, tensors: dict[str, Tensor], config: dict[str, Any], vocabulary: Path | None, record: dict[str, Any]
) -> None:
    from safetensors.torch import save_file  # load_directory needs transformers, which brings it

    texts = {"config.json": config, "conversion.json": record}
    if vocabulary is not None:
        longest = config["max_position_embeddings"]
        texts["tokenizer_config.json"] = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": True,
            "model_max_length": longest,
        }
    try:
        directory.mkdir(parents=True)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        for name, content in texts.items():
            (directory / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        if vocabulary is not None:
            shutil.copyfile(vocabulary, directory / "vocab.txt")
    except Exception as error:  # the system's, or safetensors' own kind: no space, no permission
        raise ValueError(
            f"The conversion of a TensorFlow checkpoint cannot be written to {directory.parent}: {first_line(error)}; "
            "give a directory to keep conversions in."
        ) from error


def _compare(file: Path, reader: VariableReader, prefix: Path) -> None:
    """Every parameter on disk equals its variable, read anew."""
    written = read_tensors(file)
    for variable in _model_variables(reader)[0]:
        source = _values(reader, variable, prefix)
        if not np.array_equal(written[parameter_name(variable)].numpy(), source, equal_nan=True):
            raise ValueError(f"{file} does not hold {variable} of {prefix} as it was read; the disk may be damaged.")


def _publish(unfinished: Path, directory: Path) -> None:
    """Flush, then rename: a directory of the final name is never half-written, whenever the process or machine dies."""
    try:
        for file in unfinished.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        os.replace(unfinished, directory)
    except OSError:
        if not directory.is_dir():  # else another process made the same meanwhile
            raise
