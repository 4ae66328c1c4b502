"""What trainer_svc reads of the settings: its own sections, and rules that hold between sections.

Rules that need files or reward functions are in trainer_svc/preflight.py.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from streamrl.settings import NonNegativeInt, PositiveFloat, PositiveInt, Seconds, Section, ServiceSettings
from trainer_svc.algorithms import ALGORITHMS

_KL_ESTIMATORS = {"reward": "k1", "loss": "k3"}
"""By `trainer.kl`, where `kl_estimator` is left out."""
_KL_COEFFICIENT = 1e-3
_CRITIC_RATE_FACTOR = 10.0


class TrainerSection(Section):
    algorithm: str = "grpo"
    """How rewards become advantages and advantages a loss: `grpo`, `dr_grpo`, `dapo`, `rloo`, `reinforce_pp`, `gspo`,
    `cispo`, `ppo`. `reinforce_pp` and `ppo` normalise advantages over the batch: their gradients are computed when its
    last sample is there. `ppo` trains a critic beside the policy."""
    loss_aggregation: Literal["auto", "token_mean", "sequence_mean", "sequence_sum"] = "auto"
    """token_mean: every token of the batch weighs the same. sequence_mean: every answer does. sequence_sum: the mean
    over answers of the sum over their tokens, divided by `generator.max_tokens`. auto: dr_grpo: sequence_sum; rloo and
    gspo: sequence_mean; else token_mean (grpo is published with sequence_mean, where long wrong answers weigh less)."""
    num_iterations: PositiveInt = 30
    """Batches to train: one weight version each."""
    steps_per_batch: PositiveInt = 1
    """Optimizer steps of a batch, each on as many of its groups. With more than one, gradients are computed when its
    last sample is there."""
    learning_rate: PositiveFloat = 1e-6
    """Of AdamW, after the warm-up. Adapters (`lora_rank`) take about ten times that of all weights."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up. linear, cosine: it falls, to `final_learning_rate_share` at the
    end of `num_iterations`; a resumed run that is given more of them falls over those."""
    final_learning_rate_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """What linear and cosine fall to, as a share of `learning_rate`."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of AdamW, decoupled from the gradient. Norms, biases and embeddings do not decay."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients with a larger global norm are scaled down to it; 0: never."""
    clip_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """c of the clipped surrogate: probability ratios below 1 - c or above 1 + c add no gradient. Left out: what the
    algorithm is published with (0.2; gspo 0.0003; cispo 1, no lower bound)."""
    clip_ratio_high: PositiveFloat | None = None
    """The same for the upper bound alone. Left out: `clip_ratio`, or if that is left out too what the algorithm is
    published with (0.2; dapo 0.28; gspo 0.0004; cispo 4)."""
    off_policy: Literal["auto", "ratio", "truncated", "masked", "none"] = "auto"
    """What is done about tokens that an older version drew, or that the generator sees a little differently. ratio: the
    clipped ratio is to the generator's log-probs. truncated: it is to the policy at the batch's start (decoupled PPO),
    and a token weighs what that finds it likelier than the generator did, at most `importance_limit`. masked: the same,
    and a token whose weight is above `importance_limit` or below its inverse teaches nothing. none: tokens count as
    on-policy. auto: truncated in mode async, where versions differ, and with `rloo` and `gspo`, to whose ratios of
    whole answers what the generator sees differently adds up; else ratio."""
    importance_limit: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 2.0
    """Of the weights of `off_policy` truncated and masked."""
    kl: Literal["none", "reward", "loss"] = "none"
    """Keeps the policy near a frozen copy of the initial model, the reference. reward: `kl_coefficient` times the
    estimated KL divergence is taken off the reward, of each token with `reinforce_pp` and `ppo`, else of the whole
    answer before the answers of a prompt are compared (algorithms that divide by their deviation make an advantage of
    full size of the divergence alone where the rewards are equal: take loss there). loss: it is added to the loss of
    each token."""
    kl_coefficient: PositiveFloat = _KL_COEFFICIENT
    """What a nat of divergence weighs."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """k1: the log-ratio. k2: half its square. k3: r - 1 - ln r, never negative. Left out: k1 in the reward, k3 in the
    loss (where k1 pulls nowhere on average)."""
    max_refill_prompts: Annotated[int, Field(ge=0)] | None = None
    """Dynamic sampling: a prompt whose answers all have the same reward is dropped (dropped.filtered) and another asked
    for in its place, so often in a batch at most; those beyond are dropped alone. 0: such prompts stay in the batch.
    Left out: what the algorithm is published with (dapo: 3 x `data.prompts_per_batch`; else 0)."""
    overlong_buffer_tokens: Annotated[int, Field(ge=0)] | None = None
    """Soft overlong punishment: in the last so many tokens before `generator.max_tokens` an answer's reward falls
    linearly, by `overlong_penalty` at the end. Evaluations are not punished. 0: none. Left out: what the algorithm is
    published with (dapo: a fifth of `generator.max_tokens`; else 0)."""
    overlong_penalty: PositiveFloat = 1.0
    """What the longest answer loses."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """gamma, for `ppo` and `reinforce_pp`: what the reward of the next token is worth now."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """For `ppo`: 1 trusts the rewards that came, 0 the critic's value of the next token."""
    critic_learning_rate: PositiveFloat | None = None
    """Of the critic's AdamW. Left out: 10 times `learning_rate`."""
    critic_warmup_iterations: Annotated[int, Field(ge=0)] = 0
    """Iterations at the start in which the critic learns alone and the policy stays as it is."""
    value_clip: PositiveFloat | None = None
    """How far a value may move within a batch before its loss stops falling; matters with several `steps_per_batch`.
    Left out: any distance."""
    truncated: Literal["train", "mask"] = "train"
    """Answers that were cut at `generator.max_tokens`. train: like others, with the reward they got. mask: not in the
    loss, counted as dropped.truncated; where answers are compared with each other their reward still counts in their
    group's mean."""
    incomplete_groups: Literal["train", "drop"] = "train"
    """Groups of which a sample was given up or too stale. train: without it, while two samples are left (`reinforce_pp`
    and `ppo`: one). drop: the samples that came are counted as dropped.filtered."""
    lora_rank: NonNegativeInt = 0
    """LoRA: adapters of this rank learn beside the model's linear layers, whose own weights stay as they are; gradients
    and optimizer are those of the adapters alone, and `kl` needs no second model. The final model has the merged
    weights. 0: all weights learn."""
    lora_alpha: PositiveFloat | None = None
    """What an adapter adds is multiplied by `lora_alpha` / `lora_rank`. Left out: twice `lora_rank`."""
    lora_targets: tuple[str, ...] = ()
    """The layers that get adapters, by the last part of their names, such as "q_proj". Empty: every linear layer but
    the output layer."""
    lora_publish: Literal["merged", "adapters"] = "merged"
    """What travels of a version. merged: a whole model, the adapters added to its weights. adapters: they alone. The
    model that they are added to comes once, and each instance keeps it in host memory beside the weights that it
    generates with, and merges the two when it switches. Not with `weights.fabric`."""
    batch_deadline_s: Annotated[float, Field(ge=0, le=604_800)] = 0.0
    """So many seconds after the iteration before has ended, answers that have not come are dropped (dropped.deadline),
    and their groups are settled without them as `incomplete_groups` says. What is dropped are the longest answers, as
    with `data.extra_prompts`. 0: they are waited for."""
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
    """Most tokens of one forward and backward pass of a rank, padding included where there is any (`packing`)."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Whether the answers of a pass stand one behind the other instead of being padded to the longest; each sees its
    prompt and itself alone, and the gradients are the same. auto: on GPUs where PyTorch's variable-length flash
    attention can do it (`model.dtype` bfloat16, full attention in all layers). on: on CPUs too, with a call of
    attention for each answer; refused where it cannot be done."""
    share_prompts: bool = True
    """Answers to one prompt share a row, which computes it once, where that is cheaper. The gradients are the same."""
    gradient_checkpointing: bool = False
    """Computes activations again in the backward pass instead of keeping them: less memory, more time."""
    device_memory_gib: PositiveFloat | None = None
    """Memory of the device of each rank: settings that take about more are refused before anything starts. Left out:
    that of this machine's GPUs; without any, all that the run takes is compared with the machine's memory."""
    offload: tuple[Literal["optimizer", "reference"], ...] = ()
    """What lies in host memory while it is not needed, on GPUs. optimizer: moments and master weights, between steps.
    reference: its weights, brought in once for the samples that wait, not for each."""
    deterministic: bool = False
    """Orders micro-batches by identity and waits for a whole batch first: the same samples give the same bits."""
    checkpoint_every: NonNegativeInt = 10
    """Iterations between checkpoints; 0: only when the run ends or is stopped."""
    keep_checkpoints: PositiveInt = 2
    """How many of the newest checkpoints stay on disk."""

    @field_validator("algorithm")
    @classmethod
    def _known_algorithm(cls, value: str) -> str:
        if value not in ALGORITHMS:
            raise ValueError(f"unknown algorithm {value!r}; expected one of {', '.join(ALGORITHMS)}")
        return value

    @model_validator(mode="after")
    def _practice_fits(self) -> "TrainerSection":
        warmup = self.critic_warmup_iterations
        if warmup >= self.num_iterations:
            raise ValueError(
                f"trainer.critic_warmup_iterations is {warmup}: the policy would learn in none of the run's "
                f"{self.num_iterations} iterations (trainer.num_iterations): expected less"
            )
        num_steps = (self.num_iterations - warmup) * self.steps_per_batch
        if self.learning_rate_schedule != "constant" and self.warmup_steps >= num_steps:
            raise ValueError(
                f"trainer.warmup_steps is {self.warmup_steps}: of the policy's {num_steps} steps none is left over "
                f"which learning_rate_schedule {self.learning_rate_schedule} could fall"
            )
        if self.learning_rate_schedule == "constant" and self.final_learning_rate_share > 0:
            raise ValueError(
                f"trainer.final_learning_rate_share is {self.final_learning_rate_share}, and the learning rate stays "
                "constant: set trainer.learning_rate_schedule to linear or cosine, or leave the share out"
            )
        if self.lora_rank == 0 and (self.lora_alpha is not None or self.lora_targets):
            given = "lora_targets" if self.lora_alpha is None else "lora_alpha"
            raise ValueError(f"trainer.{given} is set, and trainer.lora_rank is 0: set the rank, such as 16, too")
        if self.lora_rank == 0 and self.lora_publish == "adapters":
            raise ValueError(
                "trainer.lora_publish is adapters, and trainer.lora_rank is 0, so that all weights learn and there are "
                "none: set the rank, such as 16, too, or leave trainer.lora_publish at merged"
            )
        if self.kl == "none" and (self.kl_coefficient != _KL_COEFFICIENT or self.kl_estimator is not None):
            given = "kl_coefficient" if self.kl_estimator is None else "kl_estimator"
            raise ValueError(f"trainer.{given} is set, and trainer.kl is none: set that to loss or reward, too")
        of_critic = {
            "critic_learning_rate": self.critic_learning_rate,
            "critic_warmup_iterations": warmup,
            "value_clip": self.value_clip,
        }
        without_critic = [name for name in of_critic if of_critic[name]]
        if without_critic and not ALGORITHMS[self.algorithm].has_critic:
            raise ValueError(
                f"trainer.{without_critic[0]} is set, and trainer.algorithm is {self.algorithm}, which has no critic: "
                "leave it out, or take ppo"
            )
        if "reference" in self.offload and (self.kl == "none" or self.lora_rank > 0):
            why = "trainer.kl is none" if self.kl == "none" else "with trainer.lora_rank it is the policy itself"
            raise ValueError(f"trainer.offload names the reference, and there is none to move: {why}. Leave it out")
        return self

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

    @property
    def waits_for_batches(self) -> bool:
        """Whether gradients are computed when a batch's last sample is there, rather than as its groups settle."""
        return not ALGORITHMS[self.algorithm].streams(self.steps_per_batch)

    @property
    def estimator(self) -> str:
        """Of the KL divergence, what was left out filled in; `kl` is not none."""
        return self.kl_estimator or _KL_ESTIMATORS[self.kl]

    @property
    def adapter_alpha(self) -> float:
        """LoRA's, what was left out filled in."""
        return self.lora_alpha or 2.0 * self.lora_rank

    @property
    def critic_rate(self) -> float:
        """The critic's learning rate, what was left out filled in."""
        return self.critic_learning_rate or _CRITIC_RATE_FACTOR * self.learning_rate


