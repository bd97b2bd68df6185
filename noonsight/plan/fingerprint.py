"""Identity of a result: what it was made from, as one short hash and as the parts that can be named when they move.

    fingerprint = xxh3-128 of canonical JSON (name, version, function, config, fingerprints of the inputs, code)

`code` is the source closure: in the function's own module the definitions that the function reaches by name, and every
file of ours that their imports reach, transitively. So an edit elsewhere in a long module moves nothing, and no edit
that could change the result goes unseen. The office itself (`noonsight.plan`) starts stages and computes nothing, so
it is left out. Placement, paths and times never enter.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import xxhash

import noonsight
from noonsight.logbook import record
from noonsight.plan.stage import Function

COMPILED = (".cc", ".h")  # sources beside a package that the package builds into a library
EXPERIMENT_MODULE = "noonsight_experiment_file"  # the name under which an experiment file is loaded


def fingerprint(run: record.Run) -> str:
    """Hash of everything in `run` that makes its result what it is, in hex."""
    inputs = {name: source["fingerprint"] for name, source in run.inputs.items()}
    parts = [run.name, run.version, run.function, run.config, inputs, run.code]
    return xxhash.xxh3_128_hexdigest(record.encode(parts))


def canonical(config: Any) -> dict[str, Any]:
    """The config as JSON values. Raises ValueError unless the same config can be built again from them."""
    kind = type(config)
    try:
        values = msgspec.json.decode(record.encode(config))
        if rebuild(values, kind) != config:
            raise TypeError("a value comes back as another one")
    except (TypeError, ValueError, NameError, msgspec.MsgspecError) as error:
        raise ValueError(
            f"config {kind.__name__} cannot be written down and read back: {error}. Use literals, tuples and nested "
            "frozen dataclasses, finite numbers only, and import the types of its fields outside `if TYPE_CHECKING`."
        ) from None
    return values


def rebuild(values: dict[str, Any], kind: type) -> Any:
    """The config of type `kind` from its JSON values."""
    return msgspec.convert(values, kind)


def moved(old: record.Run, new: record.Run) -> list[str]:
    """What differs between two runs of one address, one line each: config fields with both values, inputs, files."""
    lines = [f"config.{path}: {left} -> {right}" for path, left, right in _differences(old.config, new.config)]
    if old.function != new.function:
        lines.append(f"function: {old.function} -> {new.function}")
    for name in sorted(old.inputs.keys() | new.inputs.keys()):
        left, right = old.inputs.get(name), new.inputs.get(name)
        if left is None or right is None:
            lines.append(f"input {name}: {'added' if left is None else 'removed'}")
        elif left["stage"] != right["stage"]:
            lines.append(f"input {name}: {left['stage']} -> {right['stage']}")
        elif left["fingerprint"] != right["fingerprint"]:
            lines.append(f"input {name}: {right['stage']} is not the one it was made from")
    for file in sorted(old.code.keys() | new.code.keys()):
        if old.code.get(file) != new.code.get(file):
            word = "is new" if file not in old.code else "is gone" if file not in new.code else "changed"
            lines.append(f"code {file} {word}")
    if old.prediction_hash and new.prediction_hash and old.prediction_hash != new.prediction_hash:
        lines.append(f"prediction: {old.prediction_hash[:12]} -> {new.prediction_hash[:12]}")
    return lines


def source_closure(function: Function, experiment_file: Path) -> dict[str, str]:
    """Files of ours that `function` depends on -> xxh3 of their source (of its own module: of what it reaches)."""
    name = function.__module__
    entry = Path(sys.modules[name].__file__ or "")
    roots = _roots(name, entry, experiment_file)
    digest, imports = _reached(entry.read_text(encoding="utf-8"), function.__qualname__, _package(name, entry))
    code = {_label(name, entry, experiment_file): digest}
    waiting, seen = sorted(imports), {name}
    while waiting:
        module = waiting.pop()
        if module in seen or module.startswith("noonsight.plan") or (path := _locate(module, roots)) is None:
            continue
        seen.add(module)
        text = path.read_text(encoding="utf-8")
        label = _label(module, path, experiment_file)
        code[label] = xxhash.xxh3_128_hexdigest(text.encode())
        if path.name == "__init__.py":  # a package that builds a library from the sources beside it
            for source in sorted(each for each in path.parent.iterdir() if each.suffix in COMPILED):
                code[f"{label.removesuffix('__init__.py')}{source.name}"] = xxhash.xxh3_128_hexdigest(
                    source.read_bytes()
                )
        waiting.extend(_imports(text, _package(module, path)))
    return code


def _roots(name: str, entry: Path, experiment_file: Path) -> list[tuple[str | None, Path]]:
    """(first part of the module name or None for any, folder to look in): the places where our own source lies."""
    roots: list[tuple[str | None, Path]] = [("noonsight", Path(noonsight.__file__).parent.parent)]
    if name != EXPERIMENT_MODULE:
        depth = len(name.split(".")) - (entry.name != "__init__.py")
        roots.append((name.split(".")[0], entry.resolve().parents[depth]))
    return [*roots, (None, experiment_file.resolve().parent)]


def _locate(module: str, roots: list[tuple[str | None, Path]]) -> Path | None:
    first, *_ = parts = module.split(".")
    for top, folder in roots:
        if top is None or top == first:
            stem = folder.joinpath(*parts)
            for path in (stem.with_name(stem.name + ".py"), stem / "__init__.py"):
                if path.is_file():
                    return path
    return None


def _label(module: str, path: Path, experiment_file: Path) -> str:
    if module == EXPERIMENT_MODULE:
        return experiment_file.name
    stem = module.replace(".", "/")
    return f"{stem}/__init__.py" if path.name == "__init__.py" else f"{stem}.py"


def _package(module: str, path: Path) -> str:
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


@functools.lru_cache(maxsize=4096)
def _imports(text: str, package: str) -> frozenset[str]:
    return frozenset(module for node in ast.walk(ast.parse(text)) for module, _ in _bindings(node, package))


@functools.lru_cache(maxsize=4096)
def _reached(text: str, function: str, package: str) -> tuple[str, frozenset[str]]:
    """(hash of the top-level statements that `function` reaches by name, modules that those import)."""
    body = ast.parse(text).body
    makers: dict[str, list[ast.stmt]] = {}
    always = []
    for statement in body:
        names = list(_defined(statement, package))
        for name in names:
            makers.setdefault(name, []).append(statement)
        if not names and not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            always.append(statement)
    kept: dict[int, ast.stmt] = {}
    waiting = [*always, *makers.get(function.split(".")[0], [])]
    while waiting:
        statement = waiting.pop()
        if statement.lineno in kept:
            continue
        kept[statement.lineno] = statement
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                waiting.extend(makers.get(node.id, []))
    lines = text.splitlines()
    source = []
    for line, statement in sorted(kept.items()):
        first = min([line, *(each.lineno for each in getattr(statement, "decorator_list", []))])
        source.append("\n".join(lines[first - 1 : statement.end_lineno]))
    nodes = [node for statement in kept.values() for node in ast.walk(statement)]
    modules = frozenset(module for node in nodes for module, _ in _bindings(node, package))
    return xxhash.xxh3_128_hexdigest("\n".join(source).encode()), modules


def _defined(statement: ast.stmt, package: str) -> Iterator[str]:
    """Names that a top-level statement defines, where it can be left out when nobody uses them."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if all(isinstance(target, ast.Name) for target in targets):
            yield from (target.id for target in targets if isinstance(target, ast.Name))
    elif not isinstance(statement, ast.ImportFrom) or statement.names[0].name != "*":
        yield from (bound for _, bound in _bindings(statement, package))


def _bindings(node: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """(module, name it is bound to) for each module that an import statement may load, parents included."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            for module in _parents(alias.name):
                yield module, alias.asname or alias.name.split(".")[0]
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        source = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            for module in _parents(f"{source}.{alias.name}"):
                yield module, alias.asname or alias.name


def _parents(module: str) -> Iterator[str]:
    parts = module.split(".")
    yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted(old.keys() | new.keys()):
            inner = f"{path}.{name}" if path else name
            if name in old and name in new:
                yield from _differences(old[name], new[name], inner)
            else:
                yield inner, _short(old.get(name, "absent")), _short(new.get(name, "absent"))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (left, right) in enumerate(zip(old, new)):
            yield from _differences(left, right, f"{path}[{index}]")
    elif record.encode(old) != record.encode(new):
        yield path, _short(old), _short(new)


def _short(value: Any) -> str:
    text = value if value == "absent" else record.encode(value).decode()
    return text if len(text) <= 40 else text[:37] + "..."
