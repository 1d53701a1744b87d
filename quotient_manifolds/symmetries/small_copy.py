"""Make a model small and generic, with inputs to match: what the dimension of a fibre is computed on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from quotient_manifolds.symmetries.example_inputs import accepted_by, example_inputs
from quotient_manifolds.symmetries.outputs import floating

LENGTH, WORDS = 6, 40  # words enough to be generic where a layer sees them without their positions
ENOUGH = 3  # times as many outputs as parameters
TOGETHER = 64  # outputs of a batch, about: fewer and larger batches spare time, but each row costs a pass through all
SPREAD = 0.3  # of biases, and of the logarithms of gains: enough to be generic, and ReLU neurons stay alive

# Sizes by their names in configurations of transformers. Names that a configuration does not have are left alone.
_SIZES: dict[str, Any] = {
    name: size
    for size, names in (
        (8, "hidden_size d_model n_embd embed_dim dim embedding_size word_embed_proj_dim projection_dim"),
        (8, "pooler_output_size projection_size input_embedding_size output_embedding_size intra_bottleneck_size"),
        (2, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
        (2, "encoder_num_attention_heads decoder_num_attention_heads"),
        (2, "num_encoder_attention_heads num_decoder_attention_heads"),
        (4, "head_dim d_kv attention_head_dim d_head"),
        (
            12,
            "intermediate_size d_ff n_inner hidden_dim encoder_ffn_dim decoder_ffn_dim ffn_dim ffn_hidden_size d_inner",
        ),
        (12, "moe_intermediate_size shared_expert_intermediate_size dff"),
        (WORDS, "vocab_size"),
        (LENGTH, "max_position_embeddings n_positions max_target_positions n_ctx max_seq_len"),
        (LENGTH, "max_source_positions sliding_window"),
        (1, "bos_token_id pad_token_id decoder_start_token_id num_experts_per_tok depths"),
        (2, "eos_token_id sep_token_id num_experts num_local_experts n_routed_experts"),
        (2, "window_size num_frames rotary_dim"),
        (4, "relative_attention_num_buckets patch_size"),  # 4 x 4 pixels are more numbers than the width
        (8, "image_size num_mel_bins"),
        (24, "max_2d_position_embeddings"),
    )
    for name in names.split()
}
_BLOCKS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
    *("num_decoder_layers", "num_encoder_layers", "depth", "encoder_num_hidden_layers", "decoder_num_hidden_layers"),
)
# What a configuration writes about itself and does not take.
_OWN = (
    *("stage_names", "out_features", "out_indices", "model_type", "transformers_version", "architectures"),
    *("_name_or_path", "dtype", "torch_dtype"),
)


def small_copy(model: nn.Module, *, blocks: int = 1, seed: int = 0, **settings: Any) -> nn.Module:
    """Make a small model of the same class and settings as a Hugging Face model, with generic parameters, to evaluate.

    Width 8, 2 heads (1 key head where they are grouped), 12 neurons, 40 words, 6 positions, `blocks` blocks; tied,
    normalised, biased and activated as the model is. `settings` are entries of its configuration to choose otherwise.
    Only the model's class and configuration are read, so one on the meta device will do.
    Raises ValueError for a model without a configuration of Hugging Face's, or whose class makes no model of this size.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "to_diff_dict"):
        raise ValueError(
            f"A small copy is made from a configuration of Hugging Face's, and {type(model).__name__} has none: make a "
            "small model of the same kind by hand."
        )
    try:
        small_config = _small_config(config, blocks, settings)
        small_config._experts_implementation = "eager"  # grouped products of experts exist in float32 only
        small: nn.Module = type(model)(small_config)
    except Exception as error:  # what a class makes of sizes it was never tried with
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{type(model).__name__} makes no small copy. Give settings that it takes; {reason}"
        ) from error
    for name, _ in list(small.named_children()):
        if getattr(model, name, small) is None:  # an argument of the constructor left it out, such as the pooler
            setattr(small, name, None)
    return make_generic(small, seed=seed)


