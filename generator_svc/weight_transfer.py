"""Loads a fetched weight version into vLLM's model, inside each worker of the engine.

Registered with vLLM by vllm_plugin.py. The bytes come through host memory that the generator has filled and checked
(version_buffer.py): nothing here waits for a network, so the engine stands still only while tensors are copied in. Each
worker of a tensor-parallel engine maps the same memory and takes its share.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from generator_svc.version_buffer import open_tensors
from streamrl.adapters import merged_tensors
from streamrl.v1.weights_pb2 import VersionManifest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

BACKEND = "streamrl"
"""The name that `WeightTransferConfig(backend=...)` selects it by."""


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """There is nothing to set up."""


@dataclass
class VersionUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A version that lies in shared memory."""

    path: str
    """`VersionBuffer.path`."""
    manifest: bytes
    """A serialized VersionManifest."""
    adapted_path: str = ""
    """Where the version has adapters: what they are added to. Likewise."""
    adapted_manifest: bytes = b""


class VersionTransferEngine(WeightTransferEngine[NoInit, VersionUpdate]):  # type: ignore[misc]
    """vLLM drives it: start, update once, finish; nothing runs in between.

    Any error after the start leaves a model that is partly replaced: whoever drives it must give the engine up.
    """

    init_info_cls = NoInit
    update_info_cls = VersionUpdate

    def __init__(
        self, config: "WeightTransferConfig", vllm_config: "VllmConfig", device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._to_load: set[str] = set()

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    def start_weight_update(self) -> None:
        """Brings the model back into the form of a checkpoint: on CPUs and under quantization the loaded layers are
        repacked and take no plain tensors."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        tied = _names(self.model, remove_duplicate=False) - _names(self.model)
        initialize_layerwise_reload(self.model)
        self._to_load = _names(self.model) - tied

    def update_weights(self, update_info: dict[str, object]) -> None:
        """As the base class does, which though synchronises an accelerator that CPUs do not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: VersionUpdate) -> None:
        """Loads every tensor of the version.

        Raises:
            ValueError: the version has tensors that the model does not know, or lacks some that it needs: vLLM itself
                would keep the old values of those without a word.
        """
        manifest = VersionManifest.FromString(update_info.manifest)
        tensors = open_tensors(update_info.path, manifest)
        if manifest.HasField("adapter"):
            # Merged here, a tensor at a time: what is added to is in host memory once, and on the device never whole.
            adapted = VersionManifest.FromString(update_info.adapted_manifest)
            whole = open_tensors(update_info.adapted_path, adapted)
            tensors = merged_tensors(whole, tensors, manifest.adapter.scaling, self.device)
        loaded = self.model.load_weights(tensors)
        missing = self._to_load - loaded if loaded is not None else set()
        if missing:
            raise ValueError(
                f"version {manifest.weight_version} has no values for {len(missing)} of the model's parameters: "
                f"{', '.join(sorted(missing)[:5])}"
            )

    def finish_weight_update(self) -> None:
        """Repacks the layers for the kernels, into the memory they had before."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_tied_head(self.model)

    def shutdown(self) -> None:
        pass


def _names(model: torch.nn.Module, *, remove_duplicate: bool = True) -> set[str]:
    return {name for name, _ in model.named_parameters(remove_duplicate=remove_duplicate)}


def _repack_tied_head(model: torch.nn.Module) -> None:
    """A head tied to the embedding gets no tensor of its own, so that vLLM does not repack it; its kernel on CPUs
    computes with a packed copy, which is the old version's."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    heads = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    embeddings = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    for head in heads:
        if any(head.weight is embedding.weight for embedding in embeddings if embedding is not head):
            head.quant_method.process_weights_after_loading(head)
