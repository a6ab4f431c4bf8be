"""The configuration of a mixture-of-experts GPT. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from schedir.errors import UsageError, describe
from schedir.ir.pipeline.stage_segments import COMBINE, DISPATCH
from schedir.models.gpt_config import GPTConfig
from schedir.models.partitioning import require_positive

# The letters of a layer's segment boundaries: the all-to-alls before and after its experts.
MOE_LAYER_BOUNDARIES: Final = DISPATCH + COMBINE


@dataclass(frozen=True)
class MoEConfig(GPTConfig):
    """The configuration of a GPT with experts as its feed-forward networks.

    A router sends each token to the `active` experts with the largest probabilities. The outputs of
    these experts are weighted by their probabilities and added. These probabilities are scaled so
    that their sum is 1 (Mixtral, arXiv 2401.04088).

    The auxiliary loss of a layer and microbatch is `aux_loss` * tokens * experts * sum(f * p)
    (arXiv 2101.03961, equation 4). The sum is over the experts: f is an expert's share of the
    tokens, and p its mean probability. Each replica computes the loss for its tokens.

    Args:
        experts: Number of experts of a layer.
        active: Number of experts that process each token.
        expert_hidden: Number of hidden units of an expert. 0 is 4 * hidden.
        shared_experts: Number of experts that process all tokens, in addition to the `active`
            experts (DeepSeekMoE, arXiv 2401.06066). Each replica has all shared experts. 0 is none.
        aux_loss: The factor of the auxiliary loss.
        balance_rate: The change of each expert's routing bias in an update, such as 0.001. The bias
            balances the experts without an auxiliary loss (arXiv 2412.19437, section 2.1.2). 0 is
            no bias.
        capacity_factor: The size of a rank's buffer for tokens, divided by the number of tokens
            that its experts receive from a balanced router. If more tokens arrive than fit, the
            step raises an error.

    Raises:
        UsageError: A number is not positive, or does not fit the other numbers.
    """

    experts: int = 8
    active: int = 2
    expert_hidden: int = 0
    shared_experts: int = 0
    aux_loss: float = 0.01
    balance_rate: float = 0.0
    capacity_factor: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "experts", "active")
        for name in ("expert_hidden", "shared_experts"):
            if getattr(self, name):
                require_positive(self, name)
        if self.active > self.experts:
            raise UsageError(
                f"active is {self.active}, but a layer has only {self.experts} experts",
                fields=["active", "experts"],
            )
        for name, min_value in (("aux_loss", 0), ("balance_rate", 0), ("capacity_factor", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(f"{name} must be a number, not {describe(value)}", fields=[name])
            if not min_value <= value < math.inf:
                raise UsageError(
                    f"{name} is {value:g}; it must be finite and at least {min_value}",
                    fields=[name],
                )

    @property
    def expert_width(self) -> int:
        """Number of hidden units of an expert."""
        return self.expert_hidden or 4 * self.hidden

    @property
    def num_parameters(self) -> int:
        """Number of parameters. A tied weight counts once."""
        dense_network = 8 * self.hidden**2 + 5 * self.hidden
        expert = 2 * self.hidden * self.expert_width + self.expert_width + self.hidden
        added_per_layer = self.experts * (expert + self.hidden) - dense_network
        if self.shared_experts:  # All shared experts are one network, with one output bias.
            added_per_layer += self.shared_experts * (expert - self.hidden) + self.hidden
        added_per_layer += self.experts * (self.balance_rate > 0)
        return super().num_parameters + self.layers * added_per_layer

    def compute_capacity(self, tokens: int, ep: int) -> int:
        """Return the number of rows of a rank's buffer for the tokens of its experts.

        Args:
            tokens: Number of tokens of a microbatch. Each token is sent to `active` experts.
            ep: Number of ranks among which the experts are divided.

        Example:
            >>> config = MoEConfig(active=2, capacity_factor=1.5)
            >>> config.compute_capacity(8, 1), config.compute_capacity(8, 4)
            (16, 24)
        """
        rows = tokens * self.active
        # All ranks together send at most `ep` times the rows of one rank.
        return math.ceil(min(self.capacity_factor, ep) * rows)
