"""Rows through the SwiGLU of their group: the one place where experts multiply after an exchange.

Rows of a group stand together, groups in order; rows behind the last group belong to none. What they hold is never
read, not even times zero, and their results are 0: receive buffers come uninitialised (F5). The groups need no
alignment, in the backward pass neither (F4).

Per platform: on GPU a Pallas kernel below, on CPU whole blocks of rows or the kernel in C++, elsewhere
`jax.lax.ragged_dot` (which on a CPU multiplies every row with the matrices of all groups). The platform is that of the
program, which need not be that of the process: a rehearsal compiles for GPUs where there is none.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from noonsight.model import native
from noonsight.model.exchange.gather import inverted, take

_dot = partial(jnp.einsum, preferred_element_type=jnp.float32)

CPU_BLOCK = 128  # rows of one product on a CPU; measured best for 1,024 to 4,096 rows on two cores
ROW_BLOCK = 128  # rows of one program of the kernel
BLOCK = 64  # of the other two dims, at most
LEAST_BLOCK = 16  # what a matrix unit takes; dims that are no multiple of it go another way
TRITON = triton.CompilerParams(num_warps=4, num_stages=3)


def grouped_swiglu(
    rows: Float[Array, "R Z"],
    gate: Float[Array, "g Z F"],
    up: Float[Array, "g Z F"],
    down: Float[Array, "g F Z"],
    sizes: Int[Array, " g"],
    dtype: str,
) -> Float[Array, "R Z"]:
    """Each row through the SwiGLU of its group, in the dtype of `rows`; products round their inputs to `dtype` and sum in
    float32.
    """
    if native.serves(dtype, rows):
        group = _group_of_row(len(rows), sizes)
        expert, ones = jnp.minimum(group, len(sizes) - 1)[:, None], jnp.ones((len(rows), 1), rows.dtype)
        return native.experts(rows, expert, ones, group < len(sizes), gate, up, down)
    return _swiglu(rows, gate, up, down, sizes, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _swiglu(
    rows: Float[Array, "R Z"],
    gate: Float[Array, "g Z F"],
    up: Float[Array, "g Z F"],
    down: Float[Array, "g F Z"],
    sizes: Int[Array, " g"],
    dtype: str,
) -> Float[Array, "R Z"]:
    """Kept for the gradient: the rows and the two inner products, and nothing that is quickly made from them."""
    return _swiglu_forward(rows, gate, up, down, sizes, dtype)[0]


def _swiglu_forward(rows, gate, up, down, sizes, dtype):
    inner = tuple(_product(rows, bank, sizes, dtype) for bank in (gate, up))
    return _product(_gated(*inner), down, sizes, dtype), (rows, inner, gate, up, down, sizes)


def _swiglu_backward(dtype, saved, cotangent):
    rows, inner, gate, up, down, sizes = saved
    hidden, pull = jax.vjp(_gated, *inner)
    d_gated, d_up = pull(_product(cotangent, down, sizes, dtype, transposed=True))
    d_rows = sum(_product(slope, bank, sizes, dtype, transposed=True) for slope, bank in ((d_gated, gate), (d_up, up)))
    pairs = ((rows, d_gated, gate), (rows, d_up, up), (hidden, cotangent, down))
    d_banks = (_outer_product(left, slope, sizes, dtype).astype(bank.dtype) for left, slope, bank in pairs)
    return d_rows, *d_banks, None


_swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def _gated(gated, up):
    return jax.nn.silu(gated) * up


def _product(rows, bank, sizes, dtype, transposed=False):
    """rows[r] @ bank[group of r], or its transpose, in the dtype of `rows`; 0 behind the last group."""
    ways = (partial(each, transposed=transposed) for each in (_products, _blocked_products, _ragged_products))
    return _for_platform(*ways, rows.astype(dtype), bank.astype(dtype), sizes).astype(rows.dtype)


def _outer_product(rows, slope, sizes, dtype):
    """Of each group the sum of rows[r] outer slope[r], float32."""
    ways = (_outer_products, _blocked_outer_products, _ragged_outer_products)
    return _for_platform(*ways, rows.astype(dtype), slope.astype(dtype), sizes)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def block_products(rows: Float[Array, "n b p"], bank: Float[Array, "n p q"], dtype: str) -> Float[Array, "n b q"]:
    """One product per block, inputs rounded to `dtype`, float32 sums. Written out backward as in `elementary.matmul`."""
    return _dot("nbp,npq->nbq", rows.astype(dtype), bank.astype(dtype))


def _block_forward(rows, bank, dtype):
    return block_products(rows, bank, dtype), (rows, bank)


def _block_backward(dtype, saved, cotangent):
    rows, bank = saved
    slope = cotangent.astype(dtype)
    d_rows = _dot("nbq,npq->nbp", slope, bank.astype(dtype))
    return d_rows.astype(rows.dtype), _dot("nbp,nbq->npq", rows.astype(dtype), slope).astype(bank.dtype)


block_products.defvjp(_block_forward, _block_backward)


def _for_platform(on_gpu, on_cpu, elsewhere, left, right, sizes):
    """`on_gpu`, unless a dim is too odd for it, `on_cpu` or `elsewhere`."""
    dims = (left.shape[1], *right.shape[1:])
    odd = any(dim % LEAST_BLOCK for dim in dims)
    own = {"cpu": on_cpu} if odd else {"cpu": on_cpu, "cuda": on_gpu}
    return jax.lax.platform_dependent(left, right, sizes, **own, default=elsewhere)


def _group_of_row(num_rows, sizes):
    """The group of each row; the number of groups for a row behind the last."""
    return jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(num_rows), side="right").astype(jnp.int32)


def _ragged_products(rows, bank, sizes, transposed=False):
    bank = jnp.swapaxes(bank, 1, 2) if transposed else bank
    return jax.lax.ragged_dot(rows, bank, sizes, preferred_element_type=jnp.float32).astype(rows.dtype)


def _ragged_outer_products(rows, slope, sizes):
    contract_rows = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return jax.lax.ragged_dot_general(rows, slope, sizes, contract_rows, preferred_element_type=jnp.float32)


# The CPU's blocks


class _Blocks(NamedTuple):
    """The rows in blocks of CPU_BLOCK, the last of each group partly empty, so that each block has one group."""

    group: Int[Array, " n"]  # of each block
    source: Int[Array, " s"]  # row in each slot of the blocks; past the end where it is empty
    slot: Int[Array, " R"]  # of each row; past the end behind the last group


def _blocks(num_rows, sizes):
    num_blocks = -(-num_rows // CPU_BLOCK) + len(sizes)
    padded = -(-sizes // CPU_BLOCK) * CPU_BLOCK
    ends, padded_ends = jnp.cumsum(sizes), jnp.cumsum(padded)
    shift = (padded_ends - padded) - (ends - sizes)
    group = _group_of_row(num_rows, sizes)
    slot = jnp.where(group < len(sizes), jnp.arange(num_rows) + jnp.append(shift, 0)[group], num_blocks * CPU_BLOCK)
    of_block = jnp.searchsorted(padded_ends, jnp.arange(num_blocks) * CPU_BLOCK, side="right")
    return _Blocks(jnp.minimum(of_block, len(sizes) - 1), inverted(slot, num_blocks * CPU_BLOCK), slot)


def _blocked_products(rows, bank, sizes, transposed=False):
    blocks = _blocks(len(rows), sizes)
    filled = take(rows, blocks.source).reshape(len(blocks.group), CPU_BLOCK, -1)
    products = _dot("nbq,npq->nbp" if transposed else "nbp,npq->nbq", filled, bank[blocks.group])
    return take(products.reshape(-1, products.shape[-1]), blocks.slot).astype(rows.dtype)


def _blocked_outer_products(rows, slope, sizes):
    blocks = _blocks(len(rows), sizes)
    left, right = (take(each, blocks.source).reshape(len(blocks.group), CPU_BLOCK, -1) for each in (rows, slope))
    return jax.ops.segment_sum(_dot("nbp,nbq->npq", left, right), blocks.group, len(sizes))


# The GPU's kernels


def _products(rows, bank, sizes, transposed=False, interpret=False):
    """A program makes ROW_BLOCK x BLOCK results; it adds, for each group that reaches into its rows, the product of
    those rows with the group's matrix, the others masked.
    """
    num_rows, inner = rows.shape
    num_groups, outer = bank.shape[0], bank.shape[1 if transposed else 2]
    k_block, n_block = _block(inner), _block(outer)

    def kernel(bounds_ref, rows_ref, bank_ref, out_ref):
        first, column = pl.program_id(0) * ROW_BLOCK, pl.ds(pl.program_id(1) * n_block, n_block)
        here, row = pl.ds(first, ROW_BLOCK), first + jnp.arange(ROW_BLOCK)

        def add_group(group, total):
            start, end = bounds_ref[group], bounds_ref[group + 1]
            mine = (row >= start) & (row < end)
            reaches = (start < first + ROW_BLOCK) & (end > first) & (end > start)

            def add_block(k, total):
                depth = pl.ds(k * k_block, k_block)
                left = triton.load(rows_ref.at[here, depth], mask=mine[:, None], other=0)
                right = bank_ref[group, column, depth] if transposed else bank_ref[group, depth, column]
                return total + triton.dot(left, right, trans_b=transposed, allow_tf32=False)

            depth = jnp.where(reaches, jnp.int32(inner // k_block), jnp.int32(0))
            return jax.lax.fori_loop(jnp.int32(0), depth, add_block, total)

        total = jnp.zeros((ROW_BLOCK, n_block), jnp.float32)
        total = jax.lax.fori_loop(0, num_groups, add_group, total)
        triton.store(out_ref.at[here, column], total.astype(out_ref.dtype), mask=(row < num_rows)[:, None])

    grid = (pl.cdiv(num_rows, ROW_BLOCK), outer // n_block)
    shape = jax.ShapeDtypeStruct((num_rows, outer), rows.dtype)
    return pl.pallas_call(kernel, grid=grid, out_shape=shape, compiler_params=TRITON, interpret=interpret)(
        _bounds(sizes), rows, bank
    )


def _outer_products(rows, slope, sizes, interpret=False):
    """out[g] = rows of g, transposed, times slope of g: a program makes one block of one group's matrix."""
    inner, outer = rows.shape[1], slope.shape[1]
    k_block, n_block = _block(inner), _block(outer)

    def kernel(bounds_ref, rows_ref, slope_ref, out_ref):
        group = pl.program_id(0)
        depth = pl.ds(pl.program_id(1) * k_block, k_block)
        column = pl.ds(pl.program_id(2) * n_block, n_block)
        start, end = bounds_ref[group], bounds_ref[group + 1]

        def add_rows(block, total):
            row = block * ROW_BLOCK + jnp.arange(ROW_BLOCK)
            mine, here = ((row >= start) & (row < end))[:, None], pl.ds(block * ROW_BLOCK, ROW_BLOCK)
            left = triton.load(rows_ref.at[here, depth], mask=mine, other=0)
            right = triton.load(slope_ref.at[here, column], mask=mine, other=0)
            return total + triton.dot(left, right, trans_a=True, allow_tf32=False)

        total = jnp.zeros((k_block, n_block), jnp.float32)
        blocks = start // ROW_BLOCK, jnp.where(end > start, pl.cdiv(end, ROW_BLOCK), 0)
        out_ref[group, depth, column] = jax.lax.fori_loop(*blocks, add_rows, total)

    shape = jax.ShapeDtypeStruct((len(sizes), inner, outer), jnp.float32)
    grid = (len(sizes), inner // k_block, outer // n_block)
    return pl.pallas_call(kernel, grid=grid, out_shape=shape, compiler_params=TRITON, interpret=interpret)(
        _bounds(sizes), rows, slope
    )


def _bounds(sizes):
    """Where each group starts, and where the last one ends."""
    return jnp.concatenate([jnp.zeros(1, sizes.dtype), jnp.cumsum(sizes)])


def _block(size):
    """The largest power of two up to BLOCK that divides `size`."""
    return min(BLOCK, size & -size)
