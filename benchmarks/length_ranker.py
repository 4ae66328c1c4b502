"""The length ranker on new prompts: how many of the longest answers it finds, and how long it takes to learn and score.

Two sets of lengths. The laptop example's task: an answer to "to B from A" has B - A numbers and an end. And what
SmolLM2-135M-Instruct wrote, eight answers a prompt, to a mix of ten tasks of reasoning-gym: a real engine draws them
the first time (benchmarks/lengths/produce.py), their lengths are kept in benchmarks/data, prompts are made anew.
Each set is cut into folds; each fold is scored by a ranker that has learned from the others and none of it. Beside it
stand the rankings by prompt length and by what is usual for the task. On one thread; ten minutes with lengths at hand.
"""

import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import mean

import numpy as np

from benchmarks.lengths.kept import KeptLengths
from benchmarks.lengths.prompts import prompts, task_of
from benchmarks.result import Cell, Result
from scheduler_svc.ranker.examples import Example, seen_of
from scheduler_svc.recall import recall_of_longest
from streamrl.planning.forecast import LengthForecast

NUM_FOLDS = 4
PASSES = 20
SEED = 0
SHARES = {"longest_20": 0.20, "longest_10": 0.10, "longest_5": 0.05}
LAPTOP_MAX_TOKENS = 136
RECALL_GOALS = {"laptop": 0.95, "smollm2": 0.80}
TRAINING_LIMIT_S = 300.0
SCORING_GOAL_PER_S = 1000.0


@dataclass(frozen=True)
class Prompted:
    """A prompt and what came of it."""

    example: Example
    kind: str
    """Its task."""

    @property
    def length(self) -> float:
        """Mean over its answers."""
        return mean(self.example.lengths)


@dataclass
class Scores:
    """What rankings say of prompts, and how long that took."""

    forecasts: dict[int, float] = field(default_factory=dict)
    by_task: dict[int, float] = field(default_factory=dict)
    training_s: list[float] = field(default_factory=list)
    scoring_s: float = 0.0


def measure() -> Result:
    """Both sets, one after the other."""
    import torch

    torch.set_num_threads(1)
    # Goes on where it was interrupted; where all is there, it does nothing.
    subprocess.run([sys.executable, "-m", "benchmarks.lengths.produce"], stdout=sys.stderr, check=True)
    kept = KeptLengths.load(KeptLengths.FILE)
    result = Result(
        "length_ranker",
        {
            "folds": NUM_FOLDS,
            "passes": PASSES,
            "seed": SEED,
            "smollm2_prompts": len(kept.lengths),
            "smollm2_max_tokens": kept.max_tokens,
        },
    )
    result.cells += set_cells("laptop", laptop_prompts(), LAPTOP_MAX_TOKENS)
    result.cells.append(Cell.limited("smollm2/cut", kept.cut_share, "of the answers", limit=0.05))
    result.cells += set_cells("smollm2", smollm2_prompts(kept), kept.max_tokens)
    return result


def set_cells(name: str, prompted: Sequence[Prompted], max_tokens: int) -> list[Cell]:
    """Recall beside other rankings, and times.

    Args:
        max_tokens: answers are cut there, and so are forecasts, as the scheduler's.
    """
    scores = cross_validated(prompted, max_tokens)
    rankings: dict[str, Callable[[int], float]] = {
        "ranker": scores.forecasts.__getitem__,
        "by_task": scores.by_task.__getitem__,
        "by_prompt_length": lambda index: float(len(prompted[index].example.token_ids)),
    }
    cells = []
    for share_name, share in SHARES.items():
        found = {ranking: recall_over_folds(prompted, score, share) for ranking, score in rankings.items()}
        cells += [Cell(f"{name}/{share_name}/{ranking}", value, "recall") for ranking, value in found.items()]
        if share_name == "longest_20":
            goal = RECALL_GOALS[name]
            cells[-len(found)] = Cell.compared(
                f"{name}/{share_name}/ranker", found["ranker"], "recall", against="goal", peer=goal, goal=1.0
            )
            for other in ("by_task", "by_prompt_length"):
                better = found["ranker"] / max(found[other], 1e-9)
                cells.append(
                    Cell(f"{name}/{share_name}/over_{other}", better, "times", other, better, 1.0, better > 1.0)
                )
    if name == "smollm2":
        halves = recall_over_folds(prompted, lambda index: mean(prompted[index].example.lengths[::2]), 0.20, other_half)
        cells.append(Cell(f"{name}/longest_20/half_of_the_answers_by_the_other", halves, "recall"))
    scored_per_s = len(prompted) / scores.scoring_s
    return [
        *cells,
        Cell.limited(f"{name}/training", max(scores.training_s), "s of one core", limit=TRAINING_LIMIT_S),
        Cell.compared(
            f"{name}/scoring", scored_per_s, "prompts/s of one core", against="goal", peer=SCORING_GOAL_PER_S, goal=1.0
        ),
    ]


