"""adversarial small nets on tokens x (B,T,8)"""

import sys

import torch
import torch.nn.functional as F
from check import check
from torch import nn

d = 8


class L(nn.Module):
    """template: emb -> body -> head"""

    def __init__(s, body, bias, out=12, pool="mean", inp=9, **mods):
        super().__init__()
        s.emb = nn.Linear(inp, d, bias=bias)
        s.head = nn.Linear(d, out, bias=bias)
        s.body = body
        s.pool = pool
        for k, v in mods.items():
            setattr(s, k, v)

    def forward(s, x):
        s.raw = x
        s.given = x
        x = s.body(s, s.emb(x))
        if s.pool == "mean":
            x = x.mean(1)
        elif s.pool == "cls":
            x = x[:, 0]
        elif s.pool == "max":
            x = x.max(1).values
        return s.head(x) if x.shape[-1] == d else x


def stats(width=d, **k):
    n = nn.BatchNorm1d(width, **k)
    n.running_mean += torch.randn(width)
    n.running_var += torch.rand(width)
    return n


def nets(bias):
    torch.manual_seed(0)
    li = lambda i=d, o=d: nn.Linear(i, o, bias=bias)
    N = {}

    def add(name, body, pool="mean", **mods):
        N[name] = (body, pool, mods)

    P = lambda *s: nn.Parameter(torch.randn(*s))
    t, bn = torch.tanh, lambda n, y: n(y.mT).mT
    add("linear", lambda s, x: x)
    add(
        "half pooled",
        lambda s, x: torch.cat([x[..., :4].mean(1, keepdim=True).expand(-1, 5, -1), x[..., 4:]], -1),
        None,
    )
    add(
        "half pooled lin",
        lambda s, x: s.a(torch.cat([x[..., :4].mean(1, keepdim=True).expand(-1, 5, -1), x[..., 4:]], -1)).tanh(),
        None,
        a=li(),
    )
    add("half rolled", lambda s, x: s.a(torch.cat([x[..., :4].roll(1, 1), x[..., 4:]], -1)).tanh(), None, a=li())
    add(
        "half number",
        lambda s, x: s.a(torch.cat([x[..., :4] * torch.arange(1.0, 6)[:, None], x[..., 4:]], -1)).tanh(),
        None,
        a=li(),
    )
    add(
        "half first", lambda s, x: s.a(torch.cat([x[:, :1, :4].expand(-1, 5, -1), x[..., 4:]], -1)).tanh(), None, a=li()
    )
    add(
        "half mixed",
        lambda s, x: s.a(
            torch.cat([torch.softmax(torch.arange(25.0).view(5, 5) / 9, -1) @ x[..., :4], x[..., 4:]], -1)
        ).tanh(),
        None,
        a=li(),
    )
    add("relu", lambda s, x: s.b(F.relu(s.a(x))), a=li(), b=li())
    add("leaky", lambda s, x: s.b(F.leaky_relu(s.a(x))), a=li(), b=li())
    add("where leaky", lambda s, x: s.b((lambda y: torch.where(y > 0, y, 0.1 * y))(s.a(x))), a=li(), b=li())
    add("abs", lambda s, x: s.b(s.a(x).abs()), a=li(), b=li())
    add("sq", lambda s, x: s.b(s.a(x) ** 2), a=li(), b=li())
    add("cube", lambda s, x: s.b(s.a(x) ** 3), a=li(), b=li())
    add("gelu", lambda s, x: s.b(F.gelu(s.a(x))), a=li(), b=li())
    add("glu", lambda s, x: s.b(torch.sigmoid(s.a(x)) * s.c(x)), a=li(), b=li(), c=li())
    add("bilinear", lambda s, x: s.b(s.a(x) * s.c(x)), a=li(), b=li(), c=li())
    add("selfgate", lambda s, x: s.b(s.a(x) * s.a(x)), a=li(), b=li())
    add("maxout", lambda s, x: s.b(torch.maximum(s.a(x), s.c(x))), a=li(), b=li(), c=li())
    add("max0", lambda s, x: s.b(torch.maximum(s.a(x), torch.zeros(()))), a=li(), b=li())
    add("max1", lambda s, x: s.b(torch.maximum(s.a(x), torch.ones(()))), a=li(), b=li())
    add("ratio", lambda s, x: s.b(s.a(x) / (1 + s.c(x) ** 2)), a=li(), b=li(), c=li())
    add("two", lambda s, x: s.b(s.a(x)), "cls", a=li(), b=li())
    add("narrow", lambda s, x: x + s.b(s.a(x)), a=li(d, 3), b=li(3, d))
    add("lora", lambda s, x: torch.tanh(s.w(x) + s.b(s.a(x))), a=li(d, 3), b=li(3, d), w=li())
    add("res lin", lambda s, x: torch.tanh(x + s.w(x)), w=li())
    add("gain", lambda s, x: s.b(torch.tanh(s.g * s.a(x))), a=li(), b=li(), g=P(d))
    add("scalar gain", lambda s, x: s.b(torch.tanh(s.g * s.a(x))), a=li(), b=li(), g=P(1))
    add("gain lin", lambda s, x: s.b(s.g * s.a(x)), a=li(), b=li(), g=P(d))
    add("gain two", lambda s, x: s.b(s.g * s.h * s.a(x)), a=li(), b=li(), g=P(d), h=P(d))
    add("gate x", lambda s, x: s.b(torch.sigmoid(s.g) * s.a(x)), a=li(), b=li(), g=P(d))
    add("ln", lambda s, x: s.b(torch.tanh(s.a(s.n(x)))), a=li(), b=li(), n=nn.LayerNorm(d))
    add("ln res", lambda s, x: x + s.b(torch.tanh(s.a(s.n(x)))), a=li(), b=li(), n=nn.LayerNorm(d))
    add("ln final", lambda s, x: s.n(x + s.b(torch.tanh(s.a(x)))), a=li(), b=li(), n=nn.LayerNorm(d))
    add("rms", lambda s, x: x + s.b(torch.tanh(s.a(s.n(x)))), a=li(), b=li(), n=nn.RMSNorm(d, eps=1e-5))
    add(
        "rms hand",
        lambda s, x: x + s.b(torch.tanh(s.a(s.g * x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()))),
        a=li(),
        b=li(),
        g=P(d),
    )
    add(
        "l2",
        lambda s, x: x + s.b(torch.tanh(s.a(x / x.square().sum(-1, keepdim=True).add(1e-5).sqrt()))),
        a=li(),
        b=li(),
    )
    add(
        "ln hand",
        lambda s, x: (
            x
            + s.b(
                torch.tanh(
                    s.a((lambda y: y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt())(x - x.mean(-1, keepdim=True)))
                )
            )
        ),
        a=li(),
        b=li(),
    )
    add(
        "ln var",
        lambda s, x: (
            x
            + s.b(
                torch.tanh(
                    s.a((x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt())
                )
            )
        ),
        a=li(),
        b=li(),
    )
    add(
        "half ln",
        lambda s, x: s.b(torch.tanh(s.a(torch.cat([s.n(x[..., :4]), x[..., 4:]], -1)))),
        a=li(),
        b=li(),
        n=nn.LayerNorm(4),
    )
    add(
        "ln heads",
        lambda s, x: s.b(torch.tanh(s.a(s.n(x.view(-1, 5, 2, 4)).flatten(2)))),
        a=li(),
        b=li(),
        n=nn.LayerNorm(4),
    )
    add("norm and head", lambda s, x: s.b(torch.tanh(s.a(s.n(x)))) + s.c(x), a=li(), b=li(), c=li(), n=nn.LayerNorm(d))

    def att(s, x, h=2, scale=1.0, mask=None, kv=None, qn=None):
        B, T, _ = x.shape
        sp = lambda y: y.view(B, T, -1, 4).transpose(1, 2)
        q, k, v = sp(s.q(x)), sp(s.k(x)), sp(s.v(x))
        if qn:
            q, k = s.qn(q), s.kn(k)
        if k.shape[1] < q.shape[1]:
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        S = q @ k.mT / 2
        if mask is not None:
            S = S + mask
        return s.o((S.softmax(-1) @ v).transpose(1, 2).reshape(B, T, -1))

    A = lambda **k: dict(q=li(), k=li(**k), v=li(**k), o=li())
    add("attn", lambda s, x: x + att(s, x), **A())
    add("attn rms", lambda s, x: x + att(s, s.n(x)), n=nn.RMSNorm(d, eps=1e-5), **A())
    add("gqa", lambda s, x: x + att(s, x), **A(o=4))
    add("qknorm", lambda s, x: x + att(s, x, qn=1), qn=nn.RMSNorm(4, eps=1e-5), kn=nn.RMSNorm(4, eps=1e-5), **A())
    add("qkln", lambda s, x: x + att(s, x, qn=1), qn=nn.LayerNorm(4), kn=nn.LayerNorm(4), **A())
    add("causal", lambda s, x: x + att(s, x, mask=torch.full((5, 5), -1e9).triu(1)), **A())
    add("linear attn", lambda s, x: x + s.o(F.elu(s.q(x)).add(1) @ (F.elu(s.k(x)).add(1).mT @ s.v(x))), **A())
    add("no softmax", lambda s, x: x + s.o((s.q(x) @ s.k(x).mT) @ s.v(x)), **A())
    add("sigmoid attn", lambda s, x: x + s.o(torch.sigmoid(s.q(x) @ s.k(x).mT) @ s.v(x)), **A())
    add("shared qk", lambda s, x: x + s.o((s.q(x) @ s.q(x).mT).softmax(-1) @ s.v(x)), **A())
    num = 1 + torch.arange(8.0) / 4
    add("shared qk scaled", lambda s, x: x + s.o((s.q(x) @ (s.q(x) * num).mT).softmax(-1) @ s.v(x)), **A())
    add("shared qk signs", lambda s, x: x + s.o((s.q(x) @ (s.q(x) * (num - 1.9)).mT).softmax(-1) @ s.v(x)), **A())
    add("shared qk gain", lambda s, x: x + s.o((s.q(x) @ (s.q(x) * s.g).mT).softmax(-1) @ s.v(x)), g=P(d), **A())
    add(
        "tied head",
        lambda s, x: F.linear(s.n(x + s.b(t(s.a(x)))), s.emb.weight.T),
        None,
        a=li(),
        b=li(),
        n=nn.LayerNorm(d),
    )
    add(
        "tied head rms",
        lambda s, x: F.linear(x + s.b(t(s.a(s.n(x)))), s.emb.weight.T),
        None,
        a=li(),
        b=li(),
        n=nn.RMSNorm(d, eps=1e-5),
    )
    add(
        "tied head scaled",
        lambda s, x: F.linear(num * x + s.b(t(s.a(s.n(x)))), s.emb.weight.T),
        None,
        a=li(),
        b=li(),
        n=nn.RMSNorm(d, eps=1e-5),
    )
    add(
        "tied head ln",
        lambda s, x: F.linear(x + s.b(t(s.a(s.n(x)))), s.emb.weight.T),
        None,
        a=li(),
        b=li(),
        n=nn.LayerNorm(d),
    )
    add("temp", lambda s, x: x + s.o((s.t * (s.q(x) @ s.k(x).mT)).softmax(-1) @ s.v(x)), t=P(1), **A())
    add("score bias", lambda s, x: x + s.o((s.q(x) @ s.k(x).mT + s.t).softmax(-1) @ s.v(x)), t=P(5, 5), **A())
    add(
        "score by query",
        lambda s, x: x + s.o((s.q(x) @ s.k(x).mT + s.r(x).softmax(1)).softmax(1) @ s.v(x)),
        "cls",
        r=li(d, 5),
        **A(),
    )
    add("two scores", lambda s, x: x + s.o((s.q(x) @ s.k(x).mT + s.v(x) @ s.k(x).mT).softmax(-1) @ s.v(x)), **A())
    add("score of key", lambda s, x: x + s.o((s.q(x) @ s.k(x).mT + s.r(x).mT).softmax(-1) @ s.v(x)), r=li(d, 1), **A())
    pooled = lambda x, **k: F.avg_pool1d(x.mT, 3, 2, **k).mT
    add("average pool", lambda s, x: s.n(pooled(x + s.p)), None, n=nn.LayerNorm(d), p=P(5, d))
    add("average padded", lambda s, x: s.n(pooled(x + s.p, padding=1)), None, n=nn.LayerNorm(d), p=P(5, d))
    add("average whole", lambda s, x: s.n(pooled(x, padding=1, count_include_pad=False)), None, n=nn.LayerNorm(d))
    add(
        "half averaged",
        lambda s, x: s.a(torch.cat([pooled(x[..., :4]), x[:, ::4, 4:]], -1)).tanh(),
        None,
        a=li(),
    )
    add("average of channels", lambda s, x: s.a(F.avg_pool1d(x, 2)).tanh(), None, a=li(4, d))

    own = lambda s, x: s.c.expand(len(x), 1, d)

    def weighed(s, x):
        return F.linear(x, torch._weight_norm(s.v, s.g, 0))

    add("weight norm", lambda s, x: s.b(torch.tanh(weighed(s, x))), b=li(), v=P(d, d), g=P(d, 1))
    add("weight norm, read", lambda s, x: s.b(torch.tanh(weighed(s, x) + x @ s.v)), b=li(), v=P(d, d), g=P(d, 1))
    add("weight norm, one", lambda s, x: s.b(torch.tanh(weighed(s, x) + s.v[0])), b=li(), v=P(d, d), g=P(d, 1))
    hand = lambda v: v / v.square().sum(1, keepdim=True).sqrt()
    add("weight norm by hand", lambda s, x: s.b(torch.tanh(F.linear(x, s.g * hand(s.v)))), b=li(), v=P(d, d), g=P(d, 1))

    unit = lambda y, **k: F.normalize(y.view(*y.shape[:2], 2, 4), dim=-1, **k).flatten(2)
    add("unit", lambda s, x: s.b(torch.tanh(s.c(unit(s.a(x))))), a=li(), b=li(), c=li())
    add(
        "unit by hand",
        lambda s, x: s.b(s.a(x) / s.a(x).square().sum(-1, keepdim=True).clamp(1e-20).sqrt()),
        a=li(),
        b=li(),
    )
    add("unit at least", lambda s, x: s.b(torch.tanh(s.c(unit(s.a(x), eps=0.9)))), a=li(), b=li(), c=li())
    add("unit of relu", lambda s, x: s.b(s.a(x) / F.relu(s.c(x)).clamp(1e-12)), a=li(), b=li(), c=li())
    number = torch.polar(1 + torch.arange(20.0).view(5, 4) / 20, ang)
    pairs = lambda y: torch.view_as_complex(y.view(*y.shape[:2], -1, 2))
    rotated = lambda y, n=number: torch.view_as_real(pairs(y) * n).flatten(2)
    add("complex", lambda s, x: x + s.o((rotated(s.q(x)) @ rotated(s.k(x)).mT).softmax(-1) @ s.v(x)), **A())
    add("complex one", lambda s, x: s.b(torch.tanh(s.c(rotated(s.a(x), number[:1, :1])))), a=li(), b=li(), c=li())
    add("complex two", lambda s, x: s.b(torch.tanh(s.c(rotated(rotated(s.a(x)), number[:1])))), a=li(), b=li(), c=li())
    add(
        "complex of inputs",
        lambda s, x: s.b(torch.tanh(s.c(rotated(s.a(x), torch.polar(1 + 0 * s.given[..., :4], s.given[..., :4]))))),
        **dict(a=li(), b=li(), c=li()),
    )
    add(
        "complex square", lambda s, x: s.b(torch.view_as_real(pairs(s.a(x)) * pairs(s.a(x))).flatten(2)), a=li(), b=li()
    )
    add(
        "complex product",
        lambda s, x: s.b(torch.view_as_real(pairs(s.a(x)) * pairs(s.c(x))).flatten(2)),
        a=li(),
        b=li(),
        c=li(),
    )
    add("complex real", lambda s, x: s.b(torch.tanh(s.c(rotated(s.a(x), torch.arange(4.0))))), a=li(), b=li(), c=li())
    add(
        "conjugate",
        lambda s, x: s.b(torch.tanh(torch.view_as_real(pairs(s.a(x)).conj().resolve_conj()).flatten(2))),
        a=li(),
        b=li(),
    )
    add(
        "half complex",
        lambda s, x: s.b(torch.tanh(s.c(torch.cat([rotated(s.a(x)[..., :4], number[:, :2]), s.a(x)[..., 4:]], -1)))),
        a=li(),
        b=li(),
        c=li(),
    )

    heads = lambda s, y: s.f(y.view(*y.shape[:2], 2, -1).transpose(1, 2)).transpose(1, 2).flatten(2)
    depthwise = lambda size=3, **k: nn.Conv2d(2, 2, (size, 1), groups=2, bias=False, **k)
    add("heads mixed", lambda s, x: s.b(heads(s, s.a(x))), None, a=li(), b=li(), f=depthwise())
    add(
        "heads mixed padded",
        lambda s, x: s.b(heads(s, s.a(x)) + s.a(x)),
        **dict(a=li(), b=li(), f=depthwise(padding=(1, 0))),
    )
    add(
        "half of heads mixed",
        lambda s, x: s.b(torch.cat([heads(s, s.a(x)[..., :4]), s.a(x)[..., 4:]], -1)),
        **dict(a=li(), b=li(), f=depthwise(padding=(1, 0))),
    )
    add(
        "heads mixed twice",
        lambda s, x: s.b(heads(s, heads(s, s.a(x)))),
        **dict(a=li(), b=li(), f=depthwise(padding=(1, 0))),
    )
    add(
        "channels mixed",
        lambda s, x: s.b(heads(s, s.a(x))),
        None,
        a=li(),
        b=li(6, d),
        f=nn.Conv2d(2, 2, (3, 2), groups=2),
    )

    def windows(y, w, **k):
        y = F.unfold(y.mT[..., None], (3, 1), **k).mT
        return (y.view(*y.shape[:2], -1, 3) @ w[..., None])[..., 0]

    add(
        "windows",
        lambda s, x: s.b(windows(s.a(x), s.r(x).softmax(-1), padding=(1, 0))),
        a=li(),
        b=li(),
        r=li(d, 3),
    )
    add("windows inside", lambda s, x: s.b(windows(s.a(x), s.r(x)[:, :3].softmax(-1))), a=li(), b=li(), r=li(d, 3))
    add(
        "half in windows",
        lambda s, x: s.b(
            torch.cat([windows(s.a(x)[..., :4], s.r(x).softmax(-1), padding=(1, 0)), s.a(x)[..., 4:]], -1)
        ),
        a=li(),
        b=li(),
        r=li(d, 3),
    )
    chosen = lambda s: (s.given[1, :, 0] > 0).nonzero()[:, 0]
    add("index add", lambda s, x: s.b(s.a(x).index_add(1, chosen(s), s.c(x)[:, chosen(s)])), a=li(), b=li(), c=li())
    add("idle", lambda s, x: s.b(s.a(x).index_add(1, chosen(s), s.c(x)[:, chosen(s)])), a=li(), b=li(), c=li())
    add("idle expert", lambda s, x: s.b(s.a(x).index_add(1, chosen(s), s.c(x[:, chosen(s)]))), a=li(), b=li(), c=li())
    add(
        "half index add",
        lambda s, x: s.b(
            torch.cat([s.a(x)[..., :4].index_add(1, chosen(s), s.c(x)[:, chosen(s), :4]), s.a(x)[..., 4:]], -1)
        ),
        a=li(),
        b=li(),
        c=li(),
    )

    count = lambda s: int((s.given[1, :, 0] > 0).sum())

    def sent(s, x):  # the first tokens to one expert, the others to another
        one, other = x.split([count(s), x.shape[1] - count(s)], 1)
        return s.b(torch.cat([torch.tanh(s.a(one)), torch.tanh(s.c(other))], 1))

    add("sent", sent, a=li(), b=li(), c=li())
    add(
        "sent, mean",
        lambda s, x: torch.cat([s.a(x[:, : count(s)]), s.c(x[:, count(s) :])], 1).mean(1),
        None,
        **dict(a=li(), c=li()),
    )
    add("short sum", lambda s, x: s.a(x).sum(1), None, a=li())
    add("short mean", lambda s, x: torch.cat([own(s, x), s.a(x)], 1).mean(1), None, a=li(), c=P(1, 1, d))
    add(
        "sent, none",
        lambda s, x: torch.tanh(s.a(torch.cat([own(s, x), s.a(x)], 1).mean(1))),
        None,
        a=li(),
        c=P(1, 1, d),
    )
    add("idle split", sent, a=li(), b=li(), c=li())
    add(
        "idle slice",
        lambda s, x: s.b(x) + F.pad(s.a(x[:, : count(s)]), (0, 0, 0, x.shape[1] - count(s))),
        a=li(),
        b=li(),
    )

    def twice(s, x):
        for _ in range(2):
            x = s.n(x + s.b(torch.tanh(s.a(x))))
        return x

    add("layer twice", lambda s, x: twice(s, s.n(x)), a=li(), b=li(), n=nn.LayerNorm(d))
    add("layer twice, norm once", lambda s, x: twice(s, s.m(x)), a=li(), b=li(), n=nn.LayerNorm(d), m=nn.LayerNorm(d))
    add("bias twice", lambda s, x: s.n(x) + torch.tanh(s.a(s.n(x) + s.p) + s.p), a=li(), n=nn.LayerNorm(d), p=P(d))
    add(
        "read twice",
        lambda s, x: (lambda u, v: torch.tanh(s.a(u)) * torch.tanh(2 * s.a(v)))(s.n(x), s.n(x) + s.p),
        a=li(),
        n=nn.LayerNorm(d),
        p=P(d),
    )

    def placed(s, x):
        return s.n(x + s.t(torch.arange(x.shape[1])))

    add(
        "short table",
        lambda s, x: s.b(torch.tanh(s.a(placed(s, x)))),
        a=li(),
        b=li(),
        n=nn.LayerNorm(d),
        t=nn.Embedding(5, d),
    )
    add(
        "short slice",
        lambda s, x: s.b(torch.tanh(s.a(s.n(x + s.p[: x.shape[1]])))),
        a=li(),
        b=li(),
        n=nn.LayerNorm(d),
        p=P(5, d),
    )
    add(
        "short attn",
        lambda s, x: (lambda y: y + s.o((s.q(y) @ s.k(y).mT).softmax(-1) @ s.v(y)))(x + s.t(torch.arange(x.shape[1]))),
        t=nn.Embedding(5, d),
        **A(),
    )
    add(
        "short rows apart",
        lambda s, x: torch.tanh(s.a(x + s.p[0])) + torch.tanh(s.b(x) + s.p[1]) + s.p[2 : x.shape[1]].sum(0),
        a=li(),
        b=li(),
        p=P(5, d),
    )
    add("pos", lambda s, x: s.b(torch.tanh(s.a(x + s.p))), a=li(), b=li(), p=P(5, d))
    add("pos attn", lambda s, x: (lambda y: y + att(s, y))(x + s.p), p=P(5, d), **A())
    add(
        "cls",
        lambda s, x: s.b(torch.tanh(s.a(torch.cat([s.c.expand(x.shape[0], 1, d), x], 1)))),
        "cls",
        a=li(),
        b=li(),
        c=P(1, 1, d),
    )
    add(
        "cls attn",
        lambda s, x: (lambda y: y + s.o((s.q(y) @ s.k(y).mT).softmax(-1) @ s.v(y)))(
            torch.cat([s.c.expand(x.shape[0], 1, d), x], 1)
        ),
        "cls",
        c=P(1, 1, d),
        **A(),
    )
    add("detach", lambda s, x: s.b(torch.tanh(s.a(x))), a=li(), b=li())
    add("tied", lambda s, x: s.a(torch.tanh(s.a(x))), a=li())
    add("tied T", lambda s, x: F.linear(torch.tanh(s.a(x)), s.a.weight.T), a=li())
    add("tied lin", lambda s, x: s.a(s.a(x)), a=li())
    add("conv", lambda s, x: s.b(torch.tanh(s.a(x.mT)).mT), a=nn.Conv1d(d, d, 3, padding=1, bias=bias), b=li())
    add("conv res", lambda s, x: x + s.a(x.mT).mT, a=nn.Conv1d(d, d, 3, padding=1, bias=bias))
    add(
        "depthwise",
        lambda s, x: s.b(torch.tanh(s.a(x.mT)).mT),
        a=nn.Conv1d(d, d, 3, padding=1, groups=d, bias=bias),
        b=li(),
    )
    add("group conv", lambda s, x: s.b(torch.tanh(s.a(x.mT)).mT), a=nn.Conv1d(d, d, 3, groups=2, bias=bias), b=li())
    add(
        "experts",
        lambda s, x: s.b(
            torch.einsum("etd,bte->btd", torch.einsum("eij,tj->eti", s.w, torch.ones(5, d)), torch.softmax(s.r(x), -1))
        ),
        b=li(),
        r=li(d, 3),
        w=P(3, d, d),
    )
    add(
        "moe",
        lambda s, x: torch.stack([torch.tanh(a(x)) for a in (s.a, s.c)], -1) @ torch.softmax(s.r(x), -1)[..., None],
        a=li(),
        c=li(),
        r=li(d, 2),
    )
    add("sum heads", lambda s, x: s.b(s.a(x).view(-1, 5, 2, 4).sum(2)), a=li(), b=li(4, d))
    add("shared heads", lambda s, x: s.b(s.c(s.a(x).view(-1, 5, 2, 4)).flatten(2)), a=li(), b=li(), c=li(4, 4))
    add(
        "outer",
        lambda s, x: s.b((s.a(x)[..., :, None] * s.c(x)[..., None, :]).flatten(2)),
        a=li(d, 3),
        c=li(d, 3),
        b=li(9, d),
    )
    add("rot", lambda s, x: x + s.o((rope(s.q(x)) @ rope(s.k(x)).mT).softmax(-1) @ s.v(x)), **A())
    add("rot2", lambda s, x: x + s.o((rope2(s.q(x)) @ rope2(s.k(x)).mT).softmax(-1) @ s.v(x)), **A())
    add("max pool", lambda s, x: s.b(F.relu(s.a(x))), "max", a=li(), b=li())
    add("mask in", lambda s, x: s.b(torch.tanh(s.a(s.n(x) * (x[..., :1] > 0)))), a=li(), b=li(), n=nn.LayerNorm(d))
    add("cumsum", lambda s, x: s.b(s.a(x).cumsum(1)), a=li(), b=li())
    add("softmax feat", lambda s, x: s.b(s.a(x).softmax(-1)), a=li(), b=li())
    add("softmax tok", lambda s, x: s.r(x).softmax(1) * s.a(x), r=li(d, 1), a=li())
    add("centre only", lambda s, x: torch.tanh(s.a(x - x.mean(-1, keepdim=True))), a=li())
    add("mean used", lambda s, x: torch.tanh(s.a(x - x.mean(-1, keepdim=True))) + x.mean(-1, keepdim=True), a=li())
    add("dead", lambda s, x: s.b(torch.tanh(s.a(x))[..., :5]), a=li(), b=li(5, d))
    add("batchnorm", lambda s, x: s.b(torch.tanh(s.n(s.a(x).mT).mT)), a=li(), b=li(), n=nn.BatchNorm1d(d))
    add("bn mean", lambda s, x: s.b(t(bn(s.n, s.a(x)))), a=li(), b=li(), n=stats())
    add("bn plain", lambda s, x: s.b(t(bn(s.n, s.a(x)))), a=li(), b=li(), n=stats(affine=False))
    add("bn relu", lambda s, x: s.b(F.relu(bn(s.n, s.a(x)))), a=li(), b=li(), n=stats())
    add("bn relu plain", lambda s, x: s.b(F.relu(bn(s.n, s.a(x)))), a=li(), b=li(), n=stats(affine=False))
    add("bn lin", lambda s, x: s.b(t(s.c(bn(s.n, s.a(x))))), a=li(), b=li(), c=li(), n=stats())
    add("bn lin plain", lambda s, x: s.b(t(s.c(bn(s.n, s.a(x))))), a=li(), b=li(), c=li(), n=stats(affine=False))
    add("bn twice", lambda s, x: s.b(t(bn(s.n, s.c(t(bn(s.n, s.a(x))))))), a=li(), b=li(), c=li(), n=stats())
    add(
        "bn half",
        lambda s, x: s.b(t(s.c(torch.cat([bn(s.n, s.a(x)[..., :4]), s.a(x)[..., 4:]], -1)))),
        a=li(),
        b=li(),
        c=li(),
        n=stats(4),
    )
    add("bn narrow", lambda s, x: s.b(t(s.c(bn(s.n, s.e(s.a(x)))))), a=li(d, 3), e=li(3, d), b=li(), c=li(), n=stats())
    add("bn res", lambda s, x: s.b(t(x + bn(s.n, s.a(x)))), a=li(), b=li(), n=stats())
    add("bn one channel", lambda s, x: s.b(t(bn(s.n, s.a(x).expand(-1, -1, d)))), a=li(d, 1), b=li(), n=stats())
    add("bias first", lambda s, x: s.b(t(s.c((s.a(x).mT + s.p).mT))), a=li(), b=li(), c=li(), p=P(d, 1))
    add("positions first", lambda s, x: s.b(t(s.c((s.a(x).mT + s.p).mT))), a=li(), b=li(), c=li(), p=P(d, 5))
    add(
        "half bias",
        lambda s, x: s.b(t(s.c(torch.cat([s.a(x)[..., :4] + s.p, s.a(x)[..., 4:]], -1)))),
        a=li(),
        b=li(),
        c=li(),
        p=P(4),
    )
    add("constant", lambda s, x: s.b(t(s.a(x) + torch.arange(8.0) / 4)), a=li(), b=li())
    add("constant lin", lambda s, x: s.b(t(s.c(s.a(x) + torch.arange(8.0) / 4))), a=li(), b=li(), c=li())
    add(
        "constant half",
        lambda s, x: s.b(t(s.c(torch.cat([s.a(x)[..., :4] + 1 + torch.arange(4.0), s.a(x)[..., 4:]], -1)))),
        a=li(),
        b=li(),
        c=li(),
    )
    add("constant tokens", lambda s, x: s.b(t(s.c(s.a(x) + torch.arange(5.0)[:, None]))), a=li(), b=li(), c=li())
    add("groupnorm", lambda s, x: s.b(torch.tanh(s.n(s.a(x).mT).mT)), a=li(), b=li(), n=nn.GroupNorm(2, d))
    add("logit shift", lambda s, x: s.b(s.a(x).mean(1)).log_softmax(-1), None, a=li(), b=li(d, 4))
    tril = torch.ones(5, 5).tril()
    masks = {
        "zeroed": lambda s, w: torch.where(tril > 0, w, 0.0).softmax(-1),
        "times": lambda s, w: (w * tril).softmax(-1),
        "hidden": lambda s, w: torch.where(tril > 0, w, -torch.inf).softmax(-1),
        "zeroed by inputs": lambda s, w: torch.where((s.raw[..., 0] > 0)[:, None], w, 0.0).softmax(-1),
        "hidden by inputs": lambda s, w: w.masked_fill((s.raw[..., 0] > 1)[:, None], -1e38).softmax(-1),
        "dropped": lambda s, w: w.softmax(-1).masked_fill(tril == 0, 0.0),
        "dropped by inputs": lambda s, w: w.softmax(-1).masked_fill((s.raw[..., 0] > 1)[:, None], 0.0),
        "low": lambda s, w: torch.where(tril > 0, w, -1e4).softmax(-1),
        "not low": lambda s, w: torch.where(tril > 0, w, -100.0).softmax(-1),
        "all low": lambda s, w: torch.where((tril > 0) & (tril.sum(1) != 3), w, -1e4).softmax(-1),
        "lowered": lambda s, w: (w + s.h + torch.where(tril > 0, 0.0, -1e4)).softmax(-1),
        "all lowered": lambda s, w: (w + s.h + torch.where((tril > 0) & (tril.sum(1) != 3), 0.0, -1e4)).softmax(-1),
        "lowered a bit": lambda s, w: (w + s.h + torch.where(tril > 0, 0.0, -1e4) / 1e3).softmax(-1),
        "lowered biases": lambda s, w: (w + torch.where(tril > 0, s.h, -1e38)).softmax(-1),
        "a key's gain": lambda s, w: (w * s.g).softmax(-1),
        "a bias by place": lambda s, w: (w + s.h).softmax(-1),
    }
    for name, f in masks.items():
        about = {"g": P(5), "h": P(5, 5)}
        about = {key: about[key] for key in f.__code__.co_names if key in about}
        add(f"scores {name}", lambda s, x, f=f: x + s.o(f(s, s.q(x) @ s.k(x).mT) @ s.v(x)), **A(), **about)
    keep = torch.tensor([1.0, 1, 0, 1, 1])[:, None]
    read = lambda s, x: s.b(torch.tanh(s.a(x)))
    zero = lambda x: torch.zeros(len(x), 1, d)
    add("masked tokens", lambda s, x: read(s, torch.where(keep > 0, x, 0.0)), a=li(), b=li())
    add(
        "masked tokens, own",
        lambda s, x: read(s, torch.cat([own(s, x), torch.where(keep > 0, x, 0.0)], 1)),
        **dict(a=li(), b=li(), c=P(1, 1, d)),
    )
    add("zero token, own", lambda s, x: read(s, torch.cat([zero(x), x, own(s, x)], 1)), a=li(), b=li(), c=P(1, 1, d))
    add(
        "masked tokens, tied",
        lambda s, x: s.a(torch.where(keep > 0, torch.tanh(s.a(torch.where(keep > 0, x, 0.0))), 0.0)),
        a=li(),
    )
    add(
        "zero key, own",
        lambda s, x: (
            x
            + s.o(
                (s.q(x) @ torch.cat([s.k(x), zero(x), own(s, x)], 1).mT).softmax(-1)
                @ torch.cat([s.v(x), zero(x), zero(x)], 1)
            )
        ),
        c=P(1, 1, d),
        **A(),
    )
    add("assigned", lambda s, x: read(s, assigned(x, s.c(x), slice(None), slice(4))), a=li(), b=li(), c=li())
    add("assigned tokens", lambda s, x: read(s, assigned(x, s.c(x), slice(2))), a=li(), b=li(), c=li())
    add("assigned one", lambda s, x: read(s, assigned(x, s.c(x), 0)), a=li(), b=li(), c=li())
    add(
        "assigned part",
        lambda s, x: read(s, assigned(x, s.c(x).roll(1, 1), slice(2), slice(4))),
        a=li(),
        b=li(),
        c=li(),
    )
    add(
        "assigned halves",
        lambda s, x: read(
            s,
            assigned(
                assigned(torch.zeros_like(x), s.c(x), slice(None), slice(4)),
                s.c(x).roll(1, 1),
                slice(None),
                slice(4, 8),
            ),
        ),
        **dict(a=li(), b=li(), c=li()),
    )
    add("rot3", lambda s, x: x + s.o((rope3(s.q(x)) @ rope3(s.k(x)).mT).softmax(-1) @ s.v(x)), **A())
    return N


def assigned(x, y, *where):
    z = x.clone()
    z[(slice(None), *where)] = y[(slice(None), *where)]
    return z


def rope3(x):
    y = x.clone()
    a, b = x[..., 0:6:2], x[..., 1:6:2]
    c, s_ = ang[:, :3].cos(), ang[:, :3].sin()
    y[..., 0:6:2], y[..., 1:6:2] = a * c - b * s_, b * c + a * s_
    return y


ang = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.3])


