"""Every callback of `keras.callbacks`."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tests.keras_table.case import Case, Side, arguments_in, code_in, small, trained


def _with(*callbacks: Callable[[], object], **fit: object) -> Callable[[Side], object]:
    def program(side: Side) -> object:
        made = [make() for make in callbacks]
        return trained(side, fit={"epochs": 3, "callbacks": made, **fit}, optimizer=keras.optimizers.SGD(0.5))

    return program


def _validated(*callbacks: Callable[[], object], **fit: object) -> Callable[[Side], object]:
    return lambda side: _with(*callbacks, validation_data=(side.x, side.labels), **fit)(side)


def _calls_of(side: Side) -> list[object]:
    """Which hooks are called, with what, and how often."""
    seen: list[object] = []

    def noting(hook: str) -> Callable[..., None]:
        def noted(*given: Any, **named: Any) -> None:
            numbers = [each for each in given if isinstance(each, int)]
            logs = next((each for each in (*given, *named.values()) if isinstance(each, dict)), {})
            seen.append(f"{hook} {numbers} {sorted(logs) if hook.endswith(('epoch_end', 'batch_end')) else ''}")

        return noted

    callback = keras.callbacks.Callback()
    for hook in ("train", "epoch", "train_batch"):
        for end in ("begin", "end"):
            name = f"on_{hook}_{end}"
            setattr(callback, name, noting(name))
    result = trained(side, fit={"epochs": 2, "callbacks": [callback]})
    return [result, seen]


def _file(
    make: Callable[[str], object], read: Callable[[Path, Side], object], **fit: object
) -> Callable[[Side], object]:
    """A callback that writes files: what they hold is compared."""

    def program(side: Side) -> object:
        with tempfile.TemporaryDirectory() as folder:
            result = _with(lambda: make(folder), **fit)(side)
            return [result, read(Path(folder), side)]

    return program


def _names(folder: Path, side: Side) -> object:
    return sorted(path.name.split(".")[0] for path in folder.rglob("*") if path.is_dir() or path.suffix != ".v2")


def _csv(folder: Path, side: Side) -> object:
    return np.genfromtxt(folder / "log.csv", delimiter=",", skip_header=1)


def _best(folder: Path, side: Side) -> object:
    plain = small(Side(every_row=side.every_row))
    plain.load_weights(folder / "best.weights.h5")
    return plain.predict(side.x, verbose=0)


def _whole(folder: Path, side: Side) -> object:
    return keras.models.load_model(folder / "last.keras").predict(side.x, verbose=0)


def _swapped(side: Side) -> object:
    optimizer = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)
    swapping = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    return trained(side, optimizer=optimizer, fit={"epochs": 2, "callbacks": [swapping]})


def _not_a_number(side: Side) -> object:
    y = side.y.copy()
    y[10] = np.nan
    return trained(side, y=y, fit={"callbacks": [keras.callbacks.TerminateOnNaN()]})


def _stops(side: Side) -> object:
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            self.model.stop_training = epoch == 1

    return trained(side, fit={"epochs": 4, "callbacks": [Stop()]})


def _remote(side: Side) -> list[object]:
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    received: list[object] = []

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Listener) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        root = f"http://127.0.0.1:{server.server_port}"
        try:
            result = _with(lambda: keras.callbacks.RemoteMonitor(root=root, send_as_json=True))(side)
        finally:
            server.shutdown()
            thread.join()
    return [result, received]


def _c(name: str, program: Callable[[Side], object], *covers: str, only: str = "") -> Case:
    """A case of the callback that the name begins with, or of `covers`."""
    return Case(
        name, program, " ".join(f"callbacks.{cover}" for cover in covers or [name[1:].split("(")[0]]), only=only
    )


def _said(name: str, run: Callable[..., Callable[[Side], object]] = _with) -> Case:
    """A case of the very callback that its name says."""
    return _c(name, run(lambda: arguments_in(f"callback={code_in(name)}", vars(C))["callback"]))


C = keras.callbacks
CASES = [
    _c("`History`, `CallbackList`, `callbacks=[]`", _with(), "History", "CallbackList"),
    _c("a callback of one's own: every hook of training", _calls_of, "Callback"),
    _c("`self.model.stop_training = True`", _stops, "Callback"),
    _c("`LambdaCallback(...)`", _with(lambda: C.LambdaCallback(on_epoch_end=lambda epoch, logs: None))),
    _c("`LearningRateScheduler(...)`", _with(lambda: C.LearningRateScheduler(lambda epoch, rate: rate * 0.5))),
    _said("`ReduceLROnPlateau(monitor='loss', patience=1, min_delta=10)`"),
    _said("`EarlyStopping(monitor='loss', patience=1, min_delta=10)`"),
    _said("`EarlyStopping(patience=1, restore_best_weights=True)`, validated", _validated),
    _c(
        "`EarlyStopping(start_from_epoch=1, restore_best_weights=True)`",
        _validated(
            lambda: C.EarlyStopping(
                monitor="val_loss", mode="max", patience=1, restore_best_weights=True, start_from_epoch=1
            )
        ),
    ),
    _c("`TerminateOnNaN()`, a label that is NaN", _not_a_number),
    _said("`TerminateOnNaN()`"),
    _c("`CSVLogger(file)`", _file(lambda folder: C.CSVLogger(f"{folder}/log.csv"), _csv)),
    _c(
        "`ModelCheckpoint(file)`, whole models", _file(lambda folder: C.ModelCheckpoint(f"{folder}/last.keras"), _whole)
    ),
    _c(
        "`ModelCheckpoint(file, save_best_only=True, save_weights_only=True)`",
        _file(
            lambda folder: C.ModelCheckpoint(
                f"{folder}/best.weights.h5", monitor="loss", save_best_only=True, save_weights_only=True
            ),
            _best,
        ),
    ),
    _c(
        "`ModelCheckpoint(save_freq=2)`",
        _file(lambda folder: C.ModelCheckpoint(f"{folder}/last.keras", save_freq=2), _whole),
    ),
    _c("`TensorBoard(folder)`", _file(C.TensorBoard, _names), only="tensorflow"),
    _c("`BackupAndRestore(folder)`", _file(C.BackupAndRestore, lambda folder, side: [])),
    _c("`SwapEMAWeights(swap_on_epoch=True)`", _swapped),
    _said("`ProgbarLogger()`"),
    _c("`RemoteMonitor(root)`", _remote),
]
