"""Builds a model and checks that it can be trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter

import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Array, Int64
from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import BadIds, BadInput, ElastableError, ModelError, Unsupported
from elastable.master.api import JobSpec
from elastable.master.backend.contract import backend
from elastable.master.backend.lazy import tf
from elastable.worker.keras.same_optimizer import changed_value, traced_values
from elastable.worker.keras.seeds import draws_kept, is_seeded, layers_of
from elastable.worker.keras.structures import TensorBatch, TensorLike
from elastable.worker.layers.model_tables import store_layers
from elastable.worker.losses.loss_parts import all_metrics
from elastable.worker.losses.origins import changes_of, dtype_of
from elastable.worker.readers.batch.ragged import RaggedArray, SparseArray
from elastable.worker.readers.batch.reader import ModelInputs, Reader, source_of
from elastable.worker.rows.array_calls import ArrayPlanScope
from elastable.worker.rows.id_values import assertion_of
from elastable.worker.rows.model_inputs import (
    exact_inputs,
    exact_leaf,
    inputs_of,
    list_length,
    map_inputs,
    padded_lists,
)
from elastable.worker.rows.scope import PlanScope, entered
from elastable.worker.step.forward import (
    Forward,
    batch_spec,
    forward,
    require_like,
    require_parts,
    update_metrics,
    warn_of_values,
)
from elastable.worker.step.step_plan import overrides, rehearse
from elastable.worker.user_model.offload import keep_on_worker, offloading

_log = logging.getLogger(__name__)


def as_tensors(
    batch: object,
    source: str = "the reader",
    model: keras.Model | None = None,
    numbers: Sequence[int] | Int64 | None = None,
) -> TensorBatch:
    """A batch of arrays as the same structure of tensors, with TensorFlow's ragged and sparse tensors.

    Args:
        source: Where they are from, for messages.
        model: The model that takes them: its integer inputs get exact integers, and other floats are float32, as in
            `model.fit`. None: it is not there yet, and floats stay what they are.
        numbers: Number of each record, for messages; None: its place in the batch.

    Raises:
        BadInput: not a batch.
        BadIds: a value that an integer input cannot hold, with input, record and value.
    """
    parts = require_parts(batch, source)
    if model is not None:
        exact = partial(exact_leaf, source=source, numbers=numbers)
        x = map_inputs(model, parts[0], lambda leaf, given: padded_lists(exact(leaf, given), given))
        parts = (x, *parts[1:])
    if not backend().has_graphs:
        arrays: TensorBatch = keras.tree.map_structure(lambda leaf: _as_dense(leaf, source, model is not None), parts)
        return arrays
    tensors: TensorBatch = tf.nest.map_structure(_as_tensor, parts)
    return tensors if model is None else tf.nest.map_structure(_as_single, tensors, expand_composites=True)


def _as_dense(value: object, source: str, single: bool) -> Array:
    """A column as an array, on a backend without ragged tensors, sparse ones and strings; raises `Unsupported`."""
    name = backend().name
    if isinstance(value, RaggedArray | SparseArray):
        raise Unsupported(
            f"{source}: a column of lists of different lengths, or a sparse one, on Keras' {name} backend, which has "
            "no such tensors: they are padded with 0 where a keras.Input((None,)) goes to et.Embedding layers with "
            "mask_zero=True alone; else pad them to one length, or use TensorFlow"
        )
    array = keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else np.asarray(value)
    if array.dtype.kind in "OSU":
        raise Unsupported(
            f"{source}: a column of strings on Keras' {name} backend, which has none: hash them before, in the reader "
            "or by et.hash_ids, and give the model a keras.Input of int64"
        )
    return array.astype(np.float32) if single and array.dtype in (np.float64, np.float16) else array


def _as_tensor(value: object) -> TensorLike:
    if tf.is_tensor(value):
        return value
    if isinstance(value, RaggedArray):
        return tf.RaggedTensor.from_row_splits(_as_tensor(value.values), value.splits, validate=False)
    if isinstance(value, SparseArray):
        records = np.repeat(np.arange(len(value)), np.diff(value.splits))
        indices = np.concatenate([records[:, np.newaxis], value.indices], axis=1)
        return tf.SparseTensor(indices, _as_tensor(value.values), [len(value), *value.shape])
    return backend().tensor(value) if isinstance(value, np.ndarray) else tf.convert_to_tensor(value)


def sample_batch(reader: Reader, model: keras.Model | None = None) -> TensorBatch:
    """The first two records of a reader, as tensors; `model` as of `as_tensors`."""
    if len(reader) == 0:
        raise BadInput("the training split is empty; data('train') must hold at least one record")
    first = np.arange(min(2, len(reader)), dtype=np.int64)
    source = source_of(reader)
    batch = as_tensors(reader.take(first), source, model, first)
    require_like(batch_spec(batch, model), batch, len(first), source)
    return batch


def for_model(reader: Reader, model: keras.Model) -> Reader:
    """The same records, as the inputs of the model want them: a column of a file in the dtype of its `keras.Input`.

    Of a model without symbolic inputs (a subclass of `keras.Model`) nothing is known, and nothing changes.
    """
    inputs = inputs_of(model)
    if inputs is None:
        return reader
    flat = keras.tree.flatten(inputs)
    named = inputs.items() if isinstance(inputs, Mapping) else zip(map(attrgetter("name"), flat), flat, strict=True)
    dtypes, lengths = {}, {}
    for name, each in named:
        if isinstance(each, keras.KerasTensor):
            dtypes[name] = str(each.dtype)
            if (length := list_length(each)) is not None:
                lengths[name] = length
    return reader.for_inputs(ModelInputs(dtypes, lengths, overrides(model, "train_step")))


def make_model(
    make: Callable[[], keras.Model],
    records: Reader | Callable[[], Reader],
    seed: int,
    offload_above: int = 0,
    on_worker: Collection[str] = (),
) -> keras.Model:
    """Calls `make` for the model and builds it.

    Args:
        make: Returns a compiled Keras model.
        records: Records, for their shapes; or what returns some, called only for a model that needs them
            (`needs_sample`).
        seed: Keras' global seed, so that every process starts with equal dense variables.
        offload_above: Keras embeddings with more elements than this are offloaded to the store and never allocated; 0:
            none.
        on_worker: Tables that become Keras variables.
    """
    keras.utils.set_random_seed(seed & 0xFFFFFFFF)
    with offloading(offload_above):
        model = make()
        if callable(records) and not needs_sample(model):
            _refuse_unsupported(model)
        else:
            build_model(model, sample_batch(for_model(records() if callable(records) else records, model)))
    if on_worker:
        specs = {layer.table_name: layer.table_spec(seed) for layer in store_layers(model)}
        keep_on_worker(model, {name: specs[name] for name in on_worker if name in specs})
    return model


def needs_sample(model: keras.Model) -> bool:
    """Whether a model is not known without data: Keras has not built it, or it has its own `train_step`."""
    return overrides(model, "train_step") or not all(layer.built for layer in layers_of(model))


def build_model(model: keras.Model, sample: TensorBatch) -> None:
    """Runs the model once on `sample`, so that all variables exist, and puts back what that changes.

    Raises:
        ModelError, Unsupported: a model that is not compiled, fails on its own data, or uses unsupported features.
    """
    _refuse_unsupported(model)
    if not backend().has_graphs:
        _build_on_arrays(model, sample)
        return
    x = exact_inputs(model, sample[0])
    sample = tf.nest.map_structure(_as_single, (x, *sample[1:]), expand_composites=True)

    def run() -> list[list[tf.Tensor]]:
        if overrides(model, "train_step"):
            rehearse(model, sample)
            return []
        done = forward(model, sample, training=False)
        warn_of_values(model, "compute_metrics", update_metrics(model, done, done.loss))
        return _states_of_updates(model, _own_metrics(model), done)

    values = {} if needs_sample(model) else traced_values(model)
    try:
        # A graph shows what it changes before it does.
        with entered(PlanScope()), draws_kept():
            traced = tf.function(run, autograph=False).get_concrete_function()
        if not overrides(model, "train_step"):
            with _changes_kept(model, traced.graph):
                states = traced()
            _require_sums(_own_metrics(model), states)
    except ElastableError:
        raise
    except Exception as error:
        if isinstance(error, tf.errors.InvalidArgumentError) and (message := assertion_of(error)):
            raise BadIds(message) from error
        fixed = [of.name for of in getattr(model, "inputs", None) or () if of.shape[0] is not None]
        hint = f" (its input {fixed[0]!r} has a fixed batch size: write keras.Input(shape))" if fixed else ""
        hint = hint or (" (its data has no labels)" if len(sample) < 2 else "")
        raise ModelError(
            f"model {model.name!r} fails on the first records of its data{hint}: {type(error).__name__}: {error}"
        ) from error
    model.reset_metrics()
    if name := changed_value(model, values):
        _log.warning(
            "model %r: its own code changes %s, and is called here before training, too, so the numbers are not those "
            "of Keras: keep it in a tf.Variable or a keras.Variable, which is put back",
            model.name,
            name,
        )


def _build_on_arrays(model: keras.Model, sample: TensorBatch) -> None:
    """`build_model` where the model runs eagerly."""
    held = [(each, backend().copied(each)) for each in variables_of(model.variables)]
    try:
        with entered(ArrayPlanScope()), draws_kept(), backend().exact_ids():
            sample = keras.tree.map_structure(keras.ops.convert_to_tensor, sample)
            if overrides(model, "train_step"):
                rehearse(model, sample)
            else:
                done = forward(model, sample, training=False)
                warn_of_values(model, "compute_metrics", update_metrics(model, done, done.loss))
                _require_sums(_own_metrics(model), _states_of_updates(model, _own_metrics(model), done))
    except ElastableError:
        raise
    except Exception as error:
        hint = " (its data has no labels)" if len(sample) < 2 else ""
        raise ModelError(
            f"model {model.name!r} fails on the first records of its data{hint}: {type(error).__name__}: {error}"
        ) from error
    for variable, value in held:
        if not np.array_equal(backend().copied(variable), value):
            backend().assign(variable, value)
    model.reset_metrics()


def _draws_globally(layer: keras.Layer) -> bool:
    generator = getattr(layer, "seed_generator", None)
    plain = isinstance(layer, keras.layers.Dropout) and layer.noise_shape is None and getattr(layer, "rate", 0) > 0
    return plain and getattr(layer, "seed", 0) is None and generator is not None


def _as_single(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, tf.float32) if tensor.dtype in (tf.float64, tf.float16) else tensor


def warn_of_other_numbers(model: keras.Model, job: JobSpec) -> None:
    """Names what may come to other numbers than in Keras.

    That are an optimizer that looks at all gradients at once, layers that train on statistics of a batch, where a batch
    is computed in several micro-batches, and on PyTorch dropout without a seed.
    """
    unseeded = []
    if backend().name == "torch" and is_seeded():
        unseeded = [repr(layer.name) for layer in layers_of(model) if _draws_globally(layer)]
    if unseeded:
        _log.warning(
            "model %r: %s without a seed draws from PyTorch's global generator, from which Keras' data loader draws in "
            "model.fit, too, so a run with keras.utils.set_random_seed comes to other numbers; give it a seed",
            model.name,
            ", ".join(unseeded),
        )
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    kinds = type(optimizer).__mro__
    for kind in kinds:
        if "apply" not in vars(kind) or kind.__module__.startswith("keras."):
            continue
        _log.warning(
            "model %r: %s.apply is called for the dense variables together and for each table apart: where it looks at "
            "several gradients, or at their places, the numbers are not those of Keras; override update_step",
            model.name,
            kinds[0].__name__,
        )
        break
    if job.micro_batches_per_version == 1:
        return
    if job.average == "batches":
        if getattr(optimizer, "gradient_accumulation_steps", None):
            _warn_of_states(model)
        return
    layers = [layer for layer in layers_of(model) if isinstance(layer, keras.layers.BatchNormalization)]
    names = [repr(layer.name) for layer in layers if layer.trainable]
    if names:
        _log.warning(
            "model %r: BatchNormalization (%s) takes the statistics of each micro-batch of %d records, and not those "
            "of the %d micro-batches of a version together (grads_to_wait), so the numbers are not those of Keras on "
            "one batch; use grads_to_wait=1 (--grads-to-wait 1), or LayerNormalization or GroupNormalization",
            model.name,
            ", ".join(names),
            job.micro_batch_size,
            job.micro_batches_per_version,
        )


def _warn_of_states(model: keras.Model) -> None:
    """Names layers whose state Keras updates batch after batch while gradients are accumulated."""
    for layer in layers_of(model):
        weights = [
            each for each in getattr(layer, "_non_trainable_variables", ()) if each.name != "seed_generator_state"
        ]
        if layer.trainable and weights and not isinstance(layer, keras.layers.Normalization):
            _log.warning(
                "model %r: with gradient_accumulation_steps the state of layer %r (%s) becomes the mean over the "
                "batches of an update, and does not go from batch to batch as in Keras; leave the argument out",
                model.name,
                layer.name,
                weights[0].name,
            )


def _refuse_unsupported(model: keras.Model) -> None:
    """Refuses features of `compile()` or the model that the step does not support, by name."""
    if not getattr(model, "compiled", False):
        raise ModelError(f"model {model.name!r} is not compiled; call model.compile(optimizer, loss, ...) first")
    for name in ("make_train_function", "make_test_function"):
        if overrides(model, name):
            raise Unsupported(
                f"model {model.name!r} overrides {name}, which is not called here, as a step looks rows up first: "
                "override train_step with et.step (docs/fit.md#your-own-training-steps), or use a callback"
            )
    strategy = getattr(model, "_distribute_strategy", None)
    if strategy is not None:
        raise Unsupported(
            f"model {model.name!r} was made under tf.distribute's {type(strategy).__name__}, which copies variables "
            "itself: create it outside the strategy's scope; for several workers use elastable train --workers, for "
            "replicas with separate variables et.ReplicaTrainer"
        )
    if not backend().has_graphs:
        _refuse_on_arrays(model)
    elif model.jit_compile is True:
        # Keras does the same for a model that XLA cannot compile; the numbers differ only by rounding.
        _log.warning(
            "model %r: compile(jit_compile=True) has no effect: its steps run without XLA, because the number of "
            "unique ids differs from batch to batch",
            model.name,
        )


def _refuse_on_arrays(model: keras.Model) -> None:
    """Refuses what is written for TensorFlow's graphs and tapes."""
    able = {"train_step": ("tensorflow", "torch"), "test_step": ("tensorflow",)}
    for name, backends in able.items():
        if overrides(model, name) and backend().name not in backends:
            raise Unsupported(
                f"model {model.name!r} overrides {name}, which works on Keras' backend {' or '.join(backends)} alone: "
                f"override compute_loss, or set KERAS_BACKEND={backends[0]}"
            )


