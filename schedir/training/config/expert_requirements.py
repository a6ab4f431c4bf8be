"""The requirements of expert parallelism in a configuration. Needs no torch."""

from __future__ import annotations

from typing import Any

from schedir.errors import UsageError
from schedir.models.moe_config import MoEConfig


def require_expert_parallelism(config: Any) -> None:
    """Check the settings against the experts of the model and the expert-parallel size.

    Args:
        config: The configuration of the run.

    Raises:
        UsageError: The settings do not fit the model or the expert-parallel size.
    """
    pipeline, ep = config.pipeline, config.pipeline.ep
    if not isinstance(config.model, MoEConfig):
        if ep > 1:
            raise UsageError(
                f"ep is {ep}, but the model has no experts",
                hint='kind = "moe", or ep = 1',
                fields=["ep", "kind"],
            )
        return
    if pipeline.frozen_stages:
        raise UsageError(
            f"frozen_stages = {pipeline.frozen_stages}, but a model of kind 'moe' cannot have "
            "frozen stages",
            hint="frozen_stages = 0",
            fields=["frozen_stages"],
        )
    if ep == 1:
        return
    if config.model.experts % ep:
        raise UsageError(
            f"ep = {ep} does not divide {config.model.experts} experts", fields=["ep", "experts"]
        )
    if max(config.segmentation.segments_per_stage) == 1:
        raise UsageError(
            f"ep is {ep}, so stages need segments between their all-to-alls",
            hint='stage_segments = "layers"',
            fields=["ep", "stage_segments"],
        )
    if pipeline.zero > 1:
        raise UsageError(
            f"zero is {pipeline.zero}, but with ep = {ep} only the optimizer state can be sharded",
            hint="zero = 1",
            fields=["zero", "ep"],
        )
