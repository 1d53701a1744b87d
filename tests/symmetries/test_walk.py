"""A walk says which parameters write and read each channel; tokens of a replay give the charges of their wires."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quotient_manifolds.symmetries.charges.nodes import Nodes, Tie, distinct_columns
from quotient_manifolds.symmetries.charges.samples import Sample, samples
from quotient_manifolds.symmetries.charges.uses import Lookup, Pixels, Product, Use
from quotient_manifolds.symmetries.charges.walk import Walk
from quotient_manifolds.symmetries.outputs import answer
from quotient_manifolds.symmetries.trace.program import Ref
from quotient_manifolds.symmetries.trace.record import record
from tests.nets.net import Computed
from tests.nets.small import NETS, net


def walked(model: nn.Module, x: Tensor) -> tuple[Walk, dict[str, Tensor]]:
    return Walk(record(model, x, answer)), {name: w.detach() for name, w in model.named_parameters()}


def sample(walk: Walk, weights: dict[str, Tensor], x: Tensor, seed: int = 0, **options: bool) -> Sample:
    """Return the sample of a loss of the outputs alone."""
    made, _ = samples(walk, weights, [x], 2, torch.Generator().manual_seed(seed), **options)
    return made


def gradients(model: nn.Module, weights: dict[str, Tensor], x: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """By autograd, of the loss of `sample`."""
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    y = torch.func.functional_call(model, leaves, (x,))
    up = torch.randn(2, *y.shape, generator=torch.Generator().manual_seed(seed), dtype=y.dtype)[0]
    loss = (up * y).sum() / y.detach().square().mean().sqrt()
    return dict(zip(leaves, torch.autograd.grad(loss, [*leaves.values()], materialize_grads=True), strict=True))


@pytest.mark.parametrize("part", range(4))
def test_products_of_tokens_are_the_gradients_of_autograd(part: int) -> None:
    """dL/dW = sum over tokens of dy x^T, for each weight with one use, whatever the operations around it."""
    compared = 0
    for name in list(NETS)[part::4]:
        model, x = net(name, True)
        walk, weights = walked(model, x[:3])
        found = sample(walk, weights, x[:3], generic=False)
        used = [*(use.entries for use in walk.uses), *(gain.entries for gain in walk.gains)]
        used += [walk.entries.start[key] + nodes.flatten().nonzero() for key, nodes in walk.leaves.items()]
        made = {each.memory: n for n, each in enumerate(walk.program.layouts) if walk.entries.known(n)}
        used += [walk.entries.of(n) for memory, n in made.items() if memory not in walk.entries.plain]
        entries = Counter(e for each in used for e in each.flatten().tolist())
        flat = torch.cat([g.reshape(-1) for g in gradients(model, weights, x[:3]).values()])
        for n, use in enumerate(walk.uses):
            alone = use.memory in walk.entries.plain and max(entries[e] for e in use.entries.unique().tolist()) == 1
            if not alone or n not in found.read or use.entries.shape[2] > 1:
                continue
            product = found.written[n].slopes.T @ found.read[n].values
            error = (product - flat[use.entries[..., 0]]).norm()
            assert error <= 1e-9 * (product.norm() + 1e-6 * flat.norm()), name
            compared += 1
    assert compared > 100


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("bias", [True, False])
def test_the_numbers_at_the_entries_of_a_use_are_those_that_the_operation_takes(part: int, bias: bool) -> None:
    """Weights are random and distinct, so theta at a use's entries is its operand only if each entry is the right one.

    The entries of a row and those of a column are starts plus steps.
    """
    strided = every = 0
    for name in list(NETS)[part::4]:
        model, x = net(name, bias)
        walk, weights = walked(model, x[:3])
        theta = torch.cat([weights[key].flatten() for key in walk.entries.shapes])
        reading = walk.entries.read(weights.__getitem__)
        for use in walk.uses:
            operand = operand_of(walk, use)
            values, slopes = reading.at(use.memory, use.places)
            torch.testing.assert_close(values, operand, msg=name)
            assert torch.equal(use.values(reading), values), name
            affine = walk.entries.affine(use.memory)
            if affine is not None:
                torch.testing.assert_close(affine[0] * theta[use.entries] + affine[1], operand, msg=name)
                assert bool((slopes == affine[0]).all()), name
            every, strided = every + 1, strided + (use.rows(True) is not None)
            for writes, matrix in ((True, use.entries), (False, use.entries.transpose(0, 1))):
                if (rows := use.rows(writes)) is not None:
                    assert torch.equal(rows[0][:, None] + rows[1], matrix.flatten(1)), name
    assert strided > 0.9 * every > 100


def operand_of(walk: Walk, use: Use) -> Tensor:
    """The weight (outputs, inputs, taps) that a use's operation took when it was recorded, by what its tokens say."""
    operation, tokens = walk.program.operations[use.operation], use.tokens
    args = [walk.recording.values[each.number] if isinstance(each, Ref) else each for each in operation.args]
    if isinstance(tokens, Lookup):
        return args[0].T[..., None]
    if isinstance(tokens, Pixels):
        part = args[1].chunk(tokens.groups)[tokens.group]
        return (part.transpose(0, 1) if args[6] else part).flatten(2)
    assert isinstance(tokens, Product)
    w = args[0] if tokens.left else args[1].mT
    if w.ndim == 3:
        w = w[tokens.batch or 0]
    return w[..., None]