@contextmanager
def _changes_kept(model: keras.Model, graph: tf.Graph) -> Iterator[None]:
    """Restores, after the block, every variable that the graph changes, and names the weights among them.

    A layer, a loss or a metric may count its calls, update an average or draw a number; this call must not count.
    """
    handles = {id(handle): handle for _, handle in changes_of(graph)}.values()
    before = [(handle, tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype_of(handle))) for handle in handles]
    yield
    paths = {id(weight.value.handle): weight.path for weight in variables_of(model.weights)}
    changed = []
    for handle, value in before:
        after = tf.raw_ops.ReadVariableOp(resource=handle, dtype=value.dtype)
        if id(handle) in paths and not np.array_equal(after, value):
            changed.append(paths[id(handle)])
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    if changed:
        _log.warning(
            "model %r: %s changes in inference, too (training=False). Keras keeps what an evaluation during training "
            "changes, and here it is dropped: change it only where training is true",
            model.name,
            ", ".join(map(repr, changed)),
        )


def _own_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    return [metric for metric in all_metrics(model) if type(metric).__module__.split(".")[0] != "keras"]


def _states_of_updates(model: keras.Model, own: Sequence[keras.metrics.Metric], done: Forward) -> list[list[tf.Tensor]]:
    """The states of metrics that have seen a batch once, and twice."""
    if not own:
        return []
    # An untrained model may predict zeros, for which every state looks like a sum.
    seen = replace(done, predicted=keras.tree.map_structure(_between_zero_and_one, done.predicted))
    model.reset_metrics()
    states = []
    for _ in range(2):
        update_metrics(model, seen, seen.loss)
        states.append([keras.ops.copy(variable.value) for metric in own for variable in metric.variables])
    return states


