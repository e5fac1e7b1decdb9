"""A server of predictions, asked by the official client and by hand."""

import json
import queue
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import keras
import numpy as np
import pytest
import tritonclient.http as triton
from grpc_health.v1 import health_pb2
from typer.testing import CliRunner, Result

import elastable as et
from elastable.command import app
from elastable.embedding_store.errors import CheckpointError, ElastableError
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.models.predictor import Predictor, TensorSignature
from elastable.monitoring.endpoints import Endpoints
from elastable.monitoring.http_server import HttpServer
from elastable.monitoring.page.views import Watched
from elastable.process.exit_codes import ExitCode
from elastable.serving import service
from elastable.serving.batches import MOST_WAITING
from elastable.serving.protocols import predict_request
from elastable.serving.service import LARGE, LARGEST_BODY, PredictionService
from tests.certificates import TOKEN
from tests.elastable.monitoring.http_client import LIMIT_S, Answer, get
from tests.elastable.processes import Hold, elastable, run_elastable, wait_until
from tests.equality.test_store_servers import StoreProcess
from tests.servers import Server, running_server

CLICKS = Path(__file__).parents[1] / "click_job.py"
IDS = np.random.default_rng(0).integers(0, 40, (64, 3))
Y = np.random.default_rng(2).random((64, 1)).astype(np.float32)


def trained(url: str) -> keras.Model:
    ids = keras.Input((3,), dtype="int64", name="ids")
    hidden = keras.layers.Dense(4, "relu")(et.Embedding(None, 4, combiner="mean", name="any")(ids))
    model = keras.Model(ids, keras.layers.Dense(1, name="click")(hidden), name="clicks")
    model.compile(keras.optimizers.Adam(0.05), "mse")
    et.fit(model, IDS, Y, store=url, batch_size=16, verbose=0)
    return model


@contextmanager
def served(url: str, follow: bool = False, **tokens: Any) -> Iterator[tuple[HttpServer, PredictionService]]:
    with Predictor(url) as predictor, answered(predictor, follow, **tokens) as found:
        yield found


@contextmanager
def answered(
    predictor: Predictor, follow: bool = False, **tokens: Any
) -> Iterator[tuple[HttpServer, PredictionService]]:
    with ExitStack() as held:
        found = held.enter_context(PredictionService(predictor, follow, 512))
        endpoints = held.enter_context(closing(Endpoints(Watched({}, found.not_ready), found.routes)))
        yield (
            held.enter_context(HttpServer(Address("127.0.0.1", 0), endpoints.app, Credentials(**tokens), posts=True)),
            found,
        )


@pytest.fixture(scope="module")
def kept(valkey_node: Server) -> tuple[str, keras.Model]:
    """Version 4 of a model, which stays: its store, and the model."""
    url = f"{valkey_node.url}?namespace={uuid.uuid4().hex}"
    return url, trained(url)


@pytest.fixture(scope="module")
def clicks(kept: tuple[str, keras.Model]) -> Iterator[tuple[HttpServer, PredictionService, keras.Model]]:
    url, model = kept
    with served(url) as (server, counted):
        yield server, counted, model


@pytest.fixture
def url(valkey_node: Server) -> str:
    """Of a store that nobody in this process has had open; what others have in the server stays."""
    return f"{valkey_node.url}?namespace={uuid.uuid4().hex}"


def post(server: HttpServer, path: str, body: object, headers: dict[str, str] | None = None) -> Answer:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    return get(f"{server.url}{path}", headers, "POST", body=sent)


def test_tritons_client_talks_to_it(clicks: tuple[HttpServer, PredictionService, keras.Model]) -> None:
    server, _, model = clicks
    with triton.InferenceServerClient(str(server.address)) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("clicks")
        assert client.is_model_ready("clicks", "4")
        assert client.get_model_metadata("clicks") == {
            "name": "clicks", "versions": ["4"], "platform": "elastable",
            "inputs": [{"name": "ids", "datatype": "INT64", "shape": [-1, 3]}],
            "outputs": [{"name": "click", "datatype": "FP32", "shape": [-1, 1]}],
        }  # fmt: skip
        wanted = model.predict(IDS, verbose=0)
        for binary in (True, False):
            given = triton.InferInput("ids", list(IDS.shape), "INT64")
            given.set_data_from_numpy(IDS, binary_data=binary)
            outputs = [triton.InferRequestedOutput("click", binary_data=binary)]
            found = client.infer("clicks", [given], outputs=outputs, request_id="7")
            np.testing.assert_allclose(found.as_numpy("click"), wanted, rtol=1e-5, atol=1e-6)
            response = found.get_response()
            assert (response["model_version"], response["id"]) == ("4", "7")
        with pytest.raises(triton.InferenceServerException, match="version 9 is not here; version 4 is"):
            client.infer("clicks", [given], model_version="9")
        given = triton.InferInput("ids", [1, 2], "INT64")
        given.set_data_from_numpy(IDS[:1, :2])
        with pytest.raises(triton.InferenceServerException, match="it must be"):
            client.infer("clicks", [given])


