"""The peers' virtual environments in `.peers/`, which git ignores.

python -m benchmarks.peers.environments      # creates missing or outdated ones
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_HOME = Path(__file__).parents[2] / ".peers"
_PINS = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment for one peer.

    Attributes:
        name: Of the peer, of its folder, and of the file that pins its packages.
        home: The folder that has it.
        variables: Environment variables that its processes need.
    """

    name: str
    home: Path = _HOME
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.home / self.name / "bin" / "python"

    @property
    def pins(self) -> Path:
        """What is installed in it, each package with its version."""
        return _PINS / f"{self.name}.txt"

    @property
    def present(self) -> bool:
        """Whether it has been installed, all of it and by today's pins."""
        stamp = self._stamp
        return self.python.exists() and stamp.exists() and stamp.read_text() == self.pins.read_text()

    def install(self) -> None:
        """Makes it anew, from the package index.

        Raises:
            subprocess.CalledProcessError: it could not be made; pip has said why.
        """
        folder = self.home / self.name
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", str(self.pins)], check=True)
        self._stamp.write_text(self.pins.read_text())

    @property
    def _stamp(self) -> Path:
        return self.home / self.name / "installed.txt"


@dataclass(frozen=True, slots=True)
class _Ours(Environment):
    """The environment that the benchmark itself runs in."""

    @property
    def python(self) -> Path:
        return Path(sys.executable)

    @property
    def present(self) -> bool:
        return True


OURS = _Ours("elastable")
FBGEMM = Environment("fbgemm")
RECOMMENDERS_ADDONS = Environment("recommenders-addons", variables=(("TF_USE_LEGACY_KERAS", "1"),))
PYKEEN = Environment("pykeen")
PEERS = (FBGEMM, RECOMMENDERS_ADDONS, PYKEEN)


def main() -> int:
    """How many of the peers could not be installed."""
    failed = 0
    for peer in PEERS:
        if peer.present:
            continue
        print(f"installing {peer.name} below {peer.home}", flush=True)
        try:
            peer.install()
        except subprocess.CalledProcessError as error:
            print(f"{peer.name} could not be installed, its rows will say so: {error}", file=sys.stderr)
            failed += 1
    return failed


if __name__ == "__main__":
    main()
