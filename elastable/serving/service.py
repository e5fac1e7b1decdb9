"""An ASGI application that predicts: the Open Inference Protocol and TensorFlow Serving's REST, with their bounds."""

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput, CheckpointError, ElastableError
from elastable.embedding_store.measures import Counts, Durations
from elastable.embedding_store.wire.access.credentials import Role
from elastable.embedding_store.wire.channels.status_codes import CallRefused
from elastable.models.predictor import Predictor
from elastable.monitoring.http_server import ROLE
from elastable.serving.batches import MOST_WAITING, Batches
from elastable.serving.protocols import (
    held_version,
    infer_reply,
    infer_request,
    metadata,
    predict_reply,
    predict_request,
)

LARGEST_BODY = 16 << 20
"""Bytes of a request; one that is larger is answered with 413."""

LARGE = 64 << 10
"""Bytes of a request, or of outputs, from which others are answered while it is read, or they are written."""

_BODY_S = 10.0  # for a request to arrive
_DIGITS = 19  # of a number that a caller names: as many as an int64 has
_FOLLOW_AGAIN_S = 1.0  # where the store cannot be read

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Answer = Callable[[Request], Awaitable[Response]]


class PredictionService(Closing):
    """Answers requests for predictions of one model, each from one version, which the reply names.

    With `follow` a thread goes on to the store's newest version whenever there is one.

    Args:
        batch_records: As of `Batches`.

    Attributes:
        follows: Whether it goes on to newer versions.
        routes: For a Starlette application.
        requests: Counts of answers by protocol and status.
        seconds: From the whole request to its answer, of those that were computed.
        behind: Why the newest version is not known; None: it is.

    Raises:
        BadInput: to follow a single checkpoint, after which nothing comes.
    """

    def __init__(self, predictor: Predictor, follow: bool, batch_records: int) -> None:
        if follow and predictor.look_s is None:
            raise BadInput(
                f"--follow: version {predictor.version} is a single checkpoint, and nothing follows it; name its run, "
                "or the folder that it is in"
            )
        self.predictor, self.requests, self.seconds = predictor, Counts(), Durations()
        self.behind: str | None = None
        self.batches = Batches(predictor, batch_records)
        self._coder, self._large = ThreadPoolExecutor(1, "elastable-bodies"), 0
        self._stopped = threading.Event()
        self._follower = threading.Thread(target=self._follow, name="elastable-follower", daemon=True)
        self.follows = follow
        if follow:
            self._follower.start()
        model = predictor.name
        self.routes: list[BaseRoute] = [
            Route("/v2", self._server),
            Route("/v2/health/live", self._live),
            Route("/v2/health/ready", self._ready),
            Route("/hold", self._counted("hold", self._hold), methods=["POST"]),
        ]
        for path in (f"/v2/models/{model}", f"/v2/models/{model}/versions/{{version}}"):
            self.routes += [
                Route(path, self._metadata),
                Route(f"{path}/ready", self._ready),
                Route(f"{path}/infer", self._counted("v2", self._infer), methods=["POST"]),
            ]
        for path in (f"/v1/models/{model}", f"/v1/models/{model}/versions/{{version}}"):
            self.routes += [
                Route(path, self._status),
                Route(f"{path}:predict", self._counted("v1", self._predict), methods=["POST"]),
            ]

    def why_not_ready(self) -> str | None:
        """Why requests had better go elsewhere; None: they need not."""
        return "the server is stopping" if self._stopped.is_set() else self.behind

    def not_ready(self) -> dict[str, str]:
        """The same, by what it is for."""
        return {} if (why := self.why_not_ready()) is None else {"predictions": why}

    def drain(self) -> None:
        """It is not ready from now on, and answers as before; its version stays."""
        self._stopped.set()

    def close(self) -> None:
        """Ends the threads. Closing twice is harmless."""
        self.drain()
        if self.follows:
            self._follower.join()
        self.batches.close()
        self._coder.shutdown()

    def _follow(self) -> None:
        wait_s = self.predictor.look_s
        while not self._stopped.wait(wait_s):
            try:
                self.predictor.advance()
                self.behind, wait_s = None, self.predictor.look_s
            except Exception as error:  # noqa: BLE001 - whatever it is, the server says so, and tries again
                named = isinstance(error, ElastableError)
                why = str(error) if named else f"{type(error).__name__}: {error}"
                if self.behind is None:
                    version = self.predictor.version
                    _log.warning("version %d is answered from until this ends: %s", version, why, exc_info=not named)
                self.behind, wait_s = why, _FOLLOW_AGAIN_S

    def _counted(self, protocol: str, answer: _Answer) -> _Answer:
        """Counts the answers, and tells what is wrong with a request."""

        @wraps(answer)
        async def answered(request: Request) -> Response:
            try:
                with self.seconds.timing(protocol):
                    found = await answer(request)
            except BadInput as error:
                found = _refused(400, str(error))
            except CallRefused as error:
                found = _refused(429, str(error), {"Retry-After": "1"})
            except HTTPException as error:
                found = _refused(error.status_code, error.detail, error.headers)
            except ElastableError as error:
                found = _refused(503, str(error))
            self.requests.add(protocol, str(found.status_code))
            return found

        return answered

    async def _read(self, body: bytes, read: Callable[[bytes], _T]) -> _T:
        """What `read` makes of a body; so many large ones at a time. Raises as it does."""
        if len(body) < LARGE:
            return read(body)
        if self._large >= MOST_WAITING:
            raise CallRefused(f"{MOST_WAITING} large requests wait already")
        self._large += 1
        try:
            return await self._in_thread(lambda: read(body))
        finally:
            self._large -= 1

    async def _written(self, found: Mapping[str, Array], write: Callable[[], _T]) -> _T:
        """What `write` makes of outputs."""
        large = sum(array.nbytes for array in found.values()) >= LARGE
        return await self._in_thread(write) if large else write()

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        """The loop answers others meanwhile; what is small takes less than the way to the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._coder, call)

    async def _computed(self, request: Request, x: Mapping[str, Array]) -> tuple[dict[str, Array], int]:
        found, version = await asyncio.wrap_future(self.batches.predict(x))
        self._require(request, version)
        return found, version

    def _require(self, request: Request, version: int) -> None:
        wanted = str(request.path_params.get("version", version))
        if wanted != str(version):
            raise HTTPException(404, f"version {wanted[:_DIGITS]} is not here; version {version} is")

    async def _infer(self, request: Request) -> Response:
        length = request.headers.get("inference-header-content-length")
        if length is not None and not (length.isdecimal() and len(length) <= _DIGITS):
            raise BadInput(f"Inference-Header-Content-Length is {length[:_DIGITS]!r}; it must be a number of bytes")
        header_bytes, it = None if length is None else int(length), self.predictor
        asked = await self._read(await _body(request), lambda body: infer_request(body, header_bytes))
        found, version = await self._computed(request, asked.x)
        body, header = await self._written(found, lambda: infer_reply(asked, it.name, version, it.outputs, found))
        if header is None:
            return Response(body, media_type="application/json")
        headers = {"Inference-Header-Content-Length": str(header)}
        return Response(body, headers=headers, media_type="application/octet-stream")

    async def _predict(self, request: Request) -> Response:
        inputs = self.predictor.inputs
        x, by_record = await self._read(await _body(request), lambda body: predict_request(body, inputs))
        found, version = await self._computed(request, x)
        headers = {"Elastable-Model-Version": str(version)}  # the protocol has no place for it
        body = await self._written(found, lambda: predict_reply(found, by_record))
        return Response(body, headers=headers, media_type="application/json")

    async def _hold(self, request: Request) -> Response:
        """Holds a version, or with `null` goes on to newer ones; both for callers who may write."""
        role = request.scope[ROLE]
        if role is None or role < Role.WORKER:
            raise HTTPException(403, "a version is held and freed with the workers' token, or the administrator's")
        if request.headers.get("content-type") != "application/json":  # what a page of another site may not send
            raise HTTPException(415, "Content-Type must be application/json")
        version = await self._read(await _body(request), held_version)
        it, to_thread = self.predictor, asyncio.to_thread
        try:
            await (to_thread(it.free) if version is None else to_thread(it.hold, version))
        except CheckpointError as error:
            raise HTTPException(404, str(error)) from error
        return JSONResponse({"version": self.predictor.version, "held": self.predictor.held is not None})

    async def _server(self, request: Request) -> Response:
        return JSONResponse({"name": "elastable", "version": "2", "extensions": ["binary_tensor_data"]})

    async def _live(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def _ready(self, request: Request) -> Response:
        self._require(request, self.predictor.version)
        ready = self.why_not_ready() is None
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def _metadata(self, request: Request) -> Response:
        it = self.predictor
        self._require(request, it.version)
        return JSONResponse(metadata(it.name, it.version, it.inputs, it.outputs))

    async def _status(self, request: Request) -> Response:
        self._require(request, self.predictor.version)
        good = {"error_code": "OK", "error_message": ""}
        status = {"version": str(self.predictor.version), "state": "AVAILABLE", "status": good}
        return JSONResponse({"model_version_status": [status]})


async def _body(request: Request) -> bytes:
    """The body of a request, bounded in bytes and in time."""

    async def read() -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > LARGEST_BODY:
                raise HTTPException(413, f"a request has at most {LARGEST_BODY} bytes", {"Connection": "close"})
            parts.append(part)
        return b"".join(parts)

    try:
        return await asyncio.wait_for(read(), _BODY_S)
    except ClientDisconnect:
        raise HTTPException(400, "the request ended before its body did") from None  # nobody reads it; it is counted
    except TimeoutError:
        raise HTTPException(408, f"the request did not arrive in {_BODY_S:g} s", {"Connection": "close"}) from None


def _refused(status: int, why: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps({"error": why}), status, dict(headers or {}), "application/json")
