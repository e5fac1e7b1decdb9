"""Randomness that belongs to the micro-batch and not to the process.

Dropout and its kin draw from Keras `SeedGenerator`s, whose state counts the
calls a process has made. Before a micro-batch every generator is set to a
function of (job seed, generator, micro-batch), so that any worker draws the
same numbers for it.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

__all__ = ["global_seed", "layers_of", "seed_states", "set_seeds"]


def global_seed() -> int:
    """What `keras.utils.set_random_seed` was called with last in this process; 0 where it was not."""
    seed = keras.src.utils.rng_utils.get_random_seed()
    return 0 if seed is None else int(seed)


def layers_of(model: Any) -> list[Any]:
    """Every layer of a model, however nested, each once, in a fixed order."""
    return list(dict.fromkeys(model._flatten_layers(include_self=True, recursive=True)))


def seed_states(model: Any) -> list[Any]:
    """State variables (uint32 `[2]`) of all seed generators, in model order."""
    return [variable for variable in model.variables if variable.name == "seed_generator_state"]


def set_seeds(states: list[Any], job_seed: int | None, micro_batch: Any) -> None:
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
