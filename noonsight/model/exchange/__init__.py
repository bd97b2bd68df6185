"""Expert exchanges: how rows reach the experts they chose and come back. One file per transport, one contract.

    exchange(x[T, Z], chosen[T, A], weights[T, A], valid[T], gate[E, Z, F], up[E, Z, F], down[E, F, Z])
        -> (y[T, Z], drops)

y[t] = sum over a of weights[t, a] * SwiGLU_chosen[t, a](x[t]), accumulated in float32 and cast at the end to the
dtype of x. Rows that are not valid send nothing and receive 0. `drops` counts assignments refused for lack of room; a
dropped assignment adds 0 and the weights of its token's other experts are not renormalised (Marin, #8435).
"""

from noonsight.model.exchange.dense import einsum, sorted_blocks

EXCHANGES = {"sorted": sorted_blocks, "einsum": einsum}
