"""Tests of the rules for names of modules and classes, and for the number of files in a folder.

`docs/reference/glossary.md` has the terms.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from dataclasses import fields
from functools import cache
from inspect import signature
from pathlib import Path

import schedir
from schedir.analysis.progress_models import MODELS
from schedir.commands.common.program_options import PROGRAM_OPTIONS
from schedir.ir.isa.instructions import INSTRUCTIONS
from schedir.retired_names import (
    RENAMED_COSTS,
    RENAMED_FIELDS,
    RENAMED_INSTRUCTIONS,
    RENAMED_SIZES,
    RENAMED_VALUES,
    RETIRED_HINTS,
)
from schedir.training.config.settings_table import list_settings
from tests.pure.test_layout import MODULES, ROOT, read_module

# A folder fits on a screen, with the exceptions and their reasons.
MAX_MODULES = 15
LARGE_FOLDERS = {"commands": "a file per command"}

# Words that say nothing about a thing without a noun: participles, adverbs, prepositions, bare
# adjectives, and nouns that had several private meanings.
_VAGUE = """
about after again ahead alone anew apart around aside asked away before behind beside best
blame box built cut cuttable done drawn due early ends every exact fast faster fill finer finite
forwards found frozen gain gathered given guard halves held hunt in into kept known lags late
left lender lent living long look looked looking made maker many marks matched meets more moves
moved none of on one open opened others own part parts passed passing piece pieces placed plain
print printed put refuted rest room said same seen several shared short shorter small spent
split stale standing stands starts stored stop taken tied tiny told trip turns unchanged undone
up wanted way ways where which whole why with words
"""
VAGUE = frozenset(_VAGUE.split())
# Names of local variables that say nothing about the value. The budget is only ever lowered.
_VAGUE_LOCALS = """
at by each found given gone held here how kept left least made many mine more most much now of on
one ones others own rest said some taken that there these this told what where which who whose why
"""
VAGUE_LOCALS = frozenset(_VAGUE_LOCALS.split())
VAGUE_LOCALS_BUDGET = 60
# The name of a test says what is tested, and what is expected.
VAGUE_IN_TEST_NAMES = frozenset(
    [
        "an",
        "nobody",
        "ours",
        "said",
        "says",
        "somebody",
        "theirs",
        "told",
        "what",
        "who",
        "whom",
        "whose",
    ]
)
# Names that would be refused, with the reason to allow them.
GOOD_NAMES = {
    "commands/print": "a command's file has the name of the command",
}
# Members with such a name, with the reason.
GOOD_MEMBERS = {
    "after": "the state of a value after a `Change`",
    "before": "the state of a value before a `Change`",
    "cut": "a verb: cut a model into stages",
    "ends": "where the documents of a stream of tokens end",
    "fill": "a verb: fill a slot",
    "finite": "a flag of a private record",
    "lags": "the plural of lag",
    "matched": "the positions that match a program",
    "tied": "the setting of a model: its embedding is tied",
    "words": "the int64 words of a Stream",
}
# File names that occur twice, with the reason.
REPEATED_FILE_NAMES = {
    "__main__": "Python runs the file of this name in a package",
    "schedule_algebra": "the public module re-exports the one of schedules/",
    **dict.fromkeys(
        ("calibrate", "check", "compile", "search", "simulate", "train"),
        "a command's file has the name of the command, and the function that it calls another",
    ),
}
# Class names that occur twice, with the reason.
REPEATED_CLASS_NAMES = {
    "Layer": "each model has its own, as in its paper",
    "Stage": "each model has its own, as in its paper",
}


def list_modules() -> dict[str, Path]:
    """Return the modules of the product, by their path without `schedir/` and suffix."""
    paths = {path: path.relative_to(ROOT).with_suffix("") for path in MODULES.values()}
    named = {str(rel).removeprefix("schedir/"): path for path, rel in paths.items()}
    return {name: path for name, path in named.items() if not name.endswith("__init__")}


FILES = list_modules()


@cache
def find_classes() -> dict[str, list[str]]:
    """Return the modules that define each top-level class."""
    modules_by_class: dict[str, list[str]] = defaultdict(list)
    for name, path in FILES.items():
        for class_name in read_module(path).top_level_classes:
            modules_by_class[class_name].append(name)
    return modules_by_class


def read_all(package: Path) -> set[str]:
    """Return the names in the `__all__` of a package."""
    for node in ast.parse(package.read_bytes()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def test_folders_have_at_most_15_modules() -> None:
    counted = Counter(name.rpartition("/")[0] for name in FILES)
    assert not {
        folder: n
        for folder, n in counted.items()
        if n > MAX_MODULES and folder not in LARGE_FOLDERS
    }


def test_file_names_are_unique() -> None:
    counted = Counter(name.rpartition("/")[2] for name in FILES)
    assert {name for name, n in counted.items() if n > 1} == set(REPEATED_FILE_NAMES)


def test_module_names_are_nouns() -> None:
    vague = {name for name in FILES if name.rpartition("/")[2].strip("_") in VAGUE}
    assert vague == set(GOOD_NAMES)


def test_class_names_are_nouns() -> None:
    assert not [name for name in find_classes() if name.strip("_").lower() in VAGUE]


def test_function_and_member_names_are_not_vague() -> None:
    vague: dict[str, str] = {}
    for name, path in FILES.items():
        members = {member.strip("_") for member in read_module(path).members}
        vague |= dict.fromkeys(members & VAGUE, name)
    assert vague.keys() == GOOD_MEMBERS.keys(), vague


def test_few_local_variables_have_vague_names() -> None:
    vague: Counter[str] = Counter()
    for name, path in FILES.items():
        variables = read_module(path).variables
        vague[name] += sum(variables[variable] for variable in VAGUE_LOCALS)
    assert vague.total() <= VAGUE_LOCALS_BUDGET, vague.most_common(5)


def test_names_of_tests_are_plain() -> None:
    vague = [
        f"{path.name}::{name}"
        for path in ROOT.glob("tests/*/test_*.py")
        for name in re.findall(r"^ *def (test_\w+)", path.read_text(), re.MULTILINE)
        if not VAGUE_IN_TEST_NAMES.isdisjoint(name.split("_"))
    ]
    assert not vague


def test_class_names_are_unique() -> None:
    repeated = {
        name for name, defining_modules in find_classes().items() if len(defining_modules) > 1
    }
    assert repeated == set(REPEATED_CLASS_NAMES)


def test_no_module_shadows_exported_function() -> None:
    """The import of a module would replace a function of the same name in its package."""
    for name in (name for name, path in MODULES.items() if path.name == "__init__.py"):
        folder = MODULES[name].parent
        module_names = {path.stem for path in folder.glob("*.py")}
        module_names |= {path.parent.name for path in folder.glob("*/__init__.py")}
        functions = read_all(MODULES[name]) & module_names
        if name == "schedir":  # it also exports modules
            functions = {
                function for function in functions if ":" in schedir._LAZY_IMPORTS[function]
            }
        assert not functions, name


def test_options_have_no_retired_names() -> None:
    """This holds in Python, after `-O`, in a configuration, and in the text of a program."""
    options = {
        *PROGRAM_OPTIONS,
        *signature(schedir.compile).parameters,
        *signature(schedir.check).parameters,
    }
    assert options.isdisjoint(RENAMED_FIELDS)
    settings = {
        f"{section}.{setting.name}"
        for section, (_, settings_of_section) in list_settings().items()
        for setting in settings_of_section
    }
    assert settings.isdisjoint(RETIRED_HINTS)
    assert {row.text for row in INSTRUCTIONS}.isdisjoint(RENAMED_INSTRUCTIONS)
    assert {f.name for f in fields(schedir.Costs)}.isdisjoint(RENAMED_COSTS)
    assert {f.name for f in fields(schedir.Sizes)}.isdisjoint(RENAMED_SIZES)
    assert {*MODELS}.isdisjoint(RENAMED_VALUES["progress_model"])


def test_retired_names_map_to_current_names() -> None:
    shape = {"shape", "progress_model", "blocking_hosts", "memory_limit", "buffer_sharing"}
    hosts = {*signature(schedir.check).parameters}
    assert {*RENAMED_FIELDS.values()} <= {*PROGRAM_OPTIONS} | shape | hosts
    texts = {row.text for row in INSTRUCTIONS}
    assert {*RENAMED_INSTRUCTIONS.values()} <= texts
    assert {*RENAMED_COSTS.values()} - texts <= {f.name for f in fields(schedir.Costs)}
    assert {*RENAMED_SIZES.values()} <= {f.name for f in fields(schedir.Sizes)}
    assert {*RENAMED_VALUES["progress_model"].values()} == {*MODELS}
