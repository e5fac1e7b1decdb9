"""What was made before a test is left out of Python's garbage collections.

TensorFlow, Keras and twelve thousand collected tests are a million objects, and Keras and TensorFlow keep another
hundred thousand of a module that trains models. A full collection visits each of them, which takes a second after some
modules, and `keras.backend.clear_session` asks for one. What a test makes is collected as ever.
"""

import gc
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects no garbage while modules are imported, and afterwards nothing of what they left."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        _leave_out()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """After the last test of a module, and after one that made so much that there was a full collection."""
    try:
        yield
    finally:
        if nextitem is None or nextitem.path != item.path or _full_collections() > _seen[0]:
            _leave_out()


def _full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


_seen = [0]
"""How many there had been when it was last done."""


def _leave_out() -> None:
    gc.collect()
    gc.freeze()
    _seen[0] = _full_collections()
