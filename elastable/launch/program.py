"""What the members of a replica group run: a Python file, a module, or the `elastable` command itself."""

import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from elastable.embedding_store.errors import BadInput

_KNOWN = "a Python file, -m MODULE, or elastable COMMAND"


@dataclass(frozen=True, slots=True)
class Program:
    """One program and its arguments.

    Attributes:
        kind: "file", "module" or "elastable".
        name: The file or the module; "elastable".
        arguments: What follows it.
    """

    kind: str
    name: str
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, words: Sequence[str]) -> "Program":
        """Of a command line.

        Raises:
            BadInput: it names no program, or another kind of one, or one that is not there.
        """
        if not words:
            raise BadInput(f"replicas need a program: {_KNOWN}")
        if words[0] == "elastable":
            return cls("elastable", "elastable", tuple(words[1:]))
        if words[0] == "-m":
            if len(words) < 2 or not _is_there(words[1]):
                raise BadInput(f"replicas cannot run {' '.join(words[:2])}: there is no such module")
            return cls("module", words[1], tuple(words[2:]))
        if not Path(words[0]).is_file():
            raise BadInput(f"replicas cannot run {words[0]!r}: there is no such file; a program is {_KNOWN}")
        if Path(words[0]).suffix != ".py":
            raise BadInput(f"replicas cannot run {words[0]!r}: a program is {_KNOWN}")
        return cls("file", words[0], tuple(words[1:]))

    @property
    def words(self) -> list[str]:
        """As a command line; `of` gives the program again."""
        return [*(["-m"] if self.kind == "module" else []), self.name, *self.arguments]

    def run(self, command: Callable[[], None]) -> None:
        """Runs it here, as `python` would; whatever ends it is raised.

        Args:
            command: The `elastable` command, with the arguments of `sys.argv`.
        """
        sys.argv = [self.name, *self.arguments]
        if self.kind == "file":
            sys.path[0] = str(Path(self.name).resolve().parent)
            runpy.run_path(self.name, run_name="__main__")
        elif self.kind == "module":
            sys.path[0] = str(Path.cwd())
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"].__package__ = ""  # else the command's help calls it by this module's name
            command()


def _is_there(module: str) -> bool:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):
        return False
    finally:
        del sys.path[0]
