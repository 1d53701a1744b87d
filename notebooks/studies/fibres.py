"""How much of the fibre of small models is found: of small copies of Hugging Face model types, and models by hand."""

from __future__ import annotations

import importlib
import multiprocessing
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
import torch.nn.functional as F
from ruamel.yaml import YAML
from torch import Tensor, nn

from quotient_manifolds.messages import Progress
from quotient_manifolds.symmetries import Certificate, certify, generic_inputs, make_generic, small_copy
from quotient_manifolds.symmetries.small_copy import joined
from studies.common import Record, Tables, resume

by_hand: Any = importlib.import_module("tests.nets.handwritten")  # attention as people write it themselves
EXAMPLES = 4  # of a batch
SECONDS = 120.0  # of one model, at most
ENOUGH = 6  # times as many outputs as parameters: neurons have to be active together

MODELS: dict[str, dict[str, Any]] = YAML(typ="safe").load(Path(__file__).with_name("fibres.yaml"))
"""Types of Hugging Face by domain, models with a head of their own, and what small copies of some are made with."""
TYPES, WITH_HEAD, SETTINGS = MODELS["types"], MODELS["with_head"], MODELS["settings"]


def names() -> list[str]:
    """Return the names of all models that are certified, those written by hand last."""
    return [*(name for types in TYPES.values() for name in types), *WITH_HEAD, *HAND_WRITTEN]


def kind_of(name: str) -> str:
    """Return what kind of model it is: its domain, or by whom it is written."""
    base = WITH_HEAD.get(name, (name, ""))[0]
    return next((kind for kind, types in TYPES.items() if base in types), "by hand")


def certificate(name: str) -> Certificate:
    """Certify the model of this name, one written by hand on batches enough for the rank."""
    if name not in HAND_WRITTEN:
        return certify(_model(name), **SETTINGS.get(name, {}))
    make, inputs = HAND_WRITTEN[name]
    model = make_generic(make(), seed=SEEDS.get(name, 0))
    generator = torch.Generator().manual_seed(0)
    first = inputs(generator)
    with torch.no_grad():
        answer: Tensor = model(*first)
    count = ENOUGH * sum(w.numel() for w in model.parameters()) // answer.numel()
    return certify(model, [first, *(inputs(generator) for _ in range(count))])


def small_model(name: str, seed: int | None = None) -> tuple[nn.Module, Any]:
    """Return the model of this name, small and generic, and one batch of a few inputs for it."""
    if name in HAND_WRITTEN:
        make, inputs = HAND_WRITTEN[name]
        generator = torch.Generator().manual_seed(0)
        seed = SEEDS.get(name, 0) if seed is None else seed
        return make_generic(make(), seed=seed), joined([inputs(generator) for _ in range(EXAMPLES)])
    model = small_copy(_model(name), seed=seed or 0, **SETTINGS.get(name, {}))
    return model, joined(generic_inputs(model)[:EXAMPLES])


def _model(name: str) -> nn.Module:
    return hugging_face(*WITH_HEAD.get(name, (name, "")))


def hugging_face(model_type: str, cls: str = "") -> nn.Module:
    """Return a model of the type without layers: its class and its configuration are all that `small_copy` reads."""
    import transformers
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **({"tie_word_embeddings": False} if cls else {}))
    found: Any = getattr(transformers, cls) if cls else transformers.MODEL_MAPPING[type(config)]
    shell: Any = object.__new__(found)
    nn.Module.__init__(shell)
    shell.config = config
    return cast(nn.Module, shell)


def _gaussian(*shapes: tuple[int, ...]) -> Callable[[torch.Generator], Any]:
    return lambda generator: tuple(torch.randn(1, *shape, generator=generator) for shape in shapes)


def _words(vocabulary: int, length: int) -> Callable[[torch.Generator], Any]:
    return lambda generator: (torch.randint(vocabulary, (1, length), generator=generator),)


def _vit() -> nn.Module:
    """Return a vision transformer as wide as its patches, so that tokens fill the space, and with more classes."""
    model: nn.Module = by_hand.RearrangedViT(6, 2, 3)
    model.head = nn.Linear(6, 8)
    return model


