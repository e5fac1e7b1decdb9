import hashlib
from pathlib import Path

import pytest

from elastable.embedding_store.errors import BadInput, ModelError
from elastable.worker.user_model.model_file import load_model_file

BOTH = "def model():\n    return None\n\ndef data(split):\n    return None\n\n"


def written(home: Path, text: str) -> Path:
    file = home / "job.py"
    file.write_text(text)
    return file


def test_siblings_are_imported_and_named_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "columns_of_this_test.py").write_text("def read():\n    raise KeyError('tail')\n")
    text = "import columns_of_this_test\n\ndef model():\n    return None\n\n"
    file = load_model_file(written(tmp_path, text + "def data(split):\n    return columns_of_this_test.read()\n"))
    with pytest.raises(ModelError, match=r"data\('train'\) raised KeyError at columns_of_this_test.py:2: 'tail'"):
        file.reader("train")


def test_the_sha_is_that_of_the_bytes(tmp_path: Path) -> None:
    first = load_model_file(written(tmp_path, BOTH)).sha256
    assert load_model_file(written(tmp_path, BOTH)).sha256 == first
    assert load_model_file(written(tmp_path, BOTH + "# changed\n")).sha256 != first


def test_a_file_of_another_hash_is_not_run(tmp_path: Path) -> None:
    file, ran = written(tmp_path, BOTH), tmp_path / "ran"
    known = load_model_file(file).sha256
    assert load_model_file(file, known).sha256 == known
    file.write_text(f"open({str(ran)!r}, 'w').close()\n" + BOTH)
    with pytest.raises(ModelError, match=f"differs from the master's.*{known[:12]} there.*was not run"):
        load_model_file(file, known)
    assert not ran.exists()
    load_model_file(file)
    assert ran.exists()


def test_the_bytes_that_were_hashed_are_those_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, BOTH + "WHICH = 'hashed'\n")
    read = Path.read_bytes

    def swapped(self: Path) -> bytes:
        found = read(self)
        if self == file:
            file.write_text(BOTH + "WHICH = 'swapped in'\n")
        return found

    monkeypatch.setattr(Path, "read_bytes", swapped)
    loaded = load_model_file(file)
    assert loaded._module.WHICH == "hashed"
    assert loaded.sha256 == hashlib.sha256((BOTH + "WHICH = 'hashed'\n").encode()).hexdigest()


def test_an_unknown_split(tmp_path: Path) -> None:
    file = load_model_file(written(tmp_path, BOTH))
    assert file.reader("validation") is None
    with pytest.raises(ModelError, match="split 'test': known splits are train, validation"):
        file.reader("test")


def test_records_of_no_known_kind_name_file_and_split(tmp_path: Path) -> None:
    file = load_model_file(written(tmp_path, "def model():\n    return None\n\ndef data(split):\n    return 3\n"))
    with pytest.raises(BadInput, match=r"job.py: data\('validation'\): data is a int"):
        file.reader("validation")


def test_callbacks(tmp_path: Path) -> None:
    assert load_model_file(written(tmp_path, BOTH)).callbacks() == []
    assert load_model_file(written(tmp_path, BOTH + "def callbacks():\n    return (1, 2)\n")).callbacks() == [1, 2]
    with pytest.raises(ModelError, match=r"callbacks\(\) returned a NoneType; return a list"):
        load_model_file(written(tmp_path, BOTH + "def callbacks():\n    pass\n")).callbacks()


def test_what_a_callback_raises_is_blamed_on_its_line(tmp_path: Path) -> None:
    file = load_model_file(written(tmp_path, BOTH + "class Late:\n    def end(self):\n        return 1 / 0\n"))
    late = file._module.Late()
    with pytest.raises(ZeroDivisionError) as caught:
        late.end()
    blamed = file.blamed("a callback", caught.value)
    assert blamed is not None
    assert "a callback raised ZeroDivisionError at job.py:9" in str(blamed)
    # Ours, not the file's.
    assert file.blamed("a callback", ValueError("elsewhere")) is None
    assert file.blamed("a callback", BadInput("known already")) is None
