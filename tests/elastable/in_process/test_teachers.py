"""A frozen model that another one's loss calls: a teacher, whose rows are constants."""

import keras
import pytest

import elastable as et
from elastable.embedding_store.errors import ModelError
from elastable.worker.rows.saved_rows import leaving_rows_out
from tests.elastable.one_table import (
    DIM,
    IDS,
    ROWS,
    START,
    TARGETS,
    assert_same,
    model_of,
    own_table,
    plain_table,
    train,
)


def student_of(teacher: keras.Model, table: keras.layers.Layer) -> keras.Model:
    """A model that learns what the teacher says, too, without holding it."""

    class Student(keras.Model):
        def compute_loss(
            self, x: object = None, y: object = None, y_pred: object = None, sample_weight: object = None,
            training: bool = True,
        ) -> object:  # fmt: skip
            own = super().compute_loss(x, y, y_pred, sample_weight)
            return own + keras.ops.mean((y_pred - teacher(x)) ** 2)

    ids = keras.Input((4,), dtype="int64")
    kernel = keras.initializers.GlorotUniform(seed=2)
    student = Student(ids, keras.layers.Dense(1, kernel_initializer=kernel)(keras.layers.Flatten()(table(ids))))
    table.set_weights([START * 0.5])
    student.compile(keras.optimizers.Adam(0.05), "mse")
    return student


def freeze(model: keras.Model) -> None:
    for layer in model.layers:
        layer.trainable = False


@pytest.mark.parametrize("way", ["fit", "train_on_batch"])
def test_a_frozen_teacher_in_a_closure_is_read_as_it_is(way: str) -> None:
    found = []
    for make in (plain_table, own_table):  # both have the table "items": each reads its own
        teacher = model_of(make())
        teacher.get_layer("items").set_weights([START])
        train(teacher)
        freeze(teacher)
        student = student_of(teacher, make())
        train(student, epochs=2) if way == "fit" else student.train_on_batch(IDS, TARGETS)
        student.evaluate(IDS, TARGETS, verbose=0)
        found.append(student)
    assert_same(found[1], found[0])


def test_one_that_could_be_trained_is_refused() -> None:
    teacher = model_of(et.Embedding(ROWS, DIM, name="teacher"))
    with pytest.raises(ModelError, match=r"'teacher': the model does not know.*or set trainable=False"):
        train(student_of(teacher, own_table()))


def test_one_whose_rows_a_worker_left_out_is_refused() -> None:
    teacher = model_of(et.Embedding(ROWS, DIM, name="teacher"))
    with leaving_rows_out():
        teacher.get_layer("teacher").set_weights([START])
    freeze(teacher)
    with pytest.raises(ModelError, match=r"'teacher': .*a worker of a job has no rows of it"):
        train(student_of(teacher, own_table()))
