"""Tests of trainer_svc.data, trainer_svc.data_sources and trainer_svc.json_lines."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainer_svc import data_sources
from trainer_svc.counting_task import NUM_HELD_OUT, NUM_TRAIN
from trainer_svc.data import PromptSets, check_data, load_prompts
from trainer_svc.settings import DataSection
from trainer_svc.tiny_model import tiny_tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte; no chat template."""
    return _byte_tokenizer()


@pytest.fixture(scope="module")
def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = _byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def write_jsonl(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, *rows: Mapping[str, Any]) -> Path:
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    return path


def rows(first: int, last: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {number}", "answer": str(number)} for number in range(first, last + 1)]


def load(tokenizer: Any, *, seed: int = 0, num_eval_prompts: int = 100, **data: Any) -> PromptSets:
    return load_prompts(
        DataSection(**{key: str(value) if isinstance(value, Path) else value for key, value in data.items()}),
        tokenizer,
        seed=seed,
        num_eval_prompts=num_eval_prompts,
    )


def text_of(tokenizer: Any, token_ids: list[int]) -> str:
    alphabet = tokenizer.convert_ids_to_tokens(token_ids)
    return "".join(alphabet).replace("Ġ", " ").replace("Ċ", "\n")


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_files_become_prompts_and_held_out_ones_are_not_trained(
    tmp_path: Path, tokenizer: Any, write: Callable[..., Path]
) -> None:
    suffix = "jsonl" if write is write_jsonl else "parquet"
    train, held_out = write(tmp_path / f"train.{suffix}", *rows(0, 9)), write(tmp_path / f"eval.{suffix}", *rows(8, 20))
    sets = load(tokenizer, train=train, eval=held_out, num_eval_prompts=5)
    assert [prompt.record.answer for prompt in sets.train] == [str(number) for number in range(8)]
    assert [prompt.record.answer for prompt in sets.evaluation] == [str(number) for number in range(8, 13)]
    assert text_of(tokenizer, sets.train[3].token_ids) == "question 3"
    assert sets.train[-1] == sets.train[7]
    with pytest.raises(IndexError):
        sets.train[8]


def test_a_folder_of_files_is_one_source(tmp_path: Path, tokenizer: Any) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    write_jsonl(folder / "b.jsonl", *rows(3, 5))
    write_jsonl(folder / "a.jsonl", *rows(0, 2))
    held_out = write_jsonl(tmp_path / "eval.jsonl", *rows(9, 9))
    check_data(DataSection(train=str(folder), eval=str(held_out)))
    sets = load(tokenizer, train=folder, eval=held_out)
    assert [prompt.record.answer for prompt in sets.train] == ["0", "1", "2", "3", "4", "5"]


def test_ids_are_stable_and_come_from_the_prompt_or_its_field(tmp_path: Path, tokenizer: Any) -> None:
    held_out = write_jsonl(tmp_path / "eval.jsonl", *rows(9, 9))
    one = write_jsonl(tmp_path / "one.jsonl", *rows(0, 2))
    other_order = write_jsonl(tmp_path / "two.jsonl", *reversed(rows(0, 2)))
    ids = [prompt.id for prompt in load(tokenizer, train=one, eval=held_out).train]
    assert len(set(ids)) == 3
    assert [prompt.id for prompt in load(tokenizer, train=other_order, eval=held_out).train] == ids[::-1]

    named = write_jsonl(tmp_path / "named.jsonl", {**rows(0, 0)[0], "key": "abc"}, {**rows(1, 1)[0], "key": "7"})
    with_ids = write_jsonl(tmp_path / "named_eval.jsonl", {**rows(9, 9)[0], "key": "x"})
    sets = load(tokenizer, train=named, eval=with_ids, id_field="key")
    assert [prompt.id for prompt in sets.train] == ["abc", "7"]


def test_other_fields_go_to_the_metadata_and_answers_become_text(tmp_path: Path, tokenizer: Any) -> None:
    train = write_jsonl(
        tmp_path / "train.jsonl",
        {"question": "a", "key": 42.0, "level": 3, "tags": ["x"]},
        {"question": "b", "key": 2.5, "level": 4, "tags": []},
    )
    held_out = write_jsonl(tmp_path / "eval.jsonl", {"question": "c", "key": 7})
    first, second = load(tokenizer, train=train, eval=held_out, prompt_field="question", answer_field="key").train
    assert (first.record.text, first.record.answer, first.record.metadata) == ("a", "42", {"level": 3, "tags": ["x"]})
    assert second.record.answer == "2.5"
    keyless = load(tokenizer, train=train, eval=held_out, prompt_field="question", answer_field="").train[0].record
    assert keyless.answer == ""


def test_the_digest_changes_with_the_prompts_and_with_nothing_else(tmp_path: Path, tokenizer: Any) -> None:
    held_out = write_jsonl(tmp_path / "eval.jsonl", *rows(9, 9))
    train = write_jsonl(tmp_path / "train.jsonl", *rows(0, 3))
    copy = write_jsonl(tmp_path / "copy.jsonl", *rows(0, 3))
    more = write_jsonl(tmp_path / "more.jsonl", *rows(0, 4))
    digest = load(tokenizer, train=train, eval=held_out).train.digest
    assert load(tokenizer, train=copy, eval=held_out).train.digest == digest
    assert load(tokenizer, train=more, eval=held_out).train.digest != digest
    assert load(tokenizer, train=train, eval=held_out, template="{prompt}!").train.digest != digest


def test_a_template_is_put_around_each_prompt(tmp_path: Path, tokenizer: Any) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", {"prompt": "{x} + 1", "answer": "2"})
    held_out = write_jsonl(tmp_path / "eval.jsonl", *rows(9, 9))
    prompt = load(tokenizer, train=train, eval=held_out, template="Question: {prompt}\nAnswer:").train[0]
    assert text_of(tokenizer, prompt.token_ids) == "Question: {x} + 1\nAnswer:"
    assert prompt.record.text == "{x} + 1"


@pytest.mark.parametrize("template", ["no place", "{promt}", "{prompt} {x}", "{}", "{prompt", "}"])
def test_a_template_without_exactly_its_place_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r"data\.template"):
        check_data(DataSection(train="counting", template=template))


