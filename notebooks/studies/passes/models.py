"""Models of the kinds that zoos are made of, each with a batch and its loss, made in seconds from fixed seeds."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from quotient_manifolds.demo.zoo import draw_recipe, load_digits, one_thread, train
from quotient_manifolds.load import load_object
from quotient_manifolds.sharpness import Loss, cross_entropy, next_token_cross_entropy
from studies.common import pretrained_encoder
from studies.diagonal.networks import Regression, Setting, draw_networks
from studies.sentiment.sentences import fetched, read_sentences
from studies.sentiment.training import encode, fine_tune
from studies.sentiment.zoo import PLAIN, TRAINING

EXAMPLES: Final = 8  # of a batch of language
LENGTH: Final = 32  # characters that a language model reads
SMALL: Final = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}


class Made(NamedTuple):
    """Hold a model in eval mode, its loss and the batch that it is measured on."""

    model: nn.Module
    loss: Loss
    batch: Any


class Diagonal(nn.Module):
    """Hold a diagonal network x'(u * v), as a symmetric pair of width 1 for each coordinate."""

    def __init__(self, u: Tensor, v: Tensor) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(u.clone()), nn.Parameter(v.clone())

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ (self.u * self.v)


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return |X beta - y|^2, the loss of the diagonal networks."""
    loss: Tensor = (model(batch[0]) - batch[1]).square().sum()
    return loss


def vision(index: int, steps: int | None = None) -> Made:
    """Return a vision transformer of the demonstration's zoo, on 64 training images."""
    digits = load_digits(train_points=300)
    model = train(draw_recipe(index, steps=steps), digits.train_images, digits.train_labels)
    return Made(model, cross_entropy, {"pixel_values": digits.train_images[:64], "labels": digits.train_labels[:64]})


def diagonal(seed: int, dimension: int = 200) -> Made:
    """Return a diagonal network fitted to a regression problem of 100 points, on all of them."""
    generator = torch.Generator().manual_seed(seed)
    regression = Regression.draw(dimension // 2, generator, dimension=dimension)
    setting = Setting(dimension // 2, (0.1, 0.1), (0.01, 0.01))
    u, v, _ = draw_networks(regression, setting, generator, networks=1)
    return Made(Diagonal(u[0], v[0]).eval(), squares, (regression.X, regression.y))


def _films() -> list[Any]:
    return read_sentences(fetched(), pretrained_encoder())["films"][:TRAINING]


def fine_tuned() -> Made:
    """Return a BERT fine-tuned to tell good film reviews from bad ones, on 8 of them."""
    films = _films()
    return Made(fine_tune(PLAIN, films), cross_entropy, encode(films[:EXAMPLES]))


GPT2: Final = ("GPT2", {**SMALL, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": LENGTH})
LLAMA: Final = (
    "Llama",
    {
        **SMALL,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": LENGTH,
    },
)


@one_thread()
def causal(kind: tuple[str, dict[str, Any]], steps: int = 600) -> Made:
    """Return a small causal language model trained on the letters of film reviews, on 8 stretches of them."""
    name, settings = kind
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if name == "GPT2" else {}
    config = load_object(f"transformers:{name}Config", "a configuration")(**settings, **drop)
    build = load_object(f"transformers:{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}", "a model")
    text = "\n".join(each.text for each in _films()).encode("ascii", "ignore")
    letters = torch.tensor(list(text))[: len(text) // LENGTH * LENGTH].reshape(-1, LENGTH)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        rows = letters[torch.randperm(len(letters), generator=generator)[:32]]
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        schedule.step()
    batch = letters[:EXAMPLES]
    return Made(model.eval(), next_token_cross_entropy, {"input_ids": batch, "labels": batch})