VIEWS: dict[str, Any] = {
    "transposed": lambda w: w.T,
    "cast": lambda w: w.to(torch.float32),
    "cast, transposed": lambda w: w.T.float(),
    "transposed, copied": lambda w: w.T.contiguous(),
    "split": lambda w: w.chunk(2)[1],
    "columns of a cast": lambda w: w.float()[:, 3:],
    "scaled": lambda w: 0.5 * w / 3,
    "one more": lambda w: (1 - w) * torch.tensor(2.0),
    "of heads": lambda w: w.unflatten(0, (3, 4)).transpose(0, 1).float().flatten(1)[:, :8],
    "copied, every other row": lambda w: w.T.contiguous()[::2],
}


@pytest.mark.parametrize("how", VIEWS)
def test_views_casts_and_multiples_of_a_weight_are_strided(how: str) -> None:
    w = nn.Parameter(torch.randn(12, 8))
    reader = Computed(lambda s, x: x @ VIEWS[how](s.w).T, w=w)
    walk = Walk(record(reader, torch.randn(5, VIEWS[how](w).shape[1]), answer))
    (use,) = walk.uses
    scale, offset = walk.entries.affine(use.memory) or (0.0, 0.0)
    assert use.rows(True) is not None
    found = scale * w.detach().double().flatten()[use.entries[..., 0]] + offset
    torch.testing.assert_close(found, VIEWS[how](w).detach().double(), rtol=1e-6, atol=1e-6)
    values, slopes = walk.entries.read({"w": w.detach().double()}.__getitem__).at(use.memory, use.places[..., 0])
    torch.testing.assert_close(values, found)
    assert bool((slopes == scale).all())


