import sys

import torch
from battery import Exact, call, cases

from quotient_manifolds.symmetries import generic_inputs
from quotient_manifolds.symmetries.small_copy import joined
from quotient_manifolds.symmetries.wires.blocks import gauge_tangents
from quotient_manifolds.symmetries.wires.flows import flow_tangents
from quotient_manifolds.symmetries.wires.record import record
from quotient_manifolds.symmetries.wires.walk import Walk


def missing(name, n=400):
    m, b = cases.small_model(name)
    m = m.double().eval()
    for x in m.modules():
        if isinstance(x, torch.nn.Embedding):
            x.padding_idx = None
    dbl = lambda b: (
        {k: (v.double() if torch.is_tensor(v) and v.is_floating_point() else v) for k, v in b.items()}
        if isinstance(b, dict)
        else tuple(v.double() if v.is_floating_point() else v for v in b)
    )
    b = dbl(b)
    with torch.no_grad():
        for p in m.parameters():
            p.data += 0.02 * torch.randn_like(p)
            p.requires_grad_(True)
    w = Walk(record(m, b, call))
    T = [*gauge_tangents(w), *flow_tangents(w)]
    if name in cases.HAND_WRITTEN:
        g = torch.Generator().manual_seed(3)
        full = joined([cases.HAND_WRITTEN[name][1](g) for _ in range(n)])
    else:
        full = joined(generic_inputs(m)[:n])
    full = dbl(full)
    ps = {k: p.detach() for k, p in m.named_parameters()}
    P = sum(p.numel() for p in ps.values())
    with Exact():
        o = call(m, full)
    N = o.numel()
    R = torch.randn(min(N, int(1.3 * P)), N) / N**0.5 if N > 1.3 * P else torch.eye(N)
    o = o.reshape(-1)
    rows = []
    for c in R:
        rows.append(
            torch.cat(
                [
                    (torch.zeros_like(p) if q is None else q).reshape(-1)
                    for p, q in zip(
                        m.parameters(),
                        torch.autograd.grad(o, list(m.parameters()), c, retain_graph=True, allow_unused=True),
                    )
                ]
            )
        )
    J = torch.stack(rows)
    U, S_, Vh = torch.linalg.svd(J, full_matrices=True)
    r = int((1e-8 * S_[0] < S_).sum())
    K = Vh[r:]
    good = []
    for l, d in T:
        v = torch.cat([d[k].reshape(-1) for k in ps])
        if v.norm() > 0 and (J @ v).norm() < 1e-6 * J.norm() * v.norm():
            good.append(v / v.norm())
        elif v.norm() > 0:
            print("FALSE", l, [(k, round(float(d[k].norm()), 3)) for k in ps if d[k].norm() > 1e-9][:8])
    G = torch.stack(good)
    u, s, v = torch.linalg.svd(G, full_matrices=False)
    Q = v[: int((s > 1e-9 * s[0]).sum())].T
    Rm = K - (K @ Q) @ Q.T
    u, s, v = torch.linalg.svd(Rm)
    k = int((s > 1e-6).sum())
    D = v[:k]
    print(name, "truth", len(K), "found", Q.shape[1], "missing", k)
    i = 0
    for n_, p in ps.items():
        x = float(D[:, i : i + p.numel()].norm())
        if x > 1e-5:
            print("   ", n_, tuple(p.shape), round(x, 2))
        i += p.numel()
    return w, D, ps


if __name__ == "__main__":
    for n in sys.argv[1:]:
        missing(n)
