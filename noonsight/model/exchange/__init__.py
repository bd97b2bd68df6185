"""Expert exchanges: how rows reach the experts they chose and come back. One file per transport, one contract.

    exchange(x[T, Z], chosen[T, A], weights[T, A], valid[T], gate[e, Z, F], up[e, Z, F], down[e, F, Z], way)
        -> (y[T, Z], Drops)

y[t] = sum over a of weights[t, a] * SwiGLU_chosen[t, a](x[t]), accumulated in float32 and cast at the end to the
dtype of x. `chosen` numbers all E experts; the banks are those of this device, e = E / shards. Rows that are not valid
send nothing and receive 0. `Drops` counts assignments refused for lack of room; a dropped assignment adds 0 and the
weights of its token's other experts are not renormalised (Marin, #8435).
"""

from __future__ import annotations

from noonsight.model.exchange.dense import einsum, sorted_blocks
from noonsight.model.exchange.fixed import fixed
from noonsight.model.exchange.pooled import pooled
from noonsight.model.exchange.ragged import ragged
from noonsight.model.exchange.ring import ring
from noonsight.model.exchange.waterfill import waterfill
from noonsight.model.exchange.way import Drops, Way

__all__ = ["EXCHANGES", "Drops", "Way"]

EXCHANGES = {
    "sorted": sorted_blocks,
    "einsum": einsum,
    "ring": ring,
    "fixed": fixed,
    "pooled": pooled,
    "ragged": ragged,
    "waterfill": waterfill,
}
