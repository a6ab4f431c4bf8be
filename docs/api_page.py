"""The page of all public names, read off the source without importing it: see `generate.py`.

A name is public where the `__all__` of a public module has it.  Its signature, its docstring and
its example are those of its source.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The module of each public name, as users write it, and where its source is.
PUBLIC = {
    "": "schedir",
    "words": "schedir.schedules.words",
    "viz": "schedir.viz",
    "runtime": "schedir.runtime",
    "checkpoints": "schedir.checkpoints",
    "planner": "schedir.planner",
    "schedules": "schedir.schedules",
    "testing": "schedir.testing",
    "torch_csv": "schedir.io.torch_csv",
    "traces": "schedir.traces",
}
# As users think.  Each public name is in one group; a name that stands for others is their module.
GROUPS = {
    "Write": (
        "A schedule is a function of (rank, ranks, microbatches) that says words. "
        "[The tutorial](tutorial.md) writes one; [the built-in ones](schedules.md) are drawn.",
        ["Plan", "F", "B", "I", "W", "R", "EMPTY", "Word", "weave", "overlap", "words.join",
         "words.placed", "words.delayed", "greedy", "schedules", "draft"],
    ),
    "Compile and check": (
        "[The instructions](ir.md) has the table, the progress models and the text form; "
        "[the design](design.md) says how it is found out what is right.",
        ["compile", "forwards", "check", "check_sequence", "errors", "Program", "Stream", "Instr",
         "Opcode", "show", "parse", "trusting", "ties", "Ties",
         "torch_csv.show", "torch_csv.parse"],
    ),
    "Predict": (
        "Predicted and measured runs are one type. [Traces](traces.md) tells of runs as files, why "
        "ranks are idle, and what would shorten a step.",
        ["Costs", "Sizes", "in_pieces", "Cluster", "load_cluster", "save_cluster", "model_states",
         "layer_bytes", "simulate", "Timeline",
         "save_timeline", "load_timeline", "traces.read_run", "traces.Imported"],
    ),
    "Find": (
        "The shortest schedule that a search finds within a limit of memory, and below what none "
        "can be.",
        ["search", "bound", "frontier"],
    ),
    "Plan": (
        "From a model and a cluster to layouts, and what a step of each takes and holds: "
        "[how many GPUs, and how](planner.md).",
        ["planner.plan", "planner.step", "planner.Model", "planner.load_model", "planner.Choice",
         "planner.Priced", "planner.Parts", "planner.Memory", "planner.cluster",
         "planner.clusters"],
    ),
    "See other trainers": (
        "Runs of torch's own pipelining, Megatron-LM and DeepSpeed, as Timelines: "
        "[what is marked, and how](instrument.md).",
        ["instrument"],
    ),
    "Draw": (
        "[Pictures](pictures.md) has every way to look at a run, from the shell and from Python.",
        ["viz.gantt", "viz.compare", "viz.Style", "viz.idle_map", "viz.tradeoff",
         "viz.frontier", "viz.plan_times", "viz.plan_memory", "viz.plan_scaling",
         "viz.visited", "viz.save", "viz.letters", "viz.html", "viz.save_html"],
    ),
    "Run": (
        "[Your own nn.Module](own-model.md) on one process and on four; [what has the bits of a "
        "plain loop](same-bits.md); [split backwards](splitting.md).",
        ["runtime.InProcess", "runtime.Executor", "runtime.Boundary",
         "runtime.PerMicrobatch",
         "runtime.boundaries_of", "runtime.reference", "runtime.sizes_of",
         "runtime.split_linears", "runtime.register_split", "runtime.check_split",
         "runtime.Gloo", "runtime.Shared", "runtime.nccl"],
    ),
    "Save": (
        "[Checkpoints](checkpoints.md) that any layout of ranks reads.",
        ["checkpoints.save", "checkpoints.load", "checkpoints.Saver"],
    ),
    "Test": (
        "[A schedule of your own](testing.md#a-schedule) is tested in ten lines, and so are "
        "[the gradients of any pipeline](gradients.md).",
        ["testing.assert_schedule", "testing.assert_same_gradients",
         "testing.plans_of", "testing.plans", "testing.drafts",
         "testing.programs", "testing.ties", "testing.random_draft"],
    ),
}  # fmt: skip

PAGE = """\
# The public names

<!-- Generated from the source by `python docs/generate.py`; do not edit. -->

