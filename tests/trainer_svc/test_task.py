import json
from pathlib import Path

import pytest

from trainer_svc.models import resolve_model
from trainer_svc.settings import TrainerSettings
from trainer_svc.task import Task, load_task


@pytest.fixture
def task(random_model: Path, counting_file: Path, tmp_path: Path) -> Task:
    settings = TrainerSettings.model_validate(
        {"data": {"train": str(counting_file), "eval": str(counting_file)}, "eval": {"num_prompts": 4}}
    )
    model = resolve_model(str(random_model), dtype="float32", seed=0, cache_folder=tmp_path)
    return load_task(settings, model)


def test_the_key_as_an_answer_is_right_only_when_it_was_ended(task: Task) -> None:
    prompt = task.prompts.train[0]
    token_ids = task.tokenizer.encode(prompt.record.answer, add_special_tokens=False)
    ended = [*token_ids, task.tokenizer.eos_token_id]
    assert task.response(ended) == task.response(token_ids) == prompt.record.answer
    assert task.score(prompt, ended, False) == 1.0
    assert task.score(prompt, token_ids, True) == 0.0
    assert task.score(prompt, ended[1:], False) == 0.0
    assert task.describe(prompt, ended)["response"] == prompt.record.answer


def test_canaries_are_held_out_prompts_with_their_keys(task: Task) -> None:
    canaries = task.canaries(max_tokens=512)
    assert len(canaries) == 4
    prompt = task.prompts.evaluation[0]
    assert canaries[0][: len(prompt.token_ids)] == prompt.token_ids
    assert len(canaries[0]) > len(prompt.token_ids)
    assert sum(len(canary) for canary in task.canaries(max_tokens=12)) <= 12


def test_a_key_that_the_model_has_no_tokens_for_is_left_out_of_its_canary(
    random_model: Path, counting_file: Path, tmp_path: Path
) -> None:
    records = [json.loads(line) for line in counting_file.read_text().splitlines()]
    strange = tmp_path / "strange.jsonl"
    strange.write_text("".join(json.dumps({**record, "answer": "sure"}) + "\n" for record in records))
    settings = TrainerSettings.model_validate(
        {"data": {"train": str(strange), "eval": str(strange)}, "eval": {"num_prompts": 4}}
    )
    task = load_task(settings, resolve_model(str(random_model), dtype="float32", seed=0, cache_folder=tmp_path))
    with pytest.raises(Exception, match="UNK"):
        task.tokenizer.encode("sure", add_special_tokens=False)
    assert task.canaries(512) == [list(prompt.token_ids) for prompt in task.prompts.evaluation[:4]]


def test_prompts_and_answers_must_fit_the_model(random_model: Path, counting_file: Path, tmp_path: Path) -> None:
    settings = TrainerSettings.model_validate(
        {
            "data": {"train": str(counting_file), "eval": str(counting_file)},
            "eval": {"num_prompts": 4},
            "generator": {"max_tokens": 510},
        }
    )
    model = resolve_model(str(random_model), dtype="float32", seed=0, cache_folder=tmp_path)
    limited = settings.model_copy(
        update={"generator": settings.generator.model_copy(update={"max_tokens": 20, "max_model_len": 21})}
    )
    with pytest.raises(ValueError, match="takes 21"):
        load_task(limited, model)
    with pytest.raises(ValueError, match=r"the model \(or generator.max_model_len\) takes 512"):
        load_task(settings, model)
