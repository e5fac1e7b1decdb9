"""Training over replicas is training: the same numbers, less memory, and everything that Keras people expect."""

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from elastable.embedding_store.composite.locations import LocationSettings
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput, BadSpec, CheckpointError, ModelError, Unavailable, Unsupported
from elastable.replicas.groups.group import CommGroup, ReplicaGroup
from elastable.replicas.groups.thread_group import alone, run_threads
from elastable.replicas.host_embeddings.host_embedding import create_host_embedding
from elastable.replicas.host_embeddings.host_table import HostEmbeddingOptimizerSpec
from elastable.replicas.training.replica_training import ReplicaMemory
from elastable.replicas.training.trainer import ReplicaTrainer
from elastable.worker.layers.embedding import Embedding
from tests.replicas.training.models import (
    BOTH,
    STATE,
    WEIGHTS,
    compiled,
    perceptron,
    records,
    same_bits,
    seeded,
    sharded,
    trained,
)
from tests.untyped import Keywords


def test_one_of_four_is_two_of_two_is_two_of_two_with_sharded_state() -> None:
    # ORACLES "Tensor locations (PopART)": rtol 1e-4, atol 1e-5. 22 records: the last batch has 2.
    # The loss of regularizers counts once, whatever the replicas.
    def make() -> object:
        layers, decay = keras.layers, keras.regularizers.L2(0.1)
        return keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh", kernel_regularizer=decay), layers.Dense(1)])

    x, y = records()
    plain = seeded(make)
    plain.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], run_eagerly=True)
    history = plain.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, validation_data=(x, y)).history
    runs = {
        name: trained(size, locations, make, metrics=["mae"], shuffle=False, validation_data=(x, y))
        for name, size, locations in (
            ("one", 1, BOTH),
            ("two", 2, None),
            ("state", 2, STATE),
            ("both", 2, BOTH),
            ("weights", 2, WEIGHTS),
        )
    }
    for found in runs.values():
        for weights, logs, _ in found:
            assert same_bits(weights, found[0][0])
            assert logs == found[0][1]
            for one, other in zip(weights, plain.get_weights(), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
            for name, values in history.items():
                np.testing.assert_allclose(logs[name], values, rtol=1e-4)
    assert all(same_bits(runs[name][0][0], runs["two"][0][0]) for name in ("state", "both", "weights"))
    assert runs["both"][0][1] == runs["state"][0][1] == runs["weights"][0][1] == runs["two"][0][1]


def test_domains_of_neighbours() -> None:
    pairs = sharded(domain=CommGroup("consecutive", 2))
    locations = LocationSettings(weight=pairs, optimizer_state=pairs)

    def memory(trainer: ReplicaTrainer) -> object:
        return trainer.memory(), trainer.placements[0].domain

    found = trained(4, locations, then=memory, batch_size=6, epochs=1)
    (whole, *_), *_ = trained(1, batch_size=6, epochs=1)
    for weights, _, (held, domain) in found:
        assert same_bits(weights, found[0][0])
        for one, other in zip(weights, whole, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        assert domain.group_size == 2
        # Adam: two slots of 30, 5, 5 in halves (15, 3, 3) and of 1; iteration and learning rate.
        assert held.optimizer_state == 4 * 2 * (15 + 3 + 3 + 1) + 8 + 4
        assert held.whole_optimizer_state == 4 * 2 * (30 + 5 + 5 + 1) + 8 + 4


def test_parts_of_different_size_and_replicas_without_records() -> None:
    # 22 records in batches of 5 over 3: parts of 2, 2 and 1; the last batch of 2 leaves one replica without.
    # SGD, as Adam would not notice gradients of a wrong scale.
    of: Keywords = {"optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.9), "batch_size": 5, "epochs": 1}
    (one, *_), *_ = trained(1, shuffle=False, **of)
    for weights, *_ in trained(3, BOTH, shuffle=False, **of):
        for found, want in zip(weights, one, strict=True):
            np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def wide() -> keras.Sequential:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(512, "tanh"), keras.layers.Dense(1)], name="wide")


@pytest.mark.parametrize("size", [2, 4])
def test_measured_state_is_one_part_of_r_and_whole_slots_never_exist(size: int) -> None:
    made: list[tuple[str, int]] = []

    def note(next_creator: Callable[..., tf.Variable], **named: object) -> object:
        variable = next_creator(**named)
        made.append((variable.name, int(np.prod(variable.shape))))
        return variable

    locations = LocationSettings(optimizer_state=sharded(512))

    def work(group: ReplicaGroup) -> ReplicaMemory:
        model = seeded(wide)
        trainer = ReplicaTrainer(model, locations, group)
        trainer.compile("adam", "mse")
        with tf.variable_creator_scope(note):
            trainer.fit(*records(), batch_size=8, verbose=0)
        assert trainer.memory().weights == trainer.memory().whole_weights
        assert trainer.memory().buffers == 0
        held = sum(variable.value.read_value().numpy().nbytes for variable in trainer.optimizer.variables)
        assert held == trainer.memory().optimizer_state
        return trainer.memory()

    for held in run_threads(size, work):
        # 8 slots of 3072, 512, 512 elements are in parts, two of one element are not; iteration and learning rate.
        assert held.optimizer_state == 4 * 2 * ((3072 + 512 + 512) // size + 1) + 8 + 4
        assert held.optimizer_state == pytest.approx(held.whole_optimizer_state / size, rel=0.01)
    largest = max(elements for name, elements in made)
    assert largest == 3072 // size, made


@pytest.mark.parametrize(("locations", "state_parts"), [(BOTH, 2), (WEIGHTS, 1)], ids=["both", "weights"])
def test_weights_in_parts_are_given_back_between_steps(locations: LocationSettings, state_parts: int) -> None:
    """Also weights alone, with all of their state everywhere."""

    def work(group: ReplicaGroup) -> ReplicaMemory:
        trainer = compiled(wide, locations, group)
        trainer.fit(*records(), batch_size=8, verbose=0)
        kernel, state = trainer.placements[:2]
        assert (kernel.kind, state.kind) == ("weight", "optimizer_state")
        assert kernel.domain is not None
        assert (state.domain is None) == (state_parts == 1)
        return trainer.memory()

    for held in run_threads(2, work):
        assert held.weights == 4  # the bias of one element
        assert held.buffers == held.whole_weights // 2 - 2
        assert held.optimizer_state == pytest.approx(held.whole_optimizer_state / state_parts, rel=0.01)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8, weight_decay=0.1, global_clipnorm=0.1),
        lambda: keras.optimizers.Adafactor(0.1),  # which needs whole variables, and has them
    ],
    ids=["adam", "adafactor"],
)
def test_weights_alone_change_no_bit(optimizer: Callable[..., object]) -> None:
    def evaluated(trainer: ReplicaTrainer) -> tuple[dict[str, list[float]], dict[str, float]]:
        trainer.model.set_weights([0.5 * weight for weight in trainer.model.get_weights()])
        return trainer.fit(*records(), batch_size=4, verbose=0).history, trainer.evaluate(*records(), return_dict=True)

    found, want = (trained(2, locations, optimizer=optimizer, then=evaluated) for locations in (WEIGHTS, None))
    for (weights, history, more), (others, reported, further) in zip(found, want, strict=True):
        assert same_bits(weights, others)
        assert (history, more) == (reported, further)


