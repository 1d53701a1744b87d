import time
import warnings

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

warnings.simplefilter("ignore")
from quotient_manifolds.symmetries.wires.blocks import gauge_tangents
from quotient_manifolds.symmetries.wires.record import record
from quotient_manifolds.symmetries.wires.walk import Walk


class Exact(TorchFunctionMode):
    """Compute in float64 what a model casts to float32, and differentiate what it reads under `no_grad`.

    Rounding hides shifts that are exact; a frozen table that gets no gradient seems to be free, but a symmetry moves it.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch._C._set_grad_enabled:
            return None
        if func is torch.Tensor.float:
            return args[0].double()
        wide = lambda x: torch.float64 if x is torch.float32 else x
        return func(*tree_map(wide, args), **tree_map(wide, kwargs or {}))


torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)


def truth(m, f, batches):
    p = {k: v.detach() for k, v in m.named_parameters()}
    Js = []
    for b in batches:
        g = lambda p: f(lambda *a, **k: torch.func.functional_call(m, p, a, k), b).reshape(-1)
        J = torch.func.jacrev(g)(p)
        Js.append(torch.cat([j.reshape(j.shape[0], -1) for j in J.values()], 1))
    J = torch.cat(Js)
    U, S, V = torch.linalg.svd(J, full_matrices=True)
    r = int((1e-9 * S[0] < S).sum())
    return J, r


def check(name, m, f, batches, tangents=None, verbose=False, walk_batch=None):
    t0 = time.time()
    for q in m.parameters():
        if q.ndim == 1 or (q == q.reshape(-1)[0]).all():
            q.data += 0.3 * torch.randn_like(q)
    b0 = batches[0] if walk_batch is None else walk_batch
    w = Walk(record(m, b0, f))
    fl = lambda d: torch.cat([d[k].reshape(-1) for k in w.parameters])
    T = list(gauge_tangents(w))
    if tangents:
        T += list(tangents(w))
    J, r = truth(m, f, batches)
    P = J.shape[1]
    fib = P - r
    good, bad = [], {}
    for lab, d in T:
        v = fl(d)
        n = v.norm()
        if n == 0:
            continue
        res = float((J @ v).norm() / (J.norm() * n) * P**0.5)
        if res < 1e-8:
            good.append(v / n)
        else:
            bad.setdefault(lab, []).append(res)
    rank = int(torch.linalg.matrix_rank(torch.stack(good), rtol=1e-9)) if good else 0
    print(
        f"{name:34s} truth {fib:4d} found {rank:4d} {'' if fib == rank else 'MISSING %d' % (fib - rank)}  {'FALSE ' + str({k: (len(v), '%.1e' % max(v)) for k, v in bad.items()}) if bad else ''} {dict(w.unknown) or ''} {time.time() - t0:.1f}s",
        flush=True,
    )
    return w, good, J
