"""Training on a stream of events, compared with the same records in a Parquet file.

In this process, with a small model of eight features: from Redis Streams (JSON, one field) and from the mock broker of
librdkafka. The figure is records per second of a whole `et.fit` on a model whose steps are traced. The broker shares
the cores with the job.

    python -m benchmarks.jobs.events
"""

import json
import tempfile
from functools import partial
from pathlib import Path

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka import Producer

import elastable as et
from benchmarks.harness import compare, interleaved, publish, rate
from benchmarks.processes import redis_server
from elastable.worker.readers.batch.reader import Reader

_RECORDS, _BATCH, _FEATURES, _ROUNDS = 262_144, 1_024, 8, 3
_TOPICS = [f"clicks-{number}" for number in range(4)]  # of four partitions each
_FLOOR = 0.9
_NAMES = [f"feature_{number}" for number in range(_FEATURES)]


def main() -> None:
    """Measures, prints and writes `results/events.json`."""
    random = np.random.default_rng(2026)
    columns = {name: random.integers(0, 100_000, _RECORDS).tolist() for name in _NAMES}
    columns["clicked"] = [ids % 2 for ids in columns[_NAMES[0]]]
    events = [json.dumps(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    with tempfile.TemporaryDirectory() as home, redis_server() as server:
        file = Path(home) / "events.parquet"
        pq.write_table(pa.table(columns), file, row_group_size=8_192)
        with server.client() as client, client.pipeline(transaction=False) as pipe:
            for event in events:
                pipe.xadd("clicks", {"event": event})
            pipe.execute()
        producer, brokers = _broker(events)
        readers: dict[str, Reader] = {
            "Redis Streams": et.RedisStreamReader(server.url, "clicks", label="clicked"),
            "Kafka": et.KafkaReader(_TOPICS, brokers, label="clicked", config={"log_level": 0}),
            "Parquet": et.ParquetReader(file, label="clicked"),
        }
        contenders = {name: rate(partial(_fit, _model(), reader), _RECORDS) for name, reader in readers.items()}
        figures = interleaved(contenders, _ROUNDS)
        del producer
    rows = [
        compare(f"{name}, against Parquet", "records/s", figures[name], figures["Parquet"], _FLOOR)
        for name in ("Redis Streams", "Kafka")
    ]
    publish("events", f"Streams of events: {_FEATURES} features, {_BATCH} records a version", rows)


def _broker(events: list[str]) -> tuple[Producer, str]:
    """A mock broker with the events in its partitions, for as long as the producer lives; it keeps 5 MiB of each."""
    producer = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 0})
    (broker,) = producer.list_topics(timeout=30).brokers.values()
    for number, event in enumerate(events):
        producer.produce(_TOPICS[number % 4], event, partition=number // 4 % 4)
        producer.poll(0)
    producer.flush()
    return producer, f"{broker.host}:{broker.port}"


def _model() -> keras.Model:
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in _NAMES}
    table = et.Embedding(None, 16, name="features")
    hidden = keras.layers.Concatenate()([table(each) for each in inputs.values()])
    for width in (128, 64):
        hidden = keras.layers.Dense(width, activation="relu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile("adagrad", keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def _fit(model: keras.Model, reader: Reader) -> None:
    until, before = "end" if reader.streams else None, int(model.optimizer.iterations)
    et.fit(model, reader, batch_size=_BATCH, shuffle=False, until=until, verbose=0)
    if (made := int(model.optimizer.iterations) - before) != _RECORDS // _BATCH:
        raise SystemExit(f"{type(reader).__name__}: {made} versions of {_BATCH} records, of {_RECORDS // _BATCH}")


if __name__ == "__main__":
    main()
