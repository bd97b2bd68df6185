"""Machines by name: what XLA must know to compile for them, and what a roofline must know to time them.

A target is written `chip:shape`. GPUs: slices x hosts x devices of a host (`gb200:11x16x4` is 11 racks of 64). TPUs:
the torus (`v5p:4x4x4`; one `tpu7x` chip is two devices). `cpu:8`: virtual devices of this machine, the only ones that
could also run. JAX is not imported here.

Peaks are dense bfloat16 without sparsity, links are one direction, all of vendors' data sheets. Prices are round list
prices of an hour of one device, to compare plans with; a contract's are other ones, so every report lets one be given.
Memory of the GB200: the device size with which XLA was described and the pool of 138.2 GiB are the public run's (Marin,
#8435), whose other fields of XLA's cost model were left at those of an H100: they steer choices, not correctness.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from typing import Literal

from noonsight.model.config import ModelConfig

GIB = 2**30
MEMORY_SHARE = 0.75
"""What JAX's allocator takes of a GPU unless told otherwise; the public run kept it (Marin, #8435)."""

Platform = Literal["cuda", "tpu", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One device as JAX counts devices. Sizes in bytes, rates in bytes or FLOPs per second, price in dollars an hour."""

    name: str
    title: str
    platform: Platform
    memory: int
    budget: int  # what a program may use
    bandwidth: float  # of the device's memory
    peak: float  # dense bfloat16
    link: float  # to the devices of its island, all links together
    network: float  # to all others
    host_link: float
    price: float
    dims: tuple[int, ...] = (3,)  # how many numbers a shape may have
    capability: tuple[int, int] = (0, 0)
    cores: int = 0
    devices_per_chip: int = 1
    island_of_host: bool = False  # the fast links end at the host, not at the slice


def _gpu(
    name: str,
    title: str,
    memory: int,
    peak: float,
    link: float,
    price: float,
    *,
    bandwidth: float = 8e12,
    host_link: float = 55e9,
    budget: int | None = None,
    capability: tuple[int, int] = (10, 0),
    cores: int = 148,
    rack: bool = False,
) -> Chip:
    return Chip(
        name=name,
        title=title,
        platform="cuda",
        memory=memory,
        budget=budget or int(MEMORY_SHARE * memory),
        bandwidth=bandwidth,
        peak=peak,
        link=link,
        network=50e9,
        host_link=host_link,
        price=price,
        capability=capability,
        cores=cores,
        island_of_host=not rack,
    )


def _tpu(
    name: str,
    memory: int,
    bandwidth: float,
    peak: float,
    link: float,
    price: float,
    *,
    dims: int = 3,
    devices_per_chip: int = 1,
) -> Chip:
    return Chip(
        name=name,
        title=f"TPU {name.removeprefix('tpu')}",
        platform="tpu",
        memory=memory,
        budget=int(0.97 * memory),  # the runtime keeps a little for itself
        bandwidth=bandwidth,
        peak=peak,
        link=link,
        network=12.5e9,
        host_link=16e9,
        price=price,
        dims=(dims,),
        devices_per_chip=devices_per_chip,
    )


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _gpu(
            *("gb200", "NVIDIA GB200", 197_000_000_000, 2.5e15, 900e9, 10.5),
            host_link=225e9,
            budget=int(138.2 * GIB),
            cores=152,
            rack=True,
        ),
        _gpu("b200", "NVIDIA B200", 192_265_847_000, 2.25e15, 900e9, 8.6),
        _gpu(
            *("h200", "NVIDIA H200", 150_754_820_096, 989.4e12, 450e9, 6.3),
            bandwidth=4.8e12,
            capability=(9, 0),
            cores=132,
        ),
        _gpu(
            *("h100", "NVIDIA H100 80GB HBM3", 84_978_434_048, 989.4e12, 450e9, 6.2),
            bandwidth=3.352e12,
            capability=(9, 0),
            cores=132,
        ),
        _tpu("v4", 32 * GIB, 1.23e12, 275e12, 6 * 45e9, 3.2),
        _tpu("v5p", 95 * GIB, 2.77e12, 459e12, 6 * 90e9, 4.2),
        _tpu("v5e", 16 * GIB, 0.82e12, 197e12, 4 * 45e9, 1.2, dims=2),
        _tpu("v6e", 32 * GIB, 1.64e12, 918e12, 4 * 90e9, 2.7, dims=2),
        _tpu("tpu7x", 96 * GIB, 3.69e12, 1_153e12, 3 * 90e9, 6.0, devices_per_chip=2),  # half a chip each
        Chip(
            name="cpu",
            title="virtual devices of this machine",
            platform="cpu",
            memory=16 * GIB,
            budget=16 * GIB,
            bandwidth=2e10,
            peak=1e11,
            link=1e10,
            network=1e10,
            host_link=1e10,
            price=0.0,
            dims=(1,),
        ),
    )
}
ALIASES = {"7x": "tpu7x", "v7x": "tpu7x", "tpu-v4": "v4", "tpu-v5p": "v5p", "tpu-v5e": "v5e", "tpu-v6e": "v6e"}
EXAMPLES = {
    **{"gb200": "gb200:11x16x4", "b200": "b200:2x8x8", "h200": "h200:2x8x8", "h100": "h100:2x8x8", "v4": "v4:8x16x16"},
    **{"v5p": "v5p:8x8x16", "v5e": "v5e:16x16", "v6e": "v6e:16x16", "tpu7x": "tpu7x:4x4x4", "cpu": "cpu:8"},
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """So many of one chip, in this shape."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        return f"{self.chip.name}:{self.topology}"

    @property
    def topology(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape) * self.chip.devices_per_chip

    @property
    def island(self) -> int:
        """Devices that the fast links join: a rack, a torus, or one host."""
        return self.shape[-1] if self.chip.island_of_host else self.num_devices // self.num_slices

    @property
    def num_slices(self) -> int:
        """Parts between which there is only the data-centre network."""
        return self.shape[0] if self.chip.platform == "cuda" else 1


def parse(text: str) -> Target:
    """The target that `text` names. Raises ValueError with the nearest name and the list of them."""
    name, _, shape = text.strip().lower().removeprefix("tpu:").partition(":")
    name = ALIASES.get(name, name)
    known = ", ".join(EXAMPLES.values())
    if name not in CHIPS:
        near = difflib.get_close_matches(name, [*CHIPS, *ALIASES], n=1, cutoff=0.5)
        nearest = f"; did you mean {EXAMPLES[ALIASES.get(near[0], near[0])]}?" if near else "."
        raise ValueError(f"the target {text!r} names no machine that is known{nearest} Targets look like {known}.")
    chip = CHIPS[name]
    sizes = tuple(int(part) for part in shape.split("x")) if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) else ()
    if len(sizes) not in chip.dims:
        wanted = {"cuda": "slices x hosts x devices of a host", "tpu": "the sides of its torus", "cpu": "a number"}
        raise ValueError(
            f"the target {text!r} needs a shape after the colon, {wanted[chip.platform]}, such as {EXAMPLES[name]}. "
            f"Targets look like {known}."
        )
    return Target(chip=chip, shape=sizes)


