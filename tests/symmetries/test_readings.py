"""Readings of wide wires find what null spaces of all charges find, and nothing that a gradient contradicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from quotient_manifolds.symmetries.charges.frame import Frame
from quotient_manifolds.symmetries.charges.kernel import Point, Unknowns, solve
from quotient_manifolds.symmetries.charges.points import Points
from quotient_manifolds.symmetries.charges.positions import vectors
from quotient_manifolds.symmetries.charges.readings import Readings, read
from quotient_manifolds.symmetries.charges.samples import Sample
from quotient_manifolds.symmetries.charges.walk import Walk
from quotient_manifolds.symmetries.groups import Gauge, Symmetry, Torus
from quotient_manifolds.symmetries.outputs import answer
from quotient_manifolds.symmetries.trace.record import record
from quotient_manifolds.symmetries.trace.replay import Replay
from tests.nets.net import shaken
from tests.nets.small import net, shown


class Model:
    """Read a model at generic points, and hold what tests compare with."""

    def __init__(self, model: nn.Module, batch: object) -> None:
        self.points = Points(model, batch, shapes=False)
        self.recording = self.points.recordings[0]
        self.walk = Walk(self.recording)
        self.frame = Frame(self.walk)
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def weights(self) -> dict[str, Tensor]:
        return self.points.weights()

    def draw(self, batches: int, losses: int) -> Iterator[tuple[Mapping[str, Tensor], Sample]]:
        names = vectors(self.frame)
        for _ in range(batches):
            at, found = self.points.samples(losses, walk=self.walk, vectors=names)
            weights, constants = self.frame.constants.included(at.weights), self.frame.constants
            for sample in found:
                yield weights, replace(sample, gradients=constants.pulled(at.weights, sample.gradients))

    def pulled(self, weights: dict[str, Tensor], G: Tensor) -> Tensor:
        """Return gradients (n, P) in terms of weights with constants included."""
        parts = zip(weights, G.split([w.numel() for w in weights.values()], 1), strict=True)
        return torch.cat([*self.frame.constants.pulled(weights, dict(parts)).values()], 1)

    def gradients(self, losses: int = 1) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        """Return weights, and gradients of random losses by autograd alone."""
        leaves = {name: w.requires_grad_() for name, w in self.weights().items()}
        outputs = [
            y
            for y in Replay(self.recording.program).run(leaves.__getitem__, self.points.inputs(self.recording), {})[0]
            if y.requires_grad
        ]
        found = []
        for _ in range(losses):
            up = [self.normal(*y.shape) / y.detach().square().mean().sqrt() for y in outputs]
            each = torch.autograd.grad(outputs, [*leaves.values()], up, retain_graph=True, materialize_grads=True)
            found.append(dict(zip(leaves, each, strict=True)))
        return {name: w.detach() for name, w in leaves.items()}, found

    def point(self) -> Point:
        w, found = self.gradients(16)
        rows = [torch.cat([g.reshape(-1) for g in each.values()]) for each in found]
        G, w = self.pulled(w, torch.stack(rows)), self.frame.constants.included(w)
        theta = torch.cat([each.reshape(-1) for each in w.values()])
        return Point(theta, self.walk.entries.read(w.__getitem__), G)

    def read(self) -> Readings:
        return read(self.frame, torch.arange(len(self.frame.roots)), self.draw, self.generator)


class OfChannels(Unknowns):
    """Leave log-scales of whole slices out: they are no readings of wires."""

    def _slices(self):  # type: ignore[no-untyped-def]
        return iter(())


def rank(columns: Tensor) -> int:
    norms = columns.norm(dim=0)
    if not columns.numel() or not bool(norms.any()):
        return 0
    alive = norms > 1e-10 * norms.max()
    values = torch.linalg.svdvals(columns[:, alive] / norms[alive])
    return int((values > 1e-9 * values[0]).sum())


def tangents(symmetries: Sequence[Symmetry], weights: Mapping[str, Tensor]) -> Tensor:
    """Return the changes of all weights (P, k) by a basis of generators."""
    found = [torch.zeros(sum(w.numel() for w in weights.values()), 0, dtype=torch.float64)]
    for symmetry in symmetries:
        n = torch.Size(symmetry.shape).numel()
        X = torch.eye(n, dtype=torch.float64).view(n, *symmetry.shape)
        X = symmetry.algebra.project(X) if isinstance(symmetry, Gauge) else X
        made = symmetry.tangent(weights, X)
        rows = [made[name].reshape(n, -1) if name in made else torch.zeros(n, w.numel()) for name, w in weights.items()]
        found.append(torch.cat(rows, 1).T)
    return torch.cat(found, 1)


def vanish(symmetries: Sequence[Symmetry], points: Model) -> None:
    """Compare with gradients by autograd at other weights, and the groups' own computation of charges."""
    weights, (gradient,) = points.gradients()
    for symmetry in symmetries:
        charge = symmetry.charge(weights, gradient)
        top = float(charge.size.max())
        relative = charge.value.abs() / charge.size.clamp(min=1e-6 * top)
        assert float(relative.max()) < 1e-9


