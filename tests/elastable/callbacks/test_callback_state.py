"""What callbacks remember outlives the master, and so do the numbers that they decide."""

import logging
from pathlib import Path

import keras
import numpy as np
import pytest

from elastable.callbacks.callback_state import restore_states, states_of
from elastable.embedding_store.errors import BadInput
from tests.elastable.kept_jobs import assert_same, kept, trained

JOB = Path(__file__).with_name("plateau_job.py")
END = 20  # of the fifth epoch of four versions, which the callbacks make the last


class Counts(keras.callbacks.Callback):
    def __init__(self, state: object = None) -> None:
        super().__init__()
        self.state = state

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        if state == "refused":
            raise KeyError("seen")
        self.state = state


class Half(keras.callbacks.Callback):
    def state_dict(self) -> object:
        return 1


def states_after(*callbacks: keras.callbacks.Callback, epochs: int) -> tuple[object, ...]:
    """The callbacks, after so many epochs of equal loss."""
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for callback in callbacks:
        callback.set_model(model)
        callback.on_train_begin()
        for epoch in range(epochs):
            callback.on_epoch_end(epoch, {"loss": np.float64(1.0), "val_loss": 1.0})
    return callbacks


def test_of_keras_own_what_they_count_and_compare_with() -> None:
    stopping = keras.callbacks.EarlyStopping("val_loss", min_delta=0.5, patience=9)
    reducing = keras.callbacks.ReduceLROnPlateau("loss", patience=9, min_delta=0.5)
    states = states_of(states_after(stopping, reducing, keras.callbacks.LambdaCallback(), epochs=4))
    assert states == {
        "EarlyStopping": {"wait": 3, "best": 1.0, "best_epoch": 0, "stopped_epoch": 0},
        "ReduceLROnPlateau": {"wait": 3, "best": 1.0, "cooldown_counter": 0},
    }
    again = keras.callbacks.EarlyStopping("val_loss", min_delta=0.5, patience=9)
    states_after(again, epochs=0)
    restore_states([again], {"EarlyStopping": states["EarlyStopping"]})
    again.on_epoch_end(4, {"val_loss": 0.7})  # better by less than min_delta, whose sign belongs to its first look
    assert (again.wait, again.best) == (4, 1.0)


def test_the_second_of_a_class_is_the_second() -> None:
    states = states_of([Counts(1), keras.callbacks.TerminateOnNaN(), Counts({"seen": [2]})])
    assert states == {"Counts": 1, "Counts 2": {"seen": [2]}}
    first, second = Counts(), Counts()
    restore_states([first, second], states)
    assert (first.state, second.state) == (1, {"seen": [2]})


def test_numbers_of_numpy_are_kept_as_numbers() -> None:
    assert states_of([Counts({"best": np.float32(0.5), "wait": np.int64(3), "off": np.bool_(True)})]) == {
        "Counts": {"best": 0.5, "wait": 3, "off": True}
    }


def test_what_cannot_be_kept_or_taken_is_named() -> None:
    with pytest.raises(BadInput, match=r"callback Counts: its state_dict\(\) .* cannot be: a ndarray"):
        states_of([Counts(np.zeros(3))])
    with pytest.raises(BadInput, match=r"callback Half has a state_dict\(\) and no load_state_dict"):
        states_of([Half()])
    with pytest.raises(BadInput, match="callback Counts 2 cannot go on from the state of the job: 'seen'"):
        restore_states([Counts(), Counts()], {"Counts": 1, "Counts 2": "refused"})


def test_those_that_came_begin_anew_and_those_that_went_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    new = Counts("new")
    with caplog.at_level(logging.WARNING):
        restore_states([new], {"EarlyStopping": {"wait": 1}})
    assert new.state == "new"
    assert "callbacks that are not there any more: EarlyStopping" in caplog.text


def train(home: Path, *more: str, env: dict[str, str] | None = None, code: int = 0) -> str:
    return trained(JOB, home, "--epochs", "6", "--micro-batch-size", "16", "--workers", "1", *more, env=env, code=code)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("whole")
    assert "failed" not in train(home, env={"ENDS_S": "2"})  # nor have workers that leave once all is trained
    states = kept(home, END).progress().hooks
    assert states["EarlyStopping"]["wait"] == 4
    assert states["Slower"] == {"epochs": [0, 1, 2, 3, 4]}
    return home


# Before the last batch of an epoch, after it, and within one; from a checkpoint, or from the record of the store.
@pytest.mark.sampled(6)
@pytest.mark.parametrize(("version", "log"), [(7, True), (8, False), (18, True), (9, False)])
def test_a_resumed_job_has_the_numbers_of_a_whole_one(whole: Path, tmp_path: Path, version: int, log: bool) -> None:
    store = ("--store", f"memory?log={tmp_path / 'log'}") if log else ()
    train(tmp_path, *store, env={"STOPS_AFTER": str(version)}, code=130)
    assert f"resuming at version {version}" in train(tmp_path, *store, "--resume")
    one, other = kept(tmp_path, END), kept(whole, END)
    assert_same(one, other)
    assert dict(one.progress().hooks) == dict(other.progress().hooks)
