"""TensorFlow's sparse updates of a variable: Adagrad as one op, Adam as the ops of lazy Adam implementations."""

from collections.abc import Callable, Mapping
from itertools import cycle

import tensorflow as tf

from benchmarks.peers import workloads
from benchmarks.peers.rounds import Turn

_RATE = 0.01
_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-7


def prepare(race: str, settings: Mapping[str, object]) -> Turn:
    """`adagrad`: `ResourceSparseApplyAdagradV2`. `adam`, for which there is no op: gathers and scatters."""
    tf.config.threading.set_intra_op_parallelism_threads(workloads.THREADS)
    tf.config.threading.set_inter_op_parallelism_threads(workloads.THREADS)
    batches = workloads.unique()
    turns = cycle([tf.constant(ids) for ids in batches])
    gradient = tf.random.normal((len(batches[0]), workloads.DIM))
    step = {"adagrad": _adagrad, "adam": _adam}[race]()
    return Turn(f"tensorflow {tf.__version__}", lambda: step(next(turns), gradient), len(batches[0]))


def _zeros() -> tf.Variable:
    return tf.Variable(tf.zeros((workloads.ROWS, workloads.DIM)))


def _adagrad() -> Callable[[object, object], object]:
    weights, accumulator = _zeros(), _zeros()

    def step(ids: tf.Tensor, gradient: tf.Tensor) -> None:
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=weights.handle, accum=accumulator.handle, lr=_RATE, epsilon=_EPSILON, grad=gradient, indices=ids
        )

    compiled: Callable[[object, object], object] = tf.function(step)
    return compiled


def _adam() -> Callable[[object, object], object]:
    """As the LazyAdam of TensorFlow Addons: moments of the given rows only."""
    weights, m, v = _zeros(), _zeros(), _zeros()

    def step(ids: tf.Tensor, gradient: tf.Tensor) -> None:
        m_rows = _BETA_1 * tf.gather(m, ids) + (1 - _BETA_1) * gradient
        v_rows = _BETA_2 * tf.gather(v, ids) + (1 - _BETA_2) * tf.square(gradient)
        tf.raw_ops.ResourceScatterUpdate(resource=m.handle, indices=ids, updates=m_rows)
        tf.raw_ops.ResourceScatterUpdate(resource=v.handle, indices=ids, updates=v_rows)
        change = _RATE * m_rows / (tf.sqrt(v_rows) + _EPSILON)
        tf.raw_ops.ResourceScatterSub(resource=weights.handle, indices=ids, updates=change)

    compiled: Callable[[object, object], object] = tf.function(step)
    return compiled
