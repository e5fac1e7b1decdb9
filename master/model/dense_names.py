"""The names of a model's dense tensors, and those of another model by name."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.errors import CheckpointError
from elastable.master.api import Tensor

NAMES = "names"
"""The key of what `names_tensor` gives, among the dense tensors of a version."""


def names_tensor(names: Mapping[str, str], paths: Mapping[str, str]) -> Tensor:
    """Key of a dense tensor -> its name, and what `renumbered` says of them, as uint8 `[bytes]` of JSON."""
    return np.frombuffer(json.dumps([names, paths]).encode(), np.uint8)


def saved_names(tensors: Mapping[str, Tensor]) -> tuple[dict[str, str], dict[str, str]]:
    """What `names_tensor` was made of.

    Raises:
        CheckpointError: there are no names, or they are malformed.
    """
    try:
        names, paths = json.loads(np.asarray(tensors[NAMES], np.uint8).tobytes())
        return {str(key): str(name) for key, name in names.items()}, {str(old): str(new) for old, new in paths.items()}
    except MALFORMED as error:
        raise CheckpointError(f"the names of its dense variables are missing or malformed: {error}") from error


def comparable(
    ours: Mapping[str, str], paths: Mapping[str, str], theirs: Mapping[str, str], their_paths: Mapping[str, str]
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """The names of two models, `ours` and `theirs`: as they are, if what may be counted in one is all in the other.

    Else Keras has counted one of them from another number on, and they are renumbered by `paths` and `their_paths`.
    """
    if paths.keys() <= their_paths.keys() or paths.keys() >= their_paths.keys():
        return ours, theirs
    return _renamed(ours, paths), _renamed(theirs, their_paths)


def _renamed(names: Mapping[str, str], paths: Mapping[str, str]) -> dict[str, str]:
    """With other paths of variables, which those of an optimizer's hold, too: "Adam/dense/kernel:velocity"."""
    found = {}
    for key, name in names.items():
        kind, slash, rest = name.partition("/")
        path, colon, slot = rest.rpartition(":")
        of_optimizer = key.startswith("optimizer/") and colon
        found[key] = f"{kind}{slash}{paths.get(path, path)}:{slot}" if of_optimizer else paths.get(name, name)
    return found


def keys_by_name(ours: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, str]:
    """Our key -> theirs, of what has the same name on both sides; `ours` and `theirs` are key -> name.

    Raises:
        CheckpointError: a name is there twice.
    """
    for names in (ours, theirs):
        if twice := sorted(name for name, count in Counter(names.values()).items() if count > 1):
            raise CheckpointError(f"two dense variables are named {twice[0]}: give their layers names, each its own")
    keys = {name: key for key, name in theirs.items()}
    return {key: keys[name] for key, name in ours.items() if name in keys}


def renumbered(paths: Iterable[str], kinds: Iterable[type]) -> dict[str, str]:
    """Path of a variable that Keras may have named -> the path that it would have in the first model of its process.

    Keras numbers the names that it makes itself with every layer of a process: "dense_7".

    Args:
        paths: In model order.
        kinds: Classes of the model and its layers.
    """
    numbers: dict[str, dict[str, int]] = {_name_of(kind): {} for kind in kinds}

    def plain(part: str) -> str:
        base = re.sub(r"_\d+$", "", part)
        seen = numbers.get(part if part in numbers else base)
        if seen is None:
            return part
        number = seen.setdefault(part, len(seen))
        return f"{base}_{number}" if number else base

    split = [path.split("/") for path in paths]
    return {
        "/".join(parts): "/".join(map(plain, parts))
        for parts in split
        if any(part in numbers or re.sub(r"_\d+$", "", part) in numbers for part in parts)
    }


def _name_of(kind: type) -> str:
    """What Keras names an object of this class that nobody names, without a number."""
    spaced = re.sub(r"(.)([A-Z][a-z0-9]+)", r"\1_\2", re.sub(r"\W+", "", kind.__name__))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", spaced).lower()
