import asyncio
import logging
import math

import pytest

from generator_svc.canaries import Agreement, compare, score_canaries
from streamrl.errors import EngineDiedError
from streamrl.v1.weights_pb2 import Canary, VersionManifest


class Scorer:
    """As much of an engine as a canary needs."""

    def __init__(self, logprobs: list[float]) -> None:
        self._logprobs = logprobs

    async def score(self, token_ids: list[int]) -> list[float]:
        return self._logprobs


def test_differences_are_absolute_and_over_all_tokens() -> None:
    canaries = [Canary(token_ids=[1, 2, 3], logprobs=[-1.0, -2.0]), Canary(token_ids=[1, 2], logprobs=[-4.0])]
    assert compare(canaries, [[-1.5, -1.5], [-4.0]]) == Agreement(pytest.approx(1 / 3), 0.5, 3)


def test_no_canaries_disagree_about_nothing() -> None:
    assert compare([], []) == Agreement(0.0, 0.0, 0)


def test_a_log_prob_that_is_no_number_is_not_hidden_by_others() -> None:
    agreement = compare([Canary(token_ids=[1, 2, 3], logprobs=[-1.0, -1.0])], [[-1.0, math.nan]])
    assert math.isnan(agreement.abs_diff_mean) and math.isnan(agreement.abs_diff_max)


@pytest.mark.parametrize(
    ("logprob", "warns"), [(-1.0, False), (-1.009, False), (-1.02, True), (math.nan, True), (-math.inf, True)]
)
def test_a_warning_says_which_version_differs(logprob: float, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    manifest = VersionManifest(weight_version=7, canaries=[Canary(token_ids=[1, 2], logprobs=[-1.0])])
    with caplog.at_level(logging.WARNING):
        asyncio.run(score_canaries(Scorer([logprob]), manifest, alarm_nats=0.01))  # type: ignore[arg-type]
    assert ("version=7" in caplog.text) is warns


def test_another_number_of_log_probs_than_tokens_is_an_engine_gone_wrong() -> None:
    manifest = VersionManifest(canaries=[Canary(token_ids=[1, 2], logprobs=[-1.0])])
    with pytest.raises(EngineDiedError, match="do not fit"):
        asyncio.run(score_canaries(Scorer([]), manifest, alarm_nats=0.01))  # type: ignore[arg-type]
