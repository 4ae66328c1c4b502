"""What an algorithm's name stands for, apart from its loss (losses.SURROGATES has that under the same name): settings
are checked against this table before torch is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from trainer_svc.advantages import GroupAdvantages, centred, leave_one_out, standardised


@dataclass(frozen=True)
class Algorithm:
    """How rewards become advantages, and what its paper sets where the settings say nothing."""

    group_advantages: GroupAdvantages | None
    """Of answers to one prompt, compared with each other. None: of single tokens, normalised over the batch."""
    loss_aggregation: str
    clip_ratio: float
    clip_ratio_high: float
    has_critic: bool = False
    """Advantages are those of a critic's values, else the returns themselves."""
    refills: int = 0
    """Dynamic sampling: at most so many times a batch's prompts are asked for in place of those without spread."""
    has_answer_ratio: bool = False
    """Its ratios are of whole answers, where the small differences of all their tokens add up."""
    overlong_buffer_share: float = 0.0
    """Of `generator.max_tokens`: the last tokens, in which an answer loses reward."""

    def streams(self, steps_per_batch: int) -> bool:
        """Whether a group's gradients are known as soon as it is settled: else they wait for the whole batch."""
        return self.group_advantages is not None and steps_per_batch == 1

    @property
    def min_samples_per_prompt(self) -> int:
        return 1 if self.group_advantages is None else 2


ALGORITHMS: Mapping[str, Algorithm] = {
    # Shao et al. 2024 (arXiv 2402.03300), with every token weighing the same: by answer, long wrong ones weigh less.
    "grpo": Algorithm(standardised, "token_mean", 0.2, 0.2),
    # Liu et al. 2025 (arXiv 2503.20783).
    "dr_grpo": Algorithm(centred, "sequence_sum", 0.2, 0.2),
    # Yu et al. 2025 (arXiv 2503.14476), section 3; the buffer as in 4.1: 4,096 of 20,480 tokens.
    "dapo": Algorithm(standardised, "token_mean", 0.2, 0.28, refills=3, overlong_buffer_share=0.2),
    # Ahmadian et al. 2024 (arXiv 2402.14740), over the ratio of whole answers, clipped.
    "rloo": Algorithm(leave_one_out, "sequence_mean", 0.2, 0.2, has_answer_ratio=True),
    # Hu 2025 (arXiv 2501.03262).
    "reinforce_pp": Algorithm(None, "token_mean", 0.2, 0.2),
    # Zheng et al. 2025 (arXiv 2507.18071), section 5.1: ratios of whole answers stay much nearer to 1.
    "gspo": Algorithm(standardised, "sequence_mean", 3e-4, 4e-4, has_answer_ratio=True),
    # MiniMax-M1 (arXiv 2506.13585), section 3.1: no lower bound; the upper one limits weights, not gradients.
    "cispo": Algorithm(standardised, "token_mean", 1.0, 4.0),
    # Schulman et al. 2017 (arXiv 1707.06347), with the critic and batch normalisation of Ouyang et al. 2022.
    "ppo": Algorithm(None, "token_mean", 0.2, 0.2, has_critic=True),
}
"""By `trainer.algorithm`."""
