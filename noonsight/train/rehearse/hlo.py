"""What one device's optimised program holds and sends, read from its HLO text. JAX is not imported here.

Collectives are counted from the entry computation down, loops multiplied out by their trip counts; of a conditional
the branch that sends most counts. Bytes are those of results on one device. On the wire, with g devices in a group:
all-gather, all-to-all and ragged-all-to-all send (g-1)/g of the result, all-reduce 2(g-1)/g, reduce-scatter (g-1)
times its result, collective-permute all of it. Of a ragged-all-to-all the result is the room to receive, not the
traffic.

A group is told as mesh axes: those along which the coordinates of its members differ.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_SIZE = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
}
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_ON_HOST = re.compile(r"\b[a-z]+\d*\w*\[[\d,]*\]\{[^}]*S\(5\)[^}]*\}")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\(")
_TRIPS = re.compile(r'known_trip_count":?\s*\{"?n"?:\s*"?(\d+)')
_CALLEES = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "conditional", "iota")


class UnknownTrips(ValueError):
    """A loop sends something and does not say how often it runs."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One kind of collective along the same mesh axes: how often one device runs it in a step, and its results' bytes."""

    kind: str
    axes: str  # "data x expert", or "?" where the groups are in a form that is not read
    group: int
    count: int
    bytes_per_device: int

    @property
    def wire_bytes(self) -> float:
        """What leaves one device."""
        share = (self.group - 1) / max(self.group, 1)
        factor = {"all-reduce": 2 * share, "reduce-scatter": self.group - 1, "collective-permute": 1.0}
        return factor.get(self.kind, share) * self.bytes_per_device


@dataclass(frozen=True, kw_only=True)
class Held:
    """A result of the program: its type without layout, bytes, and where it comes from."""

    shape: str
    dims: tuple[int, ...]
    bytes: int
    opcode: str
    source: str  # the op_name of its metadata
    copies: int = 1  # instructions with the same shape and source


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """Every collective of the program `text` over `mesh` (axis -> size), those that send most first.

    Raises UnknownTrips when a loop without a trip count holds one.
    """
    blocks, entry = _blocks(text)

    @functools.cache
    def totals(name: str) -> Mapping[tuple[str, str, int], tuple[int, int]]:
        found: dict[tuple[str, str, int], tuple[int, int]] = {}
        for line in blocks.get(name, ()):
            for key, (count, size) in _of_line(line, blocks, mesh, totals).items():
                before = found.get(key, (0, 0))
                found[key] = (before[0] + count, before[1] + size)
        return found

    rows = [
        Collective(kind=kind, axes=axes, group=group, count=count, bytes_per_device=size)
        for (kind, axes, group), (count, size) in totals(entry).items()
        if group > 1  # a group of one sends nothing
    ]
    return sorted(rows, key=lambda row: -row.bytes_per_device)


def largest(text: str, number: int = 8) -> list[Held]:
    """The largest results in the program, equal ones told once. They do not all live at the same time."""
    found: dict[tuple[str, str], Held] = {}
    for held in results(text):
        known = found.get((held.shape, held.source))
        copies = known.copies + 1 if known else 1
        found[held.shape, held.source] = Held(**{**vars(held), "copies": copies})
    return sorted(found.values(), key=lambda held: -held.bytes)[:number]


def results(text: str) -> Iterator[Held]:
    """Every array that some instruction makes on the device; inside fusions nothing is kept, so nothing is told."""
    blocks, _ = _blocks(text)
    fused = {
        callee for lines in blocks.values() for line in lines if " fusion(" in line for callee in _CALLEES.findall(line)
    }
    for name, lines in blocks.items():
        if name in fused:
            continue
        for line in lines:
            made = _INSTRUCTION.match(line)
            if made is None or made[3] in _FREE:
                continue
            source = re.search(r'op_name="([^"]*)"', line)
            for kind, dims in _ARRAY.findall(_ON_HOST.sub("", made[2])):
                if kind in _SIZE:
                    yield _held(kind, dims, made[3], source[1] if source else "")


def looped(text: str, turns: int) -> list[Held]:
    """What loops of so many turns carry from one to the next: the arrays of each loop's tuple, `source` the loop."""
    blocks, found = _blocks(text)[0], []
    for lines in blocks.values():
        for line in lines:
            made = _INSTRUCTION.match(line)
            if made is not None and made[3] == "while" and _trips(line, blocks) == turns:
                arrays = [(kind, dims) for kind, dims in _ARRAY.findall(made[2]) if kind in _SIZE]
                found += [_held(kind, dims, "while", made[1]) for kind, dims in arrays]
    return found


def _held(kind: str, dims: str, opcode: str, source: str) -> Held:
    sizes = tuple(int(part) for part in dims.split(",") if part)
    return Held(shape=f"{kind}[{dims}]", dims=sizes, bytes=_SIZE[kind] * math.prod(sizes), opcode=opcode, source=source)


def _blocks(text: str) -> tuple[dict[str, list[str]], str]:
    """Computation -> its lines, and the name of the entry."""
    blocks: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name = head[2]
            blocks[name] = []
            entry = name if head[1] else entry
        elif name:
            blocks[name].append(line)
    if not entry:
        raise ValueError("this text holds no ENTRY computation, so it is no HLO module")
    return blocks, entry


