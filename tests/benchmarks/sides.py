"""A contender that tests run in a separate process."""

import os
import time

from benchmarks.peers.rounds import Turn
from elastable.embedding_store.contract.malformed import DocumentFields


def prepare(race: str, settings: DocumentFields) -> Turn:
    """`counts`: counts its calls. `refuses`, `dies`, `hangs`: as they say."""
    print("a library that greets")
    if race == "refuses":
        raise ValueError(f"no {settings['what']} here")
    if race == "dies":
        os._exit(7)
    if race == "hangs":
        time.sleep(60)
    calls: list[None] = []
    return Turn(f"counter {os.environ.get('COUNTER', '')}", lambda: calls.append(None), settings["amount"])