EQUAL = {
    "two writers of tokens by half": False,
    "linear": True,
    "gain lin": False,
    "fewer classes": False,
    "bn half": True,
    "glu": True,
    "qknorm": False,
    "gqa": True,
    "rot": False,
    "rot2": True,
    "shared qk": False,
    "temp": False,
    "scalar gain": True,
    "positions first": True,
    "strides of a part": False,
    "index add": False,
    "weight of more axes": True,
    "most of tokens": False,
    "one token, sum": False,
}
"""Nets on which readings find all that null spaces find, with biases or without."""

FEWER = {
    "softmax of channels": (True, "1 w^T of a wire without readers is a direction that nobody reads"),
}


@pytest.mark.parametrize("name", [*EQUAL, *FEWER])
def test_readings_span_what_null_spaces_of_all_unknowns_do(name: str) -> None:
    model, x = net(name, EQUAL[name] if name in EQUAL else FEWER[name][0])
    points = Model(model, shown(name, x)[:4])
    found = points.read()
    kernel = solve(OfChannels(points.frame), points.point)
    weights = points.weights()
    counted = points.frame.constants.included(weights)
    theta = torch.cat([w.reshape(-1) for w in counted.values()])
    at = Point(theta, points.walk.entries.read(counted.__getitem__), torch.zeros(1, 0))
    pulled = points.pulled(weights, torch.eye(len(theta), dtype=torch.float64))
    fields = pulled @ kernel.unknowns.fields(at) @ kernel.basis
    moved = tangents(found.symmetries, weights)
    assert rank(torch.cat([fields, moved], 1)) == rank(fields)
    assert (rank(moved) == rank(fields)) == (name in EQUAL)
    assert sum(symmetry.dimension(weights) for symmetry in found.symmetries) == rank(moved), "a generator twice"
    assert found.largest < 1e-10 < 1e-7 < found.smallest
    vanish(found.symmetries, points)
    y, new = model(x), {name: w.detach() for name, w in model.named_parameters()}
    for symmetry in found.symmetries:
        new = symmetry.act(new, symmetry.element(points.generator, 0.3))
    torch.testing.assert_close(torch.func.functional_call(model, new, (x,)), y, rtol=0, atol=1e-10)


def text(length: int, seed: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(50, (2, length), generator=torch.Generator().manual_seed(seed))}