def _of_line(
    line: str, blocks: Mapping, mesh: Mapping[str, int], totals
) -> dict[tuple[str, str, int], tuple[int, int]]:
    """What one instruction sends, with all that it calls."""
    made = _INSTRUCTION.match(line)
    if made is None:
        return {}
    opcode = made[3].removesuffix("-start")
    if opcode in KINDS:
        axes, group = _groups(line, mesh)
        return {(opcode, axes, group): (1, _moved(made[2], opcode, started=opcode != made[3]))}
    if opcode == "while":
        body = re.search(r"body=%?([\w.\-]+)", line)
        inside = totals(body[1]) if body else {}
        times = _known_trips(line, blocks) if inside else 1
        return {key: (count * times, size * times) for key, (count, size) in inside.items()}
    if opcode == "conditional":
        branches = [totals(name) for name in _branches(line)]
        return dict(max(branches, key=lambda branch: sum(size for _, size in branch.values()), default={}))
    if made[3].endswith(("-done", "-update")):  # its start has counted
        return {}
    called: dict[tuple[str, str, int], tuple[int, int]] = {}
    for callee in _CALLEES.findall(line):
        called |= totals(callee)
    return called


def _branches(line: str) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", line)
    if listed:
        return re.findall(r"[\w.\-]+", listed[1])
    return re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line)


def _trips(line: str, blocks: Mapping[str, Sequence[str]]) -> int | None:
    """How often a loop runs: as annotated, or the one constant that its condition holds the counter against."""
    if told := _TRIPS.search(line):
        return int(told[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    lines = list(blocks.get(condition[1], ())) if condition else []
    lines += [inner for each in lines for callee in _CALLEES.findall(each) for inner in blocks.get(callee, ())]
    limits = {int(found[1]) for each in lines if (found := re.search(r"= [su]\d+\[\]\S* constant\((\d+)\)", each))}
    if len(limits) == 1 and sum("direction=LT" in each for each in lines) == 1:
        return limits.pop()
    return None


def _known_trips(line: str, blocks: Mapping[str, Sequence[str]]) -> int:
    if (times := _trips(line, blocks)) is not None:
        return times
    name = line.split("=")[0].strip()
    raise UnknownTrips(
        f"the loop {name} sends something and does not say how often it runs, so its bytes cannot be counted; make it a "
        "lax.scan or a fori_loop with fixed bounds"
    )


def _moved(result: str, kind: str, *, started: bool) -> int:
    """Bytes of a collective's results. A "-start" of any kind but all-reduce lists (operands, results, ...)."""
    parts = _elements(result)
    if started and kind != "all-reduce" and len(parts) > 1:
        result = parts[1]
    return sum(
        _SIZE[name] * math.prod(int(n) for n in dims.split(",") if n)
        for name, dims in _ARRAY.findall(result)
        if name in _SIZE
    )


def _elements(result: str) -> list[str]:
    """The elements of a tuple type; a type that is no tuple is its own only element."""
    if not result.startswith("("):
        return [result]
    parts, depth, start = [], 0, 1
    for at, letter in enumerate(result):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        if (letter == "," and depth == 1) or depth == 0:
            parts.append(result[start:at].strip())
            start = at + 1
            if depth == 0:
                break
    return parts


def _groups(line: str, mesh: Mapping[str, int]) -> tuple[str, int]:
    """(the mesh axes along which the groups of a collective run, devices in a group)."""
    members = _first_group(line, mesh)
    if members is None:
        return "?", math.prod(mesh.values())
    places = [_coordinates(device, mesh) for device in members]
    axes = [axis for axis in mesh if len({place[axis] for place in places}) > 1]
    size = math.prod(mesh[axis] for axis in axes)
    if "source_target_pairs=" in line:
        return " x ".join(axes) or "none", size
    # A group that is only a part of an axis (a halving step, say) is told by its own size.
    return " x ".join(axes) or "none", len(members)


def _first_group(line: str, mesh: Mapping[str, int]) -> list[int] | None:
    """Devices of one group, by their number in the mesh; None where the form is not known."""
    everyone = list(range(math.prod(mesh.values())))
    if pairs := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", line):
        return [int(pairs[1]), int(pairs[2])]
    if "replica_groups={}" in line:
        return everyone
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return [int(part) for part in listed[1].split(",")]
    if tiled := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        return _iota(tiled[2], tiled[3])[: int(tiled[1].split(",")[-1])]
    if named := re.search(
        r"replica_groups=\{?mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?(.*)", line
    ):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", named[1])}
        chosen = re.search(r"\{((?:'[^']+'(?:, ?)?)+)\}", named[4])
        if chosen is None:
            return None
        if named[2]:
            everyone = _iota(named[2], named[3])
        over = set(re.findall(r"'([^']+)'", chosen[1]))
        return [
            device
            for at, device in enumerate(everyone)
            if all(axis in over or not place for axis, place in _coordinates(at, sizes).items())
        ]
    return None


def _iota(shape: str, order: str | None) -> list[int]:
    """The devices that `[4,2]T(1,0)` names, in one row."""
    dims = [int(part) for part in shape.split(",")]
    return _transposed(dims, [int(part) for part in order.split(",")] if order else range(len(dims)))


def _transposed(dims: Sequence[int], order: Sequence[int]) -> list[int]:
    """0 .. prod(dims) - 1 in the shape `dims`, with its dims in another order, in one row."""
    strides = [math.prod(dims[at + 1 :]) for at in range(len(dims))]
    found = [0]
    for at in order:
        found = [value + step * strides[at] for value in found for step in range(dims[at])]
    return found


def _coordinates(device: int, mesh: Mapping[str, int]) -> dict[str, int]:
    places = {}
    for axis in reversed(mesh):
        device, places[axis] = divmod(device, mesh[axis])
    return places
