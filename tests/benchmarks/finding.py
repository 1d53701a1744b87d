"""Find the symmetries of a random Llama in a process of its own: python -m tests.benchmarks.finding NAME TYPE TOKENS.

NAME is "small", of 153 million parameters, "medium", of half a billion, or "large", of 1.1 billion; TYPE a type of
torch, such as bfloat16; TOKENS the length of the two sequences. Prints a dict: parameters, bytes of weights, seconds of
the processor for a second forward pass and for finding, bytes of peak resident memory above the model with its passes,
and how much was found.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quotient_manifolds.symmetries import find_symmetries
from tests.benchmarks.running import peak

SIZES = {
    "small": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "medium": {"hidden_size": 1536, "num_hidden_layers": 15, "num_attention_heads": 12, "intermediate_size": 4608},
    "large": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 8192},
    # For tests/benchmarks/test_accelerator_cost.py alone.
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 128},
    "7b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008},
}


def llama(name: str, kind: torch.dtype, device: torch.device | str = "cpu") -> nn.Module:
    """The model, made without a random number drawn twice: each weight has uniform numbers of variance 1 / width."""
    heads = {"large": 8, "7b": 32}.get(name, 4)
    config = LlamaConfig(**SIZES[name], num_key_value_heads=heads, vocab_size=32000, tie_word_embeddings=False)
    with torch.device("meta"):
        empty = LlamaForCausalLM(config).to(kind)
    model: nn.Module = empty.to_empty(device=device)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    random = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for w in model.parameters():
            bound = (3 / w.shape[1]) ** 0.5 if w.ndim > 1 else 0.5
            w.uniform_(-bound, bound, generator=random).add_(float(w.ndim == 1))
    return model.eval()


def main(name: str, kind: str, tokens: int) -> None:
    torch.set_num_threads(1)
    model = llama(name, getattr(torch, kind))
    words = torch.randint(32000, (2, tokens), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": words, "use_cache": False}
    with torch.no_grad():
        for _ in range(2):
            start = time.process_time()
            model(**batch)
            forward = time.process_time() - start
    before, start = peak(), time.process_time()
    found = find_symmetries(model, batch)
    seconds = time.process_time() - start
    result = {
        "parameters": sum(w.numel() for w in model.parameters()),
        "weights": sum(w.numel() * w.element_size() for w in model.parameters()),
        "forward": forward,
        "find": seconds,
        "extra": peak() - before,
        "pairs": len(found.pairs),
        "reparameterizations": len(found.reparameterizations),
    }
    print(result)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