def test_prompts_go_through_the_chat_template(tmp_path: Path, chat_tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    train = write_jsonl(tmp_path / "train.jsonl", {"prompt": messages, "answer": "x"})
    held_out = write_jsonl(tmp_path / "eval.jsonl", *rows(9, 9))
    sets = load(chat_tokenizer, train=train, eval=held_out, system_prompt="be brief")
    prompt = sets.train[0]
    assert text_of(chat_tokenizer, prompt.token_ids) == "<system>be brief<user>a<assistant>b<user>c<assistant>"
    assert prompt.record.text == "c"
    assert text_of(chat_tokenizer, sets.evaluation[0].token_ids) == "<system>be brief<user>question 9<assistant>"
    plain = load(
        chat_tokenizer, train=held_out, eval=write_jsonl(tmp_path / "e.jsonl", *rows(1, 1)), chat_template="never"
    )
    assert text_of(chat_tokenizer, plain.train[0].token_ids) == "question 9"


def test_messages_and_system_prompts_need_a_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", {"prompt": [{"role": "user", "content": "a"}], "answer": "x"})
    held_out = write_jsonl(tmp_path / "eval.jsonl", *rows(9, 9))
    with pytest.raises(ValueError, match="list of messages, and there is no chat template"):
        load(tokenizer, train=train, eval=held_out)
    with pytest.raises(ValueError, match=r"data\.system_prompt needs a chat template, and the tokenizer has none"):
        load(tokenizer, train="counting", system_prompt="be brief")


def test_long_prompts_are_left_out_and_counted(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", *rows(0, 2), {"prompt": "x" * 50, "answer": ""}, *rows(3, 3))
    held_out = write_jsonl(tmp_path / "eval.jsonl", *rows(2, 2))
    caplog.set_level("INFO")
    sets = load(tokenizer, train=train, eval=held_out, max_prompt_tokens=20)
    assert [prompt.record.answer for prompt in sets.train] == ["0", "1", "3"]
    assert sets.train.longest == 10
    assert sets.notes() == ["1 of 4 training prompts are longer than data.max_prompt_tokens and left out"]
    assert "3 training prompts, the longest of 10 tokens; left out: 1 longer than 20 tokens, 1 held out" in caplog.text
    with pytest.raises(
        ValueError, match=r"no evaluation prompt is left of 1: 1 are longer than data\.max_prompt_tokens"
    ):
        load(tokenizer, train=train, eval=held_out, max_prompt_tokens=3)


def test_the_counting_task_is_there_by_name() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), bos_token="<bos>", eos_token="<eos>")
    check_data(DataSection(train="counting"))
    sets = load(tokenizer, train="counting", num_eval_prompts=NUM_HELD_OUT)
    assert (len(sets.train), len(sets.evaluation)) == (NUM_TRAIN, NUM_HELD_OUT)
    assert {len(prompt.token_ids) for prompt in (*sets.train, *sets.evaluation)} == {5}
    assert not {prompt.id for prompt in sets.train} & {prompt.id for prompt in sets.evaluation}
    assert len(load(tokenizer, train="counting", num_eval_prompts=7).evaluation) == 7


