"""Randomness that belongs to the micro-batch and not to the process.

Dropout and its kin draw from Keras `SeedGenerator`s, whose state counts the
calls a process has made. Before a micro-batch every generator is set to a
function of (job seed, generator, micro-batch), so that any worker draws the
same numbers for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["layers_of", "seed_states", "set_seeds"]


def layers_of(model: Any) -> list[Any]:
    """Every layer of a model, however nested, each once, in a fixed order."""
    return list(dict.fromkeys(model._flatten_layers(include_self=True, recursive=True)))


def seed_states(model: Any) -> list[Any]:
    """State variables (uint32 `[2]`) of all seed generators, in model order."""
    return [variable for variable in model.variables if variable.name == "seed_generator_state"]


def set_seeds(states: list[Any], job_seed: int, micro_batch: Any) -> None:
    """Sets generator g to a function of (job seed, g, micro-batch).

    Args:
        states: From `seed_states`.
        job_seed: Of the job.
        micro_batch: int64 scalar tensor: its number within the job.
    """
    # A generator's second half counts its draws: leave room for 1,024 of them.
    first_draw = micro_batch * 1024
    low = tf.cast(tf.bitwise.bitwise_and(first_draw, 0xFFFFFFFF), tf.uint32)
    high = tf.cast(tf.bitwise.right_shift(first_draw, tf.constant(32, tf.int64)), tf.uint32)
    for number, state in enumerate(states):
        key = int(np.random.SeedSequence([job_seed & (2**64 - 1), number]).generate_state(1)[0])
        state.assign(tf.stack([tf.bitwise.bitwise_xor(tf.constant(key, tf.uint32), high), low]))
