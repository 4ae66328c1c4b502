"""LoRA, whole: learns, is killed and resumed, and leaves a plain model."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_adapters_learn_over_a_kill_and_leave_a_merged_model(
    start_run: Callable[..., Any], assert_adds_up: Callable[[dict[str, Any]], None]
) -> None:
    run = start_run(
        {
            "trainer.lora_rank": 16,
            "trainer.learning_rate": 1e-3,
            "trainer.learning_rate_schedule": "cosine",
            "trainer.warmup_steps": 2,
            "trainer.kl": "loss",
            "trainer.num_iterations": 20,
            "trainer.checkpoint_every": 4,
            "eval.every": 0,
        }
    )
    run.wait_for_iteration(6, 600)
    run.process.send_signal(signal.SIGKILL)
    assert run.left_behind() == []
    checkpoint = max((Path(run.folder) / "checkpoints").glob("attempt-0001-iteration-*"))
    run.resume()
    summary = run.finish(800)
    assert run.process.returncode == 0, run.log()
    assert_adds_up(summary)
    assert summary["attempts"] == 2
    assert summary["eval"]["last"] >= 0.85

    final = Path(run.folder) / "model"
    weights = load_file(final / "model.safetensors")
    # The checkpoint has adapters and their optimizer; the model is whole.
    saved = sum(file.stat().st_size for file in checkpoint.rglob("*model_states.pt"))
    assert saved < sum(tensor.nbytes for tensor in weights.values())
    assert not [name for name in weights if "lora" in name or "base_layer" in name]

    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(final)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(final)
    prompt = tokenizer("to 44 from 38", return_tensors="pt").input_ids
    with torch.no_grad():
        answer = model.generate(prompt, max_new_tokens=20, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True).split() == [str(number) for number in range(39, 45)]
