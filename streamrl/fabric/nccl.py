"""vLLM's NCCL communicator, the one of its own weight transfer, as a `Network`. Not tested on hardware.

Members find each other by NCCL's unique id, which comes to them with the negotiation. vLLM's other way, a store on a
TCP port, unpickles what it is sent: there, whoever reaches the port could run code.
"""

import torch
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.utils.nccl import unpinned_nccl_env

_BLOCK_BYTES = 64 * 1024**2


class NcclNetwork:
    """The first GPU that this process sees. NCCL wants another GPU for each member of a group."""

    def __init__(self) -> None:
        """
        Raises:
            RuntimeError: this process sees no CUDA device.
        """
        if not torch.cuda.is_available():
            raise RuntimeError("weights.fabric is set, and there is no CUDA device here")
        self._device = torch.device("cuda", 0)
        torch.cuda.set_device(self._device)

    def mint(self) -> bytes:
        with unpinned_nccl_env():
            return bytes(NCCLLibrary().ncclGetUniqueId().internal)

    def join(self, unique_id: bytes, rank: int, world_size: int) -> "NcclCommunicator":
        return NcclCommunicator(unique_id, rank, world_size, self._device)


class NcclCommunicator:
    """See `Communicator`. Takes one block of host memory and one of the device's."""

    def __init__(self, unique_id: bytes, rank: int, world_size: int, device: torch.device) -> None:
        with unpinned_nccl_env():
            self._communicator = PyNcclCommunicator.from_unique_id_bytes(unique_id, rank, world_size, device)
        if self._communicator.disabled:
            raise RuntimeError("vLLM's NCCL communicator is switched off: unset VLLM_DISABLE_PYNCCL")
        self._is_sender = rank == 0
        self._on_device = torch.empty(_BLOCK_BYTES, dtype=torch.uint8, device=device)
        self._on_host = torch.empty(_BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        self.staging = self._on_host.numpy().data

    def broadcast(self, num_bytes: int) -> None:
        on_device, on_host = self._on_device[:num_bytes], self._on_host[:num_bytes]
        stream = torch.cuda.current_stream()
        if self._is_sender:
            on_device.copy_(on_host, non_blocking=True)
        self._communicator.broadcast(on_device, src=0, stream=stream)
        if not self._is_sender:
            on_host.copy_(on_device, non_blocking=True)
        stream.synchronize()

    def leave(self) -> None:
        self._communicator.destroy()
