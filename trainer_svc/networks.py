"""What one rank trains and asks: the policy, and the reference and the critic where the algorithm has them."""

import logging
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trainer_svc.critic import Critic
from trainer_svc.microbatches import MicroBatch
from trainer_svc.policy import Policy
from trainer_svc.reference import PolicyWithoutAdapters, Reference

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Networks:
    """Every rank calls every method, in one order."""

    policy: Policy
    reference: Reference | PolicyWithoutAdapters | None = None
    critic: Critic | None = None
    keeps_proximal: bool = False
    """Whether the log-probs of the policy at the batch's start are needed after it has changed."""

    @property
    def prepares(self) -> bool:
        """Whether `prepare` finds anything."""
        return self.reference is not None or self.critic is not None or self.keeps_proximal

    def prepare(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """What forward passes say of a micro-batch, by field of `TrainSample`: (rows, targets), float32,
        on the CPU."""
        found = {}
        if self.reference is not None:
            found["reference_logprobs"] = self.reference.answer_logprobs(micro_batch)
        if self.keeps_proximal:
            found["proximal_logprobs"] = self.policy.answer_logprobs(micro_batch)
        if self.critic is not None:
            found["values"] = self.critic.values(micro_batch)
        return {name: values.float().cpu() for name, values in found.items()}

    def begin_preparing(self) -> None:
        """Before a chunk of micro-batches is prepared: brings in what lies in host memory."""
        if isinstance(self.reference, Reference):
            self.reference.bring_in()

    def end_preparing(self) -> None:
        """After it."""
        if isinstance(self.reference, Reference):
            self.reference.put_out()

    def save(self, folder: Path) -> None:
        """Writes all that learns into a checkpoint."""
        self.policy.save(folder)
        if self.critic is not None:
            self.critic.save(folder)

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote. A checkpoint without a critic is of a run that has had none so far: it begins to
        learn now. Raises as `Policy.load`."""
        self.policy.load(folder)
        if self.critic is not None:
            if self.critic.is_in(folder):
                self.critic.load(folder)
            else:
                logger.warning("%s has no critic: it begins as a copy of the initial model", folder.name)

    def close(self) -> None:
        """Releases DeepSpeed's hooks and buffers."""
        for network in (self.policy, self.reference, self.critic):
            if network is not None:
                network.close()
