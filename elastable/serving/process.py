"""`elastable serve-model`: a process that answers predictions until a signal ends it."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial

from rich.console import Console

from elastable.embedding_store.support.address import Address
from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.jobs.options import ModelServerOptions
from elastable.models.predictor import Predictor
from elastable.monitoring.endpoints import Endpoints
from elastable.monitoring.http_server import HttpServer, require_servable
from elastable.monitoring.metrics import Sample, Source, calls_source, connections_source, prediction_source
from elastable.monitoring.page.views import Watched
from elastable.process.exit_codes import ExitCode
from elastable.process.heap import keep_collections_short
from elastable.process.logs import describe_process
from elastable.process.stopping import stopping_on_signals
from elastable.serving.over_grpc import inference_service
from elastable.serving.service import LARGEST_BODY, PredictionService


def run_model_server(options: ModelServerOptions, console: Console) -> int:
    """Answers until a signal ends it; the exit code.

    Raises:
        ElastableError: the model cannot be served, or the address not be used.
    """
    address, credentials = Address.parse(options.http), Credentials.from_environment()
    require_servable(address, credentials, options.insecure)  # before a model is read for minutes
    describe_process(role="model-server")
    with ExitStack() as held:
        predictor = Predictor(
            options.source, version=options.version, checkpoints=options.checkpoints, unknown=options.unknown_ids,
            model_file=options.model_file, deadline_s=options.deadline_s,
        )  # fmt: skip
        held.callback(predictor.close)
        service = held.enter_context(PredictionService(predictor, options.follow, options.batch_records))
        sources: dict[str, Source] = {"predictions": partial(_samples, service)}
        grpc = None
        if options.grpc is not None:
            grpc = GrpcServer(
                options.grpc, [inference_service(service)], credentials=credentials, insecure=options.insecure,
                largest_message=2 * LARGEST_BODY,  # so that what is too large is refused by name
            )  # fmt: skip
            held.enter_context(grpc)
            sources |= {"calls": partial(calls_source, grpc.calls)}
            sources |= {"connections": partial(connections_source, grpc.connections)}
        watched = Watched(sources, service.not_ready)
        endpoints = held.enter_context(closing(Endpoints(watched, service.routes)))
        keep_collections_short()
        server = HttpServer(address, endpoints.app, credentials, options.insecure, posts=True)
        held.enter_context(server)
        line = f"model {predictor.name}, version {predictor.version}, at {server.url}"
        line += "" if grpc is None else f" and over gRPC at {grpc.address}"
        console.print(line, highlight=False, markup=False)
        stopped = threading.Event()
        with stopping_on_signals(lambda reason: stopped.set(), console):
            stopped.wait()
            service.drain()
            time.sleep(options.drain_s)
    return ExitCode.DONE


def _samples(service: PredictionService) -> Iterator[Sample]:
    it = service.predictor
    newest = it.newest() if service.follows else it.version
    return prediction_source(service.requests, service.seconds, service.batches.waiting, it.version, newest)
