from generator_svc.answers import Answers
from streamrl.identity import PURPOSE_TRAIN, SampleKey
from streamrl.v1.scheduler_pb2 import HeartbeatRequest

FIRST, SECOND = SampleKey(PURPOSE_TRAIN, 0, 0, 0), SampleKey(PURPOSE_TRAIN, 0, 0, 1)


def said(answers: Answers) -> tuple[list[str], list[str]]:
    request = HeartbeatRequest()
    answers.write_to(request)
    keys = (
        [str(SampleKey.from_proto(sample_id)) for sample_id in ids] for ids in (request.revoked, request.not_revoked)
    )
    revoked, not_revoked = keys
    return revoked, not_revoked


def test_answers_are_said_once_when_they_are_heard() -> None:
    answers = Answers()
    answers.revoked([FIRST, FIRST])
    answers.not_revoked([SECOND])
    assert said(answers) == (["0/0/0"], ["0/0/1"])
    answers.heard()
    answers.not_heard()
    assert said(answers) == ([], [])


def test_answers_of_a_stream_that_broke_are_said_again() -> None:
    answers = Answers()
    answers.revoked([FIRST])
    said(answers)
    answers.revoked([SECOND])
    answers.not_heard()
    assert sorted(said(answers)[0]) == ["0/0/0", "0/0/1"]


def test_another_life_has_nothing_to_answer() -> None:
    answers = Answers()
    answers.revoked([FIRST])
    said(answers)
    answers.clear()
    answers.not_heard()
    assert said(answers) == ([], [])
