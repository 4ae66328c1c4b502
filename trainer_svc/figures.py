"""Every figure that a run logs: its name, unit and meaning, and how an iteration's are computed. Pure.

The same names stand in MLflow, in the trainer's status and in docs/metrics.md, which is made from the table here. The
step of a figure is the weight version that the iteration made (iteration i makes version i + 1), or that was evaluated.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_svc.batch_intake import BatchIntake
    from trainer_svc.critic import CriticStats
    from trainer_svc.groups import Answer
    from trainer_svc.policy import StepStats


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure."""

    name: str
    unit: str
    meaning: str


FIGURES: tuple[Figure, ...] = (
    Figure("reward/mean", "reward", "mean reward of the batch's answers"),
    Figure("reward/std", "reward", "standard deviation of the rewards over the batch"),
    Figure("reward/equal_groups_share", "share", "groups whose rewards are all equal: they have no gradient"),
    Figure("reward/overlong_penalty_mean", "reward", "what the answers of compared groups lose for their length, mean"),
    Figure("eval/accuracy", "reward", "mean reward of greedy answers to held-out prompts, of exactly one version"),
    Figure("eval/answers", "answers", "how many that is the mean of: a prompt that got no answer is left out"),
    Figure("eval/length_mean", "tokens", "mean length of those answers"),
    Figure("eval/truncated_share", "share", "those answers that were cut at generator.max_tokens"),
    Figure("length/mean", "tokens", "mean length of the batch's answers, ending token included"),
    Figure("length/p50", "tokens", "median length"),
    Figure("length/p95", "tokens", "95th percentile of the lengths"),
    Figure("length/max", "tokens", "longest answer"),
    Figure("length/truncated_share", "share", "answers that were cut at generator.max_tokens"),
    Figure("length/dropped_mean", "tokens", "mean length of the rollouts that were dropped; only when there are any"),
    Figure(
        "length/cut_mean", "tokens", "mean length, by heartbeats, of answers that ran when dropped since the last step"
    ),
    Figure("staleness/mean", "versions", "batch index minus the oldest version among an answer's tokens, mean"),
    Figure("staleness/max", "versions", "the largest staleness in the batch"),
    Figure("loss/policy", "nats", "the loss of the step, divided by its samples' count; mean over steps, as the next"),
    Figure("policy/entropy", "nats", "mean entropy of the next-token distribution over trained tokens"),
    Figure("policy/clip_fraction", "share", "trained tokens whose probability ratio was outside the clip range"),
    Figure("kl/behaviour_k3", "nats", "k3 estimate of KL(generator's policy || trained policy), a token"),
    Figure("kl/reference_k3", "nats", "k3 estimate of KL(trained policy || reference), a token; with `trainer.kl`"),
    Figure(
        "policy/effective_sample_share",
        "share",
        "effective sample size of the tokens' importance weights, over their number: 1 when nothing is off-policy",
    ),
    Figure(
        "policy/importance_limited_share",
        "share",
        "tokens whose importance weight is above `trainer.importance_limit` or below its inverse",
    ),
    Figure("critic/loss", "reward^2", "half the squared error of the critic's values; with `ppo` only, as the next"),
    Figure("critic/explained_variance", "share", "of the returns, by the values: 1 all, 0 no more than by their mean"),
    Figure("critic/value_mean", "reward", "mean value over trained tokens"),
    Figure("critic/return_mean", "reward", "mean return over trained tokens"),
    Figure("critic/clip_fraction", "share", "tokens whose value moved further than `trainer.value_clip` in the batch"),
    Figure("critic/grad_norm", "norm", "the critic's global gradient norm before clipping"),
    Figure("critic/learning_rate", "rate", "learning rate of the critic's step"),
    Figure("critic/skipped_steps", "steps", "steps of the critic so far whose gradient was not finite"),
    Figure("grad/norm", "norm", "global gradient norm before clipping"),
    Figure("train/learning_rate", "rate", "learning rate of the step"),
    Figure("train/tokens", "tokens", "answer tokens that went through a pass; those of equal-reward groups do not"),
    Figure("train/applied", "0 or 1", "0: the gradient was not finite and the step changed nothing"),
    Figure("train/skipped_steps", "steps", "steps of the run so far whose gradient was not finite"),
    Figure(
        "mismatch/logprob_abs_diff_mean",
        "nats",
        "|log-prob difference| to the generator on tokens of the same version",
    ),
    Figure("mismatch/logprob_abs_diff_max", "nats", "the largest such difference in the batch"),
    Figure("mismatch/kl_k3", "nats", "k3 estimate of KL(generator's policy || trained policy) on those tokens"),
    Figure("mismatch/own_tokens", "tokens", "tokens that those three are over; 0: nothing in the batch is that new"),
    Figure("mismatch/behaviour_abs_diff_mean", "nats", "the same mean over all trained tokens, staleness included"),
    Figure("mismatch/canary_abs_diff_mean", "nats", "|log-prob difference| on the canaries, mean over instances"),
    Figure("mismatch/canary_abs_diff_max", "nats", "the largest such difference of any instance"),
    Figure("data/epoch", "epochs", "how often the training prompts have been walked through"),
    Figure("data/left_out", "prompts", "training prompts that are left out for their pass rates"),
    Figure("data/level", "level", "of the curriculum that prompts are drawn from, from 0 on"),
    Figure("throughput/samples_per_s", "1/s", "samples trained in the iteration, over its time"),
    Figure("throughput/tokens_per_s", "1/s", "answer tokens received for the batch, over the iteration's time"),
    Figure("idle/trainer", "share", "of the time so far (blocking evaluations apart) in which the trainer waited"),
    Figure("idle/generator", "share", "of that time in which an instance ran no sequence, mean over instances"),
    Figure("time/iteration_s", "s", "from the end of the iteration before to the end of this, evaluations apart"),
    Figure("time/wait_s", "s", "of it, waiting for rollouts or for the publisher"),
    Figure("time/train_s", "s", "of it, forward and backward passes and the step"),
    Figure("time/snapshot_s", "s", "of it, copying the weights out"),
    Figure("time/generation_mean_s", "s", "mean time from an answer's first step to its last"),
    Figure("time/generation_s", "s", "from the first step of the batch's first answer to the last step of its last"),
    Figure("weights/publish_s", "s", "from the snapshot to the announcement, in the background"),
    Figure("weights/fetch_s", "s", "mean over instances of their last fetch of a version"),
    Figure("weights/switch_s", "s", "mean over instances of their last switch, from pause to resume"),
    Figure("weights/bytes_full", "bytes", "what all fetches so far would have been if each were full"),
    Figure("weights/bytes_sent", "bytes", "what they were"),
    Figure("rollouts/trained", "samples", "samples of the batch that took part in the step"),
    Figure("rollouts/refills", "prompts", "asked for in the batch in place of prompts without spread"),
    Figure("rollouts/cut", "samples", "samples of the batch that were not waited for (dropped.deadline)"),
    Figure("rollouts/rejected", "samples", "rollouts of the batch that had failed and were to come again"),
    Figure("rollouts/duplicate", "samples", "second and later copies so far"),
    Figure("rollouts/dropped", "samples", "samples so far that were not trained, whatever the reason"),
    Figure("rollouts/redispatched", "samples", "samples so far that were given to an instance once more"),
    Figure("rollouts/dead_letters", "records", "records so far that a service could not handle"),
    Figure("rollouts/refused_attempts", "records", "rollouts so far that processes of earlier attempts sent too late"),
    Figure("rollouts/reused", "samples", "rollouts of earlier attempts that this attempt took from the topic"),
    Figure("rollouts/forgotten", "records", "those that it passed over, for a version that the run went back behind"),
    Figure("fleet/instances", "instances", "generators that are alive"),
    Figure("fleet/running", "sequences", "sequences that run in their engines"),
    Figure("fleet/waiting", "sequences", "sequences that wait in front of them"),
    Figure(
        "fleet/moved",
        "samples",
        "answers that went on on another instance after they had begun, since the scheduler was started",
    ),
    Figure("fleet/moved_tokens", "tokens", "tokens that they had, which the other instance computed again as a prompt"),
    Figure(
        "ranker/recall_longest_20",
        "share",
        "of the longest 20 % of new prompts, what was foretold to be among them (`scheduler.length_model`); over the "
        "last 512 that the ranker had learned nothing of, as the next two",
    ),
    Figure("ranker/recall_longest_10", "share", "of the longest 10 %"),
    Figure("ranker/recall_longest_5", "share", "of the longest 5 %"),
)


