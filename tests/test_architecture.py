"""The house of docs/architecture.md, held: imports run downwards, and modules say what they hold."""

import ast
import functools
import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

import elastable
from elastable.process.heap import without_collections

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
        "elastable.master.backend",
        "elastable.master.rpc.client",
        "elastable.master.tasks.record_order",
        "elastable.master.v1",
        "elastable.worker",
    ),
    # Replicas have no master; they write checkpoints in a job's format, and read records in a job's order.
    "replicas": (
        "elastable.embedding_store",
        "elastable.master.api",
        "elastable.master.backend",
        "elastable.master.checkpoints",
        "elastable.master.tasks.progress",
        "elastable.master.tasks.record_order",
        "elastable.worker",
        "elastable.replicas",
    ),
    "elastable": ("elastable",),
}
NEVER_IN_THE_STORE = ("tensorflow", "keras", "tf_keras", "torch", "jax")


def modules(package: str) -> list[Path]:
    found = (path for path in (ROOT / package).rglob("*.py") if "v1" not in path.parent.parts)
    # elastable/ links to the other packages, so that all are imported as elastable.*; they are listed under their own.
    return sorted(path for path in found if path.resolve().relative_to(ROOT).parts[0] == package)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imported_at(path: Path) -> tuple[tuple[str, int], ...]:
    """Dotted names that a module imports, wherever in it, and the line; `from a import b` gives a.b."""
    names: list[tuple[str, int]] = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names.extend((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where it goes"
            names.extend((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
    return tuple(names)


def imported(path: Path) -> tuple[str, ...]:
    return tuple(name for name, _ in imported_at(path))


def within(name: str, allowed: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in allowed)


@pytest.fixture(scope="module", autouse=True)
def _trees_are_no_garbage() -> Iterator[None]:
    """They are a million objects."""
    with without_collections():
        yield


EVERY_MODULE = [path for package in ALLOWED for path in modules(package)]
by_package = pytest.mark.parametrize("package", ALLOWED)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts if parts[0] == "elastable" else ("elastable", *parts))
    return name.removesuffix(".__init__")


MODULES = {module_of(path): path for path in EVERY_MODULE}


def needed(path: Path) -> dict[str, int]:
    """What a module imports of ours, at its top, inside a function or for type checkers -> the line that says so."""
    found: dict[str, int] = {}
    for name, line in imported_at(path):
        module = name if name in MODULES else name.rpartition(".")[0]
        if module in MODULES:
            found.setdefault(module, line)
    return found


@functools.cache
def imports() -> dict[str, dict[str, int]]:
    """Module -> what it needs. Not made when tests are collected, which every test process does."""
    return {name: needed(path) for name, path in MODULES.items()}


def circles() -> list[list[str]]:
    """Groups of modules each of which needs all the others (Tarjan's strongly connected components)."""
    number, low, stack, found = dict[str, int](), dict[str, int](), list[str](), list[list[str]]()

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for other in imports()[module]:
            if other not in number:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == number[module]:
            place = stack.index(module)
            if len(stack) - place > 1 or module in imports()[module]:
                found.append(sorted(stack[place:]))
            del stack[place:]

    for module in imports():
        if module not in number:
            visit(module)
    return found


def test_no_modules_need_each_other() -> None:
    """Imports inside functions and those for type checkers count: they hide a cycle from Python, not from a reader."""
    problems = [
        f"{MODULES[module].relative_to(ROOT)}:{imports()[module][other]} imports {other}"
        for circle in circles()
        for module in circle
        for other in circle
        if other in imports()[module]
    ]
    assert not problems, "import circles:\n" + "\n".join(problems)


#: The rooms and loose modules of each package, from the lowest to the highest: each imports only what comes before it.
ROOMS = {
    "embedding_store": (
        *("errors", "closing", "option", "measures", "contract", "support", "log", "native", "optimizers", "tables"),
        *("engine", "tiers", "shards", "composite", "wire", "store_reader", "broken_store"),
        *("open_store", "warm"),
    ),
    "master": (
        *("api", "master_options", "push_check", "backend"),
        *("tasks", "checkpoints", "commits", "model", "core", "rpc"),
    ),
    "worker": ("readers", "keras", "rows", "layers", "losses", "step", "user_model", "runtime"),
    "replicas": ("groups", "host_embeddings", "knowledge_graphs", "training"),
    "elastable": (
        *(
            "process",
            "output",
            "monitoring",
            "assembly",
            "models",
            "callbacks",
            "jobs",
            "serving",
            "in_process",
            "launch",
            "commands",
            "command",
        ),
        *("replica_program", "__main__"),
    ),
}
GENERATED = "v1"
MOST_LOOSE_MODULES = 12
ENTRY_POINTS = ("main", "serve")


def package_of(module: str) -> str:
    """The package that a module lies in; a package itself lies in none but itself."""
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def unit(package: str, module: str) -> str:
    """The room or loose module of `package` that a module belongs to; "" for others and for the package itself."""
    inside = module.removeprefix(f"{package}.")
    return "" if inside == module else inside.partition(".")[0]


def imports_between_units(package: str) -> Iterator[tuple[str, str, str]]:
    """(unit, unit that it needs, the import that says so) of every two units of a package."""
    for module, others in imports().items():
        own = unit(package, module)
        for other, line in others.items():
            needed_unit = unit(package, other)
            if own and needed_unit and own != needed_unit:
                yield own, needed_unit, f"{MODULES[module].relative_to(ROOT)}:{line} imports {other}"


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_lie_above_one_another(package: str) -> None:
    whole = package if package == "elastable" else f"elastable.{package}"
    order = ROOMS[package]
    skipped = (*FOLDERS, GENERATED, "") if package == "elastable" else (GENERATED, "")
    there = {unit(whole, module) for module in MODULES}
    assert there - set(skipped) == set(order), "rooms that the list does not name, or that are gone"
    climbing = [
        message
        for own, other, message in imports_between_units(whole)
        if own not in skipped and other not in skipped and order.index(other) > order.index(own)
    ]
    assert not climbing, "imports that climb:\n" + "\n".join(climbing)
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert f"{package}: {' < '.join(order)}" in " ".join(page.split()), "docs/architecture.md tells another order"


@pytest.mark.parametrize("package", sorted({package_of(module) for module in MODULES}))
def test_rooms_inside_rooms_have_an_order_too(package: str) -> None:
    """Whichever it is: a room or loose module never needs one that needs it."""
    needs: dict[str, dict[str, str]] = {}
    for own, other, message in imports_between_units(package):
        needs.setdefault(own, {}).setdefault(other, message)
    below: dict[str, set[str]] = {}

    def all_below(of: str, way: tuple[str, ...]) -> set[str]:
        assert of not in way, "rooms that need each other:\n" + "\n".join(
            needs[one][other] for one, other in itertools.pairwise((*way[way.index(of) :], of))
        )
        if of not in below:
            below[of] = set().union(*({other} | all_below(other, (*way, of)) for other in needs.get(of, ())))
        return below[of]

    for one in list(needs):
        all_below(one, ())


@functools.cache
def face(room: str) -> frozenset[str]:
    """What `__all__` of a room lists: names, and modules that others may import from."""
    lists = (node for node in tree_of(MODULES[room]).body if is_list_of_names(node))
    return frozenset(name for node in lists for name in ast.literal_eval(node.value))


def past_faces(path: Path, home: str) -> Iterator[str]:
    """What a file imports of rooms that do not hold `home`, and their faces do not give."""
    for name in imported(path):
        module = name if name in MODULES else name.rpartition(".")[0]
        room, _, last = module.rpartition(".")
        if module not in MODULES or MODULES[module].name == "__init__.py" or room.count(".") < 2:
            continue  # a package's loose modules lie open
        if home == room or home.startswith(f"{room}.") or last in face(room):
            continue
        if path.name != "__init__.py" or not room.startswith(f"{home}."):  # a package's face gives what its rooms have
            yield f"{path.relative_to(ROOT)} imports {name}; {room} gives only {sorted(face(room))}"


def test_rooms_are_entered_by_their_faces() -> None:
    """A room's `__init__` lists what others may use of it, names or modules; tests look inside their own package."""
    past = [line for module, path in MODULES.items() for line in past_faces(path, module)]
    for path in sorted((ROOT / "tests").rglob("*.py")):
        package, *rest = path.relative_to(ROOT / "tests").parts
        if package not in ("chaos", "fuzz", "contracts") and rest:  # which attack, or check, the insides
            own = f" imports elastable.{'' if package == 'elastable' else package}"
            past += [line for line in past_faces(path, "tests") if own not in line]
    assert not past, "imports past a face:\n" + "\n".join(past)


def test_a_face_lists_what_others_use() -> None:
    files = (*EVERY_MODULE, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"))
    used = {path: set(imported(path)) for path in files}
    for room, init in MODULES.items():
        if init.name != "__init__.py" or room.count(".") < 2:
            continue
        outside = {name for path, names in used.items() if init.parent not in path.parents for name in names}
        if room in outside:
            continue  # it is imported as a module, and its names are used as attributes
        reached = {name.removeprefix(f"{room}.").partition(".")[0] for name in outside if name.startswith(f"{room}.")}
        package = importlib.import_module(".".join(room.split(".")[:2]))
        reached |= {*getattr(package, "__all__", ())}  # what a package gives, it loads late
        assert face(room) <= reached, f"{room} lists what nobody uses: {sorted(face(room) - reached)}"


def test_no_room_takes_the_place_of_a_public_name() -> None:
    """Python sets a sub-package as an attribute of its package once it is imported: `et.fit` would become a module."""
    assert not {unit("elastable", module) for module in MODULES} & set(elastable.__all__)


def test_a_package_has_few_loose_modules() -> None:
    loose: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        if path.name != "__init__.py":
            loose.setdefault(package_of(module), []).append(path.name)
    for path in (ROOT / "benchmarks").rglob("*.py"):
        if path.name != "__init__.py":
            loose.setdefault(str(path.parent.relative_to(ROOT)), []).append(path.name)
    many = {package: sorted(names) for package, names in loose.items() if len(names) > MOST_LOOSE_MODULES}
    assert not many, f"more than {MOST_LOOSE_MODULES} loose modules: divide them into rooms"


MOST_LOOSE_TESTS = 24


@pytest.mark.parametrize("package", ROOMS)
def test_tests_lie_in_the_room_of_what_they_test(package: str) -> None:
    """A test folder is named after a room; only tests of a loose module, or of the package, lie next to the rooms."""
    home = ROOT / "tests" / package
    source = ROOT / package
    folders = {path.parent.relative_to(home) for path in home.rglob("test_*.py")} - {Path()}
    strangers = sorted(str(folder) for folder in folders if not (source / folder / "__init__.py").is_file())
    assert not strangers, f"no room of {package} has these names"
    loose = {path.stem.removeprefix("test_") for path in home.glob("test_*.py")}
    assert loose <= {path.stem for path in source.glob("*.py")} | {"public_names"}, "each belongs into a room"
    crowded = [str(folder) for folder in folders if len(list((home / folder).glob("*.py"))) - 1 > MOST_LOOSE_TESTS]
    assert not crowded, f"more than {MOST_LOOSE_TESTS} files"


def test_a_module_name_says_which_module() -> None:
    names = [path.stem for path in EVERY_MODULE if path.name != "__init__.py"]
    assert [name for name in sorted(set(names)) if names.count(name) > 2] == []


def test_a_public_name_is_defined_once() -> None:
    homes: dict[str, set[str]] = {}
    for path in EVERY_MODULE:
        for node in tree_of(path).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if not any(".command(" in ast.unparse(each) for each in node.decorator_list):  # named by what users write
                homes.setdefault(node.name, set()).add(str(path.relative_to(ROOT)))
    twice = {name: sorted(where) for name, where in homes.items() if len(where) > 1 and name not in ENTRY_POINTS}
    assert not twice


def is_list_of_names(node: ast.stmt) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["__all__"]


@by_package
def test_imports_run_downwards(package: str) -> None:
    names = [(path, name) for path in modules(package) for name in imported(path)]
    upwards = [
        f"{path.relative_to(ROOT)} must not import {name}"
        for path, name in names
        if name.partition(".")[0] in OURS and not within(name, ALLOWED[package])
    ]
    assert not upwards
    assert not [f"{path}: import elastable.{name}" for path, name in names if name.partition(".")[0] in FOLDERS]


@by_package
def test_modules_say_what_they_hold(package: str) -> None:
    assert not [path for path in modules(package) if not ast.get_docstring(tree_of(path))], "no docstring"


def test_the_store_never_loads_a_training_framework() -> None:
    names = [(path, name) for path in modules("embedding_store") for name in imported(path)]
    assert not [each for each in names if each[1].partition(".")[0] in NEVER_IN_THE_STORE]


#: Whoever has another framework than Keras runs on need not have these.
ONLY_THERE = {
    "jax": {"master/backend/jax_backend.py"},
    "torch": {"master/backend/torch_backend.py"},
    "tensorflow": {
        "elastable/process/quiet.py",
        "master/backend/lazy.py",  # loads it when it is used
        "master/backend/tensorflow_backend.py",
        "replicas/host_embeddings/host_embedding.py",
        "replicas/knowledge_graphs/scores/functions.py",
        "replicas/training/part_optimizer.py",
        "replicas/training/replica_training.py",
        "replicas/training/step.py",
        "replicas/training/trainer.py",
        "worker/readers/stream_reader.py",  # where it is given a dataset of TensorFlow
    },
}


@pytest.mark.parametrize("framework", ONLY_THERE)
def test_a_framework_is_imported_by_its_backend_alone(framework: str) -> None:
    importing = {
        str(path.relative_to(ROOT))
        for path in EVERY_MODULE
        if any(within(name, (framework,)) for name in imported(path))
    }
    assert importing == ONLY_THERE[framework]


def test_the_lazily_named_modules_are_downwards_too() -> None:
    assert all(within(home, ALLOWED["elastable"]) for home in elastable._HOMES.values())


def test_proto_is_no_package() -> None:
    # `import proto` belongs to proto-plus.
    assert not list((ROOT / "proto").rglob("*.py"))


def test_no_bare_except() -> None:
    for path in EVERY_MODULE:
        handlers = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ExceptHandler)]
        assert all(handler.type is not None for handler in handlers), path


ASK_WHAT_TIME_IT_IS = {
    "embedding_store/measures.py",  # once, and then by how much it has jumped
    "master/core/stream_planner.py",  # how old events are that others gave a time, and `--until` a time
    # When something happened, for people; nothing is decided by it:
    "elastable/monitoring/opentelemetry_tracer.py",
    "elastable/monitoring/page/views.py",
    "elastable/output/noted.py",
    "master/checkpoints/writing.py",
}


def test_time_that_counts_is_not_the_systems() -> None:
    """Which somebody may set: leases, deadlines, pins and durations go by clocks that do not jump."""
    clocks = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
    asking = {
        str(path.relative_to(ROOT))
        for path in EVERY_MODULE
        for node in ast.walk(tree_of(path))
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in clocks)
        or (isinstance(node, ast.ImportFrom) and node.module == "time" and "time" in {of.name for of in node.names})
    }
    assert asking == ASK_WHAT_TIME_IT_IS
