"""Settings of scheduler_svc."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from streamrl.planning.dispatch import named_policy
from streamrl.settings import FleetView, PositiveInt, Seconds, ServiceSettings

_HEARTBEATS_PER_LEASE = 5


class SchedulerSection(FleetView):
    model_config = ConfigDict(extra="forbid")

    dispatch: Annotated[str, Field(validate_default=True)] = "makespan"
    """How a batch is divided among the instances. makespan: so that the batch is expected to be over earliest, given
    how uncertain lengths are and how fast each instance is; the longest answers may get instances of their own. Where
    the next batch waits for the trainer (mode sync), over means that the trainer is done with it, too.
    longest_first: the longest expected answers first, each to the instance that would be done with it earliest.
    round_robin: the longest first, dealt in turn. paper, paper_max: Algorithm 2 of the StreamRL paper, with the sum or
    the maximum of its two latencies. random: any instance, in the order of the batch."""
    length_model: Literal["ranker", "history", "oracle"] = "ranker"
    """What foretells how long answers will be. ranker: a small model that learns it from this run's own answers, beside
    the scheduler at the lowest priority, and what earlier answers to the same prompt were; it needs PyTorch. history:
    earlier answers alone. oracle: `length_file` knows it."""
    ranker_base_model: str = ""
    """Folder or hub name of a causal language model that the ranker stands on; it must have the policy's tokens, and
    should be small. Empty: a network of two narrow layers, made from scratch, which a processor core trains."""
    length_file: Path | None = None
    """For length_model = "oracle": a JSON object, prompt ids to the length of an answer in tokens, or a list of such.
    For replays, and to see what perfect forecasts bring. Prompts that it lacks are foretold from their history."""
    moves: Literal["running", "waiting", "none"] = "running"
    """What may go from one instance to another after it was dispatched, when the batch is expected to be over earlier
    so. running: answers that have begun too: they go on elsewhere with the tokens that they have, which the other
    instance computes again, as a prompt. waiting: only those that have not begun. none: nothing."""
    max_dispatches: PositiveInt = 3
    """How often a sample is given to an instance before it is given up. Times when it was given back in order do not
    count."""
    fleet_wait_s: Seconds = 60.0
    """How long after the first instance has registered the scheduler waits for the others (`generator.num_instances`)
    before it dispatches to those that are there."""

    @field_validator("dispatch")
    @classmethod
    def _known_policy(cls, value: str) -> str:
        named_policy(value)
        return value

    @model_validator(mode="after")
    def _length_model_has_what_it_needs(self) -> "SchedulerSection":
        if (self.length_model == "oracle") != (self.length_file is not None):
            raise ValueError(
                f"scheduler.length_file is {self.length_file} with scheduler.length_model {self.length_model!r}: "
                'expected a file with "oracle", and none else'
            )
        if self.ranker_base_model and self.length_model != "ranker":
            raise ValueError(
                f"scheduler.ranker_base_model is set with scheduler.length_model {self.length_model!r}: expected "
                '"ranker"'
            )
        return self

    @property
    def heartbeat_interval_s(self) -> float:
        """Several heartbeats may be late or lost before a lease is."""
        return self.lease_s / _HEARTBEATS_PER_LEASE


class SchedulerSettings(ServiceSettings):
    """What scheduler_svc reads of the resolved settings file."""

    scheduler: SchedulerSection = SchedulerSection()