def batch_of(make: Callable[[], nn.Module], length: int, seed: int) -> dict[str, Tensor]:
    if make is vit:
        generator = torch.Generator().manual_seed(seed)
        return {"pixel_values": torch.randn(length // 2, 3, 16, 16, generator=generator, dtype=torch.float64)}
    given = text(length, seed)
    return {**given, "decoder_input_ids": text(length - 1, seed + 1)["input_ids"]} if make is t5 else given


SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, rms_norm_eps=1e-6)
    return transformers.LlamaForCausalLM(config)


def gemma2() -> nn.Module:
    config = transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16)
    return transformers.Gemma2ForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=50, n_embd=64, n_layer=2, n_head=4, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SIZES, max_position_embeddings=32))


def albert() -> nn.Module:
    return transformers.AlbertModel(transformers.AlbertConfig(**SIZES, embedding_size=32))


def qwen3() -> nn.Module:
    config = transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False)
    return transformers.Qwen3ForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=50, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def deepseek() -> nn.Module:
    """Keys are written into a tensor that is made for them: 8 channels of a latent, and 8 that all heads share."""
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
    config = transformers.DeepseekV3Config(
        **{**SIZES, "num_hidden_layers": 1}, **latent, num_key_value_heads=4, first_k_dense_replace=1
    )
    return transformers.DeepseekV3ForCausalLM(config)


def vit() -> nn.Module:
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=5)
    return transformers.ViTForImageClassification(config)


HEADS = 2 * 2 * 4 * 16**2
"""Of two layers: queries with keys and values with outputs, 4 heads of 16."""


@pytest.mark.parametrize(
    ("make", "gauges", "scales"),
    [
        # values of 2 heads for 4, 8 planes of 2 keys, rotations; neurons, gains of 4 norms
        (llama, 2 * (2 * 16**2 + 2 * 8 * 2) + 64 * 63 // 2, 2 * 96 + 5 * 64),
        (gemma2, 2 * (2 * 16**2 + 2 * 8 * 2), 2 * 96 + 4 * 64),
        (gpt2, HEADS, 4 * 64),
        (bert, HEADS, 0),
        (albert, HEADS // 2 + 31 * 30 // 2, 32),  # both layers have the same weights
        (qwen3, 2 * 2 * 16**2 + 64 * 63 // 2, 2 * 96 + 5 * 64 + 16),  # and gains of 8 planes of keys
        (t5, 3 * 2 * 4 * 16**2, 2 * 96 + 5 * 64),
        (
            deepseek,  # keys and values of 4 heads, 4 planes, two latents
            4 * (8**2 + 12**2) + 4 * 2 + 24 * 23 // 2 + 16 * 15 // 2 + 64 * 63 // 2,
            96 + 24 + 16 + 3 * 64,
        ),
        (vit, HEADS + 63 * 62 // 2, 5 * 64),
    ],
)
def test_readings_of_transformers(make: Callable[[], nn.Module], gauges: int, scales: int) -> None:
    """By family what is known of the architecture, and all of it acts at once on an unseen length."""
    torch.manual_seed(0)
    model = shaken(make().double(), 0.1)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    points = Model(model, batch_of(make, 4, 0))
    found = points.read()
    weights = points.weights()
    assert sum(s.dimension(weights) for s in found.symmetries if isinstance(s, Gauge)) == gauges
    assert sum(s.dimension(weights) for s in found.symmetries if isinstance(s, Torus)) == scales
    vanish(found.symmetries, points)
    new = {name: w.detach() for name, w in model.named_parameters() if name in weights}
    for symmetry in found.symmetries:
        new = symmetry.act(new, symmetry.element(points.generator, 0.3))
    batch = batch_of(make, 11, 1)
    recording = record(model, batch, answer)
    longer, inputs = Replay(recording.program), [recording.values[n] for n in recording.program.inputs]
    with torch.no_grad():
        before = longer.run(dict(model.named_parameters()).__getitem__, inputs, {}, generic=False)[0]
        after = longer.run(new.__getitem__, inputs, {}, generic=False)[0]
    assert all(float((a - b).abs().max()) < 1e-9 * float(b.abs().max()) for a, b in zip(after, before, strict=True))
