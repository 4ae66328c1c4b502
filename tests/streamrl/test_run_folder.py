"""The folder of a run."""

import errno
import json
import os
from pathlib import Path

import pytest

from streamrl.lifetime import ProcessIdentity
from streamrl.run_folder import RunFolder, RunRecord, find_run

ME = ProcessIdentity.of(os.getpid()) or ProcessIdentity(0, 0)


def _record(run_id: str, process: ProcessIdentity = ME) -> RunRecord:
    return RunRecord(run_id=run_id, config="job.toml", process=process, started_at="2026-11-29T12:00:00+00:00")


def _create(runs: Path, run_id: str) -> RunFolder:
    folder = RunFolder(runs / run_id)
    folder.create(_record(run_id), "{}")
    return folder


def test_a_run_is_found_by_id_by_folder_and_as_the_newest(tmp_path: Path) -> None:
    first, second = _create(tmp_path, "a"), _create(tmp_path, "b")
    assert find_run("a", tmp_path).path == first.path
    assert find_run(str(first.path), tmp_path / "elsewhere").path == first.path
    assert find_run(None, tmp_path).path == second.path


def test_a_run_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run in"):
        find_run(None, tmp_path)
    _create(tmp_path, "a")
    with pytest.raises(ValueError, match="the newest are a"):
        find_run("b", tmp_path)


def test_a_folder_holds_one_run(tmp_path: Path) -> None:
    _create(tmp_path, "a")
    with pytest.raises(ValueError, match="run a exists already"):
        _create(tmp_path, "a")


def test_settings_are_for_their_owner_only(tmp_path: Path) -> None:
    assert _create(tmp_path, "a").settings.stat().st_mode & 0o777 == 0o600


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    folder = _create(tmp_path, "a")
    failed = _record("a").ended("failed", "2026-11-29T12:01:00+00:00", {"kind": "X", "message": "y"})
    folder.write_record(failed)
    assert folder.read_record() == failed


def test_a_run_whose_process_is_gone_is_dead_unless_it_said_how_it_ended() -> None:
    assert _record("a").state == "running"
    other_life = ProcessIdentity(ME.pid, ME.start_ticks + 1)
    assert _record("a", other_life).state == "dead"
    assert _record("a", other_life).ended("stopped", "", None).state == "stopped"


@pytest.mark.parametrize(
    ("summary", "state"),
    [('{"status": "completed"}', "completed"), ('{"status": "stopped"}', "dead"), ("{", "dead"), (None, "dead")],
)
def test_a_run_whose_trainer_was_done_is_completed_though_its_command_was_killed(
    tmp_path: Path, summary: str | None, state: str
) -> None:
    folder = RunFolder(tmp_path / "a")
    folder.create(_record("a", ProcessIdentity(pid=1 << 22, start_ticks=1)), "{}")
    if summary is not None:
        folder.summary.write_text(summary)
    record = folder.read_record()
    assert record.state == state
    assert (record.finished_at is not None) == (state == "completed")


def test_a_half_written_error_file_is_no_error(tmp_path: Path) -> None:
    folder = _create(tmp_path, "a")
    assert folder.read_error("trainer") is None
    folder.error_file("trainer").parent.mkdir()
    folder.error_file("trainer").write_text('{"kind": "X"')
    assert folder.read_error("trainer") is None
    folder.error_file("trainer").write_text('{"kind": "X", "message": "y"}')
    assert folder.read_error("trainer") == {"kind": "X", "message": "y"}


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    folder = _create(tmp_path, "a")
    folder.record.write_text("{")
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        folder.read_record()


@pytest.mark.parametrize("content", ["{", '{"run_id": "a"}', '{"run_id": "\\ud800', "[]"])
def test_damage_is_told_in_one_line_that_names_the_file(tmp_path: Path, content: str) -> None:
    folder = _create(tmp_path, "a")
    folder.record.write_text(content)
    with pytest.raises(ValueError, match=r"^\S+run\.json is damaged: .+$") as caught:
        folder.read_record()
    assert "\n" not in str(caught.value)
    folder.summary.write_bytes(content.encode() if content != '{"run_id": "a"}' else b"\xff")
    with pytest.raises(ValueError, match=r"^\S+summary\.json is damaged: .+$"):
        folder.read_summary()


def test_a_time_that_is_none_is_damage(tmp_path: Path) -> None:
    folder = _create(tmp_path, "a")
    folder.record.write_text(folder.record.read_text().replace("2026-11-29T12:00:00+00:00", "noon"))
    with pytest.raises(ValueError, match=r"run\.json is damaged: started_at"):
        folder.read_record()


def _places_that_are_none(tmp_path: Path) -> list[Path]:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    return [
        tmp_path / "file",
        tmp_path / "file" / "deeper",
        tmp_path / "dangling",
        Path("/proc/x"),
        tmp_path / ("x" * 300),
    ]


def test_a_place_where_no_run_can_be_is_refused_by_name(tmp_path: Path) -> None:
    for place in _places_that_are_none(tmp_path):
        folder = RunFolder(place / "a")
        for attempt in (folder.check_usable, lambda folder=folder: folder.create(_record("a"), "{}")):
            with pytest.raises(ValueError, match=f"^run.dir is {place}, where no run can be: .+$"):
                attempt()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_place_that_is_not_writable_is_refused_by_name(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match=r"^run\.dir is .*Permission denied"):
        RunFolder(tmp_path / "runs" / "a").check_usable()


