"""Say of each model whose fibre is not found whole what the rest is."""

from __future__ import annotations

from typing import Final

_WRITTEN_OUT = "norms that are written out: that they do not read means is not seen"
_CONVOLVED = (
    "values go through a convolution over tokens, which GL(h) of values and output passes and the search does not"
)
_SQUARED = "neurons with a squared ReLU: a factor a before is a squared behind, which is no pair"
_TABLE = (
    "words go into a norm without positions: as the eps lets a row have any length, the table can hold the norm's gain "
    "and bias too"
)
_VALUES = "what values have in common without a bias of their own: another layer's bias makes up for it"
_RELATIVE = "a number added to all relative positions of a head, which softmax does not see"
_MEAN = "a mean that the next norm does not read, from one layer's bias to another's"

REASONS: Final[dict[str, str]] = {
    "albert": "one direction that moves the map of the embeddings and a layer that is passed twice; not understood",
    "arcee": _SQUARED,
    "attention of pixels": "the gain and bias of a GroupNorm, whose groups of channels are not followed",
    "beit": _MEAN,
    "bitnet": f"{_SQUARED}; rotations of the values of a head, where a norm stands before the output",
    "bloom": _TABLE,
    "clip_vision_model": _MEAN,
    "cohere": f"{_WRITTEN_OUT}; {_TABLE}",
    "convbert": f"{_CONVOLVED}; scales between its convolutions",
    "convolutions with BatchNorm": "scales of channels that a BatchNorm and a ReLU pass",
    "cross-attention as in diffusers": _MEAN,
    "ctrl": "the mean of the rows of a table that is multiplied in place",
    "deberta": _WRITTEN_OUT,
    "deepseek_v3": "rotations of latent queries and keys between linear maps and a norm, and the gain of one such norm",
    "dinov3_vit": "directions between queries and keys, perhaps as four patches have few positions; not understood",
    "gptj": _VALUES,
    "gte": f"{_TABLE}; the bias of a norm whose readers have none",
    "hubert": "the length of what a weight norm divides by it",
    "ibert": _WRITTEN_OUT,
    "learned temperature": f"{_RELATIVE}; the temperature against the queries",
    "mixtral": "the gain of a norm that experts read, in products of many matrices at once",
    "modernbert": _TABLE,
    "mpnet": _RELATIVE,
    "network with ReLUs": "scales of the second layer, whose numbers are those of the first pair's other side",
    "nomic_bert": f"{_TABLE}; {_VALUES}",
    "normalised queries and keys": "rotations between queries and keys of length 1, and the lengths of both",
    "nystromformer": _CONVOLVED,
    "nemotron": f"{_SQUARED}; {_VALUES}",
    "openai-gpt": "a vector that the tables give to the stream, and biases of the first layer take back",
    "persimmon": f"means of queries and keys that norms of a head do not read; {_SQUARED}",
    "stablelm": _VALUES,
    "qwen2_audio_encoder": "means that a norm does not read, where the mean of two tokens is taken before it",
    "siglip_vision_model": "the queries of the pooling head come from one learned vector, so its layer sees one point",
    "squeezebert": "biases of norms and means, where the stream goes into grouped convolutions",
    "torch's encoder and cross-attention": "biases of keys and values together with the appended key and value",
    "torch's encoder, norms first": _MEAN,
    "vit with a head": "the head reads one token alone, so that the queries of a single block are asked at one point",
    "wav2vec2": "the length of what a weight norm divides by it, and what more inputs would tell",
    "ViT with to_qkv and to_out": (
        "the head reads the mean over tokens without a norm: its bias can hold others, and means of positions may move"
    ),
}
"""By the name of the model."""
