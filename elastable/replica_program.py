"""The program of one member of a replica group, in the process that `elastable.launch.member` starts for it."""

import ctypes
import os
import signal
import sys
import traceback
from contextlib import suppress

from elastable.embedding_store.errors import ElastableError
from elastable.launch.program import run_program
from elastable.process.exit_codes import ExitCode, exit_code_of
from elastable.process.heap import keep_freed_memory
from elastable.process.quiet import quiet_when_imported

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def main() -> None:
    """Runs the program; the first argument is the file descriptor to say what it failed by, the rest the program."""
    with suppress(OSError, AttributeError, TypeError):
        # A parent that is killed cannot end this process; on Linux the kernel does.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    keep_freed_memory()
    quiet_when_imported()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    report_to, words = int(sys.argv[1]), sys.argv[2:]  # the program gets its own arguments
    code, why = _run(words)
    world = sys.modules.get("elastable.replicas.groups.world")
    if code != 0 and world is not None:
        world.leave_all(why or f"exit code {code}")
    with suppress(OSError):
        os.write(report_to, why.encode())
    sys.exit(code)


def _run(words: list[str]) -> tuple[int, str]:
    """Exit code, and what the program failed by."""
    try:
        run_program(words)
    except SystemExit as ended:
        why = _said(ended.__context__) if ended.code else ""
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0, why
        print(ended.code, file=sys.stderr)
        return ExitCode.UNEXPECTED, why
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED, "interrupted"
    except ElastableError as error:
        traceback.print_exc()
        return exit_code_of(error), _said(error)
    except Exception as error:  # noqa: BLE001 - shown, and reported by the exit code
        traceback.print_exc()
        return ExitCode.UNEXPECTED, _said(error)
    return ExitCode.DONE, ""


def _said(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
