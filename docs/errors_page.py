"""Generate the page of all error classes."""

from __future__ import annotations

from inspect import getdoc, isclass

from docs.pages import define_page, format_cell_text, format_table, parse_entries
from schedir import errors


def list_error_classes() -> list[type[errors.SchedirError]]:
    """Return the error classes in the order of their module."""
    return [
        value
        for value in vars(errors).values()
        if isclass(value) and issubclass(value, errors.SchedirError)
    ]


def format_summary(error: type[errors.SchedirError]) -> str:
    """Return the docstring of an error without its sections, as text of a table cell."""
    paragraphs = str(getdoc(error)).split("\n\nArgs:")[0].split("\n\n")
    return " ".join(format_cell_text(p) for p in paragraphs if not p.startswith("Each argument is"))


def list_field_rows(described: type) -> list[list[str]]:
    """Return a row for each field that a class adds or gives another meaning."""
    doc = str(getdoc(described))
    field_texts = parse_entries(doc) | parse_entries(doc, "Attributes")
    if issubclass(described, errors.SchedirError) and described is not errors.SchedirError:
        base = parse_entries(str(getdoc(errors.SchedirError)))
        field_texts = {
            "sites" if name in ("window", "site") else name: text
            for name, text in field_texts.items()
            if name not in ("fact", "program", "hint", "fields", "location_format")
            and text != base.get(name)
        }
    classes = [f"`{described.__name__}`"] + [""] * len(field_texts)
    return [
        [class_cell, f"`{name}`", text]
        for class_cell, (name, text) in zip(classes, field_texts.items(), strict=False)
    ]


def build_blocks() -> dict[str, str]:
    """Return the tables of the classes and of their fields."""
    classes = [
        [f"`{error.__name__}`", f"`{base.__name__}`", format_summary(error)]
        for error in list_error_classes()
        if (base := error.__base__) is not None and error is not errors.SchedirError
    ]
    described = [*list_error_classes()[1:], errors.InstructionSite, errors.CycleWait]
    return {
        "classes": format_table(["error", "base", "raised for"], classes),
        "common": format_table(
            ["field", "meaning"], [row[1:] for row in list_field_rows(errors.SchedirError)]
        ),
        "own": format_table(
            ["class", "field", "meaning"],
            [row for described_class in described for row in list_field_rows(described_class)],
        ),
    }


PAGES = define_page("reference/errors", build_blocks)
