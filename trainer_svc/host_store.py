"""Tensors that lie in host memory while nobody computes with them.

A tensor that is put out keeps its identity, and so do views of it: its storage on the device is given back, and filled
again when it is brought in. Whatever else refers to it (DeepSpeed's flat buffers, an optimizer's state) need not know.
When to do so is decided by who owns the tensors.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class HostStore:
    """The host's copies of tensors of one owner."""

    def __init__(self, *, constant: bool = False) -> None:
        """
        Args:
            constant: nobody writes to the tensors: they are copied to the host once.
        """
        self._constant = constant
        self._copies: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._out = False

    def put_out(self, tensors: Iterable[Tensor]) -> None:
        """Copies tensors to the host and frees what they take on the device: nobody may use them until they are brought
        in. Constant ones must be the same each time."""
        assert not self._out, "put out twice"
        if not self._constant or not self._copies:
            # Views of one storage move together.
            storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
            # What was read from a file into host memory stays there: such a storage cannot be given back.
            self._copies = [(storage, _host_copy(storage)) for storage in storages.values() if storage.resizable()]
        for storage, _ in self._copies:
            storage.resize_(0)
        self._out = True

    def bring_in(self) -> None:
        """Makes the tensors usable, as they were. Without any that is out, nothing."""
        if not self._out:
            return
        for storage, copy in self._copies:
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy, non_blocking=True)
        if not self._constant:
            self._copies = []
        self._out = False


def _host_copy(storage: torch.UntypedStorage) -> Tensor:
    # Page-locked, where a device copies from and to it by itself; both copies are in the order of its stream.
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return copy.copy_(_bytes_of(storage), non_blocking=True)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
