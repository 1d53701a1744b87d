import torch
import torch.nn.functional as F
from check import check
from torch import nn


class Block(nn.Module):
    def __init__(s, d=6, h=2, norm="ln", act="gelu", bias=True, hid=8, post=False):
        super().__init__()
        s.h = h
        s.post = post
        N = (
            (lambda: nn.LayerNorm(d))
            if norm == "ln"
            else (lambda: nn.RMSNorm(d, eps=1e-5))
            if norm == "rms"
            else (lambda: nn.Identity())
        )
        s.n1, s.n2 = N(), N()
        s.q, s.k, s.v, s.o = (nn.Linear(d, d, bias=bias) for _ in range(4))
        s.up, s.down = nn.Linear(d, hid, bias=bias), nn.Linear(hid, d, bias=bias)
        s.act = act

    def attn(s, x):
        B, T, d = x.shape
        sp = lambda y: y.view(B, T, s.h, -1).transpose(1, 2)
        return s.o(F.scaled_dot_product_attention(sp(s.q(x)), sp(s.k(x)), sp(s.v(x))).transpose(1, 2).reshape(B, T, d))

    def mlp(s, x):
        return s.down(getattr(F, s.act)(s.up(x)) if s.act != "sq" else F.relu(s.up(x)) ** 2)

    def forward(s, x):
        if s.post:
            x = s.n1(x + s.attn(x))
            return s.n2(x + s.mlp(x))
        x = x + s.attn(s.n1(x))
        return x + s.mlp(s.n2(x))


class M(nn.Module):
    def __init__(s, d=6, final=None, pool=True, out=10, pos=False, inp=7, layers=1, **k):
        super().__init__()
        s.emb = nn.Linear(inp, d)
        s.b = nn.ModuleList(Block(d, **k) for _ in range(layers))
        s.f = {"ln": nn.LayerNorm, "rms": nn.RMSNorm}[final](d) if final else nn.Identity()
        s.head = nn.Linear(d, out)
        s.pool = pool
        s.p = nn.Parameter(torch.randn(5, d)) if pos else None

    def forward(s, x):
        x = s.emb(x)
        if s.p is not None:
            x = x + s.p
        for b in s.b:
            x = b(x)
        x = s.f(x)
        return s.head(x.mean(1) if s.pool else x)


f = lambda m, b: m(b)
B = [torch.randn(48, 5, 7) for _ in range(3)]
if __name__ == "__main__":
    tang = None
    try:
        from quotient_manifolds.symmetries.wires.flows import flow_tangents as tang
    except ImportError:
        pass
    for kw in [
        dict(norm="rms"),
        dict(),
        dict(act="relu"),
        dict(act="sq"),
        dict(norm="none"),
        dict(final="ln"),
        dict(final="rms", norm="rms", pos=True),
        dict(post=True),
        dict(bias=False, norm="rms", act="relu"),
        dict(out=3),
        dict(layers=2),
    ]:
        torch.manual_seed(0)
        check(str(kw), M(**kw), f, B, tang)
