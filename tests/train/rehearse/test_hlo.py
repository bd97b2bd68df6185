"""What a compiled program sends, read from its text: held against programs whose collectives are known."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from noonsight.train.rehearse.hlo import UnknownTrips, collectives, largest, looped

MESH = {"replica": 2, "data": 2, "expert": 2}


def text_of(local, *shapes, spec=PartitionSpec(("replica", "data", "expert"))):
    """The optimised text of a function of one device's rows, on the mesh of eight."""
    import numpy as np

    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), tuple(MESH))
    whole = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for shape in shapes]
    return jax.jit(whole).lower(*arrays).compile().as_text()


@pytest.mark.parametrize("axes", [("expert",), ("data",), ("replica",), ("replica", "expert"), ("data", "expert")])
def test_a_collective_is_told_by_its_axes(axes):
    text = text_of(lambda x: x + jax.lax.psum(jnp.sin(x), axes), (64, 128))
    (row,) = collectives(text, MESH)
    assert (row.kind, row.axes, row.group, row.count) == ("all-reduce", " x ".join(axes), 2 ** len(axes), 1)
    assert row.bytes_per_device == 8 * 128 * 4
    assert row.wire_bytes == pytest.approx(2 * (row.group - 1) / row.group * row.bytes_per_device)


def test_loops_are_multiplied_out_also_inside_each_other():
    def local(x):
        def inner(x, _):
            return jnp.sin(jax.lax.all_to_all(x, "expert", 0, 0, tiled=True)), None

        def outer(x, _):
            x, _ = jax.lax.scan(inner, x, None, length=5)
            return x + jnp.tile(jax.lax.all_gather(x, "data", tiled=True), (1, 1))[:8], None

        return jax.lax.scan(outer, x, None, length=3)[0]

    found = {row.kind: row for row in collectives(text_of(local, (64, 128)), MESH)}
    assert (found["all-to-all"].count, found["all-to-all"].bytes_per_device) == (15, 15 * 8 * 128 * 4)
    assert (found["all-gather"].count, found["all-gather"].bytes_per_device) == (3, 3 * 16 * 128 * 4)
    assert found["all-gather"].axes == "data" and found["all-to-all"].axes == "expert"


def test_a_loop_that_does_not_say_how_often_is_named():
    def local(x):
        return jax.lax.while_loop(lambda x: x.sum() < 1e9, lambda x: x + jax.lax.psum(x, "expert"), x)

    with pytest.raises(UnknownTrips, match="does not say how often it runs"):
        collectives(text_of(local, (64, 128)), MESH)


def test_of_a_conditional_the_branch_that_sends_most_counts():
    def local(x):
        def much(x):
            return x + jax.lax.psum(jnp.sin(x), "expert")

        return jax.lax.cond(jax.lax.axis_index("data") == 0, much, jnp.cos, x)

    (row,) = collectives(text_of(local, (64, 128)), MESH)
    assert (row.kind, row.count) == ("all-reduce", 1)


STARTED = """HloModule step

ENTRY %main (p: f32[8,4]) -> f32[64,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %s = (f32[8,4]{1,0}, f32[64,4]{1,0}) all-gather-start(%p), replica_groups=[1,8]<=[8], dimensions={0}
  %r = f32[8,4]{1,0} collective-permute(%p), source_target_pairs={{0,4},{4,0},{1,5},{5,1}}
  %m = (f32[8]{0}, f32[2,4]{1,0}) all-reduce-start(%a, %b), replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}, use_global_device_ids=true, to_apply=%add
  ROOT %d = f32[64,4]{1,0} all-gather-done(%s)
}
"""


def test_what_an_accelerator_writes_is_read_too():
    """Started and done apart, groups as tiles and as a mesh: forms that the CPU's compiler does not write."""
    found = {row.kind: row for row in collectives(STARTED, MESH)}
    assert (found["all-gather"].axes, found["all-gather"].bytes_per_device) == ("replica x data x expert", 64 * 4 * 4)
    assert (found["collective-permute"].axes, found["collective-permute"].wire_bytes) == ("replica", 8 * 4 * 4)
    assert (found["all-reduce"].axes, found["all-reduce"].group) == ("data x expert", 4)
    assert found["all-reduce"].bytes_per_device == 8 * 4 + 8 * 4
    with pytest.raises(ValueError, match="no ENTRY"):
        collectives("HloModule nothing", MESH)


def test_the_largest_and_what_loops_carry():
    def local(x):
        _, kept = jax.lax.scan(lambda x, _: (jnp.sin(x), x), x, None, length=6)
        return kept.sum(0)

    text = text_of(local, (64, 128))
    assert any(held.dims == (6, 8, 128) for held in looped(text, 6)) and not looped(text, 7)
    held = largest(text, 3)
    assert all(math.prod(each.dims) * 4 == each.bytes for each in held if each.shape.startswith("f32"))
    assert [each.bytes for each in held] == sorted((each.bytes for each in held), reverse=True)
