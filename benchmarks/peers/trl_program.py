"""TRL's GRPOTrainer on a task of ours: `python trl_program.py TASK.json RESULT.json`, in an environment of TRL's own.

It knows nothing of our packages. TASK.json names the model's folder, prompts with their keys, and the settings that
both sides have; RESULT.json gets the time and the mean reward of each step, greedy accuracy before and after, versions.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

_EVALUATED_AT_ONCE = 64


class _Clock(TrainerCallback):  # type: ignore[misc]
    """When each step ended."""

    def __init__(self) -> None:
        self.ended_s: list[float] = []

    def on_train_begin(self, *_arguments: Any, **_more: Any) -> None:
        self.ended_s.append(time.monotonic())

    def on_step_end(self, *_arguments: Any, **_more: Any) -> None:
        self.ended_s.append(time.monotonic())


class _ExactMatch:
    """1 for an answer that is the key and that the model ended."""

    __name__ = "exact_match"

    def __init__(self, tokenizer: Any, stop_token_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_token_ids = set(stop_token_ids)
        self.means: list[float] = []
        self.num_tokens: list[int] = []

    def of(self, token_ids: list[int], answer: str) -> float:
        ended = bool(token_ids) and token_ids[-1] in self._stop_token_ids
        text = self._tokenizer.decode(token_ids[:-1] if ended else token_ids, skip_special_tokens=True)
        return float(ended and text.strip() == answer.strip())

    def __call__(self, completion_ids: list[list[int]], answer: list[str], **_columns: Any) -> list[float]:
        rewards = [self.of(token_ids, key) for token_ids, key in zip(completion_ids, answer, strict=True)]
        self.means.append(sum(rewards) / len(rewards))
        self.num_tokens.append(sum(map(len, completion_ids)))
        return rewards


def main(task_file: str, result_file: str) -> None:
    task = json.loads(Path(task_file).read_text())
    torch.set_num_threads(task["num_threads"])
    torch.manual_seed(task["seed"])
    # As the folder says, whatever the architecture's own tokenizer would make of it.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(task["model"], padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
    model.generation_config.eos_token_id = task["stop_token_ids"]
    reward, clock = _ExactMatch(tokenizer, task["stop_token_ids"]), _Clock()
    batch_size = task["prompts_per_batch"] * task["samples_per_prompt"]
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=[reward],
        args=trl.GRPOConfig(
            output_dir=str(Path(result_file).with_suffix(".trl")),
            use_cpu=True,
            bf16=task["dtype"] == "bfloat16",
            max_steps=task["num_iterations"],
            per_device_train_batch_size=task["rows_at_once"],
            gradient_accumulation_steps=batch_size // task["rows_at_once"],
            num_generations=task["samples_per_prompt"],
            max_completion_length=task["max_tokens"],
            temperature=task["temperature"],
            top_p=1.0,
            top_k=0,
            loss_type="dapo",
            scale_rewards="group",
            beta=0.0,
            epsilon=0.2,
            learning_rate=task["learning_rate"],
            lr_scheduler_type="constant",
            adam_beta1=task["betas"][0],
            adam_beta2=task["betas"][1],
            weight_decay=0.0,
            max_grad_norm=task["max_grad_norm"],
            gradient_checkpointing=False,
            seed=task["seed"],
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(task["train"]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    first = _accuracy(trainer.model, tokenizer, reward, task)
    trainer.train()
    result = {
        "step_s": [after - before for before, after in zip(clock.ended_s, clock.ended_s[1:], strict=False)],
        "rewards": _by_step(reward.means, task["num_iterations"]),
        "tokens": sum(reward.num_tokens),
        "accuracy": [first, _accuracy(trainer.model, tokenizer, reward, task)],
        "versions": {module.__name__: module.__version__ for module in (trl, torch, transformers, accelerate)},
    }
    Path(result_file).write_text(json.dumps(result))


def _by_step(values: list[float], num_steps: int) -> list[float]:
    """Means over the calls of each step."""
    calls = len(values) // num_steps
    return [sum(values[start : start + calls]) / calls for start in range(0, calls * num_steps, calls)]


@torch.no_grad()
def _accuracy(model: Any, tokenizer: Any, reward: _ExactMatch, task: dict[str, Any]) -> float:
    """Greedy, on held-out prompts."""
    model.eval()
    right = 0.0
    for start in range(0, len(task["held_out"]), _EVALUATED_AT_ONCE):
        rows = task["held_out"][start : start + _EVALUATED_AT_ONCE]
        inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
        found = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            max_new_tokens=task["max_tokens"],
            eos_token_id=task["stop_token_ids"],
            pad_token_id=tokenizer.pad_token_id,
        )
        for token_ids, row in zip(found[:, inputs["input_ids"].shape[1] :].tolist(), rows, strict=True):
            stops = [place for place, token in enumerate(token_ids) if token in task["stop_token_ids"]]
            right += reward.of(token_ids[: stops[0] + 1] if stops else token_ids, row["answer"])
    model.train()
    return right / len(task["held_out"])


if __name__ == "__main__":
    main(*sys.argv[1:])
