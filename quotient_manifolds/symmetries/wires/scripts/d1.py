import sys

import numpy as np
import torch
from battery import call, cases

from quotient_manifolds.symmetries.wires.linear_algebra import kernel
from quotient_manifolds.symmetries.wires.record import record
from quotient_manifolds.symmetries.wires.unreached import Unreached
from quotient_manifolds.symmetries.wires.unseen import Unseen
from quotient_manifolds.symmetries.wires.values import Values
from quotient_manifolds.symmetries.wires.walk import Walk

name = sys.argv[1]
m, b = cases.small_model(name)
m = m.double().eval()
with torch.no_grad():
    for p in m.parameters():
        p.data += 0.02 * torch.randn_like(p)
w = Walk(record(m, {k: v.double() if v.is_floating_point() else v for k, v in b.items()}, call))
values = Values(w, w.parameters)
R = Unreached(w, values)
U = Unseen(w, values, R)
for l in w.linears:
    K = kernel(np.concatenate([U.of(r) for r in l.outs]))
    us = [R.of(r) for r in l.ins]
    print(
        l.entries.name,
        l.shape,
        "rows",
        len(l.ins),
        "K",
        K.shape[1],
        "unreached",
        [len(c) for _, c in us],
        [np.round(c, 3).tolist()[:3] for _, c in us][:3],
        "shared",
        l.shared,
        "common",
        len(Unreached._common(us)[0]),
    )
