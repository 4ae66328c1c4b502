"""What was said is said again only where it must be."""

from generator_svc.answer_prefix import Prefix
from generator_svc.answers import Answers
from streamrl.identity import PURPOSE_TRAIN, SampleKey
from streamrl.v1.scheduler_pb2 import HeartbeatRequest

FIRST, SECOND = SampleKey(PURPOSE_TRAIN, 0, 0, 0), SampleKey(PURPOSE_TRAIN, 0, 0, 1)
PREFIX = Prefix((5, 6), (-0.5, -1.0), ((0, 2),))


def said(answers: Answers) -> tuple[list[str], list[str]]:
    request = HeartbeatRequest()
    answers.write_to(request)
    revoked = [f"{SampleKey.from_proto(one.id)}@{one.dispatch}+{len(one.prefix.token_ids)}" for one in request.revoked]
    return revoked, [str(SampleKey.from_proto(sample_id)) for sample_id in request.not_revoked]


def test_answers_are_said_once_when_they_are_heard() -> None:
    answers = Answers()
    answers.given_back(FIRST, 1)
    answers.given_back(FIRST, 1)
    answers.not_revoked([SECOND])
    assert said(answers) == (["0/0/0@1+0"], ["0/0/1"])
    answers.heard()
    answers.not_heard()
    assert said(answers) == ([], [])


def test_answers_of_a_stream_that_broke_are_said_again() -> None:
    answers = Answers()
    answers.given_back(FIRST, 1)
    said(answers)
    answers.given_back(SECOND, 2)
    answers.not_heard()
    assert sorted(said(answers)[0]) == ["0/0/0@1+0", "0/0/1@2+0"]


def test_a_beginning_that_was_handed_over_goes_along_whenever_it_is_asked_for_again() -> None:
    answers = Answers()
    answers.given_back(FIRST, 1, PREFIX)
    assert said(answers)[0] == ["0/0/0@1+2"]
    answers.heard()
    # The scheduler has not heard of it: what answered was an earlier heartbeat.
    answers.given_back(FIRST, 1)
    assert said(answers)[0] == ["0/0/0@1+2"]
    answers.given_back(FIRST, 3)
    assert said(answers)[0] == ["0/0/0@3+0"]


def test_long_beginnings_go_in_several_heartbeats() -> None:
    answers = Answers()
    keys = [SampleKey(PURPOSE_TRAIN, 0, 0, sample) for sample in range(3)]
    long = Prefix((5,) * 900_000, (-0.5,) * 900_000, ((0, 900_000),))
    for key in keys:
        answers.given_back(key, 1, long)
    request = HeartbeatRequest()
    assert answers.write_to(request)
    assert request.ByteSize() < 20_000_000
    assert said(answers)[0] == ["0/0/2@1+900000"]
    answers.not_heard()
    request.Clear()
    assert answers.write_to(request)
    assert not answers.write_to(request)
    assert len(request.revoked) == 3


def test_another_life_has_nothing_to_answer() -> None:
    answers = Answers()
    answers.given_back(FIRST, 1, PREFIX)
    said(answers)
    answers.clear()
    answers.not_heard()
    assert said(answers) == ([], [])
    answers.given_back(FIRST, 1)
    assert said(answers)[0] == ["0/0/0@1+0"]


def test_no_beginning_is_forgotten_before_it_was_said() -> None:
    answers = Answers()
    keys = [SampleKey(PURPOSE_TRAIN, 0, 0, sample) for sample in range(200)]
    for key in keys:
        answers.given_back(key, 1, PREFIX)
        answers.heard()
    assert all(one.endswith("+2") for one in said(answers)[0])
    answers.heard()
    for key in keys:
        answers.given_back(key, 1)
    again = said(answers)[0]
    assert [one.endswith("+2") for one in again] == [False] * 136 + [True] * 64
