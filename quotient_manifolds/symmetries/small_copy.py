"""Make a small model with generic parameters and inputs, on which the dimension of a fibre can be computed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.batches import mapped, taken_apart, tensors_in
from quotient_manifolds.symmetries.example_inputs import accepted_by, example_inputs
from quotient_manifolds.symmetries.outputs import floating

LENGTH, WORDS = 6, 40  # enough words to be generic for layers that do not depend on positions
ENOUGH = 3  # outputs per parameter
TOGETHER = 64  # outputs per batch, about: larger batches save calls, but each row of J costs a pass through its batch
SPREAD = 0.3  # standard deviation of biases and of the logarithms of gains: generic, but ReLU neurons stay active

# Sizes of entries of configurations by patterns of their names. Other entries are left unchanged.
_SIDE = r"(num_|n_|encoder_|decoder_)*"
_BLOCKS = rf"{_SIDE}(hidden_)?layers?|depth"
_SIZES: tuple[tuple[str, int], ...] = (
    (r"\w*intermediate_size|(\w+_)?ffn_(dim|hidden_size)|d_?ff|[nd]_inner|hidden_dim", 12),
    (r"(\w+_)?(hidden|embedding|projection|bottleneck|output)_size", 8),
    (r"d_model|n_embd|(embed_|projection_|\w+_proj_)?dim|image_size|num_mel_bins", 8),
    (rf"{_SIDE}(attention_)?heads?", 2),
    (r"(attention_)?head_dim|d_head|d_kv", 4),
    (r"vocab_size", WORDS),
    (r"max_2d_position_embeddings", 24),
    (r"(n|max)_(\w+_)?(position_embeddings|positions|ctx|seq_len)|n_ctx|sliding_window", LENGTH),
    (r"(bos|pad|decoder_start)_token_id|num_experts_per_tok|depths", 1),
    (r"(eos|sep)_token_id|(num|n)_(local_|routed_)?experts|window_size|num_frames|rotary_dim", 2),
    (r"relative_attention_num_buckets|patch_size", 4),  # 4 x 4 pixels have more numbers than the width
)
# Entries that a configuration writes about itself but does not accept as arguments.
_OWN = ("stage_names", "out_features", "out_indices", "dtype", "torch_dtype")


def small_copy(model: nn.Module, *, blocks: int = 1, seed: int = 0, **settings: Any) -> nn.Module:
    """Make a small Hugging Face model of the same class and settings, with generic parameters, in eval mode.

    It has width 8, 2 heads (1 key head if they are grouped), 12 neurons, 40 words, 6 positions and `blocks` blocks,
    with the model's ties, norms, biases and activations. settings: entries of its configuration to override.
    Only the model's class and configuration are used, so a model on the meta device suffices.
    Raises ValueError for a model without a Hugging Face configuration, or if its class supports no model of this size.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "to_diff_dict"):
        raise ValueError(
            "A small copy is made from a configuration of Hugging Face's. Found none in "
            f"{type(model).__name__}; make a small model of the same kind, and certify(small, batches) in Python."
        )
    try:
        small_config = _small_config(config, blocks, settings)
        small_config._experts_implementation = "eager"  # grouped products of experts exist in float32 only
        small: nn.Module = type(model)(small_config)
    except Exception as error:  # a class may raise anything for untested sizes
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{type(model).__name__} makes no small copy. Give settings that it takes; {reason}"
        ) from error
    for name, _ in list(small.named_children()):
        if getattr(model, name, small) is None:  # the model was built without this module, such as the pooler
            setattr(small, name, None)
    return make_generic(small, seed=seed)