def test_a_constraint_holds_after_every_update() -> None:
    def make() -> object:
        unit = keras.constraints.UnitNorm()
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, kernel_constraint=unit)])

    found, want = (trained(2, locations, make, epochs=1)[0][0] for locations in (BOTH, None))
    assert same_bits(found, want)
    np.testing.assert_allclose(np.linalg.norm(found[0], axis=0), 1, rtol=1e-5)


def test_moving_statistics_are_those_of_all_and_dropout_is_seeded() -> None:
    def make() -> object:
        layers = keras.layers
        frozen = layers.Dense(4, trainable=False)
        return keras.Sequential(
            [keras.Input((6,)), frozen, layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(1)]
        )

    def moving(trainer: ReplicaTrainer) -> object:
        return trainer.predict(records()[0])

    first = trained(2, STATE, make, epochs=1, batch_size=22, then=moving)
    again = trained(2, BOTH, make, epochs=1, batch_size=22, then=moving)
    assert same_bits(first[0][0], first[1][0])
    assert same_bits(first[0][0], again[0][0])
    np.testing.assert_array_equal(first[0][2], first[1][2])
    # One step: the mean of the replicas' means is that of all records; the variance within parts is less.
    model = seeded(make)
    x, _ = records()
    inputs = model.layers[0](x)
    moved = dict(zip([weight.path.split("/")[-1] for weight in model.weights], first[0][0], strict=True))
    np.testing.assert_allclose(moved["moving_mean"], 0.01 * inputs.numpy().mean(axis=0), rtol=1e-4, atol=1e-6)


