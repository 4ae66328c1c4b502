import json
from pathlib import Path
from typing import Any

import pytest

from generator_svc.sample import ModelLimits, problem_of, samples_of
from streamrl.v1.records_pb2 import Assignment, SampleDraw
from streamrl.v1.sample_pb2 import PURPOSE_TRAIN, AnswerPrefix, SamplingSettings, VersionSpan

LIMITS = ModelLimits(max_model_len=16, vocab_size=100)


def make_assignment() -> Assignment:
    return Assignment(
        attempt=1,
        incarnation=1,
        purpose=PURPOSE_TRAIN,
        batch=2,
        group=3,
        token_ids=[5, 6, 7],
        sampling=SamplingSettings(temperature=1.0, max_tokens=8, stop_token_ids=[1]),
        draws=[SampleDraw(sample=0, seed=11, dispatch=1), SampleDraw(sample=4, seed=12, dispatch=2)],
        min_weight_version=1,
        priority=9,
    )


def test_each_draw_becomes_a_sample() -> None:
    samples = samples_of(make_assignment(), received_s=3.0)
    assert [(str(sample.key), sample.dispatch, sample.seed) for sample in samples] == [
        ("2/3/0", 1, 11),
        ("2/3/4", 2, 12),
    ]
    assert not any(sample.is_pinned for sample in samples)
    assert samples[0].may_begin_with(1) and samples[0].may_begin_with(2) and not samples[0].may_begin_with(0)


def test_a_pinned_sample_begins_with_its_version_alone_even_version_zero() -> None:
    assignment = make_assignment()
    assignment.min_weight_version = assignment.exact_weight_version = 0
    sample = samples_of(assignment, received_s=0.0)[0]
    assert sample.is_pinned and sample.may_begin_with(0) and not sample.may_begin_with(1)


def test_a_possible_assignment_has_no_problem() -> None:
    assert problem_of(make_assignment(), LIMITS) == ""


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda a: a.ClearField("draws"), "no samples"),
        (lambda a: a.ClearField("token_ids"), "no tokens"),
        (lambda a: a.token_ids.append(100), "vocabulary"),
        (lambda a: a.token_ids.append(-1), "vocabulary"),
        (lambda a: setattr(a.sampling, "max_tokens", 0), "max_tokens is 0"),
        (lambda a: setattr(a.sampling, "max_tokens", 14), "longer than the 16"),
        (lambda a: setattr(a.sampling, "temperature", float("nan")), "temperature"),
        (lambda a: setattr(a.sampling, "temperature", -1.0), "temperature"),
    ],
)
def test_an_impossible_assignment_is_told_apart(change: object, problem: str) -> None:
    assignment = make_assignment()
    assert callable(change)
    change(assignment)
    assert problem in problem_of(assignment, LIMITS)


def test_limits_come_from_the_config_or_the_setting(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512, "vocab_size": 32}))
    assert ModelLimits.of(tmp_path, 0) == ModelLimits(512, 32)
    assert ModelLimits.of(tmp_path, 64) == ModelLimits(64, 32)


def test_a_config_that_does_not_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing"):
        ModelLimits.of(tmp_path, 0)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="max_model_len"):
        ModelLimits.of(tmp_path, 0)


@pytest.mark.parametrize(
    ("prefix", "problem"),
    [
        ({}, ""),
        ({"logprobs": [-1.0]}, "do not fit"),
        ({"version_spans": [VersionSpan(weight_version=1, num_tokens=1)]}, "do not fit"),
        ({"token_ids": [2, 1]}, "ends the answer"),
        ({"token_ids": [2, 100]}, "vocabulary"),
        ({"version_spans": [VersionSpan(weight_version=v, num_tokens=1) for v in (2, 1)]}, "fall"),
        (
            {
                "token_ids": [2] * 8,
                "logprobs": [-1.0] * 8,
                "version_spans": [VersionSpan(weight_version=1, num_tokens=8)],
            },
            "8 is the most",
        ),
    ],
)
def test_an_answer_goes_on_only_behind_a_beginning_that_makes_sense(prefix: dict[str, Any], problem: str) -> None:
    fields = {
        "token_ids": [2, 3],
        "logprobs": [-1.0, -1.0],
        "version_spans": [VersionSpan(weight_version=1, num_tokens=2)],
        **prefix,
    }
    assignment = make_assignment()
    assignment.draws[1].prefix.CopyFrom(AnswerPrefix(**fields))
    found = problem_of(assignment, LIMITS)
    assert (problem in found and "sample 4" in found) if problem else not found
    first, second = samples_of(assignment, received_s=0.0)
    assert len(first.prefix) == 0
    assert second.prefix.token_ids == tuple(fields["token_ids"])
    assert second.prefix.to_proto() == assignment.draws[1].prefix