def batch_figures(batch: "BatchIntake") -> dict[str, float]:
    """What a closed training batch shows of its rollouts."""
    answers = list(batch.answers.values())
    figures = {
        "reward/equal_groups_share": batch.equal_groups / len(batch.prompts),
        "rollouts/trained": float(len(batch.trained)),
        "rollouts/refills": float(batch.num_refills),
        "rollouts/cut": float(batch.counts.dropped["deadline"]),
        "rollouts/rejected": float(batch.rejected),
    }
    if batch.overlong_penalties:
        figures["reward/overlong_penalty_mean"] = mean(batch.overlong_penalties)
    if batch.dropped_lengths:
        figures["length/dropped_mean"] = mean(batch.dropped_lengths)
    if not answers:
        return figures
    rewards = [answer.reward for answer in answers]
    lengths = sorted(len(answer.token_ids) for answer in answers)
    ages = [answer.staleness for answer in answers]
    reward_mean = batch.reward_mean or 0.0
    return figures | {
        "reward/mean": reward_mean,
        "reward/std": math.sqrt(mean((reward - reward_mean) ** 2 for reward in rewards)),
        "length/mean": mean(lengths),
        "length/p50": quantile(lengths, 0.5),
        "length/p95": quantile(lengths, 0.95),
        "length/max": float(lengths[-1]),
        "length/truncated_share": truncated_share(answers),
        "staleness/mean": mean(ages),
        "staleness/max": float(max(ages)),
        "time/generation_mean_s": mean(answer.generation_s for answer in answers),
        "time/generation_s": max(one.finished_s for one in answers) - min(one.started_s for one in answers),
    }


