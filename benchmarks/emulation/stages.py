"""The two stages of an iteration on any number of devices: how long each takes alone, and both as sync RL has them.
Pure: simulated, with answers as a run has them, dealt round-robin."""

from dataclasses import dataclass
from functools import cached_property

from benchmarks import paper_workload
from benchmarks.emulation.devices import NUM_DEVICES, best_split, scaled_s, streamed_end_s
from benchmarks.emulation.lengths import PaperLengths
from streamrl.planning.profile import InstanceProfile, TokenLatency
from streamrl.planning.simulated_instance import SimulatedInstance, SimulatedSequence

NUM_INSTANCES = 16
MAX_RUNNING = 64
LONGEST_ANSWER = 500
PROMPTS_PER_BATCH, SAMPLES_PER_PROMPT = 512, 2
"""The paper trains PPO on one answer to each of 1,024 prompts; two are the fewest that can be compared with each other.
A group can be trained when its last answer is there: with larger ones, sync RL has less to do meanwhile."""
BATCH_SIZE = PROMPTS_PER_BATCH * SAMPLES_PER_PROMPT
PROFILE_DEVICES = 16
"""What the paper's Fig 6 is taken to be measured with: one device an instance."""
PREPARE_SHARE = 0.25
"""Of training: 2 of 8 parts of a token's arithmetic are the forward pass of the reference, which can be done when the
answer comes; 6 those of the policy, forward and backward, when its group is there."""


@dataclass(frozen=True)
class LengthSet:
    """One of the paper's three."""

    name: str
    longest: int
    colocated_samples_per_s: float
    """The paper's, Fig 8, of a 7B model."""
    speed: float
    """Emulated seconds in a real one."""

    @property
    def tokens_each(self) -> float:
        """Tokens of the paper's that one of ours stands for."""
        return self.longest / LONGEST_ANSWER


LENGTH_SETS = (
    LengthSet("5K", 5_000, 12.93, 2.0),
    LengthSet("10K", 10_000, 8.0, 4.0),
    LengthSet("20K", 20_000, 4.79, 8.0),
)


@dataclass(frozen=True)
class Stages:
    """Of one set of lengths."""

    lengths: LengthSet

    def step_ms(self, devices: int) -> dict[int, float]:
        """Of an instance, when generation has so many devices: milliseconds by number of running sequences."""
        return {size: self._scaled(latency_ms, devices) for size, latency_ms in paper_workload.TOKEN_LATENCY_MS.items()}

    def prefill_token_ms(self, devices: int) -> float:
        """What a token takes that is computed again."""
        return 1000 * self._scaled(paper_workload.PREFILL_TOKEN_S, devices)

    def _scaled(self, seconds: float, devices: int) -> float:
        return scaled_s("generation", seconds * self.lengths.tokens_each, measured_on=PROFILE_DEVICES, devices=devices)

    def generation_s(self, devices: int) -> float:
        """A batch alone, from its first token to its last."""
        return scaled_s("generation", max(self._endings_s), measured_on=PROFILE_DEVICES, devices=devices)

    def training_s(self, devices: int) -> float:
        """A batch alone."""
        beside_s = self.generation_s(NUM_DEVICES)
        on_all_s = BATCH_SIZE / self.lengths.colocated_samples_per_s - beside_s
        return scaled_s("training", on_all_s, measured_on=NUM_DEVICES, devices=devices)

    def train_token_s(self, devices: int) -> float:
        """Of a token of an answer, on average over many batches."""
        return self.training_s(devices) / (BATCH_SIZE * self.mean_tokens)

    @property
    def mean_tokens(self) -> float:
        """Of an answer."""
        return LONGEST_ANSWER / paper_workload.LONGEST * paper_workload.MEAN_LENGTH

    def sync_s(self, generating: int, training: int) -> float:
        """An iteration in which training goes on as answers come."""
        scale = self.generation_s(generating) / max(self._endings_s)
        token_s = self.train_token_s(training)
        work = []
        for start in range(0, BATCH_SIZE, SAMPLES_PER_PROMPT):
            group = slice(start, start + SAMPLES_PER_PROMPT)
            ends, seconds = self._endings_s[group], [token_s * tokens for tokens in self._tokens[group]]
            work += [(scale * end_s, PREPARE_SHARE * takes_s) for end_s, takes_s in zip(ends, seconds, strict=True)]
            work.append((scale * max(ends), (1 - PREPARE_SHARE) * sum(seconds)))
        return streamed_end_s(work)

    def sync_split(self) -> tuple[int, int]:
        """The devices of both stages with which that is shortest."""
        return best_split(self.sync_s)

    @cached_property
    def _tokens(self) -> list[int]:
        replayed = PaperLengths(LONGEST_ANSWER)
        return [
            replayed.of([prompt], prompt * SAMPLES_PER_PROMPT + sample)
            for prompt in range(PROMPTS_PER_BATCH)
            for sample in range(SAMPLES_PER_PROMPT)
        ]

    @cached_property
    def _endings_s(self) -> list[float]:
        """Of each answer, on the devices of the profile."""
        latency = TokenLatency({size: ms / 1000 for size, ms in self.step_ms(PROFILE_DEVICES).items()})
        endings = [0.0] * BATCH_SIZE
        for number in range(NUM_INSTANCES):
            instance = SimulatedInstance(InstanceProfile(latency, MAX_RUNNING))
            for prompt in range(number, PROMPTS_PER_BATCH, NUM_INSTANCES):
                for index in range(prompt * SAMPLES_PER_PROMPT, (prompt + 1) * SAMPLES_PER_PROMPT):
                    instance.submit(SimulatedSequence(index, self._tokens[index], 0))
            for sequence, time_s in instance.advance(float("inf")):
                assert isinstance(sequence.key, int)
                endings[sequence.key] = time_s
        return endings
