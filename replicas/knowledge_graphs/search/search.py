"""A search by Optuna: trials one after the other, each a run that goes on where it was interrupted."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from elastable.embedding_store.errors import BadInput, NotFinite
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import KnowledgeGraph
from elastable.replicas.knowledge_graphs.search.search_space import SearchSpace
from elastable.replicas.knowledge_graphs.training.defaults import settings_of
from elastable.replicas.knowledge_graphs.training.graph_checkpoints import GraphCheckpoints, RunProgress
from elastable.replicas.knowledge_graphs.training.graph_run import GraphRun, graph_identity, train_graph

__all__ = ["Search", "TrialListener"]

_DEADLINE_S = 600.0
_JOURNAL = "study.journal"
_HOME, _ABOUT = "home", "about"

TrialListener = Callable[[FrozenTrial], None]
"""Called after every trial that ended."""


@dataclass(frozen=True)
class Search:
    """Trials of one graph, kept in a folder; a search of the same folder goes on.

    Attributes:
        graph: The graph; it must have validation triples.
        source: Where it came from.
        model: Name of the model.
        fixed: Settings of every trial.
        space: Settings that are tried.
        home: Folder of the study (`study.journal`) and of the trials' runs (`trial-0000`, ...).
        workers: Threads that train a trial.
        prune: End trials that are worse than the median of others after as many evaluations.
        seed: Seed of the suggestions: what a trial tries is a function of the seed and the trials before it.
        stop: Set to save the current trial and return.

    Raises:
        BadInput: there are no validation triples.
    """

    graph: KnowledgeGraph
    source: str
    model: str
    fixed: Mapping[str, object]
    space: SearchSpace
    home: Path
    workers: int = 1
    prune: bool = True
    seed: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        if not len(self.graph.valid):
            raise BadInput(f"{self.source} has no validation triples, by whose MRR a search chooses")
        both = sorted(set(self.fixed) & set(self.space.values))
        if both:
            raise BadInput(f"{', '.join(both)} cannot be fixed and tried; leave one of them out")

    def study(self) -> optuna.Study:
        """The study in the folder, or a new one. Raises BadInput if that is of another search."""
        self.home.mkdir(parents=True, exist_ok=True)
        storage = JournalStorage(JournalFileBackend(str(self.home / _JOURNAL)))
        study = optuna.create_study(
            storage=storage, study_name="knowledge graph", direction="maximize", load_if_exists=True
        )
        about = json.loads(json.dumps(self._about()))
        if study.user_attrs.setdefault(_ABOUT, about) != about:
            raise BadInput(f"{self.home} holds a search of another graph, model, space or seed; name another folder")
        study.set_user_attr(_ABOUT, about)
        return study

    def run(self, trials: int, tell: TrialListener) -> optuna.Study:
        """Runs trials until the folder has so many that ended, those of earlier calls included.

        A trial that was interrupted goes on from its newest checkpoint. One whose loss is not finite, or whose
        settings do not fit together, has failed and counts.

        Raises:
            BadInput: the folder holds another search.
        """
        study = self.study()
        self._requeue(study)
        study.pruner = optuna.pruners.MedianPruner(n_startup_trials=4) if self.prune else optuna.pruners.NopPruner()
        while _ended(study) < trials and not self.stop.is_set():
            study.sampler = optuna.samplers.TPESampler(seed=self.seed + len(study.trials))
            trial = study.ask()
            values = self.space.suggest(trial)
            trial.set_user_attr(_HOME, trial.user_attrs.get(_HOME, f"trial-{trial.number:04d}"))
            if self._trained(study, trial, values):
                tell(study.trials[trial.number])
        return study

    def _trained(self, study: optuna.Study, trial: Trial, values: Mapping[str, object]) -> bool:
        """Runs a trial; whether it ended."""
        home, started, seen = self.home / trial.user_attrs[_HOME], time.monotonic(), _Reports(trial, self.stop)
        try:
            settings = settings_of(self.model, {**self.fixed, **values})
            home.mkdir(exist_ok=True)
            self.graph.save_names(home, settings.reciprocal)
            begin = GraphCheckpoints(home / "checkpoints").newest() if (home / "checkpoints").is_dir() else None
            run = GraphRun(self.graph, self.source, settings, home, begin, stop=seen.ended)

            def work(group: ReplicaGroup) -> dict[str, object]:
                return train_graph(group, run, seen)

            found = run_threads(self.workers, work, _DEADLINE_S)[0]
        except (BadInput, NotFinite) as error:
            trial.set_user_attr("error", str(error))
            study.tell(trial, state=TrialState.FAIL)
            return True
        trial.set_user_attr("seconds", trial.user_attrs.get("seconds", 0.0) + time.monotonic() - started)
        if self.stop.is_set() and found.get("stopped"):
            return False
        if seen.pruned:
            study.tell(trial, state=TrialState.PRUNED)
        else:
            study.tell(trial, float(str(found["best_validation_mrr"])))
        return True

    def _requeue(self, study: optuna.Study) -> None:
        """Trials that were running when the last process ended are asked for again, with their folder."""
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            study.tell(trial.number, state=TrialState.FAIL)
            attributes = {_HOME: trial.user_attrs.get(_HOME, f"trial-{trial.number:04d}")}
            study.enqueue_trial(trial.params, user_attrs={**attributes, "continues": trial.number})

    def _about(self) -> dict[str, object]:
        return {
            "graph": graph_identity(self.graph, self.source)["checksum"],
            "model": settings_of(self.model, {}).model,
            "fixed": dict(self.fixed),
            "space": dict(self.space.values),
            "seed": self.seed,
        }


class _Reports:
    """Hears of a trial's evaluations, and ends it if it should be pruned, or if the search is stopped."""

    def __init__(self, trial: Trial, stop: threading.Event) -> None:
        self._trial, self._stop, self.pruned = trial, stop, False
        self.ended = threading.Event()

    def __call__(self, kind: str, place: RunProgress, values: Mapping[str, float]) -> None:
        if self._stop.is_set():
            self.ended.set()
        if kind == "evaluation" and "val_mrr" in values:
            self._trial.report(place.best_mrr, place.epochs)
            if self._trial.should_prune():
                self.pruned = True
                self.ended.set()


def _ended(study: optuna.Study) -> int:
    """Trials that ended; those that another one continues do not count."""
    trials = study.get_trials(deepcopy=False)
    continued = {trial.user_attrs.get("continues") for trial in trials}
    return sum(trial.state.is_finished() and trial.number not in continued for trial in trials)
