"""What callbacks remember from one epoch to the next, as a job keeps it with its versions."""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import keras
import numpy as np

from elastable.embedding_store.contract.malformed import DocumentFields
from elastable.embedding_store.errors import BadInput

_LOG = logging.getLogger(__name__)

# Keras has no word for it. What else these have is configuration, or derived from it when it is first needed.
_OF_KERAS: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch", "stopped_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
}


def states_of(callbacks: Sequence[keras.callbacks.Callback]) -> dict[str, object]:
    """The state of each callback that has one, by name, as JSON can hold it.

    Keras' own callbacks: what they count and compare with. Any other: what its `state_dict()` returns, which
    `load_state_dict(state)` restores, as in PyTorch's modules and Lightning's callbacks.

    Raises:
        BadInput: a `state_dict()` that JSON cannot hold, or that nothing can be done with; names the callback.
    """
    states = {}
    for name, callback in named(callbacks):
        if hasattr(callback, "state_dict"):
            if not hasattr(callback, "load_state_dict"):
                raise BadInput(
                    f"callback {name} has a state_dict() and no load_state_dict(state): give it both, or none"
                )
            try:
                states[name] = json.loads(json.dumps(callback.state_dict(), default=_plain))
            except (TypeError, ValueError) as error:
                raise BadInput(
                    f"callback {name}: its state_dict() is kept with the job as JSON, and cannot be: {error}; give "
                    "numbers, strings, lists and dicts of them"
                ) from error
        else:
            for kind, attributes in _OF_KERAS.items():
                if isinstance(callback, kind):
                    states[name] = {at: _plain(getattr(callback, at)) for at in attributes if hasattr(callback, at)}
    return states


def restore_states(callbacks: Sequence[keras.callbacks.Callback], states: DocumentFields) -> None:
    """Gives callbacks the states that `states_of` returned; call it after their `on_train_begin`.

    One that was not there then begins anew; what is kept of one that is gone is left out, with a warning.

    Raises:
        BadInput: a callback refuses its state; names it.
    """
    left = dict(states)
    for name, callback in named(callbacks):
        if name not in left:
            continue
        state = left.pop(name)
        if hasattr(callback, "load_state_dict"):
            try:
                callback.load_state_dict(state)
            except Exception as error:
                raise BadInput(f"callback {name} cannot go on from the state of the job: {error}") from error
        else:
            for attribute, value in state.items():
                setattr(callback, attribute, value)
    if left:
        _LOG.warning("the job had callbacks that are not there any more: %s", ", ".join(sorted(left)))


def named(callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[tuple[str, keras.callbacks.Callback]]:
    """Each by its class, and the second of a class as "EarlyStopping 2": others may be put between them."""
    seen = Counter[str]()
    for callback in callbacks:
        kind = type(callback).__name__
        seen[kind] += 1
        yield (kind if seen[kind] == 1 else f"{kind} {seen[kind]}"), callback


def _plain(value: object) -> object:
    """Scalars of NumPy and of tensors as Python's; JSON says what it cannot hold."""
    if value is None or isinstance(value, bool | int | float | str | list | dict):
        return value
    array = np.asarray(value)
    if array.ndim or array.dtype.kind not in "biuf":
        raise TypeError(f"a {type(value).__name__}")
    return array.item()
