import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from streamrl.identity import PURPOSE_EVALUATION, PURPOSE_TRAIN, BatchKey
from streamrl.v1.records_pb2 import PromptRecord
from streamrl.v1.sample_pb2 import SamplingSettings
from trainer_svc.prompt_cursor import CursorState
from trainer_svc.prompt_selection import Selection, SelectionRules, SelectionState
from trainer_svc.prompt_writer import BatchShape, PromptWriter


@dataclass(frozen=True)
class SomePrompt:
    id: str
    token_ids: tuple[int, ...] = (1, 2)


PROMPTS = [SomePrompt(f"p{index}", (1, index)) for index in range(5)]


class Topic:
    """A topic that only keeps what is sent, and which batches were opened before."""

    def __init__(self) -> None:
        self.records: list[PromptRecord] = []
        self.opened: list[tuple[BatchKey, list[str], int, int]] = []
        self.extended: list[tuple[BatchKey, str, int]] = []
        self.complete: set[BatchKey] = set()

    def send(self, topic: str, value: bytes, *, key: bytes | None = None, partition: int = -1) -> None:
        assert (topic, partition) == ("prompts", 0)
        self.records.append(PromptRecord.FromString(value))

    def open(self, key: BatchKey, prompts: Sequence[Any], samples_per_prompt: int) -> None:
        self.opened.append((key, [prompt.id for prompt in prompts], samples_per_prompt, len(self.records)))

    def extend(self, key: BatchKey, prompt: Any) -> None:
        self.extended.append((key, prompt.id, len(self.records)))

    def ends(self) -> list[tuple[int, int, int]]:
        ends = [record.batch_end for record in self.records if record.WhichOneof("kind") == "batch_end"]
        return [(end.purpose, end.batch, end.num_groups) for end in ends]

    def writer(
        self,
        *,
        max_staleness: int = 1,
        num_iterations: int = 4,
        first_batch: int = 0,
        selection: Selection | None = None,
    ) -> PromptWriter:
        return PromptWriter(
            self,  # type: ignore[arg-type]
            "prompts",
            attempt=2,
            shape=BatchShape(2, 3, num_iterations, max_staleness),
            prompts=PROMPTS,
            cursor=CursorState(0, len(PROMPTS)),
            sampling=SamplingSettings(temperature=0.7, max_tokens=9, stop_token_ids=[2]),
            open_batch=self.open,
            extend_batch=self.extend,
            is_complete=lambda key: key in self.complete,
            first_batch=first_batch,
            selection=selection,
        )


def test_at_most_max_staleness_batches_are_written_ahead_and_none_after_the_last() -> None:
    topic = Topic()
    writer = topic.writer()
    writer.write_ahead(0)
    assert topic.ends() == [(PURPOSE_TRAIN, 0, 2), (PURPOSE_TRAIN, 1, 2)]
    writer.write_ahead(0)
    assert len(topic.ends()) == 2
    for iteration in (1, 2, 3):
        writer.write_ahead(iteration)
    assert [batch for _, batch, _ in topic.ends()] == [0, 1, 2, 3]


def test_a_batch_is_opened_before_its_prompts_and_closed_by_its_count() -> None:
    topic = Topic()
    topic.writer(max_staleness=0).write_ahead(0)
    (key, ids, samples_per_prompt, written_before) = topic.opened[0]
    assert (key, samples_per_prompt, written_before) == (BatchKey(PURPOSE_TRAIN, 0), 3, 0)
    first, second, end = topic.records
    assert [first.prompt.prompt_id, second.prompt.prompt_id] == ids
    assert (second.prompt.group, second.prompt.num_samples, second.attempt) == (1, 3, 2)
    assert second.prompt.sampling.temperature == SamplingSettings(temperature=0.7).temperature
    assert end.batch_end.num_groups == 2


def test_evaluation_is_one_greedy_answer_a_prompt() -> None:
    topic = Topic()
    writer = topic.writer()
    key = writer.open_evaluation(7, PROMPTS)
    assert topic.records == []
    writer.write(key)
    writer.write(key)
    assert key == BatchKey(PURPOSE_EVALUATION, 7)
    prompt = topic.records[4].prompt
    assert (prompt.sampling.temperature, prompt.sampling.max_tokens, prompt.num_samples) == (0.0, 9, 1)
    assert topic.ends() == [(PURPOSE_EVALUATION, 7, 5)]


def test_a_run_that_goes_on_from_a_batch_draws_the_same_prompts_for_it() -> None:
    topic, again = Topic(), Topic()
    writer = topic.writer(max_staleness=2)
    writer.write_ahead(0)
    cursor = writer.cursor_before(1)
    later = again.writer(max_staleness=0, first_batch=1)
    later._cursor = CursorState.from_json(cursor.to_json(), len(PROMPTS))
    later.write_ahead(1)
    assert again.opened[0][:2] == topic.opened[1][:2]
    # What was not drawn yet will be drawn from where the writer stands.
    assert writer.cursor_before(3) == writer._cursor