def test_looking_whether_a_folder_is_usable_leaves_nothing(tmp_path: Path) -> None:
    RunFolder(tmp_path / "runs" / "a").check_usable()
    assert list(tmp_path.iterdir()) == []
    _create(tmp_path, "a")
    with pytest.raises(ValueError, match="run a exists already"):
        RunFolder(tmp_path / "a").check_usable()


def test_something_else_in_the_place_of_the_newest_is_told_before(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(ValueError, match="in the place of the link to the newest run"):
        RunFolder(tmp_path / "a").check_usable()


@pytest.mark.parametrize("place", ["settings", "lineage", "checkpoint"])
def test_an_attempt_that_anything_in_the_folder_names_has_been(tmp_path: Path, place: str) -> None:
    folder = _create(tmp_path, "a")
    for _ in range(3):
        folder.begin_attempt()
    folder.attempt.unlink()
    assert folder.last_attempt() == 0
    if place == "settings":
        folder.settings.write_text(json.dumps({"run": {"attempt": 4}}))
    elif place == "lineage":
        (folder.path / "lineage.json").write_text(json.dumps({"1": {}, "4": {}, "x": {}}))
        folder.settings.write_text("[]")
    else:
        (folder.path / "checkpoints" / "attempt-0004-iteration-000010").mkdir(parents=True)
        (folder.path / "checkpoints" / "attempt-0009-iteration-000010.unfinished").mkdir()
    assert folder.last_attempt() == 4
    folder.attempt.write_text('{"attempt": 1}')
    assert folder.begin_attempt() == 5


@pytest.mark.parametrize(
    ("content", "came"),
    [
        ("", "got nothing"),
        ("null", "got null"),
        ("[1]", "got a list"),
        ("7", "got a number"),
        ('{"attempt": null}', "got None"),
        ('{"attempt": "x"}', "got 'x'"),
        ("{", "line 1, column 2"),
    ],
)
def test_damage_is_told_with_what_was_expected_what_came_and_what_to_do(
    tmp_path: Path, content: str, came: str
) -> None:
    folder = _create(tmp_path, "a")
    folder.attempt.write_text(content)
    with pytest.raises(ValueError, match=r"attempt\.json is damaged: expected .*got .*\. Delete it: ") as caught:
        folder.last_attempt()
    assert came in str(caught.value)


def test_damaged_settings_are_told_by_their_section(tmp_path: Path) -> None:
    folder = _create(tmp_path, "a")
    folder.settings.write_text('{"run": null}')
    with pytest.raises(ValueError, match=r"expected a JSON object as section run, got None\. Restore it"):
        folder.read_settings()
    folder.settings.unlink()
    with pytest.raises(ValueError, match=r"has no settings\.json\. Restore it"):
        folder.read_settings()


def test_a_folder_without_its_record_is_told_what_is_missing(tmp_path: Path) -> None:
    folder = _create(tmp_path, "a")
    folder.record.unlink()
    for name, runs in (("a", tmp_path), (str(folder.path), tmp_path / "elsewhere")):
        with pytest.raises(ValueError, match=r"a holds no run: run\.json is missing\. Restore it"):
            find_run(name, runs)
    with pytest.raises(ValueError, match=r"holds what is left of a run, but no run\.json"):
        folder.check_usable()


def test_a_folder_whose_lock_cannot_be_opened_is_refused_by_name(tmp_path: Path) -> None:
    folder = _create(tmp_path, "a")
    (folder.path / "lock").mkdir()
    with pytest.raises(ValueError, match=rf"^run\.dir is {tmp_path}, where no run can be: .*lock$"), folder.lock():
        pass


@pytest.mark.parametrize(
    ("summary", "completed"),
    [('{"status": "completed"}', True), ('{"status": "stopped"}', False), ("{", False), (None, False)],
)
def test_a_run_is_completed_when_its_summary_says_so(tmp_path: Path, summary: str | None, completed: bool) -> None:
    folder = _create(tmp_path, "a")
    if summary is not None:
        folder.summary.write_text(summary)
    assert folder.is_completed() == completed


def test_the_end_of_a_run_is_written_also_where_no_other_file_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _create(tmp_path, "a")
    before = folder.record.read_text()
    ended = _record("a").ended("failed", "2026-11-29T12:01:00+00:00", {"kind": "StorageError", "message": "full"})

    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("streamrl.run_folder.replace_file", full)
    folder.write_end(ended)
    assert folder.read_record() == ended
    # And one that is too long for that leaves the old one whole.
    folder.record.write_text(before)
    with pytest.raises(OSError, match="No space left"):
        folder.write_end(ended.model_copy(update={"config": "x" * 100_000}))
    assert folder.record.read_text() == before


def test_a_run_whose_folder_could_not_be_made_leaves_its_id_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = RunFolder(tmp_path / "a")
    with monkeypatch.context() as broken:
        broken.setattr("streamrl.run_folder.write_private", full)
        with pytest.raises(ValueError, match="where no run can be: No space left on device"):
            folder.create(_record("a"), "{}")
    folder.check_usable()
