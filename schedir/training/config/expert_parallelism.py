"""The requirements of expert parallelism in a configuration. Needs no torch."""

from __future__ import annotations

from typing import Any

from schedir.errors import UsageError
from schedir.models.moe_config import MoEConfig


def require_expert_parallelism(config: Any) -> None:
    """Refuse settings that do not fit a mixture-of-experts model or its experts on several ranks.

    Args:
        config: The configuration of the run.

    Raises:
        UsageError: The settings do not fit.
    """
    pipeline, ep = config.pipeline, config.pipeline.ep

    def refuse(fact: str, hint: str, *fields: str) -> UsageError:
        return UsageError(fact, hint=hint, fields=fields)

    if not isinstance(config.model, MoEConfig):
        if ep > 1:
            raise refuse(
                f"ep is {ep}, but the model has no experts", 'kind = "moe", or ep = 1', "ep", "kind"
            )
        return
    if pipeline.frozen_stages:
        raise refuse(
            "a model of kind 'moe' has no frozen stages", "frozen_stages = 0", "frozen_stages"
        )
    if ep == 1:
        return
    if config.model.experts % ep:
        raise refuse(
            f"ep = {ep} does not divide {config.model.experts} experts", "", "ep", "experts"
        )
    if max(config.segmentation.segments_per_stage) == 1:
        raise refuse(
            f"ep is {ep}, so stages need segments between their all-to-alls",
            'stage_segments = "layers"',
            "ep",
            "stage_segments",
        )
    for name, section in (("zero", pipeline), ("checkpoint_dir", config.train)):
        if getattr(section, name):
            raise refuse(
                f"{name} does not support ep = {ep}: replicas have different experts",
                f"ep = 1, or leave out {name}",
                name,
                "ep",
            )
