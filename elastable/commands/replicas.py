"""`elastable replicas`: a program in several processes that exchange arrays with each other."""

from dataclasses import dataclass

from elastable.commands.command_line import takes
from elastable.embedding_store.option import Option, required, setting

REPLICAS_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Of click: what follows the program is the program's."""


@dataclass(frozen=True, slots=True)
class _ReplicaOptions:
    words: tuple[str, ...] = required(
        Option(
            "A Python file, -m MODULE, or elastable COMMAND; with its arguments.",
            metavar="PROGRAM [ARGS]...", positional=True,
        )
    )  # fmt: skip
    count: int = required(Option("Number of processes.", flags=("-n",), at_least=1))
    deadline_s: float = setting(
        60.0,
        Option(
            "Seconds before a process that others wait for counts as failed.",
            flags=("--deadline",), above=0, metavar="SECONDS",
        ),
    )  # fmt: skip
    hosts: str | None = setting(None, Option("Hosts to run on, by ssh.", metavar="HOST[:COUNT],...", unset="this one"))
    grace_s: float = setting(
        5.0,
        Option(
            "Seconds for the others to end after one has failed.", flags=("--grace",), at_least=0, metavar="SECONDS"
        ),
    )


@takes(_ReplicaOptions)
def replicas(options: _ReplicaOptions) -> None:
    """Run a program in several processes; et.replica_group() joins them. All end when one fails."""
    from elastable.launch.launch import Launch
    from elastable.launch.program import Program

    Launch(options.count, Program.of(options.words), options.deadline_s, options.hosts, options.grace_s).run()
