"""Requests that wait are answered together, each as if it were alone."""

import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack

import keras
import numpy as np
import numpy.typing as npt
import pytest

import elastable as et
from elastable.embedding_store.errors import BadInput, ElastableError, IdOutOfRange, ModelError
from elastable.models.predictor import Predictor
from elastable.serving import batches
from elastable.serving.batches import Batches, Prediction
from tests.servers import Server

LIMIT_S = 120.0
IDS = np.random.default_rng(0).integers(0, 40, (64, 3))


@pytest.fixture(scope="module")
def predictors(valkey_node: Server) -> Iterator[dict[str, Predictor]]:
    """Of a model whose records are apart, of one that centres its outputs over the batch, of one with Keras' rows."""
    with ExitStack() as held:
        made = {}
        for name in ("apart", "centred", "own"):
            url = f"{valkey_node.url}?namespace={uuid.uuid4().hex}"
            ids = keras.Input((None,), dtype="int64", name="ids")
            rows = et.Embedding(None if name == "own" else 40, 4, combiner="mean", name="any")(ids)
            if name == "own":  # whose range the backend alone checks
                rows = rows + keras.ops.mean(keras.layers.Embedding(40, 4, name="own")(ids), axis=1)
            hidden = keras.layers.Dense(4, "relu")(rows)
            out = keras.layers.Dense(1, name="click")(hidden)
            if name == "centred":
                out = out - keras.ops.mean(out, axis=0, keepdims=True)
            model = keras.Model(ids, out, name=name)
            model.compile("adam", "mse")
            et.fit(model, IDS, np.ones((64, 1), np.float32), store=url, batch_size=16, verbose=0)
            made[name] = held.enter_context(Predictor(url))
        yield made


def together(
    predictor: Predictor, requests: Sequence[npt.ArrayLike], most: int = 512
) -> tuple[list[Future[Prediction]], list[int]]:
    """The answers to requests that all wait at once, and the records of each batch that was computed for them."""
    sizes: list[int] = []
    plain = predictor.predict

    def counted(x: dict[str, npt.ArrayLike]) -> Prediction:
        sizes.append(len(np.asarray(x["ids"])))
        return plain(x)

    with Batches(predictor, most) as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictor, "predict", counted)
        with predictor._one:
            first = made.predict({"ids": IDS[:1]})
            end = time.monotonic() + LIMIT_S
            while not first.running():
                assert time.monotonic() < end
                time.sleep(0.005)
            found = [made.predict({"ids": ids}) for ids in requests]
        for one in found:
            one.exception(LIMIT_S)
    return found, sizes[1:]


def test_those_who_wait_share_a_batch_and_each_gets_its_own(predictors: dict[str, Predictor]) -> None:
    requests = [IDS[:1], IDS[1:4], IDS[4:5], IDS[5:8, :2], IDS[8:20]]
    found, sizes = together(predictors["apart"], requests)
    assert sizes == [17, 3]  # those of another shape by themselves
    for ids, one in zip(requests, found, strict=True):
        outputs, version = one.result()
        wanted, _ = predictors["apart"].predict({"ids": ids})
        assert version == 4
        np.testing.assert_allclose(outputs["click"], wanted["click"], rtol=1e-5, atol=1e-6)


def test_a_batch_is_bounded(predictors: dict[str, Predictor]) -> None:
    _, sizes = together(predictors["apart"], [IDS[:3], IDS[:3], IDS[:2], IDS[:9], IDS[:1]], most=6)
    assert sizes == [6, 3, 9]
    assert together(predictors["apart"], [IDS[:1]] * 3, most=1)[1] == [1, 1, 1]


def test_on_jax_batches_have_few_sizes(predictors: dict[str, Predictor], monkeypatch: pytest.MonkeyPatch) -> None:
    jax = type("Jax", (), {"name": "jax"})
    monkeypatch.setattr(batches, "backend", lambda: jax)
    requests = [IDS[:1], IDS[1:4], IDS[4:5], IDS[8:20]]
    found, sizes = together(predictors["apart"], requests)
    assert sizes == [32]
    for ids, one in zip(requests, found, strict=True):
        wanted, _ = predictors["apart"].predict({"ids": ids})
        np.testing.assert_allclose(one.result()[0]["click"], wanted["click"], rtol=1e-5, atol=1e-6)


def test_a_bad_request_fails_alone(predictors: dict[str, Predictor]) -> None:
    found, sizes = together(predictors["apart"], [IDS[:1], IDS[:1] + 40, IDS[:2]])
    assert sizes == [4, 1, 1, 2]
    assert isinstance(found[1].exception(), IdOutOfRange)
    assert len(found[2].result()[0]["click"]) == 2
    with Batches(predictors["apart"], 8) as made, pytest.raises(BadInput, match="at least 1"):
        made.predict({"ids": IDS[:0]})


def test_a_value_that_the_backend_refuses_fails_alone_and_is_named(predictors: dict[str, Predictor]) -> None:
    found, sizes = together(predictors["own"], [IDS[:1], IDS[:1] * 0 + 99, IDS[:2]])
    assert sizes == [4, 1, 1, 2]
    assert [len(found[place].result()[0]["click"]) for place in (0, 2)] == [1, 2]
    with pytest.raises(BadInput, match=r"model 'own' cannot compute inputs 'ids' \[1, 3\]: .*99 is not in \[0, 40\)"):
        found[1].result()


@pytest.mark.parametrize(("error", "kind"), [(MemoryError("no room"), ModelError), (ValueError("not that"), BadInput)])
def test_what_a_model_raises_has_a_name(
    predictors: dict[str, Predictor], monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[ElastableError]
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(predictors["apart"], "_step", fails)
    with pytest.raises(kind, match=f"inputs 'ids' .2, 3.: {type(error).__name__}: {error}"):
        predictors["apart"].predict({"ids": IDS[:2]})


def test_dtypes_are_not_joined_to_one_that_holds_neither(predictors: dict[str, Predictor]) -> None:
    """NumPy joins int64 and uint64 to float64."""
    found, sizes = together(predictors["apart"], [IDS[:1], IDS[:1].astype(np.uint64), IDS[:1]])
    assert sizes == [2, 1]
    assert len({float(one.result()[0]["click"][0, 0]) for one in found}) == 1


def test_a_model_that_looks_at_the_whole_batch_answers_each_request_by_itself(
    predictors: dict[str, Predictor],
) -> None:
    found, sizes = together(predictors["centred"], [IDS[:2], IDS[2:8]])
    assert sizes == [2, 6]
    for one in found:
        output, _ = one.result()
        assert abs(float(next(iter(output.values())).mean())) < 1e-6
