"""vLLM's worker for CPUs, with steps that take as long as those of a device of its own would.

A step that was computed sooner waits, without the cores, until a device would have been done. This module imports vLLM:
only an engine's processes need it.
"""

import time
from typing import TYPE_CHECKING, Any

from vllm.v1.worker.cpu_worker import CPUWorker

from benchmarks.replay.workload import device_step_s

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class PacedWorker(CPUWorker):  # type: ignore[misc]
    """Named by `VllmSettings.worker_class`."""

    def execute_model(self, scheduler_output: "SchedulerOutput") -> Any:
        """As the worker that it is, but not sooner than a device."""
        num_sequences = len(scheduler_output.num_scheduled_tokens)
        until_s = time.monotonic() + device_step_s(num_sequences, scheduler_output.total_num_scheduled_tokens)
        output = super().execute_model(scheduler_output)
        time.sleep(max(0.0, until_s - time.monotonic()))
        return output
