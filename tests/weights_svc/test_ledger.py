"""The highest attempt and the traffic outlive a restart."""

import pytest

from streamrl.errors import StaleAttemptError
from weights_svc.ledger import Ledger


def test_a_lower_attempt_is_refused_and_counted(tmp_path):
    ledger = Ledger(tmp_path / "ledger.json", attempt=1)
    ledger.raise_attempt(3)
    for count in (1, 2):
        with pytest.raises(StaleAttemptError, match=rf"attempt 2 is over: the run is at attempt 3 \({count} such"):
            ledger.check(2)


def test_checking_a_higher_attempt_does_not_raise_it(tmp_path):
    ledger = Ledger(tmp_path / "ledger.json", attempt=1)
    ledger.check(9)
    assert ledger.attempt == 1


def test_a_restart_knows_the_highest_attempt_whatever_it_is_told(tmp_path):
    path = tmp_path / "ledger.json"
    Ledger(path, attempt=1).raise_attempt(3)
    assert Ledger(path, attempt=1).attempt == 3
    assert Ledger(path, attempt=4).attempt == 4


def test_traffic_is_counted_on_after_a_restart(tmp_path):
    path = tmp_path / "ledger.json"
    ledger = Ledger(path, attempt=1)
    ledger.count_traffic(bytes_full=100, bytes_sent=40)
    ledger.save_traffic()
    ledger = Ledger(path, attempt=1)
    ledger.count_traffic(bytes_full=10, bytes_sent=10)
    assert (ledger.bytes_full, ledger.bytes_sent) == (110, 50)


def test_a_disk_that_cannot_keep_the_traffic_stops_nothing(tmp_path, caplog):
    ledger = Ledger(tmp_path / "ledger.json", attempt=1)
    (tmp_path / "ledger.json").unlink()
    (tmp_path / "ledger.json").mkdir()
    ledger.save_traffic()
    assert "traffic is not kept" in caplog.text


@pytest.mark.parametrize("text", ["", "{bad", "[]", "null", '{"attempt": "x", "bytes_full": 1, "bytes_sent": 1}', "{}"])
def test_a_damaged_file_costs_the_traffic_so_far_and_nothing_else(tmp_path, caplog, text):
    path = tmp_path / "ledger.json"
    path.write_text(text)
    ledger = Ledger(path, attempt=4)
    assert (ledger.attempt, ledger.bytes_full, ledger.bytes_sent) == (4, 0, 0)
    assert f"{path} is damaged" in caplog.text
    assert Ledger(path, attempt=1).attempt == 4
