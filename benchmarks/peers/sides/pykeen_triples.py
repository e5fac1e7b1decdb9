"""PyKEEN: one training step with sampled negatives or all entities, by the calls of its own training loops."""

import time
from collections.abc import Callable, Iterator
from itertools import cycle

import numpy as np
import numpy.typing as npt
import pykeen
import torch
from pykeen.losses import CrossEntropyLoss, SoftplusLoss
from pykeen.models import ComplEx, DistMult, ERModel, RotatE, TransE
from pykeen.sampling import BasicNegativeSampler
from pykeen.triples import CoreTriplesFactory
from pykeen.triples.instances import LCWAInstances
from torch.utils.data import default_collate

from benchmarks.peers import workloads
from benchmarks.peers.rounds import Turn

_MODELS = {"TransE": TransE, "RotatE": RotatE, "DistMult": DistMult, "ComplEx": ComplEx}


def prepare(race: str, settings: workloads.Settings) -> Turn:
    """`race` is the model; a turn's call trains one batch with Adam, its negatives drawn anew.

    With the setting `negatives` 0, it is a batch of (head, relation) with all entities: LCWA, cross-entropy.
    """
    torch.set_num_threads(workloads.THREADS)
    torch.manual_seed(0)
    triples = workloads.triples(settings["entities"], settings["relations"], settings["triples"])
    factory = CoreTriplesFactory(
        torch.from_numpy(triples), num_entities=settings["entities"], num_relations=settings["relations"]
    )
    complex_numbers = race in ("RotatE", "ComplEx")
    options: dict[str, int | None] = {"scoring_fct_norm": 1} if race == "TransE" else {}
    dim = settings["dim"] // (2 if complex_numbers else 1)
    # No regularizer and no constraint, where a model has them by default: the same arithmetic on both sides.
    if race in ("TransE", "DistMult"):
        options["entity_constrainer"] = None
    if race in ("DistMult", "ComplEx"):
        options["regularizer"] = None
    whole = not settings["negatives"]
    loss = CrossEntropyLoss() if whole else SoftplusLoss()
    if whole:
        factory = CoreTriplesFactory(
            torch.from_numpy(triples), num_entities=settings["entities"], num_relations=2 * settings["relations"]
        )
    model = _MODELS[race](triples_factory=factory, embedding_dim=dim, loss=loss, **options)
    optimizer = torch.optim.Adam(model.get_grad_params(), lr=1e-3)
    model.train()
    step = _with_all(model, optimizer, factory, settings) if whole else _sampled(model, optimizer, factory, settings)
    library = f"pykeen {pykeen.get_version()}, torch {torch.__version__}"
    return Turn(library, step, settings["batch"], time.process_time)


def _parts(count: int, batch: int) -> Iterator[npt.NDArray[np.int64]]:
    order = np.random.default_rng(0).permutation(count)
    return cycle([order[first : first + batch] for first in range(0, len(order) - batch + 1, batch)])


def _sampled(
    model: ERModel, optimizer: torch.optim.Optimizer, factory: CoreTriplesFactory, settings: workloads.Settings
) -> Callable[[], None]:
    triples = factory.mapped_triples
    sampler = BasicNegativeSampler(mapped_triples=triples, num_negs_per_pos=settings["negatives"])
    parts = _parts(len(triples), settings["batch"])

    def step() -> None:
        positive = triples[torch.from_numpy(next(parts))]
        negative, mask = sampler.sample(positive)
        optimizer.zero_grad()
        true = model.score_hrt(positive)
        false = model.score_hrt(negative.view(-1, 3)).view(*negative.shape[:-1])
        model.loss.process_slcwa_scores(true, false, batch_filter=mask).backward()
        optimizer.step()
        model.post_parameter_update()

    return step


def _with_all(
    model: ERModel, optimizer: torch.optim.Optimizer, factory: CoreTriplesFactory, settings: workloads.Settings
) -> Callable[[], None]:
    instances = LCWAInstances.from_triples(
        factory.mapped_triples, num_entities=settings["entities"], num_relations=factory.num_relations
    )
    parts = _parts(len(instances), settings["batch"])

    def step() -> None:
        batch = default_collate([instances[place] for place in next(parts)])
        pairs, labels = batch if isinstance(batch, (list, tuple)) else batch.values()
        optimizer.zero_grad()
        scores = model.score_t(pairs)
        model.loss.process_lcwa_scores(scores, labels, None, settings["entities"]).backward()
        optimizer.step()
        model.post_parameter_update()

    return step
