"""The house of docs/architecture.md, held: imports run downwards, modules are small and say what they hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import elastable

ROOT = Path(__file__).parents[1]
OURS = ("elastable", "benchmarks", "examples", "tests")
FOLDERS = ("embedding_store", "master", "worker", "replicas")

#: What the modules of a package may import of ours; a name allows what is in it.
ALLOWED = {
    "embedding_store": ("elastable.embedding_store",),
    "master": ("elastable.embedding_store", "elastable.master"),
    # Of the master a worker knows what both say to each other, and the order of records; never its state.
    "worker": (
        "elastable.embedding_store",
        "elastable.master.api",
        "elastable.master.client",
        "elastable.master.record_order",
        "elastable.master.v1",
        "elastable.worker",
    ),
    # Replicas have no master; they write checkpoints in a job's format, and read records in a job's order.
    "replicas": (
        "elastable.embedding_store",
        "elastable.master.api",
        "elastable.master.checkpoints",
        "elastable.master.progress",
        "elastable.master.record_order",
        "elastable.worker",
        "elastable.replicas",
    ),
    "elastable": ("elastable",),
}
NEVER_IN_THE_STORE = ("tensorflow", "keras", "tf_keras", "torch", "jax")
LONGEST_MODULE = 400


def modules(package: str) -> list[Path]:
    """Hand-written modules of a package."""
    found = (path for path in (ROOT / package).rglob("*.py") if "v1" not in path.parent.parts)
    # elastable/ links to the other packages, so that all are imported as elastable.*; they are listed under their own.
    return sorted(path for path in found if path.resolve().relative_to(ROOT).parts[0] == package)


def imported(path: Path) -> Iterator[str]:
    """Dotted names that a module imports, wherever in it; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where it goes"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, allowed: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in allowed)


EVERY_MODULE = [path for package in ALLOWED for path in modules(package)]
named = pytest.mark.parametrize("path", EVERY_MODULE, ids=lambda path: str(path.relative_to(ROOT)))


def module_of(path: Path) -> str:
    """Dotted name of a module of ours."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts if parts[0] == "elastable" else ("elastable", *parts))
    return name.removesuffix(".__init__")


MODULES = {module_of(path): path for path in EVERY_MODULE}


def needed(path: Path) -> dict[str, int]:
    """What a module imports of ours when it runs, at its top or inside a function -> the line that says so."""
    found: dict[str, int] = {}
    unseen: list[ast.AST] = [ast.parse(path.read_text())]
    while unseen:
        node = unseen.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            unseen.extend(node.orelse)
            continue
        unseen.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in whole]
        else:
            continue
        for name in names:
            if name in MODULES:
                found.setdefault(name, node.lineno)
    return found


IMPORTS = {name: needed(path) for name, path in MODULES.items()}


def circles() -> list[list[str]]:
    """Groups of modules each of which needs all the others (Tarjan's strongly connected components)."""
    number, low, stack, found = dict[str, int](), dict[str, int](), list[str](), list[list[str]]()

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for other in IMPORTS[module]:
            if other not in number:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == number[module]:
            place = stack.index(module)
            if len(stack) - place > 1 or module in IMPORTS[module]:
                found.append(sorted(stack[place:]))
            del stack[place:]

    for module in IMPORTS:
        if module not in number:
            visit(module)
    return found


def test_no_modules_need_each_other() -> None:
    """Also where an import stands inside a function: that hides a circle from Python, and not from a reader."""
    told = [
        f"{MODULES[module].relative_to(ROOT)}:{IMPORTS[module][other]} imports {other}"
        for circle in circles()
        for module in circle
        for other in circle
        if other in IMPORTS[module]
    ]
    assert not told, "import circles:\n" + "\n".join(told)


@named
def test_imports_run_downwards(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    for name in imported(path):
        if name.partition(".")[0] in OURS:
            assert within(name, ALLOWED[package]), f"{package} must not import {name}"
        assert name.partition(".")[0] not in FOLDERS, f"{name} is imported as elastable.{name}"


@named
def test_modules_say_what_they_hold(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "no docstring"
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    if any(not name.startswith("_") for name in defined):
        assigned = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
        assert "__all__" in [target.id for target in assigned if isinstance(target, ast.Name)], "no __all__"


@named
def test_modules_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST_MODULE


@pytest.mark.parametrize("path", modules("embedding_store"), ids=lambda path: path.name)
def test_the_store_never_loads_a_training_framework(path: Path) -> None:
    assert not [name for name in imported(path) if name.partition(".")[0] in NEVER_IN_THE_STORE]


def test_the_lazily_named_modules_are_downwards_too() -> None:
    assert all(within(home, ALLOWED["elastable"]) for home in elastable._HOMES.values())


def test_proto_is_no_package() -> None:
    # `import proto` belongs to proto-plus.
    assert not list((ROOT / "proto").rglob("*.py"))


def test_no_pickle_and_no_bare_except() -> None:
    for path in EVERY_MODULE:
        assert not [name for name in imported(path) if name.partition(".")[0] in ("pickle", "dill", "cloudpickle")]
        handlers = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ExceptHandler)]
        assert all(handler.type is not None for handler in handlers), path
