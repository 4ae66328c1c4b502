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


def test_another_life_has_nothing_to_answer() -> None:
    answers = Answers()
    answers.given_back(FIRST, 1, PREFIX)
    said(answers)
    answers.clear()
    answers.not_heard()
    assert said(answers) == ([], [])
    answers.given_back(FIRST, 1)
    assert said(answers)[0] == ["0/0/0@1+0"]
