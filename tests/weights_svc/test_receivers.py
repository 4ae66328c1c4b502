"""Who may still need which version."""

from streamrl.v1.weights_pb2 import (
    TRANSFER_FORMAT_DELTA,
    TRANSFER_FORMAT_FULL,
    AcknowledgeRequest,
    NegotiateRequest,
)
from weights_svc.negotiate import Relay
from weights_svc.receivers import BASE_GRACE_S, FETCH_GRACE_S, Receivers


def test_a_negotiated_version_is_in_use_until_the_grace_is_over():
    receivers = Receivers()
    receivers.negotiated("generator-0", 4, now_s=100.0)
    assert receivers.in_use(100.0 + FETCH_GRACE_S - 1) == {4}
    assert receivers.next_lapse_s(100.0) == 100.0 + FETCH_GRACE_S
    assert receivers.in_use(100.0 + FETCH_GRACE_S) == set()
    assert receivers.next_lapse_s(100.0 + FETCH_GRACE_S) is None


def test_a_version_is_in_use_as_long_as_a_fetch_runs_and_a_grace_longer():
    receivers = Receivers()
    receivers.fetch_began("generator-0", 4)
    assert receivers.in_use(1e9) == {4}
    receivers.fetch_ended("generator-0", 4, to_the_end=False, now_s=1e9)
    assert receivers.in_use(1e9 + FETCH_GRACE_S - 1) == {4}
    assert receivers.in_use(1e9 + FETCH_GRACE_S) == set()


def test_two_fetches_of_one_receiver_both_count():
    receivers = Receivers()
    receivers.fetch_began("generator-0", 4)
    receivers.fetch_began("generator-0", 4)
    receivers.fetch_ended("generator-0", 4, to_the_end=True, now_s=0.0)
    assert receivers.in_use(1e9) == {4}


def test_an_acknowledged_version_and_older_ones_are_no_longer_in_use():
    receivers = Receivers()
    for version in (3, 4, 5):
        receivers.negotiated("generator-0", version, now_s=0.0)
    receivers.negotiated("generator-1", 4, now_s=0.0)
    receivers.acknowledged(AcknowledgeRequest(receiver="generator-0", weight_version=4), now_s=0.0)
    assert receivers.in_use(1.0) == {4, 5}
    receivers.acknowledged(AcknowledgeRequest(receiver="generator-1", weight_version=4), now_s=0.0)
    assert receivers.in_use(1.0) == {5}


def test_only_a_fetch_after_a_whole_one_without_acknowledgement_comes_again():
    receivers = Receivers()
    assert not receivers.fetch_began("generator-0", 4)
    receivers.fetch_ended("generator-0", 4, to_the_end=False, now_s=0.0)
    assert not receivers.fetch_began("generator-0", 4)
    receivers.fetch_ended("generator-0", 4, to_the_end=True, now_s=0.0)
    assert not receivers.fetch_began("generator-1", 4)
    assert receivers.fetch_began("generator-0", 4)
    receivers.acknowledged(AcknowledgeRequest(receiver="generator-0", weight_version=4), now_s=0.0)
    assert not receivers.fetch_began("generator-0", 4)


def test_what_each_receiver_last_acknowledged_is_listed_by_name():
    receivers = Receivers()
    receivers.negotiated("generator-2", 5, now_s=0.0)
    for name, version in (("generator-1", 3), ("generator-0", 4), ("generator-1", 5)):
        receivers.acknowledged(AcknowledgeRequest(receiver=name, weight_version=version), now_s=0.0)
    listed = [(entry.receiver, entry.acknowledged.weight_version) for entry in receivers.to_proto()]
    assert listed == [("generator-0", 4), ("generator-1", 5)]


def test_a_version_that_is_gone_is_not_in_use():
    receivers = Receivers()
    receivers.negotiated("generator-0", 4, now_s=0.0)
    receivers.forget_version(4)
    assert receivers.in_use(1.0) == set()


def ask(receiver: str, *, held: int | None = None, deltas: bool = True, **rest: str) -> NegotiateRequest:
    formats = [TRANSFER_FORMAT_DELTA, TRANSFER_FORMAT_FULL] if deltas else [TRANSFER_FORMAT_FULL]
    return NegotiateRequest(receiver=receiver, held_weight_version=held, formats=formats, **rest)


def test_what_a_receiver_of_differences_holds_stays_while_it_watches_and_a_grace_longer():
    receivers = Receivers()
    receivers.watch_began("relay")
    receivers.negotiates(ask("relay", held=3), now_s=0.0)
    assert receivers.in_use(1e9) == {3}
    assert receivers.next_lapse_s(1.0) is None
    receivers.watch_ended("relay", now_s=1e9)
    assert receivers.in_use(1e9 + BASE_GRACE_S - 1) == {3}
    assert receivers.next_lapse_s(1e9) == 1e9 + BASE_GRACE_S
    assert receivers.in_use(1e9 + BASE_GRACE_S) == set()


def test_what_it_has_acknowledged_takes_the_place_of_what_it_held():
    receivers = Receivers()
    receivers.negotiates(ask("relay", held=3), now_s=0.0)
    receivers.acknowledged(AcknowledgeRequest(receiver="relay", weight_version=4), now_s=1.0)
    assert receivers.in_use(2.0) == {4}


def test_a_receiver_of_whole_tensors_needs_no_base():
    receivers = Receivers()
    receivers.watch_began("generator-0")
    receivers.negotiates(ask("generator-0", held=3, deltas=False), now_s=0.0)
    assert receivers.in_use(1.0) == set()


def test_a_relay_is_there_while_it_watches():
    receivers = Receivers()
    receivers.negotiates(ask("relay", site="west", serving_address="relay.west:7003"), now_s=0.0)
    receivers.negotiates(ask("generator-0", site="west"), now_s=0.0)
    assert receivers.relays() == []
    receivers.watch_began("relay")
    receivers.watch_began("generator-0")
    assert receivers.relays() == [Relay("west", "relay.west:7003")]
    receivers.watch_ended("relay", now_s=1.0)
    assert receivers.relays() == []
