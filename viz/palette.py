"""Colours that colour-blind readers can distinguish, also in a grey print.

The colours of F, R, I, W and B differ mainly in lightness, so that a grey print keeps the
difference. They also differ in hue, except that R has the hue of F. Each letter has its own range
of lightness. The shades within this range distinguish the stages of a rank. The palette "bright"
is an exception: its colours differ mainly in hue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedir.ir.isa.instructions import (
    COMPUTE_OPS,
    INSTRUCTIONS,
    LANES,
    RECOMPUTE,
    SEND_OPS,
    TIERS,
    Lane,
    Opcode,
    Row,
)

RGB = tuple[float, float, float]


class Tone(NamedTuple):
    """A hue with a range of lightness.

    Args:
        hue: The colour "#rrggbb" that is mixed with white or black.
        lightest: CIE L* of the lightest shade, from 0 (black) to 100 (white).
        darkest: CIE L* of the darkest shade.
    """

    hue: str
    lightest: float
    darkest: float


class Palette(NamedTuple):
    """The colours of a chart.

    Args:
        tones: The tones of F, R, B, I and W.
        lane_colors: The colour of each communication lane.
        step_color: The colour of an optimizer step.
    """

    tones: dict[Opcode, Tone]
    lane_colors: dict[Lane, str]
    step_color: str = "#c8c8c8"


TONES: Final = {
    Opcode.Forward: Tone("#7cc4ee", 92, 82),
    Opcode.Recompute: Tone("#7cc4ee", 80, 73),
    Opcode.BackwardInput: Tone("#f0a63c", 71, 62),
    Opcode.BackwardWeight: Tone("#1b9e77", 49, 41),
    Opcode.Backward: Tone("#4b3b8f", 31, 15),
}
LANE_COLORS: Final = {row.lane: row.color for row in LANES[1:]}
LIGHT_PALETTE: Final = Palette(TONES, LANE_COLORS)
# For a dark background: the same hues in the same order of lightness, all lighter than the
# background.
DARK_PALETTE: Final = Palette(
    {
        Opcode.Forward: Tone("#7cc4ee", 86, 77),
        Opcode.Recompute: Tone("#7cc4ee", 76, 69.5),
        Opcode.BackwardInput: Tone("#f0a63c", 69, 61),
        Opcode.BackwardWeight: Tone("#1b9e77", 53, 45),
        Opcode.Backward: Tone("#6a55c2", 37, 27),
    },
    LANE_COLORS
    | {Lane.ACT: "#3d9bd1", Lane.GRAD: "#e8772e", Lane.DP: "#e6e6e6", Lane.PARAMS: "#d98fb9"}
    | {Lane.D2H: "#b8935a", Lane.H2D: "#e3cb98", Lane.DISK: "#7d5f49", Lane.HOST: "#93b84a"},
)
# The palettes of a chart. All palettes except "bright" have the ranges of lightness of `TONES`.
PALETTES: Final = {
    "plain": LIGHT_PALETTE,
    "grey": Palette(
        {op: Tone("#808080", tone.lightest, tone.darkest) for op, tone in TONES.items()},
        LANE_COLORS
        | {Lane.ACT: "#8c8c8c", Lane.GRAD: "#3c3c3c", Lane.TP: "#b4b4b4", Lane.DP: "#1a1a1a"}
        | {Lane.PARAMS: "#646464", Lane.D2H: "#787878", Lane.H2D: "#b4b4b4", Lane.DISK: "#3c3c3c"}
        | {Lane.HOST: "#969696"},
    ),
    # The colours of Okabe and Ito (2008), which colour-blind readers distinguish by hue.
    "bright": Palette(
        {
            Opcode.Forward: Tone("#56b4e9", 75, 65),
            Opcode.Recompute: Tone("#56b4e9", 92, 86),
            Opcode.BackwardInput: Tone("#f0e442", 92, 84),
            Opcode.BackwardWeight: Tone("#009e73", 62, 52),
            Opcode.Backward: Tone("#d55e00", 58, 48),
        },
        LANE_COLORS
        | {Lane.ACT: "#0072b2", Lane.GRAD: "#cc79a7", Lane.TP: "#7a7a7a", Lane.DP: "#1a1a1a"}
        | {Lane.PARAMS: "#a6761d", Lane.D2H: "#5b4a1f", Lane.H2D: "#b39b5e", Lane.DISK: "#261c14"}
        | {Lane.HOST: "#3d6b00"},
    ),
}
HATCHED_OPS: Final = frozenset({RECOMPUTE})  # R has the hue of F, so hatching distinguishes R.
ACCENT_COLOR: Final = "#c8005f"  # The critical path.
IDLE_COLOR: Final = "#9a9a9a"  # The hatching of a bubble.
# CIE L* of the band of an unsharded stage: for the first and for the last stage of a rank.
_UNSHARDED_LIGHTNESS: Final = (89.0, 70.0)
_OUTLINE_LIGHTNESS: Final = 95.0  # CIE L*: a lighter box needs an outline on white paper

# Names in legends.
OP_NAMES: Final = {
    Opcode.Forward: "F forward",
    Opcode.Recompute: "R recompute",
    Opcode.Backward: "B backward",
    Opcode.BackwardInput: "I backward, input",
    Opcode.BackwardWeight: "W backward, weight",
    Opcode.OptimizerStep: "optimizer step",
}
LANE_NAMES: Final = {row.lane: row.label or row.doc for row in LANES[1:]}
# Lanes with incoming and outgoing transfers. Incoming transfers have a lighter colour.
TWO_WAY_LANES: Final = (Lane.ACT, Lane.GRAD, Lane.DISK)
UNSHARDED_LABEL: Final = "unsharded weights"

# Name in `Style` -> the instruction or lane whose colour a user can set by this name.
COLORED_KINDS: Final[dict[str, Opcode | Lane]] = {
    **{INSTRUCTIONS[op].text: op for op in COMPUTE_OPS},
    **{lane.name.lower(): lane for lane in LANE_COLORS},
    "step": Opcode.OptimizerStep,
}


def to_linear_light(colour: str | RGB) -> NDArray[np.float64]:
    """Convert an sRGB colour to linear light, shape (3,).

    Args:
        colour: "#rrggbb", or three numbers from 0 to 1.
    """
    if isinstance(colour, str):
        c = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    else:
        c = np.array(colour)
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def luminance(colour: str | RGB) -> float:
    """Return the relative luminance of a colour, from 0 (black) to 1 (white).

    Args:
        colour: "#rrggbb", or three numbers from 0 to 1.
    """
    return float(to_linear_light(colour) @ (0.2126, 0.7152, 0.0722))


def lightness(colour: str | RGB) -> float:
    """Return the CIE L* of a colour, from 0 (black) to 100 (white).

    Equal differences of L* look equally large, also in grey.

    Args:
        colour: "#rrggbb", or three numbers from 0 to 1.
    """
    y = luminance(colour)
    return 116 * y ** (1 / 3) - 16 if y > 216 / 24389 else y * 24389 / 27


def mix_to_lightness(hue: str, l_star: float) -> RGB:
    """Mix a colour with white or black until it has a given lightness.

    Args:
        hue: The colour "#rrggbb".
        l_star: CIE L* of the result, from 8 to 100. Below 8, the result is slightly too light.
    """
    target = ((l_star + 16) / 116) ** 3
    base = to_linear_light(hue)
    y = luminance(hue)
    mixed = base * target / y if target <= y else 1 - (1 - base) * (1 - target) / (1 - y)
    r, g, b = np.where(mixed <= 0.0031308, mixed * 12.92, 1.055 * mixed ** (1 / 2.4) - 0.055)
    return float(r), float(g), float(b)


def choose_shade(
    op: Opcode, local_stage: int, stages: int, palette: Palette = LIGHT_PALETTE
) -> RGB:
    """Return the colour of F, R, B, I or W for a stage of a rank.

    Args:
        op: The opcode.
        local_stage: The local stage.
        stages: The number of stages of the rank.
        palette: The palette.
    """
    tone = palette.tones[op]
    position = local_stage / (stages - 1) if stages > 1 else 0.5
    return mix_to_lightness(tone.hue, tone.lightest + (tone.darkest - tone.lightest) * position)


def choose_unsharded_shade(local_stage: int, stages: int, palette: Palette = LIGHT_PALETTE) -> RGB:
    """Return the colour of the band of an unsharded stage, in the hue of the `params` lane.

    Args:
        local_stage: The local stage.
        stages: The number of stages of the rank.
        palette: The palette.
    """
    position = local_stage / (stages - 1) if stages > 1 else 0.5
    return mix_to_lightness(
        palette.lane_colors[Lane.PARAMS],
        _UNSHARDED_LIGHTNESS[0] + (_UNSHARDED_LIGHTNESS[1] - _UNSHARDED_LIGHTNESS[0]) * position,
    )


def choose_box_color(
    op: int, local_stage: int, stages: int, palette: Palette = LIGHT_PALETTE
) -> str | RGB:
    """Return the colour of the box of an instruction.

    Args:
        op: The opcode.
        local_stage: The local stage. The local stage changes the shade of compute only.
        stages: The number of stages of the rank.
        palette: The palette.
    """
    if op in palette.tones:
        return choose_shade(Opcode(op), local_stage, stages, palette)
    row = INSTRUCTIONS[op]
    if row.lane not in palette.lane_colors:
        return palette.step_color
    base = palette.lane_colors[row.lane]
    return lighten_incoming(base) if _is_incoming(row) else base


def _is_incoming(row: Row) -> bool:
    """Return whether an opcode is an incoming transfer on one of `TWO_WAY_LANES`."""
    if row.lane not in TWO_WAY_LANES:
        return False
    if row.peer is not None:
        return row.op not in SEND_OPS
    return any(c.after in TIERS[: TIERS.index(c.before)] for c in row.changes if c.before in TIERS)


def recolor(palette: Palette, colours: Mapping[str, str]) -> Palette:
    """Return a palette with other colours for some instructions and lanes.

    Args:
        palette: The palette.
        colours: Colours "#rrggbb" by a name in `COLORED_KINDS`. The shades of a letter are up to 6
            L* lighter or darker than its colour.
    """
    tones, lanes, step = {**palette.tones}, {**palette.lane_colors}, palette.step_color
    for kind, hue in colours.items():
        kind_target = COLORED_KINDS[kind]
        if isinstance(kind_target, Lane):
            lanes[kind_target] = hue
        elif kind_target in tones:
            middle = lightness(hue)
            half_range = max(min(6.0, middle - 2, 98 - middle), 0.0)
            tones[kind_target] = Tone(hue, middle + half_range, middle - half_range)
        else:
            step = hue
    return Palette(tones, lanes, step)


def lighten_incoming(outgoing_color: str) -> RGB:
    """Return the lighter colour of incoming transfers.

    Args:
        outgoing_color: The colour "#rrggbb" of outgoing transfers on the lane.
    """
    return mix_to_lightness(outgoing_color, (lightness(outgoing_color) + 100) / 2)


def format_hex(colour: str | RGB) -> str:
    """Return a colour as "#rrggbb".

    Args:
        colour: "#rrggbb", or three numbers, which are clipped to the range from 0 to 1.
    """
    if isinstance(colour, str):
        return colour
    return "#" + "".join(f"{round(255 * min(max(part, 0.0), 1.0)):02x}" for part in colour)


def choose_outline(colour: str | RGB) -> str:
    """Return the colour of the outline of a box: white, or grey if the box is nearly white.

    Args:
        colour: The colour of the box.
    """
    return IDLE_COLOR if lightness(format_hex(colour)) > _OUTLINE_LIGHTNESS else "white"


def choose_text_color(colour: str | RGB) -> str:
    """Return "black" or "white", whichever has the higher contrast (WCAG, at least 4.5).

    Args:
        colour: The colour of the background.
    """
    y = luminance(colour) + 0.05
    return "black" if y / 0.05 > 1.05 / y else "white"
