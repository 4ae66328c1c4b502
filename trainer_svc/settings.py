"""What trainer_svc reads of the settings: its own sections, and rules that hold between sections.

Rules that need files or reward functions are in trainer_svc/preflight.py.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from streamrl.settings import NonNegativeInt, PositiveFloat, PositiveInt, Section, ServiceSettings
from trainer_svc.algorithms import ALGORITHMS

_LATER_ALGORITHMS = ("dapo", "reinforce_pp", "ppo")


class TrainerSection(Section):
    algorithm: str = "grpo"
    """How rewards become advantages and advantages a loss: `grpo`, `dr_grpo`, `rloo`, `gspo`, `cispo`."""
    loss_aggregation: Literal["auto", "token_mean", "sequence_mean", "sequence_sum"] = "auto"
    """token_mean: every token of the batch weighs the same. sequence_mean: every answer does. sequence_sum: the mean
    over answers of the sum over their tokens, divided by `generator.max_tokens`. auto: what the algorithm is published
    with (dr_grpo: sequence_sum; rloo and gspo: sequence_mean; else token_mean)."""
    num_iterations: PositiveInt = 30
    """Batches to train: one optimizer step and one weight version each."""
    learning_rate: PositiveFloat = 1e-6
    """Of AdamW, constant after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of AdamW, decoupled from the gradient."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients with a larger global norm are scaled down to it; 0: never."""
    clip_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """c of the clipped surrogate: probability ratios below 1 - c or above 1 + c add no gradient. Left out: what the
    algorithm is published with (0.2; gspo 0.0003; cispo 1, no lower bound)."""
    clip_ratio_high: PositiveFloat | None = None
    """The same for the upper bound alone. Left out: `clip_ratio`, or if that is left out too what the algorithm is
    published with (0.2; gspo 0.0004; cispo 4)."""
    off_policy: Literal["ratio", "truncated", "masked", "none"] = "ratio"
    """What is done about tokens that an older version drew, or that the generator sees a little differently. ratio: the
    clipped ratio is to the generator's log-probs. truncated: it is to the policy at the batch's start, and a token
    weighs what that finds it likelier than the generator did, at most `importance_limit`. masked: the same, and a token
    whose weight is above `importance_limit` or below its inverse teaches nothing. none: tokens count as on-policy."""
    importance_limit: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 2.0
    """Of the weights of `off_policy` truncated and masked."""
    truncated: Literal["train", "mask"] = "train"
    """Answers that were cut at `generator.max_tokens`. train: like others, with the reward they got. mask: not in the
    loss, counted as dropped.truncated; their reward still counts in their group's mean."""
    incomplete_groups: Literal["train", "drop"] = "train"
    """Groups of which a sample was given up or too stale. train: without it, while two samples are left. drop: the
    samples that came are counted as dropped.filtered."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    """DeepSpeed ZeRO: 0 nothing is sharded, 1 optimizer states, 2 gradients too, 3 weights too."""
    num_ranks: PositiveInt = 1
    """Processes that train together, one a GPU. They are started on this machine, unless a launcher such as torchrun
    started this process as one of them."""
    num_nodes: PositiveInt = 1
    """Machines that the ranks are spread over, as many on each. With several, start `streamrl serve trainer` on every
    one, with NODE_RANK (0 where rank 0 is, which speaks for all), MASTER_ADDR and MASTER_PORT (where rank 0 is met) in
    its environment, and with one `run.dir` that all of them see."""
    num_threads: PositiveInt = 1
    """CPU threads of each rank."""
    saturation_tokens: PositiveInt = 16384
    """Training begins as soon as samples of this many tokens (prompts included) wait, or the batch is complete."""
    micro_batch_tokens: PositiveInt = 8192
    """Most tokens of one forward and backward pass of a rank, padding included."""
    share_prompts: bool = True
    """Answers to one prompt share a row, which computes it once, where that is cheaper. The gradients are the same."""
    gradient_checkpointing: bool = False
    """Computes activations again in the backward pass instead of keeping them: less memory, more time."""
    deterministic: bool = False
    """Orders micro-batches by identity and waits for a whole batch first: the same samples give the same bits."""
    checkpoint_every: NonNegativeInt = 10
    """Iterations between checkpoints; 0: only when the run ends or is stopped."""
    keep_checkpoints: PositiveInt = 2
    """How many of the newest checkpoints stay on disk."""

    @field_validator("algorithm")
    @classmethod
    def _known_algorithm(cls, value: str) -> str:
        if value in _LATER_ALGORITHMS:
            raise ValueError(f"{value} is not available in this version; use one of {', '.join(ALGORITHMS)}")
        if value not in ALGORITHMS:
            raise ValueError(f"unknown algorithm {value!r}; expected one of {', '.join(ALGORITHMS)}")
        return value

    @property
    def aggregation(self) -> str:
        """The loss aggregation, `auto` resolved."""
        return ALGORITHMS[self.algorithm].loss_aggregation if self.loss_aggregation == "auto" else self.loss_aggregation

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far below and above 1 a ratio may be, what was left out filled in."""
        published = ALGORITHMS[self.algorithm]
        low = self.clip_ratio or published.clip_ratio
        return low, self.clip_ratio_high or self.clip_ratio or published.clip_ratio_high