def test_it_is_asked_as_tensorflow_serving(clicks: tuple[HttpServer, PredictionService, keras.Model]) -> None:
    server, counted, model = clicks
    wanted = model.predict(IDS[:2], verbose=0)
    before = counted.requests.totals().get(("v1", "200"), 0)
    status = json.loads(get(f"{server.url}v1/models/clicks").text)["model_version_status"]
    assert [(each["version"], each["state"]) for each in status] == [("4", "AVAILABLE")]
    for body, key in (
        ({"instances": IDS[:2].tolist()}, "predictions"),
        ({"instances": [{"ids": each} for each in IDS[:2].tolist()]}, "predictions"),
        ({"inputs": IDS[:2].tolist()}, "outputs"),
        ({"signature_name": "serving_default", "inputs": {"ids": IDS[:2].tolist()}}, "outputs"),
    ):
        answer = post(server, "v1/models/clicks:predict", body)
        assert (answer.status, answer.headers["elastable-model-version"]) == (200, "4")
        np.testing.assert_allclose(json.loads(answer.text)[key], wanted, rtol=1e-5, atol=1e-6)
    assert counted.requests.totals()["v1", "200"] == before + 4


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("v1/models/clicks:predict", b"", 400, "no JSON"),
        ("v1/models/clicks:predict", {"instances": [[1, 2]]}, 400, "it must be [records, 3]"),
        ("v1/models/clicks:predict", {"instances": [[1, 2, 2.5]]}, 400, "2.5 is no integer"),
        ("v1/models/clicks:predict", {"inputs": {"other": [[1, 2, 3]]}}, 400, "the model takes ids"),
        ("v1/models/clicks/versions/3:predict", {"instances": [[1, 2, 3]]}, 404, "version 4 is"),
        (f"v1/models/clicks/versions/{'9' * 5_000}:predict", {"instances": [[1, 2, 3]]}, 404, "version 4 is"),
        ("v1/models/other:predict", {"instances": [[1, 2, 3]]}, 404, "Not Found"),
        ("v2/models/clicks/infer", {"inputs": []}, 400, "the model takes ids"),
        ("v1/models/clicks:predict", b" " * (LARGEST_BODY + 1), 413, f"at most {LARGEST_BODY} bytes"),
    ],
)
def test_bad_requests_are_answered_by_what_they_are(
    clicks: tuple[HttpServer, PredictionService, keras.Model], path: str, body: object, status: int, said: str
) -> None:
    server, _, _ = clicks
    answer = post(server, path, body)
    assert answer.status == status
    assert said in answer.text
    assert get(f"{server.url}v1/models/clicks:predict", method="PUT").status == 405
    assert post(server, "v1/models/clicks:predict", {"instances": IDS.tolist()}).status == 200


def test_a_head_of_any_length_is_refused_by_what_it_is(
    clicks: tuple[HttpServer, PredictionService, keras.Model],
) -> None:
    for length in ("9" * 5_000, "-1", "0x2"):
        headers = {"Inference-Header-Content-Length": length}
        answer = post(clicks[0], "v2/models/clicks/infer", {}, headers)
        assert (answer.status, "it must be a number of bytes" in answer.text) == (400, True)


def test_nobody_waits_in_a_queue_without_end(clicks: tuple[HttpServer, PredictionService, keras.Model]) -> None:
    server, counted, _ = clicks
    body = {"instances": IDS[:1].tolist()}
    with counted.predictor._one:  # nothing is computed meanwhile
        first = counted.batches.predict({"ids": IDS[:1]})
        wait(first.running)
        others = [counted.batches.predict({"ids": IDS[:1]}) for _ in range(MOST_WAITING)]
        refused = post(server, "v1/models/clicks:predict", body)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert all(one.result(LIMIT_S)[1] == 4 for one in (first, *others))
    assert post(server, "v1/models/clicks:predict", body).status == 200