def make_generic(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Set all parameters of the model to generic ones, and put it into eval mode; returns the model.

    Matrices are Gaussian with variance 1 / columns, biases and running means Gaussian, gains and running variances
    log-normal. At the values that models are initialised with, gains of 1 and biases of 0, the fibre may be larger.
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
    """Return inputs of a few examples each that a small Hugging Face model accepts, `enough` times P outputs in all.

    Text goes through random orders of all words, one after the other, over all positions, so each word and each
    position is seen in many contexts; token types are random; images and sounds are Gaussian.
    Raises ValueError for a model that `example_inputs` knows no inputs of, or that fails on them.
    """
    wanted = enough * sum(w.numel() for w in model.parameters())
    failure: Exception | None = None
    for length in range(LENGTH, 0, -1):  # RoBERTa's positions, for one, begin after that of padding
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
    """Put batches together, example after example; return the first where they are not alike."""
    first, *others = (tree_flatten(batch) for batch in batches)
    tensors = [leaf for leaves, _ in (first, *others) for leaf in leaves if isinstance(leaf, Tensor)]
    alike = all(
        spec == first[1] and list(map(_shape, leaves)) == list(map(_shape, first[0])) for leaves, spec in others
    )
    if not alike or not all(tensor.ndim for tensor in tensors):
        return batches[0]
    return tree_map(lambda *each: torch.cat(each) if isinstance(each[0], Tensor) else each[0], *batches)


def _shape(leaf: Any) -> Any:
    return leaf.shape[1:] if isinstance(leaf, Tensor) else leaf


def _examples(model: nn.Module, seed: int, length: int) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    types = getattr(text, "type_vocab_size", 0) or 0
    # The word for padding, where positions are counted without it: both tables have one row that no other comes with,
    # and both know what padding is.
    tables = [
        each for each in model.modules() if hasattr(each, "weight") and getattr(each, "padding_idx", None) is not None
    ]
    left_out = getattr(config, "pad_token_id", None) if len(tables) > 1 else None
    vocabulary = getattr(text, "vocab_size", WORDS)
    words = {name: _all_words(vocabulary, left_out, generator) for name in ("input_ids", "decoder_input_ids")}
    while True:
        number = int(torch.randint(2**31, (), generator=generator))
        example = {name: value[:1] for name, value in example_inputs(model, seed=number, length=length).items()}
        if "pixel_values" not in example:  # words beside a picture stand for its patches
            for name in [name for name in words if name in example]:
                ids = [[next(words[name]) for _ in range(length)]]
                example[name] = torch.tensor(ids, device=example[name].device)
                example.pop(name.replace("input_ids", "attention_mask"), None)
        if types > 1 and "input_ids" in example and "token_type_ids" in accepted_by(model):
            kinds = torch.randint(types, (1, length), generator=generator)
            example["token_type_ids"] = kinds.to(example["input_ids"].device)
        yield example


def _all_words(words: int, left_out: int | None, generator: torch.Generator) -> Iterator[int]:
    """Yield random orders of all words but one, one order after the other."""
    while True:
        yield from (word for word in torch.randperm(words, generator=generator).tolist() if word != left_out)


def _small_config(config: Any, blocks: int, settings: dict[str, Any]) -> Any:
    """Return the configuration, and those inside it, with every size that they know made small."""
    full, aliases = config.to_dict(), getattr(config, "attribute_map", {})
    heads = getattr(config, "num_attention_heads", None)
    grouped = {
        name: 1 if isinstance(heads, int) and getattr(config, name) < heads else 2
        for name in ("num_key_value_heads", "num_kv_heads")
        if isinstance(getattr(config, name, None), int)
    }
    sizes = {**_SIZES, **dict.fromkeys(_BLOCKS, blocks), **grouped, **settings}
    parts = {
        name: part for name in getattr(config, "sub_configs", {}) if (part := getattr(config, name, None)) is not None
    }
    kept = {
        name: value
        for name, value in config.to_diff_dict().items()
        if name not in (*parts, *_OWN) and not name.startswith("_")
    }
    depth = next((value for name in _BLOCKS if isinstance(value := getattr(config, name, None), int)), None)
    for name, value in full.items():  # what is listed block by block
        if isinstance(value, (list, tuple)) and len(value) == depth and name not in (*sizes, *_OWN) and name[0] != "_":
            kept[name] = list(value[:blocks])
    stages = len(full.get("depths") or ())

    def as_many(name: str, size: Any) -> Any:  # as there are stages, or axes of a picture
        if not isinstance(full[name], (list, tuple)) or isinstance(size, (list, tuple)):
            return size
        return [size] * (blocks if len(full[name]) in (stages, depth) else len(full[name]))

    taken = {name: as_many(name, size) for name, size in sizes.items() if name in full}
    taken |= {aliases[name]: size for name, size in sizes.items() if name in aliases and aliases[name] not in sizes}
    taken |= {name: size for name, size in settings.items() if name not in aliases}
    if (kept.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0) < 0.5:  # of 4 dimensions, one plane
        kept["rope_parameters"] = {**kept["rope_parameters"], "partial_rotary_factor": 0.5}
    small = {name: _small_config(part, blocks, {}) for name, part in parts.items()}
    return type(config)(**{**kept, **taken, **small})
