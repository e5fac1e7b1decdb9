"""Powers of decay rates, the same on every machine."""

from __future__ import annotations

import numpy as np

__all__ = ["float32_power"]


def float32_power(base: float, exponent: int) -> np.float32:
    """float32 `base ** exponent`, base rounded to float32 first, as Keras' `ops.power`.

    Taken in double precision and rounded once: float32 library powers differ
    between machines, and `1 - beta_2 ** t` magnifies their last bit.
    """
    return np.float32(float(np.float32(base)) ** exponent)
