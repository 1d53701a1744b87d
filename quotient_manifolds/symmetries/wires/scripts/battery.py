import csv
import sys
import time
import traceback
import warnings

warnings.simplefilter("ignore")
import torch
import transformers
from check import Exact

transformers.logging.set_verbosity_error()
from torch.utils._pytree import tree_leaves

from quotient_manifolds.symmetries import generic_inputs
from quotient_manifolds.symmetries.small_copy import joined
from quotient_manifolds.symmetries.wires.blocks import gauge_tangents
from quotient_manifolds.symmetries.wires.flows import flow_tangents
from quotient_manifolds.symmetries.wires.record import record
from quotient_manifolds.symmetries.wires.walk import Walk
from studies import fibres as cases

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
truths = {r["Model"]: r for r in csv.DictReader(open("docs/fibres.csv"))}


def call(m, b):
    o = m(**b) if isinstance(b, dict) else m(*b) if isinstance(b, (tuple, list)) else m(b)
    ts = [
        t
        for t in tree_leaves(dict(o) if hasattr(o, "keys") else o)
        if isinstance(t, torch.Tensor) and t.is_floating_point()
    ]
    return torch.cat([t.reshape(-1) for t in ts]) if len(ts) > 1 else ts[0]


def run(name):
    t0 = time.time()
    torch.manual_seed(0)
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
    if isinstance(b, dict):
        b["use_cache"] = False if "use_cache" in str(type(m).forward.__code__.co_varnames) else None
        b = {k: v for k, v in b.items() if v is not None}
    with torch.no_grad():
        for p in m.parameters():
            p.data += 0.02 * torch.randn_like(p)
    w = Walk(record(m, b, call))
    T = [*gauge_tangents(w), *flow_tangents(w)]
    t1 = time.time()
    if name in cases.HAND_WRITTEN:
        g = torch.Generator().manual_seed(3)
        full = joined([cases.HAND_WRITTEN[name][1](g) for _ in range(40)])
    else:
        full = joined(generic_inputs(m)[:40])
    full = dbl(full)
    if isinstance(full, dict) and "use_cache" in b:
        full["use_cache"] = False
    ps = {k: p for k, p in m.named_parameters()}
    [p.requires_grad_(True) for p in ps.values()]
    G = []
    for s in range(6):
        with Exact():
            o = call(m, full)
        c = torch.randn(o.shape, generator=torch.Generator().manual_seed(s))
        gr = torch.autograd.grad((o * c).sum(), list(ps.values()), allow_unused=True)
        G.append(torch.cat([(torch.zeros_like(p) if q is None else q).reshape(-1) for p, q in zip(ps.values(), gr)]))
    G = torch.stack(G)
    good, bad = [], {}
    for lab, dct in T:
        v = torch.cat([dct[k].reshape(-1) for k in ps])
        n = v.norm()
        if n == 0:
            continue
        res = float(((G * v).sum(1).abs() / ((G * v).norm(dim=1) + 1e-300)).max())
        if float((G * v).abs().max()) < 1e-12 * float(G.abs().max()) * float(v.abs().max()):
            res = 0
        if res < 2e-5:
            good.append(v / n)
        else:
            bad.setdefault(lab, []).append(res)
    rank = int(torch.linalg.matrix_rank(torch.stack(good), rtol=1e-9)) if good else 0
    r = truths.get(name)
    fib = int(r["Fibre"]) if r else -1
    un = int(r["Not reached"]) if r else 0
    print(
        f"{name:36s} P {sum(p.numel() for p in ps.values()):5d} fibre {fib:4d} (unreached {un:3d}) old {r['Found'] if r else '?':>4} found {rank:4d} {'' if rank >= fib - un else 'MISSING %d' % (fib - un - rank)} {'FALSE ' + str({k: (len(v), '%.0e' % max(v)) for k, v in bad.items()}) if bad else ''} {dict(w.unknown) or ''} {t1 - t0:.1f}s",
        flush=True,
    )
    return w


if __name__ == "__main__":
    for name in sys.argv[1:] or cases.names():
        try:
            run(name)
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt):
                raise
            print(name, "ERROR", repr(e)[:200])
            print("   ", " | ".join(traceback.format_exc(limit=-2).splitlines()[-5:])[:300])
