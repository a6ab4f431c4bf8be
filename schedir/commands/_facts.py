"""Facts of a run, as several commands say them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedir.predict.timeline import Timeline


def facts(timeline: Timeline) -> dict[str, Any]:
    """What is said of a run as a whole."""
    return {
        "program": timeline.program.name,
        "digest": timeline.program.digest,
        "kind": timeline.kind,
        "stages_per_rank": timeline.program.plan.stages_per_rank,
        "doubt": timeline.doubt,
        "unit": timeline.unit,
        "span": timeline.span,
        "bubble": timeline.bubble,
        "bubble_over_ideal": timeline.bubble_over_ideal,
    }
