from streamrl.identity import PURPOSE_TRAIN, BatchKey, SampleKey
from trainer_svc.answer_table import AnswerTable
from trainer_svc.batch_intake import BatchIntake
from trainer_svc.critic import CriticStats
from trainer_svc.figures import FIGURES, batch_figures, evaluation_figures, quantile, steps_figures
from trainer_svc.groups import Answer
from trainer_svc.policy import StepStats

KEY = BatchKey(PURPOSE_TRAIN, 4)
NAMES = {figure.name for figure in FIGURES}


class SomePrompt:
    token_ids = (1,)


def answer(group: int, sample: int, reward: float, num_tokens: int, staleness: int = 0) -> Answer:
    return Answer(
        key=SampleKey(*KEY, group, sample),
        token_ids=[7] * num_tokens,
        logprobs=[-1.0] * num_tokens,
        versions=[(4 - staleness, num_tokens)],
        reward=reward,
        truncated=num_tokens > 3,
        staleness=staleness,
        instance="generator-0",
        started_s=100.0 + group,
        finished_s=102.0 + 2 * group,
    )


def batch() -> BatchIntake:
    intake = BatchIntake(KEY, [SomePrompt(), SomePrompt()], 2)
    for one in (answer(0, 0, 1.0, 1), answer(0, 1, 0.0, 2), answer(1, 0, 1.0, 3, staleness=1), answer(1, 1, 0.0, 10)):
        intake.answers[one.key] = one
    intake.equal_groups = 1
    return intake


def stats(**changes: float) -> StepStats:
    fields: dict[str, float] = dict.fromkeys(StepStats.__dataclass_fields__, 1)
    return StepStats(**{**fields, **changes})  # type: ignore[arg-type]


def critic_stats() -> CriticStats:
    return CriticStats(**dict.fromkeys(CriticStats.__dataclass_fields__, 1))  # type: ignore[arg-type]


def test_a_batch_is_described_by_names_that_the_table_explains() -> None:
    figures = batch_figures(batch())
    assert figures["reward/mean"] == 0.5
    assert figures["reward/std"] == 0.5
    assert figures["reward/equal_groups_share"] == 0.5
    assert (figures["length/mean"], figures["length/p50"], figures["length/max"]) == (4, 2, 10)
    assert figures["length/truncated_share"] == 0.25
    assert (figures["staleness/mean"], figures["staleness/max"]) == (0.25, 1)
    assert (figures["time/generation_mean_s"], figures["time/generation_s"]) == (2.5, 4.0)
    assert "length/dropped_mean" not in figures
    evaluated = evaluation_figures(list(batch().answers.values()))
    assert (evaluated["eval/accuracy"], evaluated["eval/answers"]) == (0.5, 4)
    assert set(figures) | set(steps_figures([stats()], [critic_stats()])) | set(evaluated) <= NAMES
    assert len(NAMES) == len(FIGURES)


def test_figures_over_no_tokens_are_left_out() -> None:
    assert "mismatch/logprob_abs_diff_mean" not in steps_figures([stats(num_own_tokens=0)], [])
    assert "policy/entropy" not in steps_figures([stats(num_tokens=0)], [])


def test_several_steps_of_a_batch_are_joined() -> None:
    first = stats(loss=1.0, num_tokens=10, applied=True, own_logprob_abs_diff_max=0.5)
    figures = steps_figures([first, stats(loss=2.0, num_tokens=20, applied=False)], [])
    assert (figures["loss/policy"], figures["train/tokens"], figures["train/applied"]) == (1.5, 30, 0)
    assert figures["mismatch/logprob_abs_diff_max"] == 1


def test_a_batch_without_answers_has_figures_too() -> None:
    empty = BatchIntake(KEY, [SomePrompt()], 2)
    empty.dropped_lengths = [4, 6]
    assert batch_figures(empty)["length/dropped_mean"] == 5


def test_quantiles_are_values_that_occur() -> None:
    assert [quantile([1, 2, 3, 4], share) for share in (0.0, 0.25, 0.5, 0.95, 1.0)] == [1, 1, 2, 4, 4]


def test_the_table_shows_the_first_answers_of_different_groups() -> None:
    table = AnswerTable(lambda _prompt, token_ids: {"response": str(len(token_ids))}, num_answers=3)
    rows = table.rows(5, batch())
    assert [(row["step"], row["response"], row["reward"]) for row in rows] == [
        (5, "1", 1.0),
        (5, "3", 1.0),
        (5, "2", 0.0),
    ]
