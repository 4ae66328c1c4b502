"""vLLM's worker for CPUs, with steps that take as long as those of a device of its own would.

A step that was computed sooner waits, without the cores, until a device would have been done; what vLLM does between
steps comes on top. This module imports vLLM: only an engine's processes need it.
"""

import time
from typing import TYPE_CHECKING, Any

from vllm.v1.worker.cpu_worker import CPUWorker

from benchmarks.replay.workload import device_step_s

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput


class PacedWorker(CPUWorker):  # type: ignore[misc]
    """Named by `VllmSettings.worker_class`."""

    _until_s = 0.0
    """When the step under way may end."""

    def execute_model(self, scheduler_output: "SchedulerOutput") -> Any:
        """The first half of a step; None: tokens are to be drawn."""
        num_sequences = len(scheduler_output.num_scheduled_tokens)
        self._until_s = time.monotonic() + device_step_s(num_sequences, scheduler_output.total_num_scheduled_tokens)
        output = super().execute_model(scheduler_output)
        return output if output is None else self._in_time(output)

    def sample_tokens(self, grammar_output: "GrammarOutput | None") -> Any:
        """The second half."""
        return self._in_time(super().sample_tokens(grammar_output))

    def _in_time(self, output: Any) -> Any:
        time.sleep(max(0.0, self._until_s - time.monotonic()))
        return output