def test_words_that_the_vocabulary_lacks_are_named(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), bos_token="<bos>", eos_token="<eos>")
    train = write_jsonl(tmp_path / "train.jsonl", *rows(0, 1))
    held_out = write_jsonl(tmp_path / "eval.jsonl", *rows(9, 9))
    with pytest.raises(ValueError, match=r"cannot be written in the model's tokens.*question 9"):
        load(tokenizer, train=train, eval=held_out)


def test_a_reasoning_gym_task_is_made_with_its_options(tokenizer: Any) -> None:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2, "size": 300}
    data = {"train": "reasoning_gym:chain_sum", "reasoning_gym": options}
    check_data(DataSection(**data))
    sets = load(tokenizer, **data, num_eval_prompts=50)
    assert len(sets.evaluation) == 50
    assert 200 < len(sets.train) <= 300
    texts = {prompt.record.text for prompt in sets.train}
    assert not texts & {prompt.record.text for prompt in sets.evaluation}
    record = sets.train[0].record
    assert record.metadata["task"] == "chain_sum"
    assert record.metadata["task_options"] == {key: value for key, value in options.items() if key != "size"}
    assert record.metadata["num_terms"] == 2

    other = load(tokenizer, **data, num_eval_prompts=50, seed=1)
    assert [prompt.id for prompt in other.evaluation] == [prompt.id for prompt in sets.evaluation]
    assert len({prompt.record.text for prompt in other.train} & texts) < len(texts) / 2
    assert load(tokenizer, **data, num_eval_prompts=50).train.digest == sets.train.digest


