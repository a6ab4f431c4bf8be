"""Generate the page about offload."""

from __future__ import annotations

from docs.pages import define_page
from schedir.predict import zero_infinity as zi

PEAK = 70e12  # floating-point operations per second of a GPU


def build_blocks() -> dict[str, object]:
    """Return the bandwidths that the equations of ZeRO-Infinity require."""
    rates = [
        ("parameters and gradients", "seq bsz", 9, zi.intensity_of_parameters(1024, 1)),
        ("optimizer state", "seq bsz / 4", 10, zi.intensity_of_optimizer(1024, 1)),
        ("inputs for recomputation", "24 hd ci", 11, zi.intensity_of_checkpoints(2048)),
    ]
    intensities = "\n".join(
        f"| {what} | {formula} | {number} | {zi.required_bandwidth(0.5, ait, PEAK) / 1e9:.3g} "
        "GB/s |"
        for what, formula, number, ait in rates
    )
    return {"intensities": intensities}


PAGES = define_page("how-to/offload-to-the-host", build_blocks)