def test_variables_that_the_loss_does_not_depend_on_do_not_change() -> None:
    class Aside(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.aside = keras.layers.Dense(1), keras.layers.Dense(3)

        def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
            self.aside(x)
            return self.used(x)

    def work(group: ReplicaGroup) -> tuple[list[Array], list[Array], list[str]]:
        model = seeded(Aside)
        trainer = ReplicaTrainer(model, STATE, group)
        trainer.compile(keras.optimizers.AdamW(0.1, weight_decay=0.5), "mse")
        with pytest.raises(ModelError, match=r"not built: give it an Input or call its build"):
            _ = trainer.placements
        x, y = records()
        trainer.predict(x[:2])
        before = [np.array(weight) for weight in model.get_weights()]
        trainer.fit(x, y, verbose=0)
        return before, model.get_weights(), [weight.path for weight in model.weights]

    for before, after, paths in run_threads(2, work):
        for old, new, path in zip(before, after, paths, strict=True):
            assert np.array_equal(old, new) == (path.split("/")[1] == "dense_1"), path


def test_evaluate_and_predict_are_those_of_keras() -> None:
    x, y = records()
    weight = np.linspace(0, 2, len(x)).astype(np.float32)

    def work(group: ReplicaGroup) -> tuple[list[float], dict[str, float], Array, Array]:
        model = seeded(perceptron)
        trainer = ReplicaTrainer(model, None, group)
        trainer.compile("adam", "mse", metrics=["mae"], weighted_metrics=["mse"])
        metrics = trainer.evaluate(x, y, batch_size=5, sample_weight=weight)
        named = trainer.evaluate(x, y, batch_size=7, sample_weight=weight, return_dict=True)
        few = trainer.predict(x[:2])
        return metrics, named, np.asarray(trainer.predict(x, batch_size=3)), np.asarray(few)

    plain = seeded(perceptron)
    plain.compile("adam", "mse", metrics=["mae"], weighted_metrics=["mse"], run_eagerly=True)
    want = plain.evaluate(x, y, batch_size=5, sample_weight=weight, verbose=0)
    for metrics, named, predicted, few in run_threads(3, work):
        np.testing.assert_allclose(metrics, want, rtol=1e-5)
        np.testing.assert_allclose(list(named.values()), want, rtol=1e-5)
        assert list(named) == ["loss", "mae", "mse"]
        np.testing.assert_allclose(predicted, plain.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(few, predicted[:2], rtol=1e-5, atol=1e-6)


def test_a_keras_embedding_is_a_dense_variable_and_inputs_may_be_nested() -> None:
    def make() -> object:
        user, item = keras.Input((2,), dtype="int32", name="user"), keras.Input((3,), name="item")
        rows = keras.layers.Flatten()(keras.layers.Embedding(50, 4)(user))
        return keras.Model(
            {"user": user, "item": item}, keras.layers.Dense(1)(keras.layers.Concatenate()([rows, item]))
        )

    random = np.random.default_rng(2)
    x = {"user": random.integers(0, 50, (10, 2)), "item": random.normal(size=(10, 3)).astype(np.float32)}
    y = random.normal(size=(10, 1)).astype(np.float32)

    def work(group: ReplicaGroup) -> tuple[list[Array], Array]:
        trainer = compiled(make, LocationSettings(optimizer_state=sharded(200)), group)
        trainer.fit(x, y, batch_size=4, verbose=0)
        return trainer.model.get_weights(), np.asarray(trainer.predict(x))

    (pair, predicted), _ = run_threads(2, work)
    ((one, alone_predicted),) = run_threads(1, work)
    for found, want in zip(pair, one, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(predicted, alone_predicted, rtol=1e-3, atol=1e-4)


def test_close_makes_the_model_ordinary_again(tmp_path: Path) -> None:
    x, y = records()

    def work(group: ReplicaGroup) -> None:
        model = seeded(perceptron)
        trainer = ReplicaTrainer(model, BOTH, group)
        trainer.compile(keras.optimizers.Adam(0.5), "mse")
        trainer.fit(x, y, verbose=0)
        path = tmp_path / f"{group.rank}.keras"
        model.save(path)
        again = keras.models.load_model(path, compile=False)
        assert same_bits(again.get_weights(), model.get_weights())
        other = ReplicaTrainer(model, BOTH, group)
        other.compile("sgd", "mse")
        with pytest.raises(BadSpec, match=r"'net/dense/kernel' is sharded already, by another et.ReplicaTrainer"):
            other.fit(x, y, verbose=0)
        trainer.close()
        other.compile("sgd", "mse")
        other.fit(x, y, verbose=0)
        with pytest.raises(ModelError, match="not compiled"):
            ReplicaTrainer(model, BOTH, group).fit(x, y)

    run_threads(2, work)


class Doubled(keras.Model):
    def train_step(self, data: tuple[tf.Tensor, ...]) -> dict[str, tf.Tensor]:
        return super().train_step(data)


def test_unsupported_models_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"needs a keras.Model, got int"):
        ReplicaTrainer(3, None, alone())
    with pytest.raises(Unsupported, match="overrides train_step"):
        ReplicaTrainer(Doubled(), None, alone())
    stored = keras.Sequential([keras.Input((2,), dtype="int64"), Embedding(10, 4, name="words")])
    with pytest.raises(Unsupported, match="embedding layer 'words' keeps its table in a store"):
        ReplicaTrainer(stored, None, alone())
    normal = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(synchronized=True, name="norm")])
    with pytest.raises(Unsupported, match="layer 'norm' with synchronized=True"):
        ReplicaTrainer(normal, None, alone())
    trainer = ReplicaTrainer(perceptron(), STATE, alone())
    for reduction in ("sum", "none", "mean_with_sample_weight"):
        with pytest.raises(Unsupported, match=f"reduction='{reduction}'"):
            trainer.compile("adam", keras.losses.MeanSquaredError(reduction=reduction))
    with pytest.raises(ModelError, match="no memory has been measured"):
        trainer.memory()
    masked = keras.Sequential(
        [keras.Input((3,), dtype="int32"), keras.layers.Embedding(9, 2, mask_zero=True), keras.layers.Dense(1)]
    )
    trainer = ReplicaTrainer(masked, None, alone())
    trainer.compile("adam", "mse")
    with pytest.raises(Unsupported, match="output with a mask"):
        trainer.fit(np.ones((4, 3), np.int32), np.ones((4, 3, 1), np.float32), verbose=0)


