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


def names_tensor(names: Mapping[str, str]) -> Tensor:
    """Key of a dense tensor -> its name, as uint8 `[bytes]` of JSON."""
    return np.frombuffer(json.dumps(names).encode(), np.uint8)


def saved_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """What `names_tensor` was made of.

    Raises:
        CheckpointError: there are no names, or they are malformed.
    """
    try:
        names = json.loads(np.asarray(tensors[NAMES], np.uint8).tobytes())
        return {str(key): str(name) for key, name in names.items()}
    except MALFORMED as error:
        raise CheckpointError(f"the names of its dense variables are missing or malformed: {error}") from error


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
    """Path of a variable -> the path that it would have in the first model of its process.

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

    return {path: "/".join(map(plain, path.split("/"))) for path in paths}


def _name_of(kind: type) -> str:
    """What Keras names an object of this class that nobody names, without a number."""
    spaced = re.sub(r"(.)([A-Z][a-z0-9]+)", r"\1_\2", re.sub(r"\W+", "", kind.__name__))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", spaced).lower()
