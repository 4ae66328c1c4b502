"""When a reader concludes that the broker will not come back."""

from streamrl.kafka.outage import Outage


def _yes() -> bool:
    return True


def _no() -> bool:
    return False


def _never_asked() -> bool:
    raise AssertionError("the broker is asked though nothing is wrong, or too soon again")


def test_a_broker_of_which_nothing_bad_is_known_is_never_asked() -> None:
    outage = Outage(patience_s=60)
    assert not outage.exhausts_patience(_never_asked, now_s=1000)


def test_a_broker_that_comes_back_is_no_longer_away() -> None:
    outage = Outage(patience_s=60)
    outage.noticed(0)
    assert not outage.exhausts_patience(_no, now_s=20)
    assert not outage.exhausts_patience(_never_asked, now_s=21)
    assert not outage.exhausts_patience(_yes, now_s=59)
    assert not outage.exhausts_patience(_never_asked, now_s=100)
    outage.noticed(110)
    assert not outage.exhausts_patience(_no, now_s=165)


def test_what_is_read_ends_an_outage() -> None:
    outage = Outage(patience_s=60)
    outage.noticed(0)
    outage.over()
    assert not outage.exhausts_patience(_never_asked, now_s=100)


def test_patience_counts_from_the_first_sign() -> None:
    outage = Outage(patience_s=60)
    for now_s in range(0, 60, 10):
        outage.noticed(now_s)
        assert not outage.exhausts_patience(_no, now_s)
    assert outage.exhausts_patience(_no, now_s=60)


def test_an_impatient_reader_asks_before_it_gives_up() -> None:
    outage = Outage(patience_s=1)
    outage.noticed(0)
    assert not outage.exhausts_patience(_yes, now_s=1)
    outage.noticed(10)
    assert outage.exhausts_patience(_no, now_s=11)
