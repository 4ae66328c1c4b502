"""How a sample's end becomes a `Rollout`, and which results of an engine are not good enough to become one."""

import math

from generator_svc.answer_prefix import spans_proto
from generator_svc.engine import GenerationResult
from generator_svc.sample import Sample
from streamrl.v1.records_pb2 import ROLLOUT_STATUS_FAILED, ROLLOUT_STATUS_OK, Rollout, RolloutTimings
from streamrl.v1.sample_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, LOGPROB_MODE_PROCESSED

_FINISH_REASONS = {"stop": FINISH_REASON_STOP, "length": FINISH_REASON_LENGTH}


def problem_of_result(sample: Sample, result: GenerationResult) -> str:
    """Why an answer must not be trained on; empty when it may."""
    num_tokens = len(result.token_ids)
    versions = [version for version, _ in result.version_spans]
    if num_tokens == 0:
        return "the engine gave no tokens"
    if len(result.logprobs) != num_tokens:
        return f"the engine gave {len(result.logprobs)} log-probs for {num_tokens} tokens"
    if not all(math.isfinite(logprob) for logprob in result.logprobs):
        return "the engine gave a log-prob that is not a finite number"
    if sum(length for _, length in result.version_spans) != num_tokens:
        return f"the engine's version spans do not add up to {num_tokens} tokens"
    if not sample.may_begin_with(versions[0]) or (sample.is_pinned and len(set(versions)) > 1):
        return f"it was generated with versions {versions}, which its assignment does not allow"
    return ""


def rollout_of(sample: Sample, result: GenerationResult, finished_s: float) -> Rollout:
    """The rollout of a finished answer, with the tokens that it came with, and without attempt, instance, incarnation
    and dispatch."""
    answer = sample.prefix.followed_by(result)
    return Rollout(
        id=sample.key.to_proto(),
        token_ids=answer.token_ids,
        logprobs=answer.logprobs,
        logprob_mode=LOGPROB_MODE_PROCESSED,
        version_spans=spans_proto(answer.version_spans),
        status=ROLLOUT_STATUS_OK,
        finish_reason=_FINISH_REASONS[result.finish_reason],
        timings=RolloutTimings(received_s=sample.received_s, started_s=result.started_s, finished_s=finished_s),
    )


def failed_rollout(sample: Sample, error: str, finished_s: float) -> Rollout:
    """The rollout of an answer that could not be generated, without attempt, instance, incarnation and dispatch."""
    return Rollout(
        id=sample.key.to_proto(),
        status=ROLLOUT_STATUS_FAILED,
        timings=RolloutTimings(received_s=sample.received_s, finished_s=finished_s),
        error=error,
    )
