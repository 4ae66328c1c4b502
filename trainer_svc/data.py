"""The prompts of a run: read from their sources, put into their final form, tokenised once.

Only token ids are held in memory; texts and keys stay in the source and are read when a prompt is drawn. In which order
prompts are drawn is prompt_cursor.py's work.
"""

import logging
import string
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from streamrl.digest import new_digest
from trainer_svc.data_sources import (
    COUNTING,
    REASONING_GYM,
    Fields,
    Joined,
    Messages,
    Record,
    Source,
    check_source,
    open_levels,
    open_source,
)
from trainer_svc.settings import DataSection

logger = logging.getLogger(__name__)

_CHUNK_ROWS = 1024
_LOG_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready to be drawn from."""

    id: str
    """Stable across epochs and runs."""
    token_ids: list[int]
    record: Record
    """The prompt as the data has it, its key and its other fields: for reward functions and tables."""


@dataclass(frozen=True)
class PromptSets:
    """What a run trains on, and what it is measured by. No text is in both."""

    train: "PromptSet"
    evaluation: "PromptSet"

    def notes(self) -> list[str]:
        """What whoever started the run should know of them, a sentence each."""
        sets = (("training", self.train), ("evaluation", self.evaluation))
        return [
            f"{prompts.num_too_long} of {len(prompts) + prompts.num_too_long} {purpose} prompts are longer than "
            "data.max_prompt_tokens and left out"
            for purpose, prompts in sets
            if prompts.num_too_long
        ]


class PromptSet(Sequence[Prompt]):
    """Prompts by index, 0 to len - 1, in the order of their source."""

    def __init__(
        self, source: Source, rows: npt.NDArray[np.int64], tokens: "_TokenLists", *, num_too_long: int = 0
    ) -> None:
        """
        Args:
            num_too_long: how many are left out for their length.
        """
        self.num_too_long = num_too_long
        self.levels: npt.NDArray[np.int64] | None = None
        """Of each prompt, from 0 on, where a curriculum orders them."""
        self._source = source
        self.rows = rows
        """Of the source, by index."""
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        row = int(self.rows[index])
        (record,) = self._source.read(row, row + 1)
        return Prompt(record.id, self._tokens[index], record)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return self._tokens.longest

    @property
    def digest(self) -> str:
        """BLAKE3, hex, over rows and token ids: a resumed run must find the same prompts."""
        digest = new_digest()
        digest.update(self.rows.tobytes())
        digest.update(self._tokens.ends.tobytes())
        digest.update(self._tokens.token_ids.tobytes())
        return digest.hexdigest()


def load_prompts(data: DataSection, tokenizer: Any, *, seed: int, num_eval_prompts: int) -> PromptSets:
    """Reads and tokenises the prompts of a run.

    Args:
        data: the settings; `data.eval` empty means the held-out prompts of the same built-in task.
        tokenizer: of transformers.
        seed: of training prompts that are made up on the spot.
        num_eval_prompts: how many held-out prompts to take, from the first on.

    Raises:
        ValueError: what `check_data` finds; a row of the wrong form; no prompt is left.
    """
    renderer = _Renderer(data, tokenizer)
    held_out = open_source(
        _evaluation_source(data),
        fields=_fields(data),
        task_options=data.reasoning_gym,
        seed=seed,
        held_out=num_eval_prompts,
    )
    evaluation, eval_identities = _prepare("evaluation", held_out, renderer, excluded=frozenset())
    if data.curriculum:
        train = _prepare_levels(data, renderer, seed, excluded=eval_identities)
    else:
        source = open_source(
            data.train, fields=_fields(data), task_options=data.reasoning_gym, seed=seed, held_out=None
        )
        train, _ = _prepare("training", source, renderer, excluded=eval_identities)
    return PromptSets(train, evaluation)


def check_data(data: DataSection) -> None:
    """Looks at settings and sources, by the first rows of each file, without importing a large library.

    Raises:
        ValueError: what was expected, what is there, and what to do.
    """
    _check_template(data)
    for name in (data.train, _evaluation_source(data)):
        check_source(name, fields=_fields(data), task_options=data.reasoning_gym)
    if data.curriculum:
        for level in open_levels(data.train, task_options=data.reasoning_gym, seed=0):
            level.read(0, 1)


def _fields(data: DataSection) -> Fields:
    return Fields(prompt=data.prompt_field, answer=data.answer_field, id=data.id_field)


def _evaluation_source(data: DataSection) -> str:
    if data.eval:
        return data.eval
    if data.train == COUNTING or data.train.startswith(REASONING_GYM):
        return data.train
    raise ValueError(f"data.eval is empty: expected a file of held-out prompts beside data.train ({data.train})")


def _check_template(data: DataSection) -> None:
    if not data.template:
        return
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(data.template) if name is not None]
    except ValueError as error:
        raise ValueError(
            f"data.template {data.template!r}: {error}; write braces of its own twice: {{{{ }}}}"
        ) from error
    if not names or set(names) != {"prompt"}:
        raise ValueError(
            f"data.template {data.template!r}: expected {{prompt}} and no other name in braces, found {names}; write "
            "braces of its own twice: {{ }}"
        )


class _Renderer:
    """Puts records into the form that the model reads, as token ids."""

    def __init__(self, data: DataSection, tokenizer: Any) -> None:
        _check_template(data)
        self._template = data.template
        self._system_prompt = data.system_prompt
        self._tokenizer = tokenizer
        self._is_chat = data.chat_template == "auto" and bool(tokenizer.chat_template)
        self.max_tokens = data.max_prompt_tokens
        if self._system_prompt and not self._is_chat:
            raise ValueError(
                "data.system_prompt needs a chat template, and "
                + ("the tokenizer has none" if data.chat_template == "auto" else "data.chat_template is never")
                + ": put the text into data.template instead"
            )

    def tokenise(self, records: Sequence[Record]) -> list[list[int]]:
        """Token ids of each record's prompt.

        Raises:
            ValueError: a prompt cannot be put into the model's form.
        """
        if self._is_chat:
            texts = [self._through_chat_template(record) for record in records]
        else:
            texts = [self._plain(record) for record in records]
        try:
            # A chat template writes the special tokens itself.
            token_ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=not self._is_chat)["input_ids"]
        except Exception as error:  # tokenizers raises Exception itself, for words that a vocabulary lacks
            raise ValueError(
                f"data: a prompt cannot be written in the model's tokens ({error}): {texts[0]!r}"
            ) from error
        for text, ids in zip(texts, token_ids, strict=True):
            if not ids:
                raise ValueError(f"data: a prompt has no tokens at all: {text!r}")
        return token_ids

    def _text(self, text: str) -> str:
        return self._template.format(prompt=text) if self._template else text

    def _plain(self, record: Record) -> str:
        if isinstance(record.prompt, str):
            return self._text(record.prompt)
        raise ValueError(
            f"data: prompt {record.id} is a list of messages, and there is no chat template: take a model whose "
            'tokenizer has one and data.chat_template = "auto", or give prompts as text'
        )

    def _through_chat_template(self, record: Record) -> str:
        from jinja2 import TemplateError

        messages: Messages = (
            [{"role": "user", "content": self._text(record.prompt)}]
            if isinstance(record.prompt, str)
            else list(record.prompt)
        )
        if not isinstance(record.prompt, str) and self._template:
            raise ValueError(
                f"data.template is for prompts that are text, and prompt {record.id} is a list of messages"
            )
        if self._system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        try:
            text: str = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            raise ValueError(f"data: the chat template refuses prompt {record.id}: {error}") from error
        return text


def _prepare(
    purpose: str, source: Source, renderer: _Renderer, excluded: frozenset[str]
) -> tuple[PromptSet, frozenset[str]]:
    """Tokenises a source in chunks; leaves out what is excluded or too long.

    Returns:
        The prompts that are left; and the identities of all, for exclusion elsewhere.
    """
    rows: list[int] = []
    tokens = _TokenLists()
    identities: set[str] = set()
    num_excluded = num_long = 0
    logged = time.monotonic()
    for first, records in _chunks(source):
        kept = [(row, record) for row, record in enumerate(records, first) if record.identity not in excluded]
        num_excluded += len(records) - len(kept)
        identities.update(record.identity for record in records)
        if not kept:
            continue
        for (row, _), token_ids in zip(kept, renderer.tokenise([record for _, record in kept]), strict=True):
            if len(token_ids) > renderer.max_tokens:
                num_long += 1
                continue
            rows.append(row)
            tokens.append(token_ids)
        if time.monotonic() - logged >= _LOG_EVERY_S:
            logged = time.monotonic()
            logger.info("tokenised %d of %d %s prompts", first + len(records), len(source), purpose)
    if not rows:
        raise ValueError(
            f"data: no {purpose} prompt is left of {len(source)}: {num_long} are longer than data.max_prompt_tokens "
            f"({renderer.max_tokens}), {num_excluded} are held out for evaluation"
        )
    prompts = PromptSet(source, np.asarray(rows, dtype=np.int64), tokens, num_too_long=num_long)
    logger.log(
        logging.WARNING if num_long else logging.INFO,
        "%d %s prompts, the longest of %d tokens; left out: %d longer than %d tokens, %d held out for evaluation",
        len(prompts),
        purpose,
        prompts.longest,
        num_long,
        renderer.max_tokens,
        num_excluded,
    )
    return prompts, frozenset(identities)


def _prepare_levels(data: DataSection, renderer: _Renderer, seed: int, excluded: frozenset[str]) -> PromptSet:
    """The levels of a curriculum as one set; levels of which nothing is left have no number."""
    joined = Joined(open_levels(data.train, task_options=data.reasoning_gym, seed=seed))
    train, _ = _prepare("training", joined, renderer, excluded)
    of_rows = np.searchsorted(joined.ends, train.rows, side="right")
    train.levels = np.unique(of_rows, return_inverse=True)[1].astype(np.int64)
    counts = np.bincount(train.levels)
    logger.info("%d levels of %s prompts", len(counts), ", ".join(map(str, counts)))
    return train


def _chunks(source: Source) -> Iterator[tuple[int, list[Record]]]:
    for start in range(0, len(source), _CHUNK_ROWS):
        yield start, source.read(start, min(start + _CHUNK_ROWS, len(source)))


class _TokenLists:
    """Many lists of token ids in one array: 4 bytes a token."""

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.ends = array("q")

    def append(self, token_ids: Iterable[int]) -> None:
        self.token_ids.extend(token_ids)
        self.ends.append(len(self.token_ids))

    def __getitem__(self, index: int) -> list[int]:
        start = self.ends[index - 1] if index else 0
        return self.token_ids[start : self.ends[index]].tolist()

    @property
    def longest(self) -> int:
        return int(np.diff(self.ends, prepend=0).max())
