"""What an algorithm's name stands for, apart from its loss (losses.SURROGATES has that under the same name): settings
are checked against this table before torch is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from trainer_svc.advantages import GroupAdvantages, centred, leave_one_out, standardised


@dataclass(frozen=True)
class Algorithm:
    """How rewards become advantages, and what its paper sets where the settings say nothing."""

    advantages: GroupAdvantages
    loss_aggregation: str
    clip_ratio: float
    clip_ratio_high: float


ALGORITHMS: Mapping[str, Algorithm] = {
    # Shao et al. 2024 (arXiv 2402.03300), with every token weighing the same: by answer, long wrong ones weigh less.
    "grpo": Algorithm(standardised, "token_mean", 0.2, 0.2),
    # Liu et al. 2025 (arXiv 2503.20783).
    "dr_grpo": Algorithm(centred, "sequence_sum", 0.2, 0.2),
    # Ahmadian et al. 2024 (arXiv 2402.14740), over the ratio of whole answers, clipped.
    "rloo": Algorithm(leave_one_out, "sequence_mean", 0.2, 0.2),
    # Zheng et al. 2025 (arXiv 2507.18071), section 5.1: ratios of whole answers stay much nearer to 1.
    "gspo": Algorithm(standardised, "sequence_mean", 3e-4, 4e-4),
    # MiniMax-M1 (arXiv 2506.13585), section 3.1: no lower bound; the upper one limits weights, not gradients.
    "cispo": Algorithm(standardised, "token_mean", 1.0, 4.0),
}
"""By `trainer.algorithm`."""
