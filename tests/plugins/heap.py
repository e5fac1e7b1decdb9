"""What was made before a module's first test is left out of Python's garbage collections.

TensorFlow, Keras and twelve thousand collected tests are a million objects, and Keras and TensorFlow keep another
hundred thousand of a module that trains models. A full collection visits each of them, which takes a second after some
modules, and `keras.backend.clear_session` asks for one. What the tests of a module make is collected as ever.
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
    """After the last test of a module, and its fixtures."""
    try:
        yield
    finally:
        if nextitem is None or nextitem.path != item.path:
            _leave_out()


def _leave_out() -> None:
    gc.collect()
    gc.freeze()