def cross_validated(prompted: Sequence[Prompted], max_tokens: int) -> Scores:
    """Scores of every prompt by a ranker that has not learned from its fold."""
    from scheduler_svc.ranker.learner import BATCH_PROMPTS, LengthLearner

    scores = Scores()
    for fold in range(NUM_FOLDS):
        held_out = fold_of(len(prompted), fold)
        learned = sorted(set(range(len(prompted))) - set(held_out))
        learner = LengthLearner("", SEED)
        started = time.process_time()
        learner.learn([prompted[index].example for index in learned], PASSES * len(learned) // BATCH_PROMPTS)
        scores.training_s.append(time.process_time() - started)
        started = time.process_time()
        lengths = learner.forecast([prompted[index].example.token_ids for index in held_out])
        forecasts = LengthForecast(np.minimum(lengths, max_tokens)).mean
        scores.scoring_s += time.process_time() - started
        scores.forecasts.update(zip(held_out, forecasts.tolist(), strict=True))
        of_task = defaultdict(list)
        for index in learned:
            of_task[prompted[index].kind].append(prompted[index].length)
        scores.by_task.update((index, mean(of_task[prompted[index].kind])) for index in held_out)
    return scores


def fold_of(num_prompts: int, fold: int) -> list[int]:
    """The indices that are held out: runs of ten, so that each fold has the same mix of tasks."""
    return [index for index in range(num_prompts) if index // 10 % NUM_FOLDS == fold]


def recall_over_folds(
    prompted: Sequence[Prompted],
    score: Callable[[int], float],
    share: float,
    length: Callable[[Prompted], float] = lambda one: one.length,
) -> float:
    """Mean over the folds."""
    folds = [fold_of(len(prompted), fold) for fold in range(NUM_FOLDS)]
    return mean(
        recall_of_longest([score(index) for index in fold], [length(prompted[index]) for index in fold], share)
        for fold in folds
    )


def other_half(one: Prompted) -> float:
    """Mean over every second answer, from the second on."""
    return mean(one.example.lengths[1::2])


def laptop_prompts(seed: int = SEED) -> list[Prompted]:
    """The training prompts of the laptop example, which are drawn by a run's seed, and its held-out ones, in one random
    order."""
    from trainer_svc.counting_task import held_out_prompts, train_prompts
    from trainer_svc.tiny_model import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    found = []
    for prompt in (*train_prompts(seed), *held_out_prompts()):
        token_ids = tuple(tokenizer.encode(prompt.text).ids)
        length = prompt.stop - prompt.start + 1
        found.append(Prompted(Example(prompt.id, 0, token_ids, (length,), (False,)), "counting"))
    return [found[index] for index in np.random.default_rng(SEED).permutation(len(found))]


def smollm2_prompts(kept: KeptLengths) -> list[Prompted]:
    """As many as there are lengths of."""
    from transformers import PreTrainedTokenizerFast

    from benchmarks.lengths.produce import MODEL
    from trainer_svc.model_cache import default_cache_folder
    from trainer_svc.packaged_model import packaged_model_folder

    tokenizer = PreTrainedTokenizerFast.from_pretrained(packaged_model_folder(MODEL, default_cache_folder()))
    found = []
    for index, (text, lengths) in enumerate(zip(islice(prompts(), len(kept.lengths)), kept.lengths, strict=True)):
        example = Example(
            f"smollm2-{index}",
            0,
            seen_of(tokenizer(text)["input_ids"]),
            tuple(length or kept.max_tokens for length in lengths),
            tuple(length == 0 for length in lengths),
        )
        found.append(Prompted(example, task_of(index)))
    return found
