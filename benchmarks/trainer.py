"""Our training step against a plain PyTorch loop on the same tokens, and whether its memory grows.

Ours is what trainer_svc does with a batch: the learner on DeepSpeed, rows that share a prompt, micro-batches, global
division, statistics. The plain loop is benchmarks/peers/plain_loop.py. Both hold the same model in the same process on
the same threads, and take turns on the same samples: a ratio is the median over turns, so that a busy machine slows
both. Answers have the paper's lengths, scaled. First the norms of both first gradients are compared: both do the same
work. Six minutes.
"""

import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import torch

from benchmarks import paper_workload
from benchmarks.peers.plain_loop import PlainLoop
from benchmarks.result import Cell, Result
from streamrl.command.resolve import resolve
from trainer_svc.assembly import networks_of
from trainer_svc.learner import Learner
from trainer_svc.losses import aggregation_of
from trainer_svc.microbatches import TrainSample, collate, cut, loss_count, places
from trainer_svc.model_cache import default_cache_folder
from trainer_svc.models import ModelFiles, resolve_model
from trainer_svc.policy import Policy
from trainer_svc.ranks import Ranks, join_ranks
from trainer_svc.settings import TrainerSettings
from trainer_svc.task import load_task

NUM_THREADS = 2
DISTINCT_GOAL = 0.8
SHARED_GOAL = 2.5
NUM_ITERATIONS = 200
GROWTH_LIMIT_MIB = 16.0
WITHOUT_EXAMPLES = 'data.template="Question: {prompt}\\nAnswer:"'


@dataclass(frozen=True)
class Workload:
    """A batch to train on, again and again."""

    name: str
    config: str
    num_prompts: int
    samples_per_prompt: int
    longest_answer: int
    num_turns: int
    goal: float
    assignments: tuple[str, ...] = ()
    """Of settings, over the file's."""


WORKLOADS = (
    Workload("laptop/distinct", "examples/laptop.toml", 256, 1, 136, 20, DISTINCT_GOAL),
    Workload("smollm2/distinct", "examples/smollm2.toml", 16, 1, 256, 5, DISTINCT_GOAL, (WITHOUT_EXAMPLES,)),
    Workload("smollm2/groups_of_8", "examples/smollm2.toml", 16, 8, 10, 4, SHARED_GOAL, (WITHOUT_EXAMPLES,)),
    Workload("smollm2/groups_of_8_two_shot", "examples/smollm2.toml", 16, 8, 10, 3, SHARED_GOAL),
)
_AGGREGATION = aggregation_of("token_mean", 1)
_SCORED_TOKENS = 4096
MEMORY_WORKLOAD = Workload("laptop/memory", "examples/laptop.toml", 32, 8, 136, 0, 0.0)


def measure() -> Result:
    """All workloads, then 200 iterations."""
    torch.set_num_threads(NUM_THREADS)
    result = Result(
        "trainer",
        {
            "num_threads": NUM_THREADS,
            "num_iterations": NUM_ITERATIONS,
            "workloads": {
                workload.name: {
                    "config": workload.config,
                    "num_prompts": workload.num_prompts,
                    "samples_per_prompt": workload.samples_per_prompt,
                    "longest_answer": workload.longest_answer,
                    "turns": workload.num_turns,
                }
                for workload in WORKLOADS
            },
        },
    )
    with join_ranks(1, [], os.environ) as ranks:
        for workload in WORKLOADS:
            result.cells += compared_cells(workload, ranks)
            gc.collect()
        result.cells += memory_cells(MEMORY_WORKLOAD, ranks)
    return result


def compared_cells(workload: Workload, ranks: Ranks) -> list[Cell]:
    """Both on one workload, in turns."""
    settings, model = _load(workload)
    with _learner(settings, model, ranks) as (learner, policy):
        samples = _samples(workload, _prompts(workload, settings, model), model, policy, seed=0)
        rules = settings.trainer
        plain = PlainLoop(
            model.load_model(),
            learning_rate=rules.learning_rate,
            betas=rules.betas,
            max_grad_norm=rules.max_grad_norm,
            tokens=rules.micro_batch_tokens,
        )
        sides: Mapping[str, Callable[[], float]] = {
            "ours": lambda: _step(learner, samples),
            "plain_loop": lambda: plain.step(samples),
        }
        norms = {side: step() for side, step in sides.items()}
        times = paired_times(sides, workload.num_turns)
    num_tokens = sum(sample.num_tokens for sample in samples)
    ratio = median(theirs / ours for ours, theirs in zip(times["ours"], times["plain_loop"], strict=True))
    rate = num_tokens / median(times["ours"])
    return [
        Cell.compared(
            f"{workload.name}/tokens_per_s",
            rate,
            "tokens/s",
            against="plain_loop, paired",
            peer=rate / ratio,
            goal=workload.goal,
        ),
        Cell(f"{workload.name}/plain_loop/tokens_per_s", num_tokens / median(times["plain_loop"]), "tokens/s"),
        Cell(
            f"{workload.name}/first_gradient_norm",
            norms["ours"],
            "before clipping",
            "plain_loop",
            norms["ours"] / norms["plain_loop"],
        ),
    ]


