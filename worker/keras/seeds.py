"""Randomness that belongs to the micro-batch and not to the process.

Dropout and its kin draw from Keras `SeedGenerator`s, and `keras.random` functions without a seed from a global one;
their state counts the calls a process has made. Before a micro-batch every generator is set to a function of (job seed,
generator, micro-batch), so that any worker draws the same numbers for it.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from keras.src.utils import rng_utils

__all__ = ["global_seed", "layers_of", "same_keras_state", "seed_states", "set_seeds"]


_GENERATOR = seed_generator.GLOBAL_SEED_GENERATOR
_SEED = rng_utils.GLOBAL_RANDOM_SEED
_OF_A_THREAD = (_SEED, _GENERATOR, "dtype_policy")


def global_seed() -> int:
    """What `keras.utils.set_random_seed` was called with last in this process; 0 where it was not."""
    seed = rng_utils.get_random_seed()
    return 0 if seed is None else int(seed)


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """Every layer of a model, however nested, each once, in a fixed order."""
    return list(dict.fromkeys(model._flatten_layers(include_self=True, recursive=True)))


def seed_states(model: keras.Model, job_seed: int | None = None) -> list[keras.Variable]:
    """State variables (uint32 `[2]`) of the seed generators that `set_seeds` sets, in model order.

    Behind them that of Keras' global generator; it is of the thread that calls, and of those that `same_keras_state`
    lets share it. Without a job's seed none is made: it draws when it is first used, as in Keras.
    """
    states = [variable for variable in model.variables if variable.name == "seed_generator_state"]
    return states if job_seed is None else [*states, seed_generator.global_seed_generator().state]


def same_keras_state(work: Callable[[], None]) -> Callable[[], None]:
    """A function that works in another thread with the global state that Keras has in this one, and leaves it here.

    Keras keeps its global seed, seed generator and dtype policy for each thread. A generator that `work` made is the
    one of this thread once `work` has returned, unless it has been seeded anew.
    """
    ours = vars(global_state.GLOBAL_STATE_TRACKER)
    given = {name: ours[name] for name in _OF_A_THREAD if ours.get(name) is not None}

    def working() -> None:
        theirs = vars(global_state.GLOBAL_STATE_TRACKER)
        theirs.update(given)
        try:
            work()
        finally:
            if ours.get(_SEED) == given.get(_SEED) and ours.get(_GENERATOR) is None:
                ours[_GENERATOR] = theirs.get(_GENERATOR)

    return working


def set_seeds(states: list[keras.Variable], job_seed: int | None, micro_batch: tf.Tensor) -> None:
    """Sets generator g to a function of (job seed, g, micro-batch).

    Args:
        states: From `seed_states`.
        job_seed: Of the job; None: the generators count on from where they are.
        micro_batch: int64 scalar tensor: its number within the job.
    """
    if job_seed is None:
        return
    # A generator's second half counts its draws: leave room for 1,024 of them.
    first_draw = micro_batch * 1024
    low = tf.cast(tf.bitwise.bitwise_and(first_draw, 0xFFFFFFFF), tf.uint32)
    high = tf.cast(tf.bitwise.right_shift(first_draw, tf.constant(32, tf.int64)), tf.uint32)
    for number, state in enumerate(states):
        key = int(np.random.SeedSequence([job_seed & (2**64 - 1), number]).generate_state(1)[0])
        state.assign(tf.stack([tf.bitwise.bitwise_xor(tf.constant(key, tf.uint32), high), low]))