def test_a_large_body_is_read_while_others_are_answered(
    clicks: tuple[HttpServer, PredictionService, keras.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is a large answer written. So many at a time; one more is refused, and small ones are not."""
    server, _, model = clicks
    read, go = threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(service, "MOST_WAITING", 2)
    ids = np.tile(IDS, (200, 1))
    large = {"instances": ids.tolist()}

    def held(body: bytes, inputs: list[TensorSignature]) -> object:
        if len(body) > LARGE:
            read.release()
            assert go.wait(LIMIT_S)
        return predict_request(body, inputs)

    monkeypatch.setattr(service, "predict_request", held)
    answers = queue.Queue[Answer]()
    threads = [
        threading.Thread(target=lambda: answers.put(post(server, "v1/models/clicks:predict", large))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert read.acquire(timeout=LIMIT_S)
    assert answers.get(timeout=LIMIT_S).status == 429
    assert get(f"{server.url}healthz").status == 200
    assert post(server, "v1/models/clicks:predict", {"instances": IDS.tolist()}).status == 200
    go.set()
    for _ in range(2):
        answer = answers.get(timeout=LIMIT_S)
        assert answer.status == 200
        found = json.loads(answer.text)["predictions"]
        np.testing.assert_allclose(found, model.predict(ids, verbose=0), rtol=1e-5, atol=1e-6)
    for thread in threads:
        thread.join(LIMIT_S)


def test_a_request_that_drips_is_ended(
    clicks: tuple[HttpServer, PredictionService, keras.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_BODY_S", 0.2)
    with socket.create_connection(("127.0.0.1", clicks[0].address.port), LIMIT_S) as drip:
        drip.sendall(b"POST /v1/models/clicks:predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert drip.recv(1 << 12).startswith(b"HTTP/1.1 408 ")


def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_error(
    clicks: tuple[HttpServer, PredictionService, keras.Model], caplog: pytest.LogCaptureFixture
) -> None:
    server, counted, _ = clicks
    before = counted.requests.totals().get(("v1", "400"), 0)
    with socket.create_connection(("127.0.0.1", server.address.port), LIMIT_S) as leaves:
        leaves.sendall(b"POST /v1/models/clicks:predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    wait(lambda: counted.requests.totals().get(("v1", "400"), 0) > before)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_tokens_are_asked_for(clicks: tuple[HttpServer, PredictionService, keras.Model]) -> None:
    with answered(clicks[1].predictor, token=TOKEN) as (server, _):
        body = {"instances": IDS[:1].tolist()}
        assert post(server, "v1/models/clicks:predict", body).status == 401
        assert post(server, "v1/models/clicks:predict", body, {"Authorization": f"Bearer {TOKEN}"}).status == 200


def test_every_answer_is_of_one_version(url: str) -> None:
    """Rows and dense part: while a job commits, answers of one version are equal, and the last is the model's."""
    model = trained(url)
    with served(url, follow=True) as (server, counted):
        store = model.get_layer("any").source
        training = threading.Thread(
            target=lambda: et.fit(model, IDS, Y, store=store, batch_size=4, epochs=11, initial_epoch=1, verbose=0)
        )
        training.start()
        answers: dict[str, set[str]] = {}
        end = time.monotonic() + LIMIT_S
        while training.is_alive() or counted.predictor.version < 11 * 16:
            assert time.monotonic() < end, counted.predictor.version
            answer = post(server, "v1/models/clicks:predict", {"instances": IDS[:8].tolist()})
            if answer.status == 503:  # between the fits, where no version is the job's yet
                assert "no version of a job yet" in answer.text
                continue
            answers.setdefault(answer.headers["elastable-model-version"], set()).add(answer.text)
        training.join()
        assert len(answers) > 1
        assert [version for version, said in answers.items() if len(said) > 1] == []
        last = post(server, "v1/models/clicks:predict", {"instances": IDS[:8].tolist()})
        wanted = model.predict(IDS[:8], verbose=0)
        np.testing.assert_allclose(json.loads(last.text)["predictions"], wanted, rtol=1e-5, atol=1e-6)


def test_a_store_that_is_away_is_no_outage(server_binary: Path, tmp_path: Path) -> None:
    with running_server(server_binary, tmp_path) as redis:
        url = f"{redis.url}?deadline=2"
        trained(url)
        with served(url, follow=True) as (server, counted):
            redis.kill()
            wait(lambda: counted.behind is not None)
            assert get(f"{server.url}v2/health/ready").status == 503
            assert get(f"{server.url}readyz").status == 503
            assert post(server, "v1/models/clicks:predict", {"instances": IDS.tolist()}).status == 200
            redis.start()  # empty: what was answered from is answered from, and nobody is told that all is well
            wait(lambda: "was at version 4" in str(counted.behind))
            assert get(f"{server.url}v2/health/ready").status == 503
            answer = post(server, "v1/models/clicks:predict", {"instances": IDS.tolist()})
            assert (answer.status, answer.headers["elastable-model-version"]) == (200, "4")


def test_a_server_that_drains_says_so_and_answers_whoever_has_asked(kept: tuple[str, keras.Model]) -> None:
    body, answers = {"instances": IDS[:1].tolist()}, list[Answer]()
    with served(kept[0]) as (server, counted):
        counted.drain()
        assert get(f"{server.url}readyz").status == get(f"{server.url}v2/health/ready").status == 503
        asking = threading.Thread(target=lambda: answers.append(post(server, "v1/models/clicks:predict", body)))
        closing_ = threading.Thread(target=server.close)
        computes, plain = threading.Event(), counted.predictor.predict

        def predict(x: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], int]:
            computes.set()
            wait(lambda: refuses(server))  # it takes no more connections
            return plain(x)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(counted.predictor, "predict", predict)
            asking.start()
            assert computes.wait(LIMIT_S)
            closing_.start()
            asking.join(LIMIT_S)
            closing_.join(LIMIT_S)
    assert [answer.status for answer in answers] == [200]


def refuses(server: HttpServer) -> bool:
    try:
        socket.create_connection(("127.0.0.1", server.address.port), LIMIT_S).close()
    except OSError:
        return True
    return False


def test_a_version_is_held_by_whoever_may_write(
    kept: tuple[str, keras.Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTP, and by the command; the version itself: `test_predictor.py`."""
    with served(kept[0], token=TOKEN) as (server, counted):
        json_, token = {"Content-Type": "application/json"}, {"Authorization": f"Bearer {TOKEN}"}
        assert post(server, "hold", {"version": 4}, json_).status == 401
        for body, headers, status, said in (
            ({"version": 4}, {**token, "Content-Type": "text/plain"}, 415, "application/json"),
            ({"version": "4"}, {**token, **json_}, 400, "'version' must be"),
            ({}, {**token, **json_}, 400, "'version' must be"),
            ({"version": 3}, {**token, **json_}, 404, "version 3 cannot be read"),
        ):
            answer = post(server, "hold", body, headers)
            assert (answer.status, said in answer.text) == (status, True), answer.text
        assert counted.predictor.held is None
        (tmp_path / "token").write_text(TOKEN)
        (tmp_path / "token").chmod(0o600)
        monkeypatch.setenv("ELASTABLE_TOKEN_FILE", str(tmp_path / "token"))

        def hold(*words: str) -> Result:
            return CliRunner().invoke(app, ["hold", server.url, *words], obj=lambda level, form: None)

        for words, held in ((("--version", "4"), 4), (("--newest",), None)):
            done = hold(*words)
            assert (done.exit_code, counted.predictor.held) == (0, held), done.output
            assert json.loads(done.output) == {"version": 4, "held": held is not None}
        assert "version 3 cannot be read" in str(hold("--version", "3").exception)
        assert "hold needs --version N, or --newest" in str(hold().exception)
        assert "hold needs --version N, or --newest" in str(hold("--version", "4", "--newest").exception)


def test_readers_hold_nothing(clicks: tuple[HttpServer, PredictionService, keras.Model]) -> None:
    with answered(clicks[1].predictor, reader_token=TOKEN) as (server, counted):
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
        assert post(server, "hold", {"version": 4}, headers).status == 403
        assert counted.predictor.held is None


def test_another_job_in_the_store_is_not_taken_for_the_next_version(url: str) -> None:
    trained(url)
    with Predictor(url) as found:
        other = keras.Sequential(
            [keras.Input((3,), dtype="int64", name="ids"), et.Embedding(None, 4, "ones", name="b")]
        )
        other.compile("sgd", "mse")
        with et.open_store(url) as store:
            et.fit(other, IDS, np.zeros((64, 3, 4)), store=store, batch_size=8, verbose=0)
        with pytest.raises(ElastableError, match="job"):
            found.advance()


def test_a_follower_that_fails_says_so_and_tries_again(
    clicks: tuple[HttpServer, PredictionService, keras.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_FOLLOW_AGAIN_S", 0.05)
    versions = list[int]()
    monkeypatch.setattr(clicks[1].predictor, "advance", lambda: versions[0])
    with answered(clicks[1].predictor, follow=True) as (server, counted):
        wait(lambda: counted.behind == "IndexError: list index out of range")
        assert get(f"{server.url}readyz").status == 503
        versions.append(4)
        wait(lambda: counted.behind is None)
        assert get(f"{server.url}readyz").status == 200


def wait(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_process_serves_a_run_until_a_signal(tmp_path: Path) -> None:
    done = run_elastable(
        "train", CLICKS, "--workers", "1", "--micro-batch-size", "64", "--run-dir", tmp_path, "--no-export"
    )
    assert done.code == 0, done.err
    with elastable(
        tmp_path / "process", "serve-model", tmp_path / "latest", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"
    ) as running:
        wait_until(lambda: " at http" in running.out + running.err, "the server", running)
        said = running.out + running.err
        assert "version 20" in said
        at = said.partition(" at ")[2].split()[0]
        name = said.partition("model ")[2].partition(",")[0]
        x = {"user_ids": [1, 2], "word_ids": [[1, 2, 3], [4, 5, 6]]}
        answer = get(f"{at}v1/models/{name}:predict", method="POST", body=json.dumps({"inputs": x}).encode())
        assert answer.status == 200, answer.text
        with grpc.insecure_channel(said.partition(" over gRPC at ")[2].split()[0]) as channel:
            call = channel.unary_unary("/grpc.health.v1.Health/Check", None, health_pb2.HealthCheckResponse.FromString)
            assert call(b"", timeout=LIMIT_S).status == health_pb2.HealthCheckResponse.SERVING
        assert "elastable_served_version 20.0" in get(f"{at}metrics").text
        running.signal(signal.SIGTERM)
        assert running.wait() == ExitCode.DONE


@pytest.mark.process
@pytest.mark.timeout(900)
def test_a_process_follows_store_servers_whichever_dies(tmp_path: Path) -> None:
    """By the run alone, while it has no checkpoint; and its last version is that of the run's checkpoint."""
    stores = [StoreProcess(tmp_path / f"store-{n}.log", f"memory?log={tmp_path / str(n)}") for n in range(2)]
    hold, at = Hold(tmp_path / "hold", 7), f"{stores[0].address},{stores[1].address}"
    x = {"user_ids": [1, 2, 3, 4], "word_ids": [[1, 2, 3]] * 4}
    job = ("train", CLICKS, "--workers", "1", "--micro-batch-size", "64", "--stores", at, "--no-export")
    with ExitStack() as held:
        for store in stores:
            held.callback(store.kill)
        training = held.enter_context(
            elastable(tmp_path / "job", *job, "--run-dir", tmp_path / "runs", env=hold.environment)
        )
        hold.wait(training)
        run = tmp_path / "runs" / "latest"
        words = ("serve-model", run, "--follow", "--http", "127.0.0.1:0", "--deadline", "120")
        serving = held.enter_context(elastable(tmp_path / "serving", *words))
        wait_until(lambda: " at http" in serving.out + serving.err or serving.process.poll() is not None, "it", serving)
        server = serving.out.partition(" at ")[2].split()[0]
        name = serving.out.partition("model ")[2].partition(",")[0]

        def asked() -> tuple[int, Any]:
            body = json.dumps({"inputs": x}).encode()
            answer = get(f"{server}v1/models/{name}:predict", method="POST", body=body)
            assert answer.status == 200, answer.text
            return int(answer.headers["elastable-model-version"]), json.loads(answer.text)["outputs"]

        assert asked()[0] in (6, 7)
        stores[1].kill()
        wait(lambda: get(f"{server}readyz").status == 503)
        before = asked()
        assert before == asked()
        stores[1].start()
        hold.go()
        assert training.wait() == ExitCode.DONE, training.err
        wait(lambda: asked()[0] == 20)
        with Predictor(run) as saved:
            (wanted,) = saved.predict({key: np.array(each) for key, each in x.items()})[0].values()
            assert saved.version == 20
        np.testing.assert_array_equal(np.float32(asked()[1]), wanted)
        serving.signal(signal.SIGTERM)
        assert serving.wait() == ExitCode.DONE


def test_what_cannot_be_served_is_refused_at_once(tmp_path: Path) -> None:
    words = ["serve-model", str(tmp_path), "--http", "127.0.0.1:0"]
    done = CliRunner().invoke(app, words, obj=lambda level, form: None)
    assert isinstance(done.exception, CheckpointError)
    assert "no checkpoint" in str(done.exception)
