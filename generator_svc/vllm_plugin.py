"""What vLLM loads in every process of an engine, through the entry point `vllm.general_plugins`."""

import multiprocessing


def register() -> None:
    """Registers our weight transfer, and ties engine processes to the life of the process that started them.

    vLLM's own workers watch the engine core, but nothing watches the process above it: when that is killed, the engine
    would stay. The process that owns the engine is left alone, its life is not the engine's business.
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from generator_svc.weight_transfer import BACKEND
    from streamrl.lifetime import die_with_parent

    WeightTransferEngineFactory.register_engine(
        BACKEND, "generator_svc.weight_transfer", "VersionTransferEngine"
    )
    parent = multiprocessing.parent_process()
    if parent is not None:
        die_with_parent(parent.pid)