def test_the_levels_of_a_curriculum_get_harder_and_leave_the_evaluation_as_it_is(tokenizer: Any) -> None:
    options = {"max_terms": 3, "size": 40}
    data = {"train": "reasoning_gym:chain_sum", "reasoning_gym": options, "curriculum": True}
    check_data(DataSection(**data))
    sets = load(tokenizer, **data, num_eval_prompts=20)
    levels = sets.train.levels
    assert levels is not None
    assert len(levels) == len(sets.train)
    assert list(levels) == sorted(levels)
    assert set(levels) == set(range(levels[-1] + 1)) and levels[-1] >= 3
    first, last = sets.train[0].record.metadata, sets.train[-1].record.metadata
    assert first["task_options"]["max_terms"] == 2 < last["task_options"]["max_terms"]
    assert {prompt.record.metadata["task_options"]["max_terms"] for prompt in sets.evaluation} == {3}
    assert load(tokenizer, **{**data, "curriculum": False}).train.levels is None


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("counting", "needs a task"),
        ("reasoning_gym:gsm_symbolic", "has none for task gsm_symbolic"),
        ("reasoning_gym:knight_swap", "refuses each level"),
    ],
)
def test_a_curriculum_needs_levels(task: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_data(DataSection(train=task, curriculum=True))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": "reasoning_gym:chain_sums"}, r"no task 'chain_sums' \(did you mean chain_sum\?\)"),
        (
            {"train": "reasoning_gym:chain_sum", "reasoning_gym": {"max_term": 3}},
            r"no such option \(did you mean max_terms\?\)",
        ),
        ({"train": "reasoning_gym:chain_sum", "reasoning_gym": {"min_terms": 9}}, "task chain_sum refuses"),
        ({"train": "reasoning_gym:chain_sum", "reasoning_gym": {"size": 0}}, "expected a number of prompts"),
    ],
)
def test_a_wrong_task_or_option_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        if "size" in str(data):
            load(_byte_tokenizer(), **data)
        else:
            check_data(DataSection(**data))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        ("", "holds no rows"),
        ("\n\n", "holds no rows"),
        ("not json", "line 1: not JSON"),
        ("[1]", "line 1: expected a JSON object in every line"),
        ('{"prompts": "a", "answer": "b"}', r"no such field \(did you mean prompts\?\); it has answer, prompts"),
        ('{"prompt": "a"}', r"data\.answer_field is 'answer'.*it has prompt"),
        ('{"prompt": 3, "answer": "b"}', "line 1: expected text, or a list of messages.*got int 3"),
        ('{"prompt": " ", "answer": "b"}', "line 1: expected text"),
        ('{"prompt": [], "answer": "b"}', "line 1: expected text"),
        ('{"prompt": [{"role": "user"}], "answer": "b"}', "line 1: expected text, or a list of messages"),
        ('{"prompt": "a", "answer": ["b"]}', "line 1: expected text or a number in field 'answer'"),
        ('{"prompt": "a", "answer": null}', "line 1: expected text or a number"),
    ],
)
def test_a_wrong_file_is_refused_at_a_glance_and_when_loaded(
    tmp_path: Path, tokenizer: Any, content: str | None, message: str
) -> None:
    path = tmp_path / "train.jsonl"
    if content is not None:
        path.write_text(content)
    held_out = write_jsonl(tmp_path / "eval.jsonl", *rows(9, 9))
    with pytest.raises(ValueError, match=message):
        check_data(DataSection(train=str(path), eval=str(held_out)))
    with pytest.raises(ValueError, match=r"^data"):
        load(tokenizer, train=path, eval=held_out)


