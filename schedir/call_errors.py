"""Errors about calls with wrong arguments, which suggest the right arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar

from schedir.errors import UsageError
from schedir.retired_names import suggest_name

_Public = TypeVar("_Public", bound=Callable[..., Any])


def explain_wrong_calls(example: str) -> Callable[[_Public], _Public]:
    """Return a decorator of public functions, methods and classes, for wrong arguments.

    Python's own TypeError does not suggest the new name of an argument, or a call that works.

    Args:
        example: A call that works.

    Returns:
        The decorator. It replaces a function, and changes the constructor of a class. A call with
        an unknown, superfluous or missing argument then raises UsageError.
    """

    def decorate(public: _Public) -> _Public:
        function: Any = public.__init__ if isinstance(public, type) else public  # type: ignore[misc]

        @wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            try:
                return function(*args, **named)
            except TypeError as error:
                # If the traceback has one frame, Python refused the arguments before the function
                # ran. Otherwise the function itself raised the error.
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise
                is_method = isinstance(public, type) or "self" in signature(public).parameters
                arguments = args[1:] if is_method else args
                raise (_make_call_error(public, arguments, named, example) or error) from None

        if not isinstance(public, type):
            return call  # type: ignore[return-value]
        setattr(public, "__init__", call)  # noqa: B010
        return public

    return decorate


def _make_call_error(
    public: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any], example: str
) -> UsageError | None:
    """Return the error for arguments that a function does not accept, else None."""
    name = public.__name__
    all_parameters = [each for each in signature(public).parameters.values() if each.name != "self"]
    parameters = {
        each.name: each
        for each in all_parameters
        if each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    }
    positional = [each for each, p in parameters.items() if p.kind is not Parameter.KEYWORD_ONLY]
    accepts_any_name = len(parameters) < len(all_parameters)
    for keyword in named:
        if keyword not in parameters and not accepts_any_name:
            hint = suggest_name(keyword, parameters) or example
            return UsageError(f"{name} has no argument {keyword!r}", hint=hint, fields=[keyword])
    if len(args) > len(positional):
        positional_text = ", ".join(positional)
        fact = (
            f"only {positional_text} can be given without a name"
            if positional_text
            else "each needs its name"
        )
        return UsageError(
            f"{name} got {len(args)} arguments without a name, but {fact}", hint=example
        )
    given_names = (*positional[: len(args)], *named)
    for each in positional[: len(args)]:
        if each in named:
            return UsageError(
                f"{name} got the argument {each} twice: by position and by name",
                hint=example,
                fields=[each],
            )
    missing = [
        each
        for each, parameter in parameters.items()
        if parameter.default is Parameter.empty and each not in given_names
    ]
    fact = f"{name} needs " + " and ".join(filter(None, (", ".join(missing[:-1]), *missing[-1:])))
    return UsageError(fact, hint=example, fields=missing) if missing else None