def make_generic(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Set all parameters of the model to generic values, and put it into eval mode; return the model.

    Matrices are Gaussian with variance 1 / columns, biases and running means are Gaussian, and gains and running
    variances log-normal. At the usual initial values, gains of 1 and biases of 0, the fibre may be larger.
    """
    generator = torch.Generator().manual_seed(seed)

    def gaussian(value: Tensor) -> Tensor:
        return torch.randn(value.shape, generator=generator, dtype=torch.float32).to(value)

    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() > 1:
                value.copy_(gaussian(value) / value[0].numel() ** 0.5)
            else:
                value.copy_(SPREAD * gaussian(value) if "bias" in name else (SPREAD * gaussian(value)).exp())
        for name, statistic in model.named_buffers():
            if name.endswith("running_mean"):
                statistic.copy_(SPREAD * gaussian(statistic))
            elif name.endswith("running_var"):
                statistic.copy_((SPREAD * gaussian(statistic)).exp())
    return model.eval()


def generic_inputs(model: nn.Module, *, seed: int = 0, enough: float = ENOUGH) -> list[dict[str, Tensor]]:
    """Return batches of a few examples that a small Hugging Face model accepts, with `enough` times P outputs in all.

    Text runs through successive random permutations of all words, over all positions, so that each word and each
    position occurs in many contexts. Token types are random; images and sounds are Gaussian.
    Raises ValueError for a model for which `example_inputs` has no inputs, or that fails on them.
    """
    wanted = enough * sum(w.numel() for w in model.parameters())
    failure: Exception | None = None
    for length in range(LENGTH, 0, -1):  # some models have fewer positions: RoBERTa's begin after padding
        try:
            examples = _examples(model, seed, length)
            chosen = [next(examples)]
            with torch.no_grad():
                outputs = sum(value.numel() for value in floating(model(**chosen[0])))
            while outputs and len(chosen) * outputs < wanted:
                chosen.append(next(examples))
            size = max(1, TOGETHER // max(1, outputs))
            chosen += itertools.islice(examples, -len(chosen) % size)
            return [joined(chosen[start : start + size]) for start in range(0, len(chosen), size)]
        except (IndexError, RuntimeError) as error:
            failure = failure or error
    raise ValueError(f"{type(model).__name__} takes no inputs made for it: {' '.join(str(failure).split())}")


def joined(batches: Sequence[Any]) -> Any:
    """Concatenate batches along the examples; return the largest one if their shapes do not match."""
    first, *others = (list(taken_apart(batch)) for batch in batches)
    alike = all([*map(_shape, leaves)] == [*map(_shape, first)] for leaves in others)
    found = [tensors_in(batch) for batch in batches]
    if not alike or not all(tensor.ndim for tensors in found for tensor in tensors):
        sizes = [sum(tensor.numel() for tensor in tensors) for tensors in found]
        return batches[sizes.index(max(sizes))]
    together = map(torch.cat, zip(*found, strict=True))
    return mapped(lambda _: next(together), batches[0])


def _shape(part: tuple[str, Any]) -> Any:
    path, leaf = part
    return path, leaf.shape[1:] if isinstance(leaf, Tensor) else leaf


def _examples(model: nn.Module, seed: int, length: int) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    types = getattr(text, "type_vocab_size", 0) or 0
    # If positions are counted without padding, the padding word and its position occur only together, which is not
    # generic. Such models have two tables with a padding index, and the padding word is left out.
    tables = [
        each for each in model.modules() if hasattr(each, "weight") and getattr(each, "padding_idx", None) is not None
    ]
    left_out = getattr(config, "pad_token_id", None) if len(tables) > 1 else None
    vocabulary = getattr(text, "vocab_size", WORDS)
    words = {name: _all_words(vocabulary, left_out, generator) for name in ("input_ids", "decoder_input_ids")}
    while True:
        number = int(torch.randint(2**31, (), generator=generator))
        example = {name: value[:1] for name, value in example_inputs(model, seed=number, length=length).items()}
        if "pixel_values" not in example:  # with an image, some words stand for its patches
            for name in [name for name in words if name in example]:
                ids = [[next(words[name]) for _ in range(length)]]
                example[name] = torch.tensor(ids, device=example[name].device)
                example.pop(name.replace("input_ids", "attention_mask"), None)
        if types > 1 and "input_ids" in example and "token_type_ids" in accepted_by(model):
            kinds = torch.randint(types, (1, length), generator=generator)
            example["token_type_ids"] = kinds.to(example["input_ids"].device)
        yield example


def _all_words(words: int, left_out: int | None, generator: torch.Generator) -> Iterator[int]:
    """Yield the words of successive random permutations of all words except `left_out`."""
    while True:
        yield from (word for word in torch.randperm(words, generator=generator).tolist() if word != left_out)


def _small_config(config: Any, blocks: int, settings: Mapping[str, Any]) -> Any:
    """Return the configuration with every size whose name is known made small, also in nested configurations."""
    full, aliases = config.to_dict(), getattr(config, "attribute_map", {})
    inside = {
        name: part for name in getattr(config, "sub_configs", {}) if (part := getattr(config, name, None)) is not None
    }
    known = {name: size for name in (*aliases, *full) if (size := _size(config, name, blocks)) is not None}
    sizes: dict[str, Any] = {aliases.get(name, name): size for name, size in known.items()}
    depths = (getattr(config, name, None) for name in known if re.fullmatch(_BLOCKS, name))
    depth = next((number for number in depths if isinstance(number, int)), None)
    stages = len(full.get("depths") or ())
    for name, value in full.items():
        if isinstance(value, (list, tuple)) and name not in _OWN and name[0] != "_":
            if name in sizes:  # one size for each block, stage or image axis
                sizes[name] = [sizes[name]] * (blocks if len(value) in (stages, depth) else len(value))
            elif len(value) == depth:
                sizes[name] = value[:blocks]
    kept = {
        name: value for name, value in config.to_diff_dict().items() if name not in (*inside, *_OWN) and name[0] != "_"
    }
    kept |= sizes | {aliases.get(name, name): value for name, value in settings.items()}
    if (kept.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0) < 0.5:  # 4 dimensions need one plane
        kept["rope_parameters"] = {**kept["rope_parameters"], "partial_rotary_factor": 0.5}
    return type(config)(**kept, **{name: _small_config(part, blocks, {}) for name, part in inside.items()})


def _size(config: Any, name: str, blocks: int) -> int | None:
    """Return the small size for an entry of this name; None if the entry is kept."""
    if re.fullmatch(_BLOCKS, name):
        return blocks
    if name in ("num_key_value_heads", "num_kv_heads"):
        heads, own = getattr(config, "num_attention_heads", None), getattr(config, name, None)
        return (1 if isinstance(heads, int) and own < heads else 2) if isinstance(own, int) else None
    if getattr(config, name, None) == 0 and not name.endswith("_id"):  # the model has none of these
        return None
    return next((size for names, size in _SIZES if re.fullmatch(names, name)), None)
