"""docs/API.md: the public names of the Python packages, with their signatures and docstrings.

Public is what a package lists in `__all__`, and what the signatures of those names speak of. They are followed from the
packages through imports, so a module may move without a change here; signatures and docstrings are read from the
source, because a compiled kernel has neither, and the reference must not hang on what is compiled.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TypeGuard

PACKAGES = ("headrace", "headrace.aio", "headrace.arrow", "headrace.spark", "headrace.pipelines")
# Public by name, but for other parts of the client alone.
INTERNAL = frozenset(
    {
        *("Cluster", "Consumer.at_exit", "Record.fields"),
        *(f"Delivery.{name}" for name in ("__init__", "batch", "move")),
        *(f"Topics.{name}" for name in ("__init__", "declare")),
        *(f"Listening.{name}" for name in ("halt", "stop", "join", "positions", "drop", "when_idle", "ring")),
    }
)
HEAD = """# Python API

Generated from the docstrings by `make reference`; do not edit. [CLIENT.md](CLIENT.md) and [SPARK.md](SPARK.md) are the
guides, with recipes that run.
"""
LINE_CHARS = 100
DECLARED_CHARS = 110
DOC_CHARS = 120
# "acks: what it means", in the docstring of a class with options.
NAMED = re.compile(r"^([a-z_]+(?:, [a-z_]+)*): (?=\S)")

Place = tuple[str, str]
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Name:
    """Where a public name is defined."""

    module: ModuleType
    name: str
    node: Definition
    doc: str

    @property
    def place(self) -> Place:
        return self.module.__name__, self.name


@cache
def tree_of(module: ModuleType) -> ast.Module:
    assert module.__file__ is not None
    file = Path(module.__file__)
    # A compiled module has its source beside it.
    return ast.parse(file.with_name(file.name.partition(".")[0] + ".py").read_text())


def definitions(body: list[ast.stmt]) -> Iterator[tuple[str, Definition, str]]:
    """What a module or class defines: name, statement, and its docstring or the string that follows it."""
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node, ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                yield target.id, node, text_of(following)


def text_of(node: ast.stmt | None) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return inspect.cleandoc(node.value.value) if is_text else ""  # type: ignore[union-attr]


def find(module: ModuleType, name: str) -> Name | None:
    """The definition that a name in a module stands for, followed through imports; None for what is not ours."""
    for defined, node, doc in definitions(tree_of(module).body):
        if defined == name:
            return Name(module, name, node, doc)
    for statement in ast.walk(tree_of(module)):
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("headrace"):
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    return find(import_module(statement.module or ""), alias.name)
    return None


class Reference:
    """Writes each name down once, and keeps those that signatures speak of for the end."""

    def __init__(self) -> None:
        self._written: dict[Place, str] = {}
        self._spoken_of: dict[Place, Name] = {}
        self._takers: dict[Place, str] = {}
        self._package_name = ""

    def text(self) -> str:
        parts = [HEAD]
        for name in PACKAGES:
            parts += self._package(import_module(name))
        return self._as_exported("\n".join(part for part in parts if part))

    def _as_exported(self, text: str) -> str:
        """With the names that users import where something is called otherwise at home."""
        called = {place[1]: name for place, name in self._written.items() if place[1] != name}
        return re.sub("|".join(rf"\b{name}\b" for name in called), lambda name: called[name[0]], text)

    def _package(self, package: ModuleType) -> Iterator[str]:
        self._package_name = package.__name__
        yield f"## {package.__name__}\n\n{inspect.cleandoc(package.__doc__ or '')}\n"
        found = {name: find(package, name) for name in package.__all__ if not name.startswith("_")}
        assert all(found.values()), f"some of {package.__name__} is defined nowhere"
        names = {name: place for name, place in sorted(found.items(), key=lambda item: item[0].lower()) if place}
        new = {name: place for name, place in names.items() if place.place not in self._written}
        self._written |= {place.place: name for name, place in new.items()}
        for name, place in new.items():
            if not is_error(place):
                yield from self._name(name, place)
        yield from self._others()
        if any(is_error(place) for place in new.values()):
            yield "### Errors\n"
            yield "\n".join(error(name, place) for name, place in new.items() if is_error(place)) + "\n"
        if again := [f"`{name}`" for name in names if name not in new]:
            yield wrapped(f"As in `{PACKAGES[0]}`: {', '.join(again)}.") + "\n"

    def _others(self) -> Iterator[str]:
        """What signatures have spoken of and no package exports."""
        others = {place: found for place, found in self._spoken_of.items() if place not in self._written}
        self._written |= {place: found.name for place, found in others.items()}
        if others:
            yield "### Other types of arguments and results\n"
        for found in sorted(others.values(), key=lambda found: found.name):
            if found.name not in INTERNAL:
                yield from self._name(found.name, found, is_exported=False)

    def _name(self, name: str, found: Name, is_exported: bool = True) -> Iterator[str]:
        level = "###" if is_exported else "####"
        yield f"{level} {name}\n"
        if is_class(found.node):
            yield from self._class(name, found, is_exported)
        elif isinstance(found.node, Function):
            yield code(self._signature(found.module, found.node, name, is_exported)) + paragraphs(found.doc)
        else:
            yield code(ast.unparse(found.node)) + paragraphs(found.doc)

    def _class(self, name: str, found: Name, is_exported: bool) -> Iterator[str]:
        members = [*own_and_inherited(found)]
        constructor = [node for member, node, _ in members if member == "__init__" and isinstance(node, Function)]
        if constructor and is_exported and f"{name}.__init__" not in INTERNAL:
            yield code(self._signature(found.module, constructor[0], name)) + paragraphs(found.doc)
            yield self._options(name, found.module, constructor[0])
        else:
            yield code(f"class {name}") + paragraphs(found.doc)
        shown = [each for each in members if each[0][0] != "_" and f"{name}.{each[0]}" not in INTERNAL]
        fields = [
            field(found.module, node, doc) for _, node, doc in shown if isinstance(node, ast.Assign | ast.AnnAssign)
        ]
        yield "\n".join([*fields, ""])
        for member, node, doc in shown:
            if isinstance(node, Function):
                yield f"{'####' if is_exported else '#####'} {name}.{member}\n"
                yield code(self._signature(found.module, node, member, is_exported)) + paragraphs(doc)

    def _options(self, name: str, module: ModuleType, constructor: Function) -> str:
        keys = keys_of(module, constructor)
        if keys is None:
            return ""
        if keys.place in self._takers:
            return f"The options are those of `{self._takers[keys.place]}`.\n"
        self._takers[keys.place] = f"{self._package_name}.{name}"
        self._note(keys.module, keys.node)
        return "\n".join(["Options:\n", *options(keys), ""])

    def _signature(self, module: ModuleType, node: Function, name: str, is_exported: bool = True) -> str:
        if is_exported:
            self._note(module, node)
        if node.returns and any(ast.unparse(each) == "property" for each in node.decorator_list):
            return f"{name}: {ast.unparse(node.returns)}"
        shown = [each for each in parameters(node.args, module) if each not in ("self", "cls")]
        start = "class " if node.name == "__init__" else "async def " if is_coroutine(node) else "def "
        end = f") -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ")"
        line = f"{start}{name}({', '.join(shown)}{end}"
        if len(line) <= LINE_CHARS:
            return line
        return "\n".join([f"{start}{name}(", *(f"    {each}," for each in shown), end])

    def _note(self, module: ModuleType, node: Definition) -> None:
        """Remember the types in its annotations that are ours."""
        found = [find(module, name) for name in names_in_annotations(node)]
        self._spoken_of |= {each.place: each for each in found if each}


def own_and_inherited(found: Name) -> Iterator[tuple[str, Definition, str]]:
    """What a class defines, and its bases that are ours."""
    assert isinstance(found.node, ast.ClassDef)
    own = [*definitions(found.node.body)]
    yield from own
    for base in found.node.bases:
        above = find(found.module, ast.unparse(base))
        if above is not None and isinstance(above.node, ast.ClassDef):
            yield from (member for member in own_and_inherited(above) if member[0] not in {name for name, *_ in own})


def names_in_annotations(node: Definition) -> Iterator[str]:
    """Of a signature or of fields, but for `Unpack[Keys]`: options are shown with what takes them."""
    if isinstance(node, Function):
        annotations = [*(each.annotation for each in ast.walk(node.args) if isinstance(each, ast.arg)), node.returns]
    else:
        annotations = [each.annotation for each in ast.walk(node) if isinstance(each, ast.AnnAssign)]
    for annotation in annotations:
        if annotation is not None and not is_unpacked(annotation):
            yield from (each.id for each in ast.walk(annotation) if isinstance(each, ast.Name))


def is_unpacked(annotation: ast.expr) -> TypeGuard[ast.Subscript]:
    return isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Unpack"


def keys_of(module: ModuleType, function: Function) -> Name | None:
    """The class that declares what `**options: Unpack[Keys]` takes."""
    annotation = function.args.kwarg.annotation if function.args.kwarg else None
    if annotation is None or not is_unpacked(annotation):
        return None
    return find(module, ast.unparse(annotation.slice))


def options(keys: Name) -> list[str]:
    """Each with its type; default and meaning are those of the class beside the keys that has them as fields."""
    assert is_class(keys.node)
    declared = {name: (node, doc) for name, node, doc in definitions(keys.node.body)}
    classes = [node for _, node, _ in definitions(tree_of(keys.module).body) if is_class(node)]
    fields = [{name: (node, doc) for name, node, doc in definitions(each.body)} for each in classes]
    described = next((found for found in fields if declared.keys() < found.keys()), declared)
    return [field(keys.module, *described[name], annotated=node) for name, (node, _) in declared.items()]


def is_class(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef)


def is_coroutine(node: Function) -> bool:
    return isinstance(node, ast.AsyncFunctionDef) and not any(isinstance(each, ast.Yield) for each in ast.walk(node))


def is_error(found: Name) -> bool:
    return is_class(found.node) and issubclass(getattr(found.module, found.node.name), Exception)


def error(name: str, found: Name) -> str:
    assert is_class(found.node)
    bases = ", ".join(f"`{ast.unparse(base)}`" for base in found.node.bases)
    return wrapped(f"- `{name}` ({bases}): {found.doc}")


def field(module: ModuleType, node: Definition, doc: str, annotated: Definition | None = None) -> str:
    """A field with its default and meaning; `annotated` has its type, if not the field itself."""
    if isinstance(node, ast.AnnAssign):
        typed = annotated if isinstance(annotated, ast.AnnAssign) else node
        declared = f"{ast.unparse(node.target)}: {ast.unparse(typed.annotation)}"
        declared += f" = {value_of(node.value, module, len(declared))}" if node.value else ""
    else:
        declared = ast.unparse(node)
    return wrapped(f"- `{declared}`: {doc}") if doc else f"- `{declared}`"


def parameters(arguments: ast.arguments, module: ModuleType) -> Iterator[str]:
    """Each as it is written, with the values of named defaults."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults)) + [*arguments.defaults]
    for index, (argument, default) in enumerate(zip(plain, defaults, strict=True), 1):
        yield with_default(argument, default, module)
        if index == len(arguments.posonlyargs):
            yield "/"
    if arguments.vararg:
        yield f"*{ast.unparse(arguments.vararg)}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield with_default(argument, default, module)
    if arguments.kwarg:
        yield f"**{ast.unparse(arguments.kwarg)}"


def with_default(argument: ast.arg, default: ast.expr | None, module: ModuleType) -> str:
    declared = ast.unparse(argument)
    return declared if default is None else f"{declared} = {value_of(default, module, len(declared))}"


def value_of(default: ast.expr, module: ModuleType, chars_before: int) -> str:
    """As it is written, or the value of what is named; one that does not fit on the line is left out."""
    value = repr(getattr(module, default.id)) if isinstance(default, ast.Name) else ast.unparse(default)
    return value if chars_before + len(value) <= DECLARED_CHARS else "..."


def code(text: str) -> str:
    return f"```python\n{text}\n```\n"


def paragraphs(doc: str) -> str:
    """A docstring as Markdown: lines that explain one name each become a list."""
    lines = [
        wrapped(NAMED.sub(lambda named: f"- `{named[1].replace(', ', '`, `')}`: ", line)) if NAMED.match(line) else line
        for line in doc.splitlines()
    ]
    return "\n".join(["", *lines, ""]) if doc else ""


def wrapped(text: str) -> str:
    indent = "  " if text.startswith("-") else ""
    return textwrap.fill(
        " ".join(text.split()), DOC_CHARS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def reference() -> str:
    return Reference().text()