def _require_sums(own: Sequence[keras.metrics.Metric], states: Sequence[Sequence[tf.Tensor]]) -> None:
    """Refuses a user's metric whose state is not a sum over records, because micro-batches could not be merged."""
    variables = [(metric, variable) for metric in own for variable in metric.variables]
    for (metric, variable), *values in zip(variables, *states, strict=True) if own else ():
        once, twice = map(keras.ops.convert_to_numpy, values)
        if not np.allclose(twice, 2 * once, rtol=1e-3, atol=1e-6):
            raise Unsupported(
                f"metric {metric.name!r} ({type(metric).__name__}): its state {variable.path!r} is no sum over "
                "records (seeing the same batch twice does not double it), so micro-batches cannot be merged; "
                "keep sums and counts in the state and compute from them in result(), or use a callback"
            )


def _between_zero_and_one(value: TensorLike) -> TensorLike:
    if not backend().has_graphs:
        return 0.1 + 0.8 * keras.ops.sigmoid(value) if keras.backend.is_float_dtype(value.dtype) else value
    if not tf.is_tensor(value) or isinstance(value, tf.RaggedTensor) or not value.dtype.is_floating:
        return value
    return tf.cast(0.1 + 0.8 * tf.random.stateless_uniform(tf.shape(value), (0, 0)), value.dtype)