def held_by(root: Any, left_out: Any) -> int:
    """Bytes of all tensors that can be reached from an object: memory that several have is counted once."""
    seen, sizes, stack = {id(left_out)}, dict[int, int](), [root]
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            if not each.is_meta:
                sizes[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        elif isinstance(each, (list, tuple, set)):
            stack += each
        elif isinstance(each, dict):
            stack += [*each, *each.values()]
        elif hasattr(each, "__dict__") and not isinstance(each, (type, nn.Module)):
            stack += vars(each).values()
    return sum(sizes.values())


@pytest.mark.parametrize("cast", [False, True])
def test_a_walk_of_a_large_model_holds_nothing_of_the_size_of_its_weights(cast: bool) -> None:
    """Of gated layers after norms, as Llama's, in bfloat16: below a tenth of the weights' bytes."""

    def layer(s: Computed, x: Tensor) -> Tensor:
        w = [each.to(torch.float32) if cast else each for each in (s.up, s.gate, s.down)]
        y = F.rms_norm(x, (len(s.g),)) * s.g
        y = y.to(w[0].dtype)
        return x + (F.silu(y @ w[1].T) * (y @ w[0].T) @ w[2].T).to(x.dtype)

    def parameter(*shape: int) -> nn.Parameter:
        count = math.prod(shape)
        return nn.Parameter(torch.randn(1000).bfloat16().repeat(1 + count // 1000)[:count].view(shape))

    width, hidden = 1024, 4096
    shapes = {"up": (hidden, width), "gate": (hidden, width), "down": (width, hidden), "g": (width,)}
    layers = [Computed(layer, **{name: parameter(*shape) for name, shape in shapes.items()}) for _ in range(2)]
    table, head = nn.Embedding(3000, width, _weight=parameter(3000, width)), nn.Linear(1, 1, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, *layers, head)
    with torch.no_grad():
        found = record(model, torch.randint(3000, (2, 3)), answer)
    weights = sum(w.numel() * w.element_size() for w in model.parameters())
    assert held_by(Walk(found), found) < 0.1 * weights


def heads(s: Computed, x: Tensor) -> Tensor:
    q, k, v = (each(x).unflatten(-1, (2, 3)).transpose(1, 2) for each in (s.q, s.k, s.v))
    return s.o((q @ k.mT).softmax(-1).matmul(v).transpose(1, 2).flatten(2))


def test_the_charge_of_heads_vanishes_at_other_weights_and_that_of_a_mixture_of_heads_does_not() -> None:
    """C = sum dq q^T - (sum dk k^T)^T is 0 in the block of each head, and nowhere else."""
    torch.manual_seed(0)
    model = Computed(heads, **{name: nn.Linear(6, 6, bias=False) for name in "qkvo"}).double()
    x = torch.randn(4, 5, 6).double()
    walk, weights = walked(model, x)
    channels, use = walk.channels, dict(zip("qkvo", walk.uses, strict=True))
    assert torch.equal(channels.wires[use["q"].out], channels.wires[use["k"].out])
    assert bool((channels.dual[use["q"].out] ^ channels.dual[use["k"].out]).all())
    assert torch.equal(channels.wires[use["v"].out], channels.wires[use["o"].into])
    other = {name: torch.randn_like(w) for name, w in weights.items()}
    found = sample(walk, other, torch.randn_like(x))
    q, k, v = found.written[0], found.written[1], found.written[2]
    o = found.read[3]
    same = torch.block_diag(*[torch.ones(3, 3)] * 2).bool()
    for charge in (q.slopes.T @ q.values - (k.slopes.T @ k.values).T, v.slopes.T @ v.values - o.slopes.T @ o.values):
        assert float(charge[same].abs().max()) < 1e-12
        assert float(charge[~same].abs().min()) > 1e-6


def test_gains_are_other_units_of_one_wire() -> None:
    """u = gain of the norm between writer and reader, and a scale of their weights in these units has no charge."""
    torch.manual_seed(0)
    model = Computed(
        lambda s, x: s.b(s.g * F.rms_norm(s.a(x), (4,), eps=1e-6)),
        a=nn.Linear(3, 4, bias=False),
        b=nn.Linear(4, 2, bias=False),
        g=nn.Parameter(torch.randn(4)),
    ).double()
    x = torch.randn(5, 3).double()
    walk, weights = walked(model, x)
    (gain,) = walk.gains
    reading = walk.entries.read(weights.__getitem__)
    values, slopes = reading.at(gain.memory, gain.places)
    assert torch.equal(values, weights["g"])
    assert torch.equal(slopes, torch.ones(4).double())
    assert gain.power == 1
    units = walk.channels.units(values)
    torch.testing.assert_close(units[walk.uses[1].into] / units[gain.before], weights["g"])


def grouped(s: Computed, x: Tensor) -> Tensor:
    """Attention of two groups of two queries (h = 3), whose key and value are picked by an index."""
    y = s.w(x).unflatten(-1, (2, 4, 3))
    q, k, v = (y[:, :, :, at] for at in ([0, 1], [2], [3]))
    q, k, v = (each.expand(-1, -1, -1, 2, -1).flatten(2, 3).transpose(1, 2) for each in (q, k, v))
    return s.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


def filtered(s: Computed, x: Tensor) -> Tensor:
    """Attention of two heads (h = 4), the values filtered along tokens, by head."""
    q, k, v = (heads.unflatten(-1, (2, 4)).transpose(1, 2) for heads in (s.q(x), s.k(x), s.v(x)))
    return s.o(((q @ k.mT).softmax(-1) @ v + s.c(v)).transpose(1, 2).flatten(2))


def with_sinks(s: Computed, x: Tensor) -> Tensor:
    """Attention of two heads (h = 4), of which each token's values are multiplied by one number, of a parameter."""
    q, k, v = (heads.unflatten(-1, (2, 4)).transpose(1, 2) for heads in (s.q(x), s.k(x), s.v(x)))
    scores = q @ k.mT
    part = (scores.logsumexp(-1) - s.sink.bias[:, None]).sigmoid()
    return s.o((part[..., None] * (scores.softmax(-1) @ v)).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("forward", "writer", "count", "parts"),
    [
        (grouped, "w", 6, {"w": nn.Linear(5, 24), "o": nn.Linear(12, 5)}),
        (
            filtered,
            "v",
            8,
            {name: nn.Linear(5, 8) for name in "qkv"}
            | {"o": nn.Linear(8, 5), "c": nn.Conv2d(2, 2, (3, 1), padding=(1, 0), groups=2, bias=False)},
        ),
        (
            with_sinks,
            "v",
            8,
            {name: nn.Linear(5, 8) for name in "qkv"} | {"o": nn.Linear(8, 5), "sink": nn.Linear(1, 2)},
        ),
    ],
    ids=["picked by an index", "filtered along tokens", "multiplied by token"],
)
def test_the_output_reads_the_channels_that_values_write(
    forward: Callable[[Computed, Tensor], Tensor], writer: str, count: int, parts: dict[str, nn.Module]
) -> None:
    walk, _ = walked(Computed(forward, **parts).double(), torch.randn(2, 6, 5).double())
    memory = {name: memory for memory, name in walk.entries.plain.items()}
    write, read = (next(use for use in walk.uses if use.memory == memory[f"{name}.weight"]) for name in (writer, "o"))
    wires = walk.channels.wires[read.into].unique()
    assert len(wires) == count
    assert bool(torch.isin(wires, walk.channels.wires[write.out]).all())


def test_a_product_of_no_tokens_is_a_use() -> None:
    model = Computed(lambda s, x: s.a(x) + s.b(x[:0]).sum(), a=nn.Linear(3, 2), b=nn.Linear(3, 2)).double()
    walk, _ = walked(model, torch.randn(4, 3).double())
    assert [use.shape for use in walk.uses] == [(2, 3, 1), (2, 3, 1)]
    assert walk.skipped == {}


def test_functions_of_parameters_are_parameters_with_slopes() -> None:
    torch.manual_seed(0)
    model = Computed(
        lambda s, x: x @ torch.cat([2 * s.w[:, 1:], s.w[:, :1].exp()], 1).T, w=nn.Parameter(torch.randn(3, 4))
    ).double()
    walk, weights = walked(model, torch.randn(5, 4).double())
    (use,) = walk.uses
    w = weights["w"]
    assert torch.equal(use.entries[..., 0], torch.arange(12).view(3, 4).roll(-1, 1))
    values, slopes = walk.entries.read(weights.__getitem__).at(use.memory, use.places[..., 0])
    torch.testing.assert_close(values, torch.cat([2 * w[:, 1:], w[:, :1].exp()], 1))
    torch.testing.assert_close(slopes, torch.cat([torch.full((3, 3), 2.0).double(), w[:, :1].exp()], 1))


def test_units_follow_joins_in_any_order_and_across_contragredients() -> None:
    """Against the definition, join by join: b = gain a, c = 1 / (3 b), and d the same channel as c."""
    nodes = Nodes()
    a, b, c, d = (nodes.add(2) for _ in range(4))
    nodes.join(c, d)
    nodes.join(a, b, Tie.GAIN, gain=nodes.add_gains(2))
    nodes.join(b, c, dual=True, const=3.0)
    channels = nodes.settled()
    gains = torch.tensor([2.0, 5.0]).double()
    units = channels.units(gains)
    torch.testing.assert_close(units[b], gains * units[a])
    torch.testing.assert_close(units[c] * units[b], torch.full((2,), 3.0).double())
    torch.testing.assert_close(units[d], units[c])
    assert channels.dual[a].tolist() == channels.dual[b].tolist() != channels.dual[c].tolist()
    assert len(channels.wires[torch.cat([a, b, c, d])].unique()) == 2


def test_distinct_columns_are_those_of_unique() -> None:
    matrix = torch.randint(4, (3, 50))
    first, which = distinct_columns(matrix)
    assert torch.equal(matrix[:, first][:, which], matrix)
    assert len(first) == torch.unique(matrix, dim=1).shape[1]
    assert all(which[:place].ne(n).all() for n, place in enumerate(first.tolist()))
