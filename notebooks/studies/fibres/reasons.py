"""Say of each model whose fibre is not found whole what the rest is."""

from __future__ import annotations

from typing import Final

_CONVOLVED = (
    "values go through a convolution over tokens, which GL(h) of values and output passes and the search does not"
)
_TABLE = (
    "words go into a norm without positions: as the eps lets a row have any length, the table can hold the norm's gain "
    "and bias too"
)
_VALUES = "what values have in common without a bias of their own: another layer's bias makes up for it"
_LOST = (
    "what values have in common without a bias of their own, where the output map makes a mean of it that no norm reads"
)

REASONS: Final[dict[str, str]] = {
    "albert": (
        "the map of the embeddings may add to all channels what the last norm makes constant: the next norm does not "
        "see it, queries, keys and values take it back in the layer's first pass, and the second has none of it"
    ),
    "attention of pixels": "the gain and bias of a GroupNorm, whose groups of channels are not followed",
    "beit": "a mean that the next norm does not read, from one layer's bias to another's, through a gain each",
    "bitnet": (
        "a squared ReLU that multiplies another linear map; rotations of the values of a head, where a norm stands "
        "before the output"
    ),
    "bloom": _TABLE,
    "cohere": _TABLE,
    "convbert": f"{_CONVOLVED}; scales between its convolutions",
    "convolutions with BatchNorm": "scales of channels that a BatchNorm and a ReLU pass",
    "deberta": "biases of queries and values, added to parts of what one linear map answers, whose keys have none",
    "deepseek_v3": "rotations of latent queries and keys between linear maps and a norm, and the gain of one such norm",
    "gte": f"{_TABLE}; the bias of a norm whose readers have none",
    "learned temperature": "the temperature against the queries",
    "modernbert": _TABLE,
    "nomic_bert": f"{_TABLE}; {_VALUES}",
    "normalised queries and keys": "rotations between queries and keys of length 1, and the lengths of both",
    "nystromformer": _CONVOLVED,
    "nemotron": _LOST,
    "openai-gpt": "a vector that the tables give to the stream, and biases of the first layer take back",
    "stablelm": _LOST,
    "siglip_vision_model": "the queries of the pooling head come from one learned vector, so its layer sees one point",
    "squeezebert": "biases of norms and means, where the stream goes into grouped convolutions",
    "torch's encoder and cross-attention": "biases of keys and values together with the appended key and value",
    "ViT with to_qkv and to_out": (
        "the head reads the mean over tokens without a norm: its bias can hold others, and means of positions may move"
    ),
}
"""By the name of the model."""
