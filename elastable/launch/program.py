"""What the members of a replica group run: a Python file, or a module such as the `elastable` command."""

import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from elastable.embedding_store.errors import BadInput

_KNOWN = "a Python file, -m MODULE, or elastable COMMAND"


def program_of(words: Sequence[str]) -> list[str]:
    """The words of a program as Python takes them: `elastable COMMAND` is `-m elastable COMMAND`.

    Raises:
        BadInput: they name no program, or another kind of one, or one that is not there.
    """
    if not words:
        raise BadInput(f"replicas need a program: {_KNOWN}")
    if words[0] == "elastable":
        return ["-m", *words]
    if words[0] == "-m":
        if len(words) < 2 or not _is_there(words[1]):
            raise BadInput(f"replicas cannot run {' '.join(words[:2])}: there is no such module")
    elif not Path(words[0]).is_file():
        raise BadInput(f"replicas cannot run {words[0]!r}: there is no such file; a program is {_KNOWN}")
    elif Path(words[0]).suffix != ".py":
        raise BadInput(f"replicas cannot run {words[0]!r}: a program is {_KNOWN}")
    return list(words)


def run_program(words: Sequence[str]) -> None:
    """Runs a program here, as `python` would; whatever ends it is raised."""
    first, *others = program_of(words)
    if first == "-m":
        sys.argv, sys.path[0] = others, str(Path.cwd())
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [first, *others], str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


def _is_there(module: str) -> bool:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):
        return False
    finally:
        del sys.path[0]
