"""Draws mutations: conditions before a `raise`, `return`, `continue` or `break`, turned around or moved by one."""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

ROOMS = {
    "embedding_store/log": "tests/embedding_store/log",
    "embedding_store/shards": "tests/embedding_store/shards",
    "embedding_store/wire": "tests/embedding_store/wire",
    "master/commits": "tests/master/commits",
}
"""Rooms whose conditions guard data, and their tests."""

_MOVED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
_ENDS = (ast.Raise, ast.Return, ast.Continue, ast.Break)


@dataclass(frozen=True, slots=True)
class Mutation:
    """One changed condition.

    Attributes:
        file: Below the root.
        function: It lies in, with its class.
        before, after: The condition, as `ast.unparse` writes it.
        equivalent: Why no caller can see the change; "": one can.
    """

    file: str
    function: str
    before: str
    after: str
    equivalent: str = ""

    @property
    def room(self) -> str:
        """Of `ROOMS`."""
        return next(room for room in ROOMS if self.file.startswith(f"{room}/"))

    def __str__(self) -> str:
        return f"{self.file}: {self.function}: if {self.before}  ->  if {self.after}"

    def applied(self, source: str) -> str:
        """The file's source with the condition changed; raises ValueError where it is not there, or not once."""
        found = [test for function, test in conditions(ast.parse(source)) if self._is(function, test)]
        if len(found) != 1:
            raise ValueError(f"{self}: is there {len(found)} times; draw the list again")
        lines = source.splitlines(keepends=True)
        (test,) = found
        assert test.end_lineno is not None
        assert test.end_col_offset is not None
        first, last = lines[test.lineno - 1], lines[test.end_lineno - 1]
        begin = first.encode()[: test.col_offset].decode()
        end = last.encode()[test.end_col_offset :].decode()
        lines[test.lineno - 1 : test.end_lineno] = [f"{begin}({self.after}){end}"]
        return "".join(lines)

    def _is(self, function: str, test: ast.expr) -> bool:
        return (function, ast.unparse(test)) == (self.function, self.before)


def conditions(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The function, and the condition, of every guard in a module."""

    def within(node: ast.AST, name: str) -> Iterator[tuple[str, ast.expr]]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            below = f"{name}.{child.name}".lstrip(".") if isinstance(child, ast.FunctionDef | ast.ClassDef) else name
            if isinstance(child, ast.If) and isinstance(child.body[-1], _ENDS) and name:
                yield name, child.test
            yield from within(child, below if named else name)

    yield from within(tree, "")


def draw(seed: int, each: int) -> list[Mutation]:
    """So many mutations of every room, each of another condition."""
    chance, drawn = random.Random(seed), list[Mutation]()
    for room in ROOMS:
        found = []
        for file in sorted((ROOT / room).rglob("*.py")):
            every = [(function, ast.unparse(test), test) for function, test in conditions(ast.parse(file.read_text()))]
            names = [(function, said) for function, said, _ in every]
            found += [(file, *one) for one in every if names.count(one[:2]) == 1]
        for file, function, said, test in chance.sample(found, each):
            drawn.append(Mutation(str(file.relative_to(ROOT)), function, said, _changed(test, chance)))
    return drawn


def _changed(test: ast.expr, chance: random.Random) -> str:
    """The condition never true, or its comparison moved by one, or one of its parts left out."""
    whole = ast.unparse(test)
    ways = [f"False and {whole}" if isinstance(test, ast.Compare) else f"False and ({whole})"]
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in _MOVED:
        moved = ast.Compare(test.left, [_MOVED[type(test.ops[0])]()], test.comparators)
        ways.append(ast.unparse(moved))
    if isinstance(test, ast.BoolOp):
        ways += [ast.unparse(part) for part in test.values]
    return chance.choice(ways)
