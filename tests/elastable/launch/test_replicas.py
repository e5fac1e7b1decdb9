"""`elastable replicas`: starts them, shows what they write, names the one that failed, and leaves none behind."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from elastable.embedding_store.errors import BadInput
from elastable.launch.program import program_of
from elastable.process.exit_codes import ExitCode
from tests.elastable.launch.host_embedding_program import BATCH, DIM, RATE, ROWS, X, Y, model_of
from tests.elastable.processes import elastable, is_running, run_elastable, succeeded, wait_until

PROGRAM = Path(__file__).with_name("replica_program.py")


def pids(home: Path, count: int) -> list[int]:
    return [int((home / f"{rank}.pid").read_text()) for rank in range(count)]


def test_replicas_do_their_work_and_say_who_says_what(tmp_path: Path) -> None:
    ran = succeeded("replicas", "-n", "3", PROGRAM, "add", tmp_path, new=True)
    assert sorted(ran.out.splitlines()) == [f"[{rank}] 3 replicas add up to 6.0" for rank in range(3)]
    assert not any(is_running(pid) for pid in pids(tmp_path, 3))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("asked_for", [False, True])
def test_tensorflow_starts_without_noise(asked_for: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sums.py"
    program.write_text("import keras\nimport tensorflow as tf\nprint(float(tf.reduce_sum(tf.ones(3))))\n")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    if asked_for:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    ran = run_elastable("replicas", "-n", "1", program, new=True)
    assert (ran.code, ran.out) == (0, "[0] 3.0\n"), ran.err
    assert bool(ran.err) is asked_for


def test_one_that_fails_is_named_and_ends_the_others(tmp_path: Path) -> None:
    ran = run_elastable("replicas", "-n", "3", "-m", "tests.elastable.launch.replica_program", "fail", tmp_path)
    assert ran.code == ExitCode.BAD_INPUT
    assert ran.err.splitlines()[-1].startswith("BadInput: rank 1 on ")
    assert ran.err.splitlines()[-1].endswith("failed with exit code 3: BadInput: no such entity")
    for rank in (0, 2):  # reported by rank 1 itself
        message = "elastable.embedding_store.errors.Unavailable: rank 1 has left the group: BadInput: no such entity"
        assert f"[{rank}] {message}" in ran.err
    assert not any(is_running(pid) for pid in pids(tmp_path, 3))


def test_one_that_crashes_is_named_and_the_others_are_ended_whatever_they_do(tmp_path: Path) -> None:
    ran = run_elastable("replicas", "-n", "2", "--grace", "0.5", PROGRAM, "ignore", tmp_path)
    assert ran.code == ExitCode.JOB_FAILED
    assert "was killed by signal 11 (Segmentation fault); rank 0 did not end, and was killed" in ran.err
    assert not any(is_running(pid) for pid in pids(tmp_path, 2))


def test_ctrl_c_ends_all(tmp_path: Path) -> None:
    with elastable(tmp_path, "replicas", "-n", "2", PROGRAM, "wait", tmp_path, new=True) as running:
        wait_until(lambda: len(list(tmp_path.glob("*.waits"))) == 2, "replicas", running)
        running.signal(signal.SIGINT)
        assert running.wait(60) == ExitCode.INTERRUPTED
        assert "KeyboardInterrupt" not in running.err.split("ending all replicas")[0]
    assert not any(is_running(pid) for pid in pids(tmp_path, 2))


def test_replicas_end_with_whoever_started_them(tmp_path: Path) -> None:
    with elastable(tmp_path, "replicas", "-n", "2", PROGRAM, "wait", tmp_path, new=True) as running:
        wait_until(lambda: len(list(tmp_path.glob("*.waits"))) == 2, "replicas", running)
        running.signal(signal.SIGKILL)
        wait_until(lambda: not any(is_running(pid) for pid in pids(tmp_path, 2)), "end of the replicas", running)


def test_those_that_are_killed_in_the_middle_are_named_at_once(tmp_path: Path) -> None:
    """One after another, rank 0 among them; the rest go on in a new group."""
    module = ["-m", "tests.elastable.launch.dying_replicas"]
    ran = run_elastable("replicas", "-n", "4", "--grace", "100", *module, tmp_path)
    saved = {rank: json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)}
    died = "has left the group: its process has ended without a word"
    # Ranks are those of the group: of 0, 1, 2 the first; of 1, 2 the second. Of the second death one of the two that
    # are left may hear from the other, who heard of it first.
    for rank, other in ((1, 2), (2, 1)):
        assert saved[rank][1] in (f"rank 0 {died}", f"rank {other} has left the group: rank 0 {died}"), ran.err
        saved[rank][1] = f"rank 0 {died}"
    expected = {0: [f"rank 3 {died}"], 1: [f"rank 3 {died}", f"rank 0 {died}", f"rank 1 {died}"], 3: []}
    expected[2] = expected[1][:2]
    assert saved == expected, ran.err
    assert "[1] alone" in ran.out
    assert "was killed by signal 9 (Killed)" in ran.err
    assert ran.code == ExitCode.JOB_FAILED


def test_a_child_of_a_replica_is_none(tmp_path: Path) -> None:
    ran = succeeded("replicas", "-n", "2", PROGRAM, "child", tmp_path)
    assert "[1] 1 replicas add up to 1.0\n" in ran.out


def test_replicas_that_cannot_be_started_are_named(tmp_path: Path) -> None:
    ran = run_elastable(
        "replicas", "-n", "2", "--deadline", "20", "--hosts", "no.such.host.invalid", PROGRAM, "add", "."
    )
    assert ran.code == ExitCode.JOB_FAILED
    assert re.search("JobFailed: rank 0, 1 did not start; .*mpiexec says: ", ran.err)
    assert "no.such.host.invalid" in ran.err


def run_program(*started_by: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Runs the program by another command than `elastable replicas`."""
    environment = {**os.environ, "PYTHONPATH": str(PROGRAM.parents[3])}
    command = [*started_by, sys.executable, str(PROGRAM), "add", str(home)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=environment, stdin=subprocess.DEVNULL
    )