def test_an_optimizer_that_needs_whole_variables_is_refused_before_anything_is_created() -> None:
    x, y = records()

    def work(group: ReplicaGroup) -> None:
        trainer = compiled(perceptron, STATE, group, keras.optimizers.Adafactor(0.1))
        with pytest.raises(Unsupported, match="Adafactor cannot update net/dense/kernel in parts"):
            trainer.fit(x, y, verbose=0)
        whole = ReplicaTrainer(trainer.model, None, group)
        whole.compile(keras.optimizers.Adafactor(0.1), "mse")
        whole.fit(x, y, verbose=0)

    run_threads(2, work)


def test_bad_arguments() -> None:
    x, y = records()
    trainer = ReplicaTrainer(perceptron(), None, alone())
    trainer.compile("sgd", "mse")
    with pytest.raises(BadInput, match="batch_size=0: give the records of a whole batch"):
        trainer.fit(x, y, batch_size=0)
    with pytest.raises(BadInput, match="initial_epoch=1, epochs=1"):
        trainer.fit(x, y, initial_epoch=1)
    with pytest.raises(BadInput, match="batch_size=0"):
        trainer.predict(x, batch_size=0)


def test_the_last_records_are_for_validation() -> None:
    x, y = records()
    trainer = compiled(perceptron, None, alone(), keras.optimizers.SGD(0.0))
    history = trainer.fit(x, y, validation_split=0.3, verbose=0).history
    assert history["val_loss"] == pytest.approx([trainer.evaluate(x[15:], y[15:])], rel=1e-5)
    assert history["loss"] == pytest.approx([trainer.evaluate(x[:15], y[:15])], rel=1e-5)
    with pytest.raises(BadInput, match=r"validation_split=1\.0 of 22 records"):
        trainer.fit(x, y, validation_split=1.0)