Names are those of `import schedir`: `viz.gantt` is `schedir.viz.gantt`. What needs torch or
matplotlib is imported where it is first used. Every example here is a test. Whatever is refused is
an [error](#errors) with fields.

{index}

{groups}"""

Definition = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Name:
    """A public name, and the node that its docstring is of: a definition, or a whole module."""

    name: str
    node: Definition | ast.Module
    source: Path

    @property
    def doc(self) -> str:
        """Its docstring."""
        return ast.get_docstring(self.node) or ""

    @property
    def module(self) -> str:
        """The module that it is written in."""
        parts = self.source.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def first(self) -> str:
        """The first sentence of its docstring."""
        return first_sentence(self.doc)

    @property
    def has_example(self) -> bool:
        """Whether its docstring shows it."""
        return ">>> " in self.doc


def path_of(module: str) -> Path | None:
    """The file of a module, if it is one."""
    path = ROOT / module.replace(".", "/")
    found = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()]
    return found[0] if found else None


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def everything(path: Path) -> Iterator[ast.stmt]:
    """What a module defines or imports, also if only for who reads types."""
    for node in tree(path).body:
        yield from node.body if isinstance(node, ast.If) else [node]


def all_of(path: Path) -> list[str]:
    """The `__all__` of a module."""
    for node in everything(path):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    raise ValueError(f"{path} has no __all__")


def bound(node: ast.ImportFrom) -> set[str]:
    """The names that an import gives."""
    return {alias.asname or alias.name for alias in node.names}


def found(name: str, module: str, as_written: str) -> Name:
    """Where a name of a module is defined, followed through imports."""
    path = path_of(module)
    assert path is not None, module
    for node in reversed([*everything(path)]):  # of overloads the last
        if isinstance(node, Definition) and node.name == name:
            return Name(as_written, node, path)
        if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
            return Name(as_written, tree(path), path)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return Name(as_written, tree(path), path)
        if isinstance(node, ast.ImportFrom) and node.module != module and name in bound(node):
            return found(name, str(node.module), as_written)
    if path := path_of(f"{module}.{name}"):
        return Name(as_written, tree(path), path)
    raise ValueError(f"{module} has no {name}")


def public() -> dict[str, Name]:
    """All public names, as users write them behind `schedir.`; each once, by its shortest."""
    names: dict[str, Name] = {}
    short: set[tuple[Path, str]] = set()
    for prefix, module in PUBLIC.items():
        path = path_of(module)
        assert path is not None, module
        for name in all_of(path):
            written = f"{prefix}.{name}" if prefix else name
            one = found(name, module, written)
            if (one.source, name) not in short:
                short.add((one.source, name))
                names[written] = one
    return names


# ---------------------------------------------------------------- text


def first_sentence(doc: str) -> str:
    paragraph = " ".join(doc.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) +(?=[A-Z`])", paragraph)[0]


def markdown(doc: str) -> str:
    """A docstring as Markdown: examples are blocks of Python, all else is as it is."""
    blocks = re.split(r"\n{2,}", doc.strip())
    parts = []
    for example, group in groupby(blocks, lambda block: block.startswith(">>> ")):
        text = "\n\n".join(group)
        if example:
            text = re.sub(r" *# doctest: .*", "", text).replace("<BLANKLINE>", "")
            text = f"```python\n{text}\n```"
        else:  # what stands in backquotes is as it is; elsewhere a star is a star
            spans = re.split(r"(`[^`]*`)", text.replace(".  ", ". "))
            spans[::2] = [span.replace("*", r"\*") for span in spans[::2]]
            text = "".join(spans)
        parts.append(text)
    return "\n\n".join(parts)


def signature(name: Name) -> str:
    """How a function or a class is called, as its source has it; "" for what is not."""
    node = name.node
    if isinstance(node, ast.Module):
        return ""
    if isinstance(node, ast.FunctionDef):
        given, result = parameters(node.args), ast.unparse(node.returns) if node.returns else ""
        if any("composite" in ast.unparse(decorator) for decorator in node.decorator_list):
            given, result = given[1:], f"SearchStrategy[{result}]"  # hypothesis gives `draw`
        return call(name.name, given, f" -> {result}" if result else "")
    (init,) = [n for n in methods(node) if n.name == "__init__"] or [None]
    if init is not None:
        return call(name.name, parameters(init.args)[1:], "")
    near = {n.name: n for n in tree(name.source).body if isinstance(n, ast.ClassDef)}
    above = [near[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in near]
    lines = [n for part in (*above, node) for n in part.body if isinstance(n, ast.AnnAssign)]
    fields = [text for n in lines if (text := field(n))]
    return call(name.name, fields, "") if fields else ""


def parameters(given: ast.arguments) -> list[str]:
    """Parameters as text, each as its source has it."""
    plain, texts = [*given.posonlyargs, *given.args], []
    for k, one in enumerate(plain):
        at = k - len(plain) + len(given.defaults)
        texts.append(parameter(one, given.defaults[at] if at >= 0 else None))
    if given.vararg:
        texts.append(f"*{ast.unparse(given.vararg)}")
    elif given.kwonlyargs:
        texts.append("*")
    texts += map(parameter, given.kwonlyargs, given.kw_defaults)
    return texts + ([f"**{ast.unparse(given.kwarg)}"] if given.kwarg else [])


def parameter(one: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return ast.unparse(one)
    return f"{ast.unparse(one)}{' = ' if one.annotation else '='}{ast.unparse(default)}"


def field(node: ast.AnnAssign) -> str:
    """A field of a dataclass or a tuple as a parameter; "" for one that is not given."""
    text, value = f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}", node.value
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        options = {str(k.arg): ast.unparse(k.value) for k in value.keywords}
        if options.get("init") == "False":
            return ""
        default = options.get("default", "..." if "default_factory" in options else None)
        return text if default is None else f"{text} = {default}"
    return text if value is None else f"{text} = {ast.unparse(value)}"


def call(name: str, given: list[str], result: str) -> str:
    line = f"{name}({', '.join(given)}){result}"
    if len(line) > 96:
        line = "".join([f"{name}(\n", *(f"    {one},\n" for one in given), f"){result}"])
    return line.replace("'", '"')


def methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [n for n in node.body if isinstance(n, ast.FunctionDef)]


def members(node: Definition | ast.Module) -> str:
    """What an object of a class has besides its fields: a list, each with its first sentence."""
    lines = []
    for own in methods(node) if isinstance(node, ast.ClassDef) else ():
        doc = ast.get_docstring(own)
        if own.name.startswith("_") or not doc:
            continue
        decorators = {ast.unparse(decorator) for decorator in own.decorator_list}
        called = not decorators & {"property", "cached_property"}
        given = f"({', '.join(parameters(own.args)[1:])})" if called else ""
        lines.append(f"- `{own.name}{given}`: {first_sentence(doc)}")
    return "\n".join(lines)


def bases(one: Name) -> list[Definition | ast.Module]:
    """The classes whose members are listed with a class's own."""
    names = BASES.get(one.name, ())
    return [found(name, one.module, name).node for name in names]


# ---------------------------------------------------------------- the page


def refusals() -> str:
    """Every error with its first sentence, the more special ones below what they are kinds of."""
    path = path_of("schedir.errors")
    assert path is not None
    classes = [n for n in tree(path).body if isinstance(n, ast.ClassDef) and n.bases]
    above = {n.name: ast.unparse(n.bases[0]) for n in classes}
    below = {n.name: 0 for n in classes}
    for name in below:
        kind = above[name]
        while kind in above:
            below[name], kind = below[name] + 1, above[kind]

    def lines(parent: str) -> Iterator[str]:
        for n in classes:
            if above[n.name] == parent:
                doc = first_sentence(ast.get_docstring(n) or "")
                yield f"{'  ' * below[n.name]}- `{n.name}`: {doc}"
                yield from lines(n.name)

    return "\n".join(lines("Exception"))


def zoo() -> str:
    """The built-in schedules, each with its first sentence and its place on their page."""
    path = path_of("schedir.schedules")
    assert path is not None
    each = (found(name, "schedir.schedules", name) for name in all_of(path))
    return "\n".join(f"- [`{one.name}`](schedules.md#{one.name}): {one.first}" for one in each)


BASES = {"runtime.Executor": ["Running"]}  # which is no public name
MORE = {"errors": refusals, "schedules": zoo}  # what a module has to list


def entry(names: list[Name], title: str) -> str:
    """What is said of a name, or of several constants of one module."""
    one = names[0]
    about, _, more = one.doc.partition("\n\n")
    text, example = more.partition(">>> ")[::2]
    parts = [f"### {title}", markdown(about)]
    if called := signature(one):
        parts.append(f"```python\n{called}\n```")
    parts += [markdown(f">>> {example}"), markdown(text)]
    if own := "\n".join(filter(None, [members(one.node), *map(members, bases(one))])):
        parts.append(own)
    parts += [lists() for name, lists in MORE.items() if name == one.name]
    return "\n\n".join(filter(None, parts))


def page() -> str:
    """docs/api.md."""
    names, told = public(), [name for _, group in GROUPS.values() for name in group]
    rest = [n for n in names if n.startswith("planner.") and n not in told]  # behind what leads
    GROUPS["Plan"][1].extend(rest)
    told += rest
    listed_once = sorted(name for name in names if not name.startswith("schedules."))
    assert sorted(told) == listed_once, {*told} ^ {*listed_once}
    index, groups, taken = [], [], Counter[str]()
    for about, (intro, listed) in GROUPS.items():
        lines, entries = [], []
        # Constants of one module stand together, for its docstring is theirs.
        for _, same in groupby((names[name] for name in listed), lambda one: id(one.node)):
            together = [*same]
            title = ", ".join(one.name for one in together)
            anchor = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
            taken[anchor] += 1
            if taken[anchor] > 1:
                anchor += f"-{taken[anchor] - 1}"
            lines.append(f"| [`{title}`](#{anchor}) | {together[0].first} |")
            entries.append(entry(together, title))
        index.append("\n".join([f"| {about} | |", "| --- | --- |", *lines]))
        groups.append("\n\n".join([f"## {about}", intro, *entries]))
    return PAGE.format(index="\n\n".join(index), groups="\n\n".join(groups)).rstrip() + "\n"
