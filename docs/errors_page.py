"""The page of all error classes: see `generate.py`."""

from __future__ import annotations

from inspect import getdoc, isclass

from docs.pages import entries, one_line, page, table
from schedir import errors


def error_classes() -> list[type[errors.SchedirError]]:
    """Return the error classes in the order of their module."""
    return [
        value
        for value in vars(errors).values()
        if isclass(value) and issubclass(value, errors.SchedirError)
    ]


def summary(error: type[errors.SchedirError]) -> str:
    """Return the docstring of an error without its sections, as text of a table cell."""
    paragraphs = str(getdoc(error)).split("\n\nArgs:")[0].split("\n\n")
    return " ".join(one_line(p) for p in paragraphs if not p.startswith("Each argument is"))


def field_rows(described: type) -> list[list[str]]:
    """Return a row for each field that a class adds, or that has another meaning there."""
    doc = str(getdoc(described))
    found = entries(doc) | entries(doc, "Attributes")
    if issubclass(described, errors.SchedirError) and described is not errors.SchedirError:
        base = entries(str(getdoc(errors.SchedirError)))
        found = {
            "sites" if name in ("window", "site") else name: text
            for name, text in found.items()
            if name not in ("fact", "program", "hint", "fields", "location_format")
            and text != base.get(name)
        }
    classes = [f"`{described.__name__}`"] + [""] * len(found)
    return [
        [shown, f"`{name}`", text]
        for shown, (name, text) in zip(classes, found.items(), strict=False)
    ]


def blocks() -> dict[str, str]:
    """The tables of the classes and of their fields."""
    classes = [
        [f"`{error.__name__}`", f"`{base.__name__}`", summary(error)]
        for error in error_classes()
        if (base := error.__base__) is not None and error is not errors.SchedirError
    ]
    described = [*error_classes()[1:], errors.InstructionSite, errors.CycleWait]
    return {
        "classes": table(["error", "base", "raised for"], classes),
        "common": table(["field", "meaning"], [row[1:] for row in field_rows(errors.SchedirError)]),
        "own": table(
            ["class", "field", "meaning"], [row for one in described for row in field_rows(one)]
        ),
    }


PAGES = page("reference/errors", blocks)