class DataSection(Section):
    train: str = "counting"
    """Training prompts: a JSONL or Parquet file, `reasoning_gym:TASK`, or `counting` (the task of the `tiny` model)."""
    eval: str = ""
    """Held-out prompts, in the same forms. Empty: those of the built-in task (`counting`, `reasoning_gym:TASK` with
    another seed); a file needs another file."""
    prompts_per_batch: Annotated[int, Field(gt=0, le=1_000_000)] = 32
    """Prompts of one iteration."""
    samples_per_prompt: Annotated[int, Field(gt=0, le=1_000_000)] = 8
    """Answers drawn for each training prompt."""
    prompt_field: str = "prompt"
    """Field of a file's rows that holds the prompt: a text, or a list of chat messages."""
    answer_field: str = "answer"
    """Field that holds the answer key; it is only given to reward functions."""
    id_field: str = ""
    """Field that holds a stable id of the prompt. Empty: made from the prompt's tokens."""
    template: str = ""
    """Put around each prompt that is text, in place of {prompt}: "Question: {prompt}\\nAnswer:". Empty: nothing is."""
    chat_template: Literal["auto", "never"] = "auto"
    """auto: prompts go through the tokenizer's chat template when it has one. never: as plain text."""
    system_prompt: str = ""
    """Put before each prompt as a system message; only with a chat template."""
    max_prompt_tokens: PositiveInt = 1024
    """Longer prompts are left out, with one warning."""
    stop: tuple[str, ...] = ()
    """Texts of exactly one token each that end an answer, beside the model's own end tokens."""
    reasoning_gym: dict[str, Any] = Field(default_factory=dict)
    """Options of the reasoning-gym task, such as `min_terms`; `size` is the number of its training prompts."""


class RewardSection(Section):
    functions: dict[str, float] = Field(default_factory=lambda: {"exact_match": 1.0})
    """Reward functions and their weights: `exact_match`, `last_number`, `math_verify`, `reasoning_gym`, `graded`, or
    `module:function`. A reward is the weighted sum."""

    @field_validator("functions", mode="before")
    @classmethod
    def _names_alone(cls, value: Any) -> Any:
        """A name, or a list of names, stands for weight 1 each."""
        if isinstance(value, str):
            return {value: 1.0}
        if isinstance(value, list | tuple):
            return dict.fromkeys(value, 1.0)
        return value

    @field_validator("functions")
    @classmethod
    def _some_function(cls, value: dict[str, float]) -> dict[str, float]:
        if not value:
            raise ValueError("expected at least one reward function, such as exact_match")
        return value


class EvalSection(Section):
    num_prompts: PositiveInt = 512
    """The first so many held-out prompts (fewer when there are fewer) are answered greedily."""
    every: NonNegativeInt = 10
    """Iterations between evaluations; 0: only before the first and after the last."""


class MlflowSection(Section):
    tracking_uri: str = ""
    """Where runs are logged. Empty: a SQLite file in `run.dir`. `off`: nowhere."""
    experiment: Annotated[str, Field(min_length=1)] = "streamrl"
    """Name of the experiment."""
    sample_answers: NonNegativeInt = 4
    """Answers that are written into a table after each iteration."""


class TrainerSettings(ServiceSettings):
    """Settings of trainer_svc."""

    trainer: TrainerSection = TrainerSection()
    data: DataSection = DataSection()
    reward: RewardSection = RewardSection()
    eval: EvalSection = EvalSection()
    mlflow: MlflowSection = MlflowSection()

    @model_validator(mode="after")
    def _sections_fit(self) -> "TrainerSettings":
        trainer, data = self.trainer, self.data
        if data.samples_per_prompt < 2:
            raise ValueError(
                f"data.samples_per_prompt is {data.samples_per_prompt}: {trainer.algorithm} compares the answers of a "
                "prompt with each other and needs 2 or more"
            )
        longest = data.max_prompt_tokens + self.generator.max_tokens
        record_bytes = longest * 9 + 4096
        if record_bytes > self.kafka.max_message_bytes:
            raise ValueError(
                f"a record of the longest prompt and answer ({longest} tokens) takes {record_bytes} bytes, more than "
                f"kafka.max_message_bytes ({self.kafka.max_message_bytes}): raise that, or lower generator.max_tokens"
            )
        if 0 < self.generator.max_model_len <= self.generator.max_tokens:
            raise ValueError(
                f"generator.max_tokens is {self.generator.max_tokens} and leaves no room for a prompt within "
                f"generator.max_model_len ({self.generator.max_model_len}): raise that, or lower generator.max_tokens"
            )
        if trainer.num_ranks % trainer.num_nodes:
            raise ValueError(
                f"trainer.num_ranks ({trainer.num_ranks}) cannot be spread evenly over trainer.num_nodes "
                f"({trainer.num_nodes}): set it to a multiple"
            )
        batch_samples = data.prompts_per_batch * data.samples_per_prompt
        if batch_samples < trainer.num_ranks:
            raise ValueError(
                f"a batch of {data.prompts_per_batch} x {data.samples_per_prompt} samples is fewer than "
                f"trainer.num_ranks ({trainer.num_ranks}): some ranks would never have work"
            )
        return self

    @property
    def mlflow_tracking_uri(self) -> str:
        """Where runs are logged, the default spelled out; empty: nowhere."""
        if self.mlflow.tracking_uri == "off":
            return ""
        return self.mlflow.tracking_uri or f"sqlite:///{(self.run.dir / 'mlflow.db').resolve()}"
