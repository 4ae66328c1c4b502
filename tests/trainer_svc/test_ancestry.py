from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import CheckpointError
from trainer_svc.ancestry import INITIAL_MODEL, Origin, read_origins, shared_version, write_origins


def test_two_attempts_share_the_versions_up_to_where_their_lines_part() -> None:
    origins = {1: INITIAL_MODEL, 2: Origin(1, 4), 3: Origin(2, 6), 4: Origin(1, 3)}
    # Attempt 1 went on to 5 and beyond, but attempt 2 continued from 4.
    assert shared_version(origins, 1, 3) == 4
    assert shared_version(origins, 2, 3) == 6
    # Attempt 4 continues an older checkpoint: nothing that attempts 2 and 3 made is in its line.
    assert [shared_version(origins, earlier, 4) for earlier in (1, 2, 3)] == [3, 3, 3]


def test_attempts_without_a_checkpoint_share_the_initial_model() -> None:
    assert shared_version({1: INITIAL_MODEL, 2: INITIAL_MODEL}, 1, 2) == 0


def test_an_attempt_of_which_nothing_is_known_shares_nothing() -> None:
    assert shared_version({3: Origin(1, 4), 1: INITIAL_MODEL}, 2, 3) == -1


@given(st.data())
def test_sharing_is_what_following_the_versions_one_by_one_gives(data: st.DataObject) -> None:
    """Each version is a thing of its own; a line is the things on the way back to the initial model."""
    origins: dict[int, Origin] = {}
    lines: dict[int, list[tuple[int, int]]] = {0: [(0, 0)]}
    for attempt in range(1, data.draw(st.integers(2, 6)) + 1):
        parent = data.draw(st.integers(0, attempt - 1))
        iteration = data.draw(st.integers(0, len(lines[parent]) - 1))
        # No checkpoint of an attempt is as old as the version that it began with.
        while parent and iteration <= origins[parent].iteration:
            parent = origins[parent].attempt
        iteration = min(iteration, len(lines[parent]) - 1)
        origins[attempt] = Origin(parent, iteration)
        made = data.draw(st.integers(0, 4))
        lines[attempt] = lines[parent][: iteration + 1] + [(attempt, iteration + 1 + step) for step in range(made)]
    mine = max(origins)
    for earlier in range(1, mine):
        pairs = zip(lines[earlier], lines[mine], strict=False)
        common = sum(its == my for its, my in pairs) - 1
        shared = shared_version(origins, earlier, mine)
        # It may say more only where one of the two has made no version of that number.
        assert shared == common or (shared > common and common == min(len(lines[earlier]), len(lines[mine])) - 1)


def test_origins_come_back_from_the_disk(tmp_path: Path) -> None:
    file = tmp_path / "run" / "lineage.json"
    assert read_origins(file) == {}
    write_origins(file, {1: INITIAL_MODEL, 2: Origin(1, 4)})
    assert read_origins(file) == {1: INITIAL_MODEL, 2: Origin(1, 4)}
    file.write_text('{"1": 3}')
    with pytest.raises(CheckpointError, match=r"lineage\.json is damaged"):
        read_origins(file)
