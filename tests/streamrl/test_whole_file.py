"""Files that are whole for every reader."""

import os
from pathlib import Path

import pytest

from streamrl import whole_file
from streamrl.whole_file import create_file


def test_a_created_file_appears_with_all_of_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    seen: list[tuple[bool, str]] = []
    link = os.link

    def link_and_look(source: Path, target: Path) -> None:
        before = target.exists()
        link(source, target)
        seen.append((before, target.read_text()))

    monkeypatch.setattr(whole_file.os, "link", link_and_look)
    create_file(file, "content")
    assert seen == [(False, "content")]
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_is_there_is_not_created_again(tmp_path: Path) -> None:
    file = tmp_path / "file"
    create_file(file, "first")
    with pytest.raises(FileExistsError):
        create_file(file, "second")
    assert file.read_text() == "first"
    assert list(tmp_path.iterdir()) == [file]