def rope(x):
    c, s_ = ang.cos().repeat(1, 2), ang.sin().repeat(1, 2)
    return x * c + torch.cat([-x[..., 4:], x[..., :4]], -1) * s_


def rope2(x):
    a, b = x[..., ::2], x[..., 1::2]
    c, s_ = ang.cos(), ang.sin()
    return torch.stack([a * c - b * s_, b * c + a * s_], -1).flatten(-2)


if __name__ == "__main__":
    from quotient_manifolds.symmetries.wires.flows import flow_tangents as tang

    f = lambda m, b: m(b)
    only = sys.argv[1:]
    for bias in (True, False):
        for name, (body, pool, mods) in nets(bias).items():
            if only and name not in only:
                continue
            torch.manual_seed(1)
            m = L(body, bias, pool=pool, **mods).eval()
            B = [torch.randn(24, 5, 9) for _ in range(4)]
            B[0][1, :, 0] = torch.tensor([1.0, 1, -1, -1, -1])
            try:
                short = B[0][:, :3] if name.startswith("short") else None  # what a walk finds holds for longer inputs
                short = -B[0].abs() if name.startswith("idle") else short  # what a walk does not see is refused
                w, g, J = check(f"{name}{'' if bias else ' -b'}", m, f, B, tang, walk_batch=short)
            except Exception as e:
                import traceback

                print(name, bias, "ERROR", repr(e)[:200])
                traceback.print_exc(limit=-3)
