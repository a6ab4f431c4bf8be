"""A mypy plugin: refuse comparisons by value of lists, tuples and other containers of tensors.

`[p] == [q]`, `p in [q]` and `[p].index(q)` compare the numbers of two tensors, not the objects.
They raise for tensors of several numbers, and are wrong for two equal tensors of one number.  Write
`p is q`, `any(p is q for q in ...)`, a dict, a set, or `torch.equal`.  Keys of dicts and
members of sets are found by identity, so these are allowed.

mypy runs it with every check (`pyproject.toml`), so it sees the types of all expressions.  It does
not see what is typed `Any`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from mypy.errorcodes import ErrorCode
from mypy.nodes import ComparisonExpr, TypeInfo, Var
from mypy.plugin import MethodContext, Plugin
from mypy.types import Instance, ProperType, TupleType, Type, UnionType, get_proper_type

BY_VALUE: Final = ErrorCode("tensor-comparison", "Tensors are compared by value", "Tensors")
COMPARISONS: Final = ("__eq__", "__ne__")
SEARCHES: Final = ("__contains__", "index", "remove", "count")
TENSOR: Final = "torch._tensor.Tensor"
SETS: Final = (  # Python finds their members by hash and identity
    "builtins.set", "builtins.frozenset", "typing.AbstractSet", "typing.MutableSet",
    "typing.KeysView", "_collections_abc.dict_keys",
)  # fmt: skip
MAPPINGS: Final = (  # Python finds their keys in the same way
    "builtins.dict", "typing.Mapping", "typing.MutableMapping", "collections.Counter",
    "collections.OrderedDict", "collections.defaultdict",
)  # fmt: skip
VALUES: Final = "_collections_abc.dict_values"  # its first argument is the type of the keys
DEPTH: Final = 4  # of containers within containers: types may be recursive
GENERIC: Final = ("builtins.", "typing.", "collections.", "_collections_abc.", "types.")


def is_tensor(proper: ProperType) -> bool:
    """Return whether a type is torch.Tensor or derives from it."""
    return isinstance(proper, Instance) and proper.type.has_base(TENSOR)


def holds_tensors(type_: Type, depth: int = DEPTH) -> bool:
    """Return whether `==` of two values of this type compares tensors and takes a bool of it."""
    proper = get_proper_type(type_)
    if isinstance(proper, UnionType):
        return any(holds_tensors(item, depth) for item in proper.items)
    if depth == 0 or is_tensor(proper):
        return False
    parts: Sequence[Type] = ()
    if isinstance(proper, TupleType):
        parts = proper.items
    elif isinstance(proper, Instance):
        is_generic = proper.type.fullname.startswith(GENERIC)
        parts = values_of(proper) if is_generic else fields_of(proper.type)
    return any(is_or_holds(part, depth - 1) for part in parts)


def is_or_holds(type_: Type, depth: int) -> bool:
    """Return whether a type is a tensor, or `holds_tensors`."""
    proper = get_proper_type(type_)
    if isinstance(proper, UnionType):
        return any(is_or_holds(item, depth) for item in proper.items)
    return is_tensor(proper) or holds_tensors(proper, depth)


def values_of(container: Instance) -> tuple[Type, ...]:
    """Return the types in a Python container that it compares with `==`."""
    if container.type.fullname in SETS:
        return ()
    has_keys = container.type.fullname in (*MAPPINGS, VALUES)
    return container.args[1:] if has_keys else container.args


def fields_of(info: TypeInfo) -> tuple[Type, ...]:
    """Return the types of a dataclass's fields, which its `==` compares, and none for others."""
    variables = (symbol.node for base in info.mro for symbol in base.names.values())
    if "dataclass" not in info.metadata or "__eq__" in info.names:
        return ()
    return tuple(v.type for v in variables if isinstance(v, Var) and v.type is not None)


def report(ctx: MethodContext) -> None:
    """Report a comparison, also where mypy tries another meaning of an operator after an error."""
    errors = ctx.api.msg.errors
    watchers, errors._watchers = errors._watchers, []
    ctx.api.fail("Tensors in a container are compared by value", ctx.context, code=BY_VALUE)
    errors._watchers = watchers


def compared(ctx: MethodContext) -> Type:
    """Check `a == b` and `a != b`."""
    if holds_tensors(ctx.type) or any(holds_tensors(t) for own in ctx.arg_types for t in own):
        report(ctx)
    return ctx.default_return_type


def searched(ctx: MethodContext) -> Type:
    """Check `a in b`, `b.index(a)`, `b.remove(a)` and `b.count(a)`."""
    container = get_proper_type(ctx.type)
    hashed = isinstance(container, Instance) and container.type.fullname in MAPPINGS
    if not hashed and holds_tensors(container):
        report(ctx)
    return ctx.default_return_type


def iterated(ctx: MethodContext) -> Type:
    """Check `a in b` where b is an iterator, which has no `__contains__`."""
    within = ctx.context
    searches = isinstance(within, ComparisonExpr) and {"in", "not in"} & {*within.operators}
    if searches and holds_tensors(ctx.default_return_type):
        report(ctx)
    return ctx.default_return_type


class TensorComparisons(Plugin):
    """Checks every comparison and search for which mypy looks up a method."""

    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        method = fullname.rpartition(".")[2]
        if method in COMPARISONS:
            return compared
        if method in SEARCHES:
            return searched
        return iterated if method == "__iter__" else None


def plugin(version: str) -> type[Plugin]:
    """Return the plugin, as mypy requires."""
    return TensorComparisons
