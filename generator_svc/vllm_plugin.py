"""What vLLM loads in every process of an engine, through the entry point `vllm.general_plugins`."""

import multiprocessing
import time

_WAIT_S = 50e-6


def register() -> None:
    """Registers our weight transfer, and ties engine processes to the life of the process that started them.

    vLLM's own workers watch the engine core, but nothing watches the process above it: when that is killed, the engine
    would stay. The process that owns the engine is left alone, its life is not the engine's business.
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from generator_svc.weight_transfer import BACKEND
    from streamrl.lifetime import die_with_parent

    WeightTransferEngineFactory.register_engine(BACKEND, "generator_svc.weight_transfer", "VersionTransferEngine")
    parent = multiprocessing.parent_process()
    if parent is not None:
        die_with_parent(parent.pid)
        if current_platform.is_cpu():
            wait_without_spinning()
            ask_for_matrix_units()


def wait_without_spinning() -> None:
    """Makes the engine's core and workers sleep, in short turns, while they wait for each other.

    vLLM lets the waiting side spin, which suits hosts with cores to spare beside their GPUs. Where the model itself
    runs on the cores, spinning was half of all the processor time that an engine took.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    assert hasattr(shm_broadcast, "sched_yield"), "this vLLM waits in another way"
    shm_broadcast.sched_yield = lambda: time.sleep(_WAIT_S)


def ask_for_matrix_units() -> None:
    """Asks the kernel for the use of AMX, which it grants a process on demand.

    vLLM's attention uses it for bfloat16 wherever the processor has it, but only other libraries ask, and only when
    the model is large enough for their own use of it: a small one would end the worker with an illegal instruction.
    """
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