def steps_figures(policy: "Sequence[StepStats]", critic: "Sequence[CriticStats]") -> dict[str, float]:
    """What the optimizer steps of a batch show: counts of tokens added up, maxima and counts so far at their highest,
    of the rest the mean. Figures over no tokens are left out: a 0 would look like agreement."""
    return _joined([_step_figures(stats) for stats in policy]) | _joined([_critic_figures(stats) for stats in critic])


_ADDED = ("train/tokens", "mismatch/own_tokens")


def _joined(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    joined = {}
    for name in dict.fromkeys(name for one in figures for name in one):
        values = [one[name] for one in figures if name in one]
        if name in _ADDED:
            joined[name] = math.fsum(values)
        elif name.endswith(("_max", "/skipped_steps")):
            joined[name] = max(values)
        else:
            joined[name] = min(values) if name == "train/applied" else mean(values)
    return joined


def _step_figures(stats: "StepStats") -> dict[str, float]:
    figures = {
        "loss/policy": stats.loss,
        "grad/norm": stats.grad_norm,
        "train/learning_rate": stats.learning_rate,
        "train/tokens": float(stats.num_tokens),
        "train/applied": float(stats.applied),
        "train/skipped_steps": float(stats.num_skipped),
        "mismatch/own_tokens": float(stats.num_own_tokens),
    }
    if stats.num_tokens:
        figures |= {
            "policy/entropy": stats.entropy,
            "policy/clip_fraction": stats.clip_fraction,
            "kl/behaviour_k3": stats.approx_kl,
            "policy/effective_sample_share": stats.effective_sample_share,
            "policy/importance_limited_share": stats.importance_limited_share,
            "mismatch/behaviour_abs_diff_mean": stats.logprob_abs_diff_mean,
        }
    if stats.reference_kl is not None:
        figures["kl/reference_k3"] = stats.reference_kl
    if stats.num_own_tokens:
        figures |= {
            "mismatch/logprob_abs_diff_mean": stats.own_logprob_abs_diff_mean,
            "mismatch/logprob_abs_diff_max": stats.own_logprob_abs_diff_max,
            "mismatch/kl_k3": stats.own_kl,
        }
    return figures


def _critic_figures(stats: "CriticStats") -> dict[str, float]:
    return {
        "critic/loss": stats.loss,
        "critic/explained_variance": stats.explained_variance,
        "critic/value_mean": stats.value_mean,
        "critic/return_mean": stats.return_mean,
        "critic/clip_fraction": stats.clip_fraction,
        "critic/grad_norm": stats.grad_norm,
        "critic/learning_rate": stats.learning_rate,
        "critic/skipped_steps": float(stats.num_skipped),
    }


def evaluation_figures(answers: "Sequence[Answer]") -> dict[str, float]:
    """What the greedy answers of one version show: nothing, when there are none."""
    if not answers:
        return {}
    return {
        "eval/accuracy": mean(answer.reward for answer in answers),
        "eval/answers": float(len(answers)),
        "eval/length_mean": mean(len(answer.token_ids) for answer in answers),
        "eval/truncated_share": truncated_share(answers),
    }


def truncated_share(answers: "Sequence[Answer]") -> float:
    return mean(float(answer.truncated) for answer in answers)


def mean(values: Iterable[float]) -> float:
    """The mean; 0 of nothing."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else 0.0


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie, by the nearest rank; at least one value, in order."""
    return float(ordered[max(0, math.ceil(share * len(ordered)) - 1)])