def test_a_batch_of_which_every_answer_was_there_is_not_asked_for_again() -> None:
    topic = Topic()
    writer = topic.writer(max_staleness=1, first_batch=2)
    writer.open_ahead(2)
    assert [key.batch for key, *_ in topic.opened] == [2, 3]
    topic.complete.add(BatchKey(PURPOSE_TRAIN, 2))
    writer.write_ahead(2)
    assert topic.ends() == [(PURPOSE_TRAIN, 3, 2)]


def test_the_end_of_the_run_is_a_record() -> None:
    topic = Topic()
    writer = topic.writer()
    writer.write_ahead(0)
    writer.end_run()
    writer.refill(BatchKey(PURPOSE_TRAIN, 0))
    assert topic.records[-1].WhichOneof("kind") == "run_end"


def test_a_refill_is_one_more_prompt_of_the_batch_closed_by_a_higher_count() -> None:
    topic = Topic()
    writer = topic.writer(max_staleness=0)
    writer.write_ahead(0)
    key = BatchKey(PURPOSE_TRAIN, 0)
    drawn = set(topic.opened[0][1])
    for number in range(3):
        writer.refill(key)
        # Expected before it is written.
        assert topic.extended[number][2] == len(topic.records) - 2
        prompt, end = topic.records[-2].prompt, topic.records[-1].batch_end
        assert (prompt.group, prompt.prompt_id, prompt.num_samples) == (2 + number, topic.extended[number][1], 3)
        assert (end.batch, end.num_groups) == (0, 3 + number)
    # All prompts that the batch does not have, each once.
    assert {prompt_id for _, prompt_id, _ in topic.extended} == {prompt.id for prompt in PROMPTS} - drawn


def test_refills_change_nothing_in_what_later_batches_hold() -> None:
    topic, refilled = Topic(), Topic()
    topic.writer().write_ahead(3)
    writer = refilled.writer()
    for iteration in range(4):
        writer.write_ahead(iteration)
        writer.refill(BatchKey(PURPOSE_TRAIN, iteration))
    assert [opened[:2] for opened in refilled.opened] == [opened[:2] for opened in topic.opened]


def test_an_attempt_that_takes_a_batch_up_again_refills_it_with_the_same_prompts() -> None:
    topic, again = Topic(), Topic()
    writer = topic.writer()
    writer.write_ahead(0)
    for _ in range(4):
        writer.refill(BatchKey(PURPOSE_TRAIN, 1))
    later = again.writer(first_batch=0)
    later.open_ahead(0)
    for _ in range(4):
        later.refill(BatchKey(PURPOSE_TRAIN, 1))
    assert [prompt_id for _, prompt_id, _ in again.extended] == [prompt_id for _, prompt_id, _ in topic.extended]
    # What was asked for before anything was written goes out with the rest.
    assert again.records == []
    later.write_ahead(0)
    assert again.ends() == [(PURPOSE_TRAIN, 0, 2), (PURPOSE_TRAIN, 1, 6)]


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_that_goes_on_draws_the_same_prompts_whatever_batches_have_shown(max_staleness: int) -> None:
    levels = np.array([0, 0, 0, 1, 1])
    rules = SelectionRules(
        delay=max_staleness + 1, easy_pass_rate=1.0, rest_iterations=3, level_accuracy=0.4, level_iterations=2
    )
    num_iterations = 9

    def rewards(key: BatchKey, ids: list[str]) -> list[list[float]]:
        return [[float((7 * key.batch + 5 * int(name[1])) % 4 > sample) for sample in range(3)] for name in ids]

    def train(first: int, cursor: dict[str, Any], shown: dict[str, Any]) -> tuple[dict[int, list[str]], list[Any]]:
        """What was drawn for each batch, and the states at the end of each iteration."""
        topic = Topic()
        selection = Selection(rules, SelectionState.from_json(shown), levels)
        writer = topic.writer(
            max_staleness=max_staleness, num_iterations=num_iterations, first_batch=first, selection=selection
        )
        writer._cursor = CursorState.from_json(cursor, len(PROMPTS))
        states = []
        for iteration in range(first, num_iterations):
            writer.write_ahead(iteration)
            key, ids, _, _ = topic.opened[iteration - first]
            writer.observe(key, rewards(key, ids))
            states.append((writer.cursor_before(iteration + 1).to_json(), writer.selection_state()))
        assert set(writer.figures()) == {"data/epoch", "data/level", "data/left_out"}
        return {key.batch: ids for key, ids, _, _ in topic.opened}, states

    drawn, states = train(0, CursorState(0, len(PROMPTS)).to_json(), {})
    assert states[-1][1]["rests"] and states[-1][1]["level_starts"]
    for iteration, (cursor, shown) in enumerate(states[:-1], start=1):
        again, _ = train(iteration, cursor, json.loads(json.dumps(shown)))
        assert again == {batch: ids for batch, ids in drawn.items() if batch >= iteration}
