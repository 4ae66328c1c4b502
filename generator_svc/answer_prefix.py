"""What there is of an answer that goes on on another instance: tokens, their log-probs, and the versions they are of.

The tokens that come behind a prefix are drawn from the same distribution as if nothing had moved; they are other draws,
since an engine's random numbers do not go on where another's have stopped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from generator_svc.engine import GenerationResult
from streamrl.v1.sample_pb2 import AnswerPrefix, VersionSpan

Spans = tuple[tuple[int, int], ...]
"""(weight version, number of tokens), in order."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first tokens of an answer. Empty: it begins here."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    version_spans: Spans = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def from_proto(cls, prefix: AnswerPrefix) -> "Prefix":
        return cls(
            tuple(prefix.token_ids),
            tuple(prefix.logprobs),
            tuple((span.weight_version, span.num_tokens) for span in prefix.version_spans),
        )

    def to_proto(self) -> AnswerPrefix:
        return AnswerPrefix(
            token_ids=self.token_ids, logprobs=self.logprobs, version_spans=spans_proto(self.version_spans)
        )

    def followed_by(self, result: GenerationResult) -> "Prefix":
        """With what an engine has drawn behind it."""
        spans = [*self.version_spans]
        for version, num_tokens in result.version_spans:
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1] + num_tokens)
            else:
                spans.append((version, num_tokens))
        return Prefix((*self.token_ids, *result.token_ids), (*self.logprobs, *result.logprobs), tuple(spans))

    def problem(self, *, max_tokens: int, stop_token_ids: Sequence[int], vocab_size: int) -> str:
        """Why no answer can go on behind it; empty when one can."""
        num_tokens = len(self.token_ids)
        if len(self.logprobs) != num_tokens or sum(length for _, length in self.version_spans) != num_tokens:
            return "log-probs or version spans of the tokens that are there do not fit them"
        if num_tokens >= max_tokens:
            return f"{num_tokens} tokens are there, and {max_tokens} is the most"
        if any(not 0 <= token < vocab_size or token in stop_token_ids for token in self.token_ids):
            return f"a token that is there ends the answer, or is outside the vocabulary of {vocab_size}"
        if any(later[0] < earlier[0] for earlier, later in pairwise(self.version_spans)):
            return "versions of the tokens that are there fall"
        return ""


def spans_proto(spans: Sequence[tuple[int, int]]) -> list[VersionSpan]:
    return [VersionSpan(weight_version=version, num_tokens=num_tokens) for version, num_tokens in spans]
