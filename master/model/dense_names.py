"""The names of a model's dense tensors, and those of another model by name."""

import json
import re
from collections.abc import Collection, Mapping

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
    except (*MALFORMED, AttributeError) as error:
        raise CheckpointError(f"the names of its dense variables are missing or malformed: {error}") from error


def keys_by_name(ours: Mapping[str, str], theirs: Mapping[str, str], numbered: Collection[str]) -> dict[str, str]:
    """Our key -> theirs, of what has the same name on both sides.

    Names that Keras made itself and numbered ("dense_3") differ with every model that a process makes. They count as
    the same without their numbers where all names do, in the same order.

    Args:
        ours, theirs: Key -> name.
        numbered: Such names of our layers, without numbers.

    Raises:
        CheckpointError: a name is there twice.
    """
    if set(ours.values()) != set(theirs.values()):
        pattern = re.compile(rf"(?<![a-z0-9])({'|'.join(map(re.escape, sorted(numbered))) or '$'})_\d+(?=[_/]|$)")
        plain = [[pattern.sub(r"\1", name) for name in names.values()] for names in (ours, theirs)]
        if plain[0] == plain[1]:
            return dict(zip(ours, theirs, strict=True))
    for names in (ours, theirs):
        if twice := sorted({name for name in names.values() if list(names.values()).count(name) > 1}):
            raise CheckpointError(f"two dense variables are named {twice[0]}: give their layers names, each its own")
    keys = {name: key for key, name in theirs.items()}
    return {key: keys[name] for key, name in ours.items() if name in keys}


def numbered_name(kind: type) -> str:
    """What Keras names an object of this class that nobody names, without a number."""
    spaced = re.sub(r"(.)([A-Z][a-z0-9]+)", r"\1_\2", re.sub(r"\W+", "", kind.__name__))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", spaced).lower()
