"""How the heap of a process that trains or serves gives memory back: seldom."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

# <malloc.h> of glibc
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_YOUNG = 10_000
"""Objects that are made, and not freed, before Python collects garbage; its own default is 700.

A call that waits is some fifty objects. With a thousand workers that wait, calls come and go by so many that the
default collected forty times a second, and found no garbage.
"""
_SETTINGS = {
    # Above it, tables and checkpoints: they are mapped for themselves and given back whole.
    "MALLOC_MMAP_THRESHOLD_": (_M_MMAP_THRESHOLD, 32 << 20),
    "MALLOC_TRIM_THRESHOLD_": (_M_TRIM_THRESHOLD, 256 << 20),
    "MALLOC_TOP_PAD_": (_M_TOP_PAD, 64 << 20),
}


def keep_freed_memory() -> None:
    """Makes this process keep what it frees, up to 256 MiB, instead of giving it back to the system.

    Every step needs the same few buffers of some MiB anew: BETs, gradients, frames. glibc gives such buffers back when
    they are freed, so that each of their pages faults again at the next step, which costs more than all the copying
    that is done with them.

    Environment variables (MALLOC_TRIM_THRESHOLD_, ...) take precedence. Without glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for variable, (option, value) in _SETTINGS.items():
        if variable not in os.environ:
            mallopt(option, value)


def keep_collections_short() -> None:
    """Makes Python's garbage collections seldom, and leaves out what is loaded by now, until this process ends.

    TensorFlow and Keras are some 600,000 objects, which each full collection visits: half a second in which a server
    answers nobody, and a tenth of its processor time with a thousand workers. What they wait with is 200,000 more.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])


@contextmanager
def without_collections() -> Iterator[None]:
    """Collects no garbage inside, and nothing of what was made inside ever: for imports.

    Nothing that an import makes is garbage, and collections look for it again and again: they are a quarter of the
    processor time of TensorFlow's import.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
