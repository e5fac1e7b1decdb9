"""A memory store whose commits fail when a test wants it."""

from collections.abc import Callable

from elastable.embedding_store import Commit, MemoryStore


class FailingShard(MemoryStore):
    """Raises `failure` when a staged commit is finished: before it, or after it as where an answer is lost."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.failure: Exception | None = None
        self.after = False

    def stage(self, commit: Commit) -> Callable[[], None]:
        finish = super().stage(commit)

        def fail() -> None:
            failure, self.failure = self.failure, None
            if failure is None or self.after:
                finish()
            if failure is not None:
                raise failure

        return fail