class DataSection(Section):
    train: str = "counting"
    """Training prompts: a JSONL or Parquet file, `reasoning_gym:TASK`, or `counting` (the task of the `tiny` model)."""
    eval: str = ""
    """Held-out prompts, in the same forms. Empty: those of the built-in task (`counting`, `reasoning_gym:TASK` with
    another seed); a file needs another file."""
    prompts_per_batch: Annotated[int, Field(gt=0, le=1_000_000)] = 32
    """Prompts of one iteration."""
    extra_prompts: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Over-generation: so many prompts more are asked for in each batch, and it is over when `prompts_per_batch` of
    them have all their answers; the others are dropped, with what is there of them (dropped.deadline and
    dropped.filtered). Generation ends without its longest answers, and the policy never learns from them: trained
    answers get shorter than those that it gives (docs/dispatching.md). 0: every answer is waited for."""
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
    right_reward: float = 1.0
    """An answer with at least this reward is right, for `easy_pass_rate`, `hard_pass_rate` and `curriculum`."""
    easy_pass_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    """A prompt is left out after a batch in which at least this share of its answers was right (1: all of them). Left
    out: no prompt is."""
    hard_pass_rate: Annotated[float, Field(ge=0, lt=1)] | None = None
    """A prompt is left out after a batch in which at most this share of its answers was right (0: none of them). Left
    out: no prompt is."""
    rest_iterations: NonNegativeInt = 0
    """For how many iterations `easy_pass_rate` and `hard_pass_rate` leave a prompt out; 0: for good. It begins
    `pipeline.max_staleness` + 1 iterations after the batch. While fewer prompts than a batch needs are left, all may be
    drawn."""
    curriculum: bool = False
    """Training prompts of `reasoning_gym:TASK` begin with the lowest level of the task's own curriculum, `size` prompts
    each, and get harder by and by. The options that a level sets go before those of `reasoning_gym`; held-out prompts
    are made with the latter alone."""
    curriculum_accuracy: Annotated[float, Field(gt=0, le=1)] = 0.8
    """The next level begins when this share of the answers of the last `curriculum_iterations` batches at a level was
    right."""
    curriculum_iterations: PositiveInt = 4
    """Batches that `curriculum_accuracy` is taken over."""

    @model_validator(mode="after")
    def _selection_fits(self) -> "DataSection":
        easy, hard = self.easy_pass_rate, self.hard_pass_rate
        if easy is not None and hard is not None and hard >= easy:
            raise ValueError(f"data.hard_pass_rate is {hard}, expected less than data.easy_pass_rate ({easy})")
        if self.curriculum and not self.train.startswith("reasoning_gym:"):
            raise ValueError(f"data.curriculum needs a task: data.train is {self.train}, expected reasoning_gym:TASK")
        return self


class RewardSection(Section):
    functions: dict[str, float] = Field(default_factory=lambda: {"exact_match": 1.0})
    """Reward functions and their weights: `exact_match`, `last_number`, `math_verify`, `reasoning_gym`, `graded`, your
    own as `module:function`, or the address of a reward model as `http://HOST:PORT/PATH`. A reward is the weighted sum.
    An answer of which a function gives no reward is not trained, and counted as dropped.infrastructure."""
    num_workers: Annotated[int, Field(gt=0, le=1024)] = 2
    """Processes in which `math_verify`, `reasoning_gym` and your own functions score answers, each one at a time. One
    that hangs or ends is replaced. They are started when there is work for them."""
    timeout_s: Seconds = 60.0
    """Seconds that a function in such a process may take for one answer, and a reward model for one request."""
    memory_gib: Annotated[float, Field(gt=0, le=2**20)] = 4.0
    """Memory that each such process may take for its data (RLIMIT_DATA, which counts what is reserved). One that wants
    more gets a MemoryError, and is replaced."""
    http_token_env: str = ""
    """Name of the environment variable that holds the bearer token for reward models. Empty: none is sent."""
    http_batch_size: PositiveInt = 16
    """Most answers in one request to a reward model. A request never waits to become full."""
    http_connections: Annotated[int, Field(gt=0, le=1024)] = 4
    """Requests to a reward model at once."""
    http_patience_s: Seconds = 300.0
    """A reward model that is away, overloaded (status 429) or broken (5xx) is asked again for so long; then its answers
    have no reward."""

    @field_validator("functions", mode="before")
    @classmethod
    def _names_alone(cls, value: Any) -> Any:
        """A name, or a list of names, stands for weight 1 each."""
        if isinstance(value, str):
            return {value: 1.0}
        if isinstance(value, list | tuple):
            doubled = sorted({str(name) for name in value if value.count(name) > 1})
            if doubled:
                raise ValueError(f"{', '.join(doubled)} stands there more than once: use a table with weights instead")
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
        if data.samples_per_prompt < ALGORITHMS[trainer.algorithm].min_samples_per_prompt:
            raise ValueError(
                f"data.samples_per_prompt is {data.samples_per_prompt}: {trainer.algorithm} compares the answers of a "
                "prompt with each other and needs 2 or more"
            )
        if data.samples_per_prompt < 2 and self.max_refill_prompts:
            raise ValueError(
                "trainer.max_refill_prompts is set, and data.samples_per_prompt is 1: one answer has nothing to differ "
                "from"
            )
        if data.extra_prompts and self.max_refill_prompts:
            raise ValueError(
                f"data.extra_prompts is {data.extra_prompts}, and up to {self.max_refill_prompts} prompts of a batch "
                "are replaced: which others are enough is not known before its end. Set trainer.max_refill_prompts "
                "to 0, or leave data.extra_prompts at 0"
            )
        if trainer.lora_publish == "adapters" and self.weights.fabric:
            raise ValueError(
                f"trainer.lora_publish is adapters, and weights.fabric is {self.weights.fabric!r}: its broadcasts are "
                "of whole versions. Leave weights.fabric empty, or trainer.lora_publish at merged"
            )
        if trainer.steps_per_batch > data.prompts_per_batch:
            raise ValueError(
                f"trainer.steps_per_batch is {trainer.steps_per_batch}: a batch has {data.prompts_per_batch} prompts "
                "(data.prompts_per_batch), and a step needs one"
            )
        if self.overlong_buffer_tokens > self.generator.max_tokens:
            raise ValueError(
                f"trainer.overlong_buffer_tokens is {trainer.overlong_buffer_tokens}, more than an answer can have "
                f"(generator.max_tokens, {self.generator.max_tokens})"
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
    def off_policy(self) -> str:
        """The correction, `auto` resolved."""
        if self.trainer.off_policy != "auto":
            return self.trainer.off_policy
        differs = self.pipeline.mode == "async" or ALGORITHMS[self.trainer.algorithm].has_answer_ratio
        return "truncated" if differs else "ratio"

    @property
    def max_refill_prompts(self) -> int:
        """Of a batch, what was left out filled in."""
        published = ALGORITHMS[self.trainer.algorithm].refills * self.data.prompts_per_batch
        return published if self.trainer.max_refill_prompts is None else self.trainer.max_refill_prompts

    @property
    def overlong_buffer_tokens(self) -> int:
        """What was left out filled in."""
        published = int(ALGORITHMS[self.trainer.algorithm].overlong_buffer_share * self.generator.max_tokens)
        given = self.trainer.overlong_buffer_tokens
        return published if given is None else given

    @property
    def mlflow_tracking_uri(self) -> str:
        """Where runs are logged, the default spelled out; empty: nowhere."""
        if self.mlflow.tracking_uri == "off":
            return ""
        return self.mlflow.tracking_uri or f"sqlite:///{(self.run.dir / 'mlflow.db').resolve()}"
