"""Load TensorFlow-1 checkpoints of google-research/bert classifiers, converted once to a Hugging Face directory."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quotient_manifolds.files import siblings
from quotient_manifolds.load.huggingface import load_pretrained, read_object, shapes_described
from quotient_manifolds.load.weights import check_shapes, read_tensors, shapes_of
from quotient_manifolds.messages import first_line

ARCHITECTURE = "BertForSequenceClassification"
CONVERSION = 1  # raise when what is written changes: older conversions are then made anew
HEAD_WIDTH = 64
# The order of MNLI's classes in google-research/bert (and so in McCoy, Min and Linzen, 2020).
MNLI_LABELS = ("contradiction", "entailment", "neutral")
SKIPPED = re.compile(r".*/adam_[mv]|global_step")  # the optimizer's, not the model's
LAST = {  # how the last part of a name is called here
    "kernel": "weight",
    "gamma": "weight",
    "beta": "bias",
    "output_weights": "classifier.weight",
    "output_bias": "classifier.bias",
}


def load_bert(path: Path, cache: Path | None = None) -> nn.Module:
    """Return the classifier in a TensorFlow checkpoint, in eval mode, by way of its conversion.

    path: the checkpoint's prefix (dir/model.ckpt-3), one of its files, or a directory with no other.
    """
    prefix = prefix_of(path)
    if prefix is None:
        raise ValueError(
            f"There is no TensorFlow checkpoint {path}: expected its .index file, or a directory with one."
        )
    return load_pretrained(convert_bert(prefix, cache))


def prefix_of(path: Path) -> Path | None:
    """Return the prefix (dir/model.ckpt-3) of the checkpoint that `path` is a file of, or of the only one in `path`.

    None if there is none, or a directory has several: then one of their .index files has to be named.
    """
    if path.is_dir():
        found = list(path.glob("*.index"))
        return found[0].with_suffix("") if len(found) == 1 else None
    named = re.fullmatch(r"(.+)\.(index|meta|data-\d{5}-of-\d{5})", path.name)
    prefix = path.with_name(named[1]) if named else path
    return prefix if _index(prefix).is_file() else None


def convert_bert(prefix: Path, cache: Path | None = None) -> Path:
    """Return the Hugging Face directory of a TensorFlow checkpoint, made if it is not there, beside it or in `cache`.

    The directory is called after the checkpoint and a hash of its content, and appears when it is complete and every
    parameter in it has been compared with its source. vocab.txt and bert_config.json (for the number of heads, else
    they are 64 wide) are taken from the checkpoint's directory or the one above.

    Raises ValueError naming the variable that has no place in the model, the parameter that has no variable, or the one
    of another shape; and where the directory cannot be written.
    """
    beside = [[folder / name for folder in prefix.parents[:2]] for name in ("vocab.txt", "bert_config.json")]
    vocabulary, settings = (next(filter(Path.is_file, places), None) for places in beside)
    identity = _content_hash(prefix, *filter(None, (vocabulary, settings)))
    home = cache or prefix.parent
    directory = home / f"{prefix.name}-{identity[:12]}-{CONVERSION}"
    if directory.is_dir():
        return directory
    reader = _open(prefix)
    tensors = {name: torch.from_numpy(value) for name, _, value in _parameters(reader, prefix)}
    config = _config(tensors, prefix, settings)
    check_shapes(shapes_of(tensors), shapes_described(ARCHITECTURE, config), f"{prefix}, read as a BERT classifier,")
    skipped = sorted(filter(SKIPPED.fullmatch, reader.get_variable_to_shape_map()))
    unfinished = home / f".unfinished-{directory.name}-{uuid.uuid4().hex[:8]}"
    try:
        _write(unfinished, tensors, config, vocabulary, {"source": prefix.name, "skipped": skipped})
        written = read_tensors(unfinished / "model.safetensors")
        for name, variable, value in _parameters(reader, prefix):  # read anew: disks and memory fail silently
            if not np.array_equal(written[name].numpy(), value, equal_nan=True):
                raise ValueError(
                    f"{unfinished / 'model.safetensors'} does not hold {variable} of {prefix} as it was read; the disk "
                    "may be damaged."
                )
        for file in unfinished.iterdir():  # all on disk, then the name: what has it is whole, whenever a machine dies
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        os.replace(unfinished, directory)
    except OSError:
        if not directory.is_dir():  # else another process made the same meanwhile
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def _index(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.index")


def _content_hash(prefix: Path, *also: Path) -> str:
    """Hash what tells a checkpoint from every other without reading it all: its index has a checksum of each variable.

    The sizes of its data files count too, and the files `also` with all they hold.
    """
    digest = hashlib.sha256(_index(prefix).read_bytes())
    for file in siblings(prefix, f"{prefix.name}.data-"):
        digest.update(os.fsencode(file.name) + f" {file.stat().st_size}\n".encode())
    for file in also:
        digest.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _open(prefix: Path) -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # tensorflow reports on the processor when it is imported
    try:
        from tensorflow import train
    except ImportError as error:
        raise ImportError(
            f'{prefix} is a TensorFlow checkpoint, read by tensorflow: pip install "quotient-manifolds[tensorflow]" '
            "(it is converted once; without tensorflow the conversion is read)."
        ) from error
    try:
        return train.load_checkpoint(str(prefix))
    except Exception as error:  # tensorflow has kinds of its own, which derive from Exception
        raise ValueError(f"{prefix} is no readable TensorFlow checkpoint: {first_line(error)}") from error


def _parameters(reader: Any, prefix: Path) -> Iterator[tuple[str, str, NDArray[np.float32]]]:
    """Yield (parameter, variable, value) for the model's variables, a kernel (in, out) transposed to (out, in)."""
    for variable in sorted(reader.get_variable_to_shape_map()):
        if SKIPPED.fullmatch(variable):
            continue
        try:
            value = np.asarray(reader.get_tensor(variable))  # tensorflow compares it with its checksum
        except Exception as error:  # as above, and IndexError for a file that is too short
            raise ValueError(f"{prefix} is damaged: {variable} cannot be read: {first_line(error)}") from error
        if value.dtype.kind != "f":
            raise ValueError(f"{prefix} has {variable} of dtype {value.dtype}, expected floating point numbers.")
        value = value.T if variable.endswith("/kernel") else value
        yield parameter_name(variable), variable, np.ascontiguousarray(value, dtype=np.float32)


def parameter_name(variable: str) -> str:
    """Return the parameter of a variable: of bert/encoder/layer_0/output/dense/kernel
    bert.encoder.layer.0.output.dense.weight, and so on.
    """
    *path, last = variable.replace("/layer_", "/layer/").split("/")
    last = f"{last}.weight" if last.endswith("_embeddings") else LAST.get(last, last)
    return ".".join([*path, last])


def _config(tensors: Mapping[str, Tensor], prefix: Path, given: Path | None) -> dict[str, Any]:
    """Return config.json of the classifier whose parameters have these shapes."""

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


def _write(
    directory: Path, tensors: dict[str, Tensor], config: dict[str, Any], vocabulary: Path | None, record: dict[str, Any]
) -> None:
    from safetensors.torch import save_file  # load_pretrained needs transformers, which brings it

    texts = {"config.json": config, "conversion.json": record}
    if vocabulary is not None:
        texts["tokenizer_config.json"] = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": True,
            "model_max_length": config["max_position_embeddings"],
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
