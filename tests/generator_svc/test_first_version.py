from pathlib import Path

import pytest

from generator_svc.first_version import write_files
from streamrl.errors import RefusedError
from streamrl.v1.weights_pb2 import ModelFile


def test_files_are_written_into_the_folder(tmp_path: Path) -> None:
    write_files([ModelFile(name="config.json", content=b"{}")], tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_bytes() == b"{}"


@pytest.mark.parametrize("name", ["", "..", "../config.json", "/etc/passwd", "a/b"])
def test_no_file_is_written_outside_of_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(RefusedError, match="plain file name"):
        write_files([ModelFile(name=name, content=b"")], tmp_path / "model")
