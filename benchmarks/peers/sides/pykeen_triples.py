"""PyKEEN: one training step with sampled negatives, by the calls of its own training loop."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import numpy as np
import pykeen
import torch
from pykeen.losses import SoftplusLoss
from pykeen.models import ComplEx, DistMult, RotatE, TransE
from pykeen.sampling import BasicNegativeSampler
from pykeen.triples import CoreTriplesFactory

from benchmarks.peers import workloads
from benchmarks.peers.rounds import Turn

__all__ = ["prepare"]

_MODELS = {"TransE": TransE, "RotatE": RotatE, "DistMult": DistMult, "ComplEx": ComplEx}


def prepare(race: str, settings: Mapping[str, Any]) -> Turn:
    """`race` is the model; a turn's call trains one batch, its negatives drawn anew, with Adam."""
    torch.set_num_threads(workloads.THREADS)
    torch.manual_seed(0)
    triples = workloads.triples(settings["entities"], settings["relations"], settings["triples"])
    factory = CoreTriplesFactory(
        torch.from_numpy(triples), num_entities=settings["entities"], num_relations=settings["relations"]
    )
    complex_numbers = race in ("RotatE", "ComplEx")
    options: dict[str, Any] = {"scoring_fct_norm": 1} if race == "TransE" else {}
    dim = settings["dim"] // (2 if complex_numbers else 1)
    # No regularizer and no constraint, where a model has them by default: the same arithmetic on both sides.
    if race in ("TransE", "DistMult"):
        options["entity_constrainer"] = None
    if race in ("DistMult", "ComplEx"):
        options["regularizer"] = None
    model = _MODELS[race](triples_factory=factory, embedding_dim=dim, loss=SoftplusLoss(), **options)
    optimizer = torch.optim.Adam(model.get_grad_params(), lr=1e-3)
    sampler = BasicNegativeSampler(mapped_triples=factory.mapped_triples, num_negs_per_pos=settings["negatives"])
    model.train()
    order = np.random.default_rng(0).permutation(len(triples))
    batch = settings["batch"]
    parts = [order[first : first + batch] for first in range(0, len(order) - batch + 1, batch)]
    batches = cycle([factory.mapped_triples[torch.from_numpy(part)] for part in parts])

    def step() -> None:
        positive = next(batches)
        negative, mask = sampler.sample(positive)
        optimizer.zero_grad()
        true = model.score_hrt(positive)
        false = model.score_hrt(negative.view(-1, 3)).view(*negative.shape[:-1])
        model.loss.process_slcwa_scores(true, false, batch_filter=mask).backward()
        optimizer.step()
        model.post_parameter_update()

    return Turn(f"pykeen {pykeen.get_version()}, torch {torch.__version__}", step, batch)