def test_replicas_with_different_records_are_refused() -> None:
    x, y = records()

    def work(group: ReplicaGroup) -> None:
        trainer = compiled(perceptron, None, group, "sgd")
        trainer.fit(x[group.rank :], y[group.rank :], verbose=0)

    with pytest.raises(BadInput, match=r"fit: replicas differ in records: rank 0 has 22, rank 1 has 21"):
        run_threads(2, work)


def test_a_lost_replica_is_named_by_its_rank() -> None:
    x, y = records()

    class Falls(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            raise RuntimeError("fallen")

    def work(group: ReplicaGroup) -> None:
        trainer = compiled(perceptron, BOTH, group, "sgd")
        if group.rank == 1:
            trainer.fit(x, y, verbose=0, epochs=2, callbacks=[Falls()])
        with pytest.raises(Unavailable, match="rank 1 has left the group: RuntimeError: fallen"):
            trainer.fit(x, y, verbose=0, epochs=2)

    with pytest.raises(RuntimeError, match="fallen"):
        run_threads(2, work)


# Host embeddings in a model that trains over replicas: the table and the dense part, together


RANDOM = np.random.default_rng(3)
IDS = RANDOM.integers(0, 20, (12, 2))
Y = RANDOM.normal(size=(12, 1)).astype(np.float32)


def trainer_of(group: ReplicaGroup, table: keras.layers.Layer) -> ReplicaTrainer:
    """A model of one table of 20 rows of 4."""

    def make() -> object:
        ids = keras.Input((2,), dtype="int64")
        return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(table(ids))))

    return compiled(make, STATE, group, keras.optimizers.Adam(0.01))


def test_a_host_embedding_learns_with_the_dense_part_and_is_saved_with_it() -> None:
    def work(group: ReplicaGroup) -> tuple[float, float, Array, Array]:
        spec = HostEmbeddingOptimizerSpec(0.1, "adam")
        table = create_host_embedding("rows", (20, 4), optimizer_spec=spec, initializer="ones", group=group)
        with table.register():
            trainer = trainer_of(group, table)
            before = trainer.evaluate(IDS, Y)
            trainer.fit(IDS, Y, batch_size=4, epochs=3, verbose=0)
            after = trainer.evaluate(IDS, Y)
            saved = {key: np.array(tensor) for key, tensor in trainer.whole_tensors()}
            trainer.fit(IDS, Y, batch_size=4, epochs=5, initial_epoch=4, verbose=0)
            assert not np.array_equal(table.get_embedding_tensor(), saved["host/rows/weights"])
            trainer.restore(saved, 9)
            again = {key: np.array(tensor) for key, tensor in trainer.whole_tensors()}
            assert list(again) == list(saved)
            assert same_bits(again.values(), saved.values())
            if group.size == 1:
                return before, after, np.asarray(trainer.predict(IDS, batch_size=5)), table.get_embedding_tensor()
            with pytest.raises(BadInput, match=r"one has 1 for 2 replicas.*'rows'"):
                trainer.fit(IDS[:5], Y[:5], batch_size=4, verbose=0)
            with pytest.raises(CheckpointError, match=r"has host/other/weights, and the model has no such"):
                trainer.restore({**saved, "host/other/weights": saved["host/rows/weights"]}, 9)
            with pytest.raises(CheckpointError, match=r"another model: .*no 'weights'"):
                trainer.restore({key: value for key, value in saved.items() if key != "host/rows/weights"}, 9)
            return before, after, np.asarray(trainer.predict(IDS, batch_size=5)), table.get_embedding_tensor()

    first, second = run_threads(2, work)
    assert first[1] < first[0]
    assert first[2].shape == (12, 1)
    assert same_bits(first[2:], second[2:])
    ((_, alone, predicted, rows),) = run_threads(1, work)
    assert alone == pytest.approx(first[1], rel=1e-4)
    np.testing.assert_allclose(predicted, first[2], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(rows, first[3], rtol=1e-3, atol=1e-4)