def _adapted() -> nn.Module:
    """Return a layer that low-rank updates are trained for; it is frozen itself, as it could hold any update."""
    model: nn.Module = by_hand.Adapted()
    model.get_submodule("base").requires_grad_(False)
    return model


def pre_norm_encoder() -> nn.Module:
    """Return torch's own layer, with norms before attention and feed-forward network, and ReLUs."""
    return nn.TransformerEncoderLayer(8, 2, 12, norm_first=True, batch_first=True)


def relu_network() -> nn.Module:
    """Return three linear layers with ReLUs between them."""
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 4))


def batch_norm_network() -> nn.Module:
    """Return linear layers with BatchNorm after the first, and a smooth activation."""
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.GELU(), nn.Linear(9, 4))


def convolutions() -> nn.Module:
    """Return two convolutions with BatchNorm and ReLU, the mean over pixels, and a head."""
    return nn.Sequential(
        *(nn.Conv2d(2, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU()),
        *(nn.Conv2d(5, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    )


class Gated(nn.Module):
    """A gated unit between two linear layers."""

    def __init__(self, d: int = 6, ff: int = 9) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(d, ff), nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x: Tensor) -> Tensor:
        """Return down(silu(gate(x)) * up(x))."""
        answer: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return answer


class Decoder(nn.Module):
    """One block with RMSNorm, attention of all heads at once, a gated unit, and a head of its own."""

    def __init__(self, d: int = 8, heads: int = 2, ff: int = 10, words: int = 11) -> None:
        super().__init__()
        self.heads = heads
        self.table, self.head = nn.Embedding(words, d), nn.Linear(d, words, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(d) for _ in range(3))
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.unit = nn.ModuleList(nn.Linear(*size, bias=False) for size in ((d, ff), (d, ff), (ff, d)))

    def forward(self, words: Tensor) -> Tensor:
        """Return logits for every position."""
        x = self.table(words)
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up, down = self.unit
        y = self.norms[1](x)
        logits: Tensor = self.head(self.norms[2](x + down(F.silu(gate(y)) * up(y))))
        return logits


class TiedDecoder(Decoder):
    """The same with the table of words for a head: neither its gain nor a rotation is free."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.table.weight


HAND_WRITTEN: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Any]]] = {
    "nanoGPT": (lambda: by_hand.NanoGPT(8, 2), _words(11, 6)),
    "ViT with to_qkv and to_out": (_vit, _gaussian((5, 6))),
    "cross-attention as in diffusers": (lambda: by_hand.CrossAttention(8, 6, 2), _gaussian((4, 8), (5, 6))),
    "block as in timm": (by_hand.PermutedQKV, _gaussian((5, 8))),
    "attention by einsum": (by_hand.Einsum, _gaussian((5, 7))),
    "rotary positions as complex numbers": (by_hand.ComplexRotary, _gaussian((6, 12))),
    "half of each head rotated": (by_hand.PartlyRotated, _gaussian((6, 12))),
    "learned temperature": (by_hand.Temperature, _gaussian((5, 8))),
    "a module for every head": (by_hand.HeadByHead, _gaussian((5, 8))),
    "attention of pixels": (by_hand.PixelAttention, _gaussian((6, 3, 4))),
    "low-rank adapters and a bottleneck": (_adapted, _gaussian((5, 8))),
    "normalised queries and keys": (by_hand.Normalised, _gaussian((5, 8))),
    "torch's encoder and cross-attention": (by_hand.Seq2Seq, _gaussian((4, 8), (5, 6), (5, 5))),
    "torch's encoder, norms first": (pre_norm_encoder, _gaussian((5, 8))),
    "network with ReLUs": (relu_network, _gaussian((40, 6))),
    "network with BatchNorm": (
        batch_norm_network,
        lambda generator: (torch.randn(10, 6, generator=generator),),
    ),
    "convolutions with BatchNorm": (convolutions, _gaussian((2, 6, 6))),
    "gated network": (Gated, _gaussian((10, 6))),
    "decoder with RMSNorm and a head": (Decoder, _words(11, 6)),
    "tied tables": (TiedDecoder, _words(11, 6)),
}
FAST = ("gated network",)
SEEDS = {"network with ReLUs": 9}  # at which every neuron is active on enough inputs and not on others


# ---- the study


def run(out: Path, *, fast: bool, progress: Progress) -> Record:
    """Certify all models; OUT/rows holds one file for each, from which a run continues."""
    import transformers

    cells = {name: partial(_apart, name) for name in (FAST if fast else names())}
    rows = resume(out / "rows", cells, what="fibres", progress=progress)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"rows": rows, **versions}


def _apart(name: str) -> Record:
    """Return the row of a model from a process of its own, which is killed after `SECONDS`."""
    began = time.perf_counter()
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        try:
            row = pool.apply_async(row_of, (name,)).get(SECONDS)
        except multiprocessing.TimeoutError:
            row = {"name": name, "failure": f"no certificate within {SECONDS:g} seconds"}
    return {"kind": kind_of(name), "seconds": round(time.perf_counter() - began, 1), **row}


def row_of(name: str) -> Record:
    """Return what the certificate of a model says, or why there is none (failure).

    dimension: of the fibre; near: what only the eps of norms breaks. found: dimensions by family; shared: of them, what
    two families have in common. unreached: dimensions that no input reaches. missing: the rest of dimension, None under
    a doubt; places: how much of it lies in which parameters. outside: symmetries that hold on some inputs only. doubts:
    what speaks against the dimension.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = certificate(name)
    except Exception as error:  # of any model
        return {"name": name, "failure": " ".join(f"{type(error).__name__}: {error}".split())}
    return {
        "name": name,
        "failure": "",
        "parameters": found.fibre.parameters,
        "dimension": found.fibre.dimension,
        "near": found.fibre.near,
        "found": dict(found.found.families),
        "shared": found.shared,
        "unreached": found.unreached,
        "missing": found.missing,
        "places": dict(found.places),
        "outside": found.outside,
        "doubts": found.fibre.doubts,
    }


def tables(record: Record) -> Tables:
    """Return the counts by kind of model, what is not found, and a row for every model."""
    rows = pd.DataFrame(record["rows"])
    counted = rows[rows["failure"] == ""].astype({"dimension": int})
    groups = {kind: counted[counted["kind"] == kind] for kind in rows["kind"].unique()} | {"all": counted}
    missing = counted[counted["missing"] > 0]
    return {
        "counts": pd.DataFrame(
            {
                "Kind": kind,
                "Complete": f"{(own['missing'] == 0).sum()} of {len(own)}",
                "Dimensions": f"{own['dimension'].sum():,}",
                "Not found": f"{own['missing'].sum():,.0f}",
            }
            for kind, own in groups.items()
        ),
        "missing": pd.DataFrame(
            {
                "Model": missing["name"],
                "Not found": missing["missing"].astype(int),
                "Of": missing["dimension"].map("{:,}".format),
            }
        ),
        "models": pd.DataFrame(map(_printed, record["rows"])).fillna(""),
    }


def _printed(row: Record) -> dict[str, Any]:
    if row["failure"]:
        return {"Model": row["name"], "Doubts": row["failure"]}
    families = [f"{name} {size}" for name, size in row["found"].items()]
    twice = [f"twice {-row['shared']}"] if row["shared"] else []
    doubts = [*row["doubts"], *(f"{name} holds on some inputs only" for name in row["outside"])]
    return {
        "Model": row["name"],
        "Parameters": str(row["parameters"]),
        "Fibre": str(row["dimension"]),
        "Near": str(row["near"]),
        "Found": str(sum(row["found"].values()) - row["shared"]),
        "Not reached": str(row["unreached"]),
        "Not found": "?" if row["missing"] is None else str(row["missing"]),
        "By family": ", ".join([*families, *twice]),
        "Doubts": "; ".join(doubts),
    }