def test_mpirun_starts_replicas_too(tmp_path: Path) -> None:
    ran = run_program(str(Path(sys.executable).with_name("mpirun")), "-n", "2", home=tmp_path)
    assert (ran.returncode, ran.stdout.count("2 replicas add up to 3.0")) == (0, 2), ran.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no_such.py"], "'no_such.py': there is no such file; a program is a Python file, -m MODULE, or elastable"),
        (["-m", "no.such.module"], "-m no.such.module: there is no such module"),
        (["-m"], "there is no such module"),
        ([__file__ + "/.."], "no such file"),
        ([sys.executable], "a program is a Python file"),
        ([], "need a program"),
    ],
)
def test_what_is_no_program_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        program_of(words)


@pytest.mark.parametrize("words", [["-m", "json.tool", "-n"], [__file__, "--help"], ["-m", "elastable", "kg", "train"]])
def test_a_program_is_the_words_that_name_it(words: list[str]) -> None:
    assert program_of(words) == words
    assert program_of(["elastable", "kg"]) == ["-m", "elastable", "kg"]


def test_without_replicas_a_program_is_a_group_of_one(tmp_path: Path) -> None:
    ran = run_program(home=tmp_path)
    assert ran.stdout == "1 replicas add up to 1.0\n", ran.stderr


# Host embeddings in real processes, dense variables by `et.ReplicaTrainer`: the numbers of one plain Keras model


def test_two_processes_train_as_one_plain_keras_model(tmp_path: Path) -> None:
    """Batches of 15 are 8 and 7: the parts differ in size."""
    succeeded("replicas", "-n", "2", "-m", "tests.elastable.launch.host_embedding_program", tmp_path)
    # The regularizer of weight zero makes gradients dense: see `tests.equality.model.plain_model`.
    zero = keras.regularizers.L2(0.0)
    rows = keras.layers.Embedding(ROWS, DIM, embeddings_initializer="ones", embeddings_regularizer=zero)
    plain = model_of(rows)
    plain.compile(keras.optimizers.Adagrad(RATE), "mse")
    plain.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    for rank in range(2):
        with np.load(tmp_path / f"{rank}.npz") as found:
            for strategy in ("TOKEN", "ENCODING"):
                np.testing.assert_allclose(found[strategy], np.asarray(rows.embeddings), rtol=0, atol=1e-6)
                np.testing.assert_allclose(
                    found[f"{strategy} kernel"], np.asarray(plain.layers[-1].kernel), rtol=0, atol=1e-6
                )
            np.testing.assert_array_equal(found["TOKEN"], found["ENCODING"])
