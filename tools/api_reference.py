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

PACKAGES = ("headrace", "headrace.aio", "headrace.arrow", "headrace.spark", "headrace.pipelines", "headrace.testing")
# Public by name, but for other parts of the client alone.
INTERNAL = frozenset(
    {
        *("Cluster", "Consumer.at_exit", "Record.fields"),
        *(f"Delivery.{name}" for name in ("__init__", "batch", "move")),
        *(f"Topics.{name}" for name in ("__init__", "declare")),
        *(f"Listening.{name}" for name in ("halt", "stop", "join", "positions", "drop", "when_idle")),
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
    """A name of a module or class, where it is defined."""

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


def definitions(module: ModuleType, body: list[ast.stmt]) -> Iterator[Name]:
    """What a module or class defines. The docstring of an assignment is the string that follows it."""
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield Name(module, node.name, node, ast.get_docstring(node) or "")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                yield Name(module, target.id, node, text_of(following))


def text_of(node: ast.stmt | None) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return inspect.cleandoc(node.value.value) if is_text else ""  # type: ignore[union-attr]


def find(module: ModuleType, name: str) -> Name | None:
    """The definition that a name in a module stands for, followed through imports; None for what is not ours."""
    for found in definitions(module, tree_of(module).body):
        if found.name == name:
            return found
    for statement in ast.walk(tree_of(module)):
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("headrace"):
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    return find(import_module(statement.module or ""), alias.name)
    return None


class Reference:
    """Writes each name down once, first what a package exports, then what that speaks of.

    `met` are all classes and members that were come by, written down or not; `silent` are those without a docstring.
    """

    def __init__(self) -> None:
        self._written: dict[Place, str] = {}
        self._spoken_of: dict[Place, Name] = {}
        self._takers: dict[Place, str] = {}
        self._package_name = ""
        self.met: set[str] = set()
        self.silent: list[str] = []

    def text(self) -> str:
        parts = [HEAD]
        for name in PACKAGES:
            parts += self._package(import_module(name))
        return self._as_exported("\n".join(part for part in parts if part))

    def _as_exported(self, text: str) -> str:
        """With the names that users import where something is called otherwise at home."""
        for (_, name), exported in self._written.items():
            text = re.sub(rf"\b{name}\b", exported, text) if name != exported else text
        return text

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
            self.met.add(found.name)
            if found.name not in INTERNAL:
                yield from self._name(found.name, found, is_exported=False)

    def _name(self, name: str, found: Name, is_exported: bool = True) -> Iterator[str]:
        level = "###" if is_exported else "####"
        yield f"{level} {name}\n"
        if is_class(found.node):
            yield from self._class(name, found, is_exported)
        elif isinstance(found.node, Function):
            yield code(self._signature(found, name, is_exported)) + paragraphs(found.doc)
        else:
            yield code(ast.unparse(found.node)) + paragraphs(found.doc)

    def _class(self, name: str, found: Name, is_exported: bool) -> Iterator[str]:
        members = [*own_and_inherited(found)]
        constructor = [each for each in members if each.name == "__init__"]
        if constructor and is_exported and f"{name}.__init__" not in INTERNAL:
            yield code(self._signature(constructor[0], name)) + paragraphs(found.doc) + paragraphs(constructor[0].doc)
            yield self._options(name, constructor[0])
        else:
            yield code(f"class {name}") + paragraphs(found.doc)
        shown = [each for each in members if each.name[0] != "_" and f"{name}.{each.name}" not in INTERNAL]
        self.met |= {name, *(f"{name}.{each.name}" for each in members)}
        self.silent += [f"{name}.{each.name}" for each in shown if isinstance(each.node, Function) and not each.doc]
        yield "\n".join([*(field(each) for each in shown if isinstance(each.node, ast.Assign | ast.AnnAssign)), ""])
        for member in shown:
            if isinstance(member.node, Function):
                yield f"{'####' if is_exported else '#####'} {name}.{member.name}\n"
                yield code(self._signature(member, member.name, is_exported)) + paragraphs(member.doc)

    def _options(self, name: str, constructor: Name) -> str:
        keys = keys_of(constructor)
        if keys is None:
            return ""
        if keys.place in self._takers:
            return f"The options are those of `{self._takers[keys.place]}`.\n"
        self._takers[keys.place] = f"{self._package_name}.{name}"
        self._note(keys)
        return "\n".join(["Options:\n", *options(keys), ""])

    def _signature(self, found: Name, name: str, is_exported: bool = True) -> str:
        node = found.node
        assert isinstance(node, Function)
        if is_exported:
            self._note(found)
        if node.returns and any(ast.unparse(each) == "property" for each in node.decorator_list):
            return f"{name}: {ast.unparse(node.returns)}"
        shown = [each for each in parameters(node.args, found.module) if each not in ("self", "cls")]
        start = "class " if node.name == "__init__" else "async def " if is_coroutine(node) else "def "
        end = f") -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ")"
        line = f"{start}{name}({', '.join(shown)}{end}"
        if len(line) <= LINE_CHARS:
            return line
        return "\n".join([f"{start}{name}(", *(f"    {each}," for each in shown), end])

    def _note(self, found: Name) -> None:
        """Remember the types in its annotations that are ours."""
        spoken_of = [find(found.module, name) for name in names_in_annotations(found.node)]
        self._spoken_of |= {each.place: each for each in spoken_of if each}


def own_and_inherited(found: Name) -> Iterator[Name]:
    """What a class defines, and its bases that are ours."""
    assert is_class(found.node)
    own = [*definitions(found.module, found.node.body)]
    yield from own
    for base in found.node.bases:
        above = find(found.module, ast.unparse(base))
        if above is not None and is_class(above.node):
            yield from (each for each in own_and_inherited(above) if each.name not in {one.name for one in own})


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


def keys_of(constructor: Name) -> Name | None:
    """The class that declares what `**options: Unpack[Keys]` takes."""
    assert isinstance(constructor.node, Function)
    taken = constructor.node.args.kwarg
    if taken is None or taken.annotation is None or not is_unpacked(taken.annotation):
        return None
    return find(constructor.module, ast.unparse(taken.annotation.slice))


def options(keys: Name) -> list[str]:
    """Each with its type; default and meaning are those of the class beside the keys that has them as fields."""
    declared = {each.name: each for each in own_and_inherited(keys)}
    classes = [each for each in definitions(keys.module, tree_of(keys.module).body) if is_class(each.node)]
    fields = [{each.name: each for each in own_and_inherited(one)} for one in classes]
    described = next((found for found in fields if declared.keys() < found.keys()), declared)
    return [field(described[name], typed) for name, typed in declared.items()]


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


def field(found: Name, typed: Name | None = None) -> str:
    """A field with its default and meaning; its type is that of `typed`, if given."""
    declared, node = ast.unparse(found.node), found.node
    if isinstance(node, ast.AnnAssign):
        type_of = typed.node if typed and isinstance(typed.node, ast.AnnAssign) else node
        declared = f"{found.name}: {ast.unparse(type_of.annotation)}"
        declared += f" = {value_of(node.value, found.module, len(declared))}" if node.value else ""
    return wrapped(f"- `{declared}`: {found.doc}") if found.doc else f"- `{declared}`"


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
