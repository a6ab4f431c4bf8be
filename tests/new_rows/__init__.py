"""New rows: kinds of instruction, each a row, a pass and a handler in a copy of the tree.

    stash       a change of tier on lanes of their own: to the disk and back
    verdict     a collective: all ranks judge together whether the gradients are finite
    compress    a change of form: activations are sent in fewer bytes

Three more are looked at and not run, and have no handlers:

    log         a value beside what a forward saves, moved to the host, and read and freed there
    tape        what an I makes of what was saved, moved to the host and back
    clamp       a change of each stage's gradient by what a rank gives; and what only reads weights

Each is edits of the tables in `ir/isa/instruction_table.py` and its numbers in `ir/isa/opcodes.py`
(`EDITS`), the file of a pass (`*_pass.py`), and the file of its handlers (`*_handlers.py`).
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from schedir.ir.isa.opcodes import Form, Lane, Opcode, Value

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
PRODUCT = ("schedir", "kernels", "viz")

_LAST = {each: [*each][-1] for each in (Opcode, Value, Lane, Form)}
_OPCODES, _TOKENS, _LANES, _FORMS = (f"    {last.name} = {last}\n" for last in _LAST.values())
_TOKEN_ROWS = f"    ValueRow(\n        _V.{_LAST[Value].name}, "
_LANE_ROWS = f"    LaneRow(_L.{_LAST[Lane].name}, "
_FORM_ROWS = f"    FormRow(Form.{_LAST[Form].name}, "
_INSTRUCTION_ROWS = f"    Row(\n        _O.{_LAST[Opcode].name}, "

# What is inserted behind what in opcodes.py and instruction_table.py; text behind "=" is replaced.
EDITS: dict[str, list[tuple[str, str]]] = {
    "stash": [
        (_OPCODES, "    Stash = {next}\n    Take = {next}\n"),
        (_LANES, "    AWAY = {lane}\n    BACK = {lane}\n"),
        (_LANE_ROWS, """\
    LaneRow(_L.AWAY, False, "starts", "copies straight to the disk"),
    LaneRow(_L.BACK, False, "starts", "copies straight back"),
"""),
        (_INSTRUCTION_ROWS, """\
    Row(_O.Stash, "stash", _L.AWAY, _MB, (_V.SAVED,), (_V.SAVED,), (),
        "Moves what a forward saved straight to the disk.", cost="stash",
        changes=(Change(_V.SAVED, "device", "disk"),), traffic=Traffic("disk", ("saved",))),
    Row(_O.Take, "take", _L.BACK, _MB, (_V.SAVED,), (_V.SAVED,), (),
        "Moves it back.", cost="stash", changes=(Change(_V.SAVED, "disk", "device"),)),
"""),
    ],
    "verdict": [
        (_OPCODES, "    Judge = {next}\n"),
        (_TOKENS, "    VERDICT = {token}\n"),
        (_TOKEN_ROWS, '    ValueRow(_V.VERDICT, _RANK, _ALL, "the verdict"),\n'),
        ('="step", _L.COMPUTE, _RANK,\n        needs=(\n            ',
         '"step", _L.COMPUTE, _RANK,\n        needs=(\n            _V.VERDICT, '),
        (_INSTRUCTION_ROWS, """\
    Row(_O.Judge, "judge", _L.DP, _RANK, (_V.GRAD,), (_V.VERDICT,), (),
        "All ranks count together what is not finite.", cost="judge", partner=_O.Judge,
        group="model", host_sync="always"),
"""),
    ],
    "compress": [
        (_OPCODES, "    Compress = {next}\n    Decompress = {next}\n"),
        (_FORMS, "    PACKED = {form}\n"),
        (_FORM_ROWS, '    FormRow(Form.PACKED, "the value in fewer bytes", size="packed"),\n'),
        (_INSTRUCTION_ROWS, """\
    Row(_O.Compress, "compress", _L.COMPUTE, _MB, (_V.ACT_OUT,), (_V.ACT_OUT,), (),
        "Packs an activation.", cost="compress", form=Form.PACKED),
    Row(_O.Decompress, "decompress", _L.COMPUTE, _MB, (_V.ACT_IN,), (_V.ACT_IN,), (),
        "Unpacks it.", cost="compress", form=Form.PACKED),
"""),
    ],
}  # fmt: skip
LOOKED_AT: dict[str, list[tuple[str, str]]] = {
    "log": [
        (_OPCODES, "    ToHost = {next}\n    Log = {next}\n"),
        (_TOKENS, "    SEEN = {token}\n    MASK = {token}\n"),
        (_TOKEN_ROWS, """\
    ValueRow(_V.SEEN, _MB, _ONCE, "what is logged", "seen"),
    ValueRow(_V.MASK, _MB, _ONCE, "the mask", "mask"),
"""),
        (_LANES, "    COPY = {lane}\n    NOTES = {lane}\n"),
        (_LANE_ROWS, """\
    LaneRow(_L.COPY, False, "starts", "copies to the host"),
    LaneRow(_L.NOTES, False, "starts", "what the host does"),
