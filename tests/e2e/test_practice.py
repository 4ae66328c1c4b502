"""LoRA, whole: learns, is killed and resumed, and leaves a plain model."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.engine
@pytest.mark.parametrize("publish", ["merged", "adapters"])
def test_adapters_learn_over_a_kill_and_leave_a_merged_model(
    start_run: Callable[..., Any], assert_adds_up: Callable[[dict[str, Any]], None], publish: str
) -> None:
    run = start_run(
        {
            "trainer.lora_rank": 16,
            "trainer.lora_publish": publish,
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
    logs = [log.read_text() for log in (Path(run.folder) / "logs").glob("generator-*.log")]
    assert len(logs) == 2 and not any("of canaries differ" in log for log in logs)

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


def test_a_fleet_that_is_sent_adapters_alone_has_what_they_are_added_to_whoever_dies(
    start_run: Callable[..., Any], assert_adds_up: Callable[[dict[str, Any]], None]
) -> None:
    """A generator that starts again, then the whole run, which goes back two versions; on engines without weights."""
    run = start_run(
        {
            "generator.engine": "fake",
            "generator.fake_step_ms": {"1": 15.0},
            "generator.max_running": 8,
            "data.prompts_per_batch": 8,
            "data.samples_per_prompt": 4,
            "eval.num_prompts": 16,
            "trainer.num_iterations": 9,
            "trainer.checkpoint_every": 2,
            "trainer.keep_checkpoints": 9,
            "trainer.lora_rank": 2,
            "trainer.lora_publish": "adapters",
            "weights.keep_versions": 2,
            "scheduler.lease_s": 2,
        }
    )
    run.wait_for_iteration(3)
    run.service("generator-0").kill()
    run.wait_for_iteration(6)
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    assert run.left_behind() == []
    command = [sys.executable, "-m", "streamrl.command.main", "rollback", str(run.folder), "--version", "4"]
    subprocess.run(command, check=True, timeout=60)
    run.resume()
    summary = run.finish(400)
    assert run.process.returncode == 0, run.log()
    assert_adds_up(summary)
    assert summary["attempts"] == 2

    folder = Path(run.folder)
    sizes = {int(file.name[8:16]): file.stat().st_size for file in (folder / "weights").glob("*.safetensors")}
    assert sizes.keys() == {0, 8, 9}
    assert 4 * sizes[9] < sizes[0]
    # Sent to each life of each instance once, and published once.
    assert summary["weights"]["bytes_sent"] < 0.7 * summary["weights"]["bytes_full"]
    log = (folder / "logs" / "weights.log").read_text()
    announced = re.findall(r"version=(\d+) \(attempt (\d)\) is announced", log)
    assert [attempt for version, attempt in announced if version == "0"] == ["1"]
    assert ("5", "1") in announced and ("5", "2") in announced
