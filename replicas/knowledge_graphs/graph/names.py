"""Names of entities or relations, with ids in order of first occurrence."""

import difflib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadInput

_ALIKE_AMONG = 100_000  # how many names to search for similar ones


class Names(Sequence[str]):
    """Names by id, 0 .. n - 1, and ids by name.

    Args:
        names: Unique names in the order of their ids.
        what: What they name, for errors.

    Raises:
        BadInput: a name is repeated, empty, or contains a tab or line break.
    """

    def __init__(self, names: Iterable[str], what: str = "entity") -> None:
        self._names = list(names)
        self._ids = {name: place for place, name in enumerate(self._names)}
        self.what = what
        if len(self._ids) != len(self._names):
            twice = next(name for place, name in enumerate(self._names) if self._ids[name] != place)
            raise BadInput(f"{what} names: {twice!r} is there twice")
        for name in self._names:
            if not name or any(sign in name for sign in "\t\n\r"):
                raise BadInput(f"{what} names: {name!r} is empty or holds a tab or line break")

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        return self._names[place]

    def __contains__(self, name: object) -> bool:
        return name in self._ids

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Names) and self._names == other._names

    __hash__ = None  # type: ignore[assignment]

    def id_of(self, name: str) -> int:
        """The id of a name. Raises BadInput, with similar names, if there is none."""
        found = self._ids.get(name)
        if found is None:
            alike = difflib.get_close_matches(name, self._names[:_ALIKE_AMONG], n=3)
            hint = f"; alike are {', '.join(map(repr, alike))}" if alike else ""
            raise BadInput(f"no {self.what} {name!r} among {len(self)}{hint}")
        return found

    def ids_of(self, names: Iterable[str]) -> Int64:
        """int64 `[k]`: the ids of names; raises as `id_of`."""
        return np.array([self.id_of(name) for name in names], np.int64)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the names, one per line in the order of ids; replaces an existing file."""
        with replaced(path) as file:
            file.writelines(f"{name}\n".encode() for name in self._names)

    @classmethod
    def load(cls, path: str | os.PathLike[str], what: str = "entity") -> "Names":
        """Reads what `save` wrote. Raises BadInput for a missing or malformed file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{path}: not a file of {what} names ({error})") from error
        if text and not text.endswith("\n"):
            raise BadInput(f"{path}: the last of the {what} names is cut off")
        return cls(text.split("\n")[:-1], what)


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write, which replaces that of this path once all of it is on disk."""
    draft = Path(path).with_name(f".{Path(path).name}.new")
    with draft.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def inverse_names(relations: Sequence[str]) -> list[str]:
    """Names of the inverse relations: `NAME (inverse)`, or with more of that where a relation has such a name."""
    ending, known = " (inverse)", set(relations)
    while any(name + ending in known for name in relations):
        ending += " (inverse)"
    return [name + ending for name in relations]