"""),
        ("=gives=(_V.ACT_OUT, _V.SAVED, _V.SKIP_OUT),",
         "gives=(_V.ACT_OUT, _V.SAVED, _V.SKIP_OUT, _V.SEEN, _V.MASK),"),
        ("=gives=(_V.GRAD_OUT, _V.WGRAD, _V.SKIP_GRAD_OUT),\n        frees=(_V.SAVED, ",
         "gives=(_V.GRAD_OUT, _V.WGRAD, _V.SKIP_GRAD_OUT),\n        frees=(_V.MASK, _V.SAVED, "),
        ('="B", _L.COMPUTE, _MB,\n        needs=(',
         '"B", _L.COMPUTE, _MB,\n        needs=(_V.MASK, '),
        (_INSTRUCTION_ROWS, """\
    Row(_O.ToHost, "to_host", _L.COPY, _MB, (_V.SEEN,), (_V.SEEN,), (),
        "Moves what is logged to the host.", cost="to_host",
        changes=(Change(_V.SEEN, "device", "host"),)),
    Row(_O.Log, "log", _L.NOTES, _MB, (_V.SEEN,), (), (_V.SEEN,), "Logs it there.", cost="log",
        changes=(Change(_V.SEEN, "host", "host"),)),
"""),
    ],
    "tape": [
        (_OPCODES, "    OffloadTape = {next}\n    ReloadTape = {next}\n"),
        (_LANES, "    TAPES = {lane}\n"),
        (_LANE_ROWS, '    LaneRow(_L.TAPES, False, "starts", "copies of tapes"),\n'),
        (_INSTRUCTION_ROWS, """\
    Row(_O.OffloadTape, "offload_tape", _L.TAPES, _MB, (_V.DEFERRED_WGRAD,), (_V.DEFERRED_WGRAD,),
        (),
        "Moves what an I leaves to the host.", cost="move",
        changes=(Change(_V.DEFERRED_WGRAD, "device", "host"),)),
    Row(_O.ReloadTape, "reload_tape", _L.TAPES, _MB, (_V.DEFERRED_WGRAD,), (_V.DEFERRED_WGRAD,), (),
        "Moves it back.", cost="move", changes=(Change(_V.DEFERRED_WGRAD, "host", "device"),)),
"""),
    ],
    "clamp": [
        (_OPCODES, "    Clamp = {next}\n    Copy = {next}\n"),
        (_TOKENS, "    CLAMPED = {token}\n"),
        (_TOKEN_ROWS, '    ValueRow(_V.CLAMPED, _STAGE, _ALL, "the clamped gradient"),\n'),
        ("=_V.GRAD, _V.NORM, _V.SHARDED_PARAMS, _V.SNAPSHOT,",
         "_V.CLAMPED, _V.SHARDED_PARAMS, _V.SNAPSHOT,"),
        ("=gives=(_V.PARAMS, _V.LOCAL_NORM),\n        frees=(_V.GRAD, _V.NORM),",
         "gives=(_V.PARAMS, _V.LOCAL_NORM),\n        frees=(_V.CLAMPED,),"),
        (_INSTRUCTION_ROWS, """\
    Row(_O.Clamp, "clamp", _L.COMPUTE, _STAGE, (_V.GRAD, _V.NORM), (_V.CLAMPED,),
        (_V.GRAD, _V.NORM), "Clamps a stage's gradient.", cost="clamp"),
    Row(_O.Copy, "copy", _L.COMPUTE, _RANK, (_V.PARAMS,), (), (),
        "Copies the weights that an update begins with."),
"""),
    ],
}  # fmt: skip


# The instructions that this tree has of all these kinds.
NEW = {
    Opcode[name]
    for edits in (EDITS | LOOKED_AT).values()
    for _, what in edits
    for name in re.findall(r"(\w+) = \{next\}", what)
    if name in Opcode.__members__
}


def copy(to: Path, *names: str) -> Path:
    """A copy of the tree, with the tests, extended by some of these rows; returns its folder."""
    for folder in (*PRODUCT, "tests"):
        shutil.copytree(ROOT / folder, to / folder, symlinks=True,
                        ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    files = [to / "schedir/ir/isa" / name for name in ("opcodes.py", "instruction_table.py")]
    texts = [file.read_text() for file in files]
    numbers = dict(zip(("next", "token", "lane", "form"), map(len, _LAST), strict=True))
    for name in names:
        for where, what in (EDITS | LOOKED_AT)[name]:
            for key in numbers:
                while f"{{{key}}}" in what:
                    what = what.replace(f"{{{key}}}", str(numbers[key]), 1)
                    numbers[key] += 1
            if where.startswith("="):
                where = where[1:]
            else:
                last = _last(next(text for text in texts if where in text), where)
                where, what = last, last + what
            (k,) = (k for k, text in enumerate(texts) if where in text)
            assert texts[k].count(where) == 1, (name, where)
            texts[k] = texts[k].replace(where, what)
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    for name in names:
        _add(to, name)
    return to


def _last(text: str, where: str) -> str:
    """The line that ends the list which a line of the tree's own ends: others come behind it."""
    begin = text.index(where)
    rest = text[begin:].split("\n")
    end = next(k for k, line in enumerate(rest) if not line.startswith("    "))
    return "\n".join(rest[:end]) + "\n"


def _add(to: Path, name: str) -> None:
    """The files of a pass and of handlers."""
    shutil.copy(HERE / f"{name}_pass.py", to / "schedir" / "passes" / f"{name}.py")
    if name not in LOOKED_AT:
        handlers = to / "schedir/runtime/handlers"
        shutil.copy(HERE / f"{name}_handlers.py", handlers / f"{name}_handlers.py")