def mesh_sizes(target: Target, config: ModelConfig, *, context: int = 1) -> dict[str, int]:
    """Mesh axis -> size: slices are replicas; of the devices of an island, as many as divide the experts evenly share
    them (`expert`), what is left over of the slice splits data.

    `context` devices share each sequence. Raises ValueError when it does not divide the devices of an island.
    """
    if target.island % context:
        raise ValueError(
            f"context {context} does not divide the {target.island} devices that the links of {target.name} join; "
            "take a divisor"
        )
    here = target.num_devices // target.num_slices // context
    expert = math.gcd(target.island // context, config.num_experts) if config.is_moe else 1
    return {"replica": target.num_slices, "data": here // expert, "expert": expert, "model": 1, "context": context}


def describe_gpu(chip: Chip, beside: int = 0) -> str:
    """XLA's `GpuTargetConfigProto` in text form, with `beside` bytes more of memory: so much of what the program is given
    lies on the host in truth, and the compiler, which counts it, shall not recompute or reorder to make room for it.
    """
    major, minor = chip.capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048  core_count: {chip.cores}  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98
  device_memory_size: {chip.memory + beside}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 13 }}
device_description_str: "{chip.title}"
"""


def environment(target: Target) -> dict[str, str]:
    """Variables that must be set before JAX is imported. Real accelerators are never looked for."""
    told = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "NOONSIGHT_KERNELS": "xla"}
    if target.chip.platform == "tpu":
        told |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
        told |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # two rehearsals at a time: there is no TPU to fight for
    if target.chip.platform == "cpu":
        told["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={target.num_devices}"
    return told