def test_parquet_is_looked_at_without_reading_it_all(tmp_path: Path) -> None:
    held_out = str(write_jsonl(tmp_path / "eval.jsonl", *rows(9, 9)))
    empty = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}), empty)
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(b"PAR1 nothing PAR1")
    other = write_parquet(tmp_path / "other.parquet", {"question": "a", "answer": "b"})
    for path, message in ((empty, "no rows"), (damaged, "not a Parquet file"), (other, "no such field")):
        with pytest.raises(ValueError, match=message):
            check_data(DataSection(train=str(path), eval=held_out))


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_wrong_row_further_down_is_named(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, write: Callable[..., Path]
) -> None:
    name = "train.jsonl" if write is write_jsonl else "train.parquet"
    train = write(tmp_path / name, *rows(0, 4), {"prompt": "", "answer": "5"}, *rows(6, 9))
    held_out = write_jsonl(tmp_path / "eval.jsonl", *rows(9, 9))
    with pytest.raises(ValueError, match=r"train\..*6: expected text"):
        check_data(DataSection(train=str(train), eval=str(held_out)))
    monkeypatch.setattr(data_sources, "CHECKED_ROWS", 5)
    check_data(DataSection(train=str(train), eval=str(held_out)))
    with pytest.raises(ValueError, match=r"train\..*6: expected text"):
        load(tokenizer, train=train, eval=held_out)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{half a row", "not JSON"),
        ('{"prompt": "caf\u00e9", "answer": "b"}'.encode("latin-1"), "not UTF-8 .*: convert the file to UTF-8"),
        (rb'{"prompt": "a", "answer": "\ud83d"}', "half of a surrogate pair"),
        (b'{"prompt": "a", "answer": NaN}', "expected text or a finite number in field 'answer', got nan"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, tokenizer: Any, line: bytes, message: str) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", *rows(0, 1))
    train = write_jsonl(folder / "b.jsonl", *rows(2, 3))
    held_out = write_jsonl(tmp_path / "eval.jsonl", *rows(9, 9))
    train.write_bytes(train.read_bytes() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=rf"^data: .*b\.jsonl, line 4: .*{message}"):
        load(tokenizer, train=folder, eval=held_out)
    train.write_bytes(line)
    with pytest.raises(ValueError, match=rf"^data: .*b\.jsonl, line 1: .*{message}"):
        check_data(DataSection(train=str(train), eval=str(held_out)))


def test_text_arrives_as_it_is_written(tmp_path: Path, tokenizer: Any) -> None:
    written: list[dict[str, Any]] = [
        {"prompt": "2024-01-01", "answer": "2024-01-01", "when": "2024-01-01T00:00:00Z", "n": 12345678901234567890},
        {"prompt": "a \u2028 b \U0001f600", "answer": "1e3", "when": None, "extra": {"any": [1, "x"]}},
        {"prompt": "c", "answer": "007", "when": 3},
    ]
    train = write_jsonl(tmp_path / "train.jsonl", *written)
    train.write_bytes(b"\xef\xbb\xbf" + train.read_bytes())
    held_out = write_jsonl(tmp_path / "eval.jsonl", {"prompt": "x", "answer": "1999-12-31"})
    check_data(DataSection(train=str(train), eval=str(held_out)))
    sets = load(tokenizer, train=train, eval=held_out)
    read = [{"prompt": one.record.text, "answer": one.record.answer, **one.record.metadata} for one in sets.train]
    assert read == written
    assert sets.evaluation[0].record.answer == "1999-12-31"


def test_lines_that_change_while_in_use_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", *rows(0, 3))
    sets = load(tokenizer, train=train, eval=write_jsonl(tmp_path / "eval.jsonl", *rows(9, 9)))
    write_jsonl(train, *rows(0, 2), *rows(4, 4))
    assert sets.train[2].record.answer == "2"
    with pytest.raises(ValueError, match=r"train\.jsonl, line 4 was changed while in use"):
        sets.train[3]


def test_parquet_answers_that_are_no_numbers_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    write_parquet(folder / "a.parquet", {"prompt": "a", "answer": 1.0}, {"prompt": "b", "answer": 2.5})
    held_out = write_jsonl(tmp_path / "eval.jsonl", *rows(9, 9))
    for value in (float("nan"), float("inf")):
        write_parquet(folder / "b.parquet", {"prompt": "c", "answer": 3.0}, {"prompt": "d", "answer": value})
        with pytest.raises(ValueError, match=rf"b\.parquet, row 2: .* in field 'answer', got {value}"):
            load(tokenizer, train=folder, eval=held_out)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("countin", r"did you mean counting\?"),
        ("no/such/file.jsonl", "there is no file no/such/file.jsonl"),
        ("README.md", "is not a .jsonl"),
        ("folder", "expected files of one kind"),
    ],
)
def test_a_name_that_is_no_source_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("text")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=message):
        check_data(DataSection(train=train, eval="counting"))


def test_a_file_needs_another_file_of_held_out_prompts(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", *rows(0, 1))
    with pytest.raises(ValueError, match=r"data\.eval is empty: expected a file"):
        check_data(DataSection(train=str(train)))


def test_a_glance_imports_no_large_library(tmp_path: Path) -> None:
    train = write_parquet(tmp_path / "train.parquet", *rows(0, 1))
    held_out = write_jsonl(tmp_path / "eval.jsonl", *rows(9, 9))
    code = (
        "import sys\n"
        "from trainer_svc.data import check_data\n"
        "from trainer_svc.models import check_model\n"
        "from trainer_svc.rewards import check_rewards\n"
        "from trainer_svc.settings import DataSection, RewardSection\n"
        f"check_data(DataSection(train={str(train)!r}, eval={str(held_out)!r}))\n"
        "check_model('tiny')\n"
        "check_rewards(RewardSection(functions='math_verify'))\n"
        "assert not {'torch', 'transformers', 'datasets', 'math_verify'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