def paired_times(sides: Mapping[str, Callable[[], object]], num_turns: int) -> dict[str, list[float]]:
    """Seconds of each turn; who begins changes from turn to turn."""
    times: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(num_turns):
        for side in sorted(sides, reverse=turn % 2 == 1):
            started = time.perf_counter()
            sides[side]()
            times[side].append(time.perf_counter() - started)
    return times


def memory_cells(workload: Workload, ranks: Ranks) -> list[Cell]:
    """What the process holds over the iterations of a run: steps, and the snapshot that each version is made of."""
    settings, model = _load(workload)
    process, held, prompts = psutil.Process(), [], _prompts(workload, settings, model)
    with _learner(settings, model, ranks) as (learner, policy):
        for iteration in range(NUM_ITERATIONS):
            # Other lengths each time: what a pass needs must not depend on what came before.
            _step(learner, _samples(workload, prompts, model, policy, seed=iteration))
            learner.weights()
            held.append(process.memory_info().rss / 2**20)
    return [
        Cell("memory/after_20_iterations", held[19], "MiB"),
        Cell.limited("memory/growth", growth(held), f"MiB, of {held[-1]:.0f}", limit=GROWTH_LIMIT_MIB),
    ]


def growth(held: Sequence[float]) -> float:
    """From the third quarter to the last, by medians, which a single large batch does not move."""
    quarter = len(held) // 4
    return max(0.0, median(held[-quarter:]) - median(held[-2 * quarter : -quarter]))


def _load(workload: Workload) -> tuple[TrainerSettings, ModelFiles]:
    resolved = resolve(Path(workload.config), workload.assignments)
    settings = TrainerSettings.model_validate(resolved.model_dump())
    model = resolve_model(
        settings.model.path, dtype=settings.model.dtype, seed=settings.run.seed, cache_folder=default_cache_folder()
    )
    return settings, model


@contextmanager
def _learner(settings: TrainerSettings, model: ModelFiles, ranks: Ranks) -> Iterator[tuple[Learner, Policy]]:
    """As trainer_svc makes it."""
    networks = networks_of(settings, model)
    try:
        yield (
            Learner(
                networks,
                ranks,
                aggregation=_AGGREGATION,
                micro_batch_tokens=settings.trainer.micro_batch_tokens,
                row_cost=networks.policy.row_cost if settings.trainer.share_prompts else None,
            ),
            networks.policy,
        )
    finally:
        networks.close()


def _prompts(workload: Workload, settings: TrainerSettings, model: ModelFiles) -> list[list[int]]:
    task = load_task(settings, model)
    task.rewards.close()
    return [prompt.token_ids for prompt in task.prompts.train[: workload.num_prompts]]


def _samples(
    workload: Workload, prompts: Sequence[Sequence[int]], model: ModelFiles, policy: Policy, seed: int
) -> list[TrainSample]:
    """Random answers with the policy's own log-probs. Every one has an advantage, so that every one needs a pass."""
    generator = np.random.default_rng(seed)
    vocabulary_size = json.loads(model.files["config.json"])["vocab_size"]
    num_samples = workload.num_prompts * workload.samples_per_prompt
    lengths = paper_workload.scaled_lengths(num_samples, workload.longest_answer, generator).tolist()
    samples = [
        TrainSample(
            identity=(0, *divmod(number, workload.samples_per_prompt)),
            prompt_token_ids=prompts[number // workload.samples_per_prompt],
            answer_token_ids=generator.integers(vocabulary_size, size=length).tolist(),
            behaviour_logprobs=[0.0] * length,
            advantage=float(generator.normal()),
            own_version=[True] * length,
        )
        for number, length in enumerate(lengths)
    ]
    return [told for chunk in cut(samples, _SCORED_TOKENS) for told in _with_own_logprobs(chunk, policy)]


def _with_own_logprobs(samples: Sequence[TrainSample], policy: Policy) -> list[TrainSample]:
    rows = [[sample] for sample in samples]
    logprobs = policy.answer_logprobs(collate(rows, _AGGREGATION))
    return [
        replace(sample, behaviour_logprobs=logprobs[place.row, place.answer].tolist())
        for sample, place in zip(samples, places(rows, packed=False), strict=True)
    ]


def _step(learner: Learner, samples: Sequence[TrainSample]) -> float:
    """What trainer_svc does when a batch is complete; returns the gradient's norm before clipping."""
    learner.accumulate(samples)
    return learner.step(loss_count(samples, _AGGREGATION)).grad_norm
