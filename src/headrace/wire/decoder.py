"""Compiles the decoder of one (API, version, direction) from its schema.

The decoder is one generated function of (view, position). Runs of fixed-width fields, together with the length
or count that follows them, are read by one `struct` call. Every length is compared with the bytes that remain,
and every count with the bytes that so many elements need at least and with MAX_ELEMENTS, before anything is
allocated for it. The depth of nesting is that of the schema. Unknown tagged fields are skipped.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, Final

from headrace.errors import ProtocolError
from headrace.wire import schema
from headrace.wire.message import FreshDefault, Message
from headrace.wire.schema import FIXED, STRUCT, Direction, Field, Struct
from headrace.wire.source import Source, join
from headrace.wire.varint import Refused, read_uvarint, skip_tags, too_long, too_many

# All array elements of one message together. A frame of empty strings would otherwise grow a hundredfold.
MAX_ELEMENTS: Final = 1_000_000

Decode = Callable[[memoryview, int], Message]


def compile_decoder(api_key: int, version: int, direction: Direction, checked: bool = True) -> Decode:
    """`checked=False` leaves out the checks of counts: only for the proof that the fuzzer finds that."""
    return _Decoder(api_key, version, direction, checked).compile()


def smallest_bytes(field: Field, flexible: bool) -> int:
    """The least number of bytes that one element of an array, or a single value, takes on the wire."""
    if field.kind in FIXED:
        return struct.calcsize(">" + FIXED[field.kind])
    if field.kind == "string":
        return 1 if flexible else 2
    if field.struct is None:
        return 1 if flexible else 4
    total = 1 if field.struct.flexible else 0
    for inner in field.struct.plain:
        if inner.is_array:
            total += 1 if flexible else 4
        elif inner.struct is not None and inner.nullable:
            total += 1
        else:
            total += smallest_bytes(inner, flexible)
    return total


class _Run:
    """Consecutive fixed-width values that one `struct` call reads."""

    def __init__(self) -> None:
        self.codes: list[str] = []
        self.targets: list[str] = []
        self._paths: list[str] = []

    @property
    def path(self) -> str:
        return self._paths[0] if len(self._paths) == 1 else f"{self._paths[0]} .. {self._paths[-1]}"

    def add(self, code: str, target: str, path: str) -> None:
        self._paths.append(path)
        self.codes.append(code)
        self.targets.append(target)


class _Decoder:
    def __init__(self, api_key: int, version: int, direction: Direction, checked: bool) -> None:
        self._title = f"{schema.api_name(api_key)} v{version} {direction}"
        self._struct = schema.load(api_key, version, direction)
        self._checked = checked
        # librdkafka 2.16 leaves three bytes behind its Metadata request for all topics, and brokers pass over them.
        self._lenient = direction == "request"
        self._classes = _MessageClasses(api_key, direction)
        self._source = Source("def codec(view, pos):")
        self._names: dict[str, Any] = {
            "new": object.__new__,
            "unpack_from": struct.unpack_from,
            "read_uvarint": read_uvarint,
            "skip_tags": skip_tags,
            "too_long": too_long,
            "too_many": too_many,
            "Refused": Refused,
            "BROKEN": (Refused, struct.error, IndexError, UnicodeDecodeError),
            "refuse": self._refuse,
        }

    def compile(self) -> Decode:
        source = self._source
        source.line("end = len(view)", "")
        source.line(f"left = {MAX_ELEMENTS}", "")
        source.line("try:", "")
        source.depth += 1
        self._read_struct(self._struct, "root", "", ())
        if self._lenient:
            source.line("if pos > end: raise Refused('the last field is cut short')", "end of body")
        else:
            source.line("if pos != end: raise Refused(f'{end - pos} bytes after the last field')", "end of body")
        source.line("return root", "")
        source.depth -= 1
        source.line("except BROKEN as error:", "")
        source.line("    raise refuse(error, pos, end) from None", "")
        return source.compile(self._title, self._names)

    def _refuse(self, error: Exception, pos: int, end: int) -> ProtocolError:
        what = str(error) if isinstance(error, Refused) else f"cut short or malformed ({error})"
        field = self._source.field_at(error.__traceback__)
        return ProtocolError(f"{self._title}: field {field} at byte {pos} of {end}: {what}")

    def _read_struct(self, spec: Struct, var: str, path: str, keys: tuple[str, ...]) -> None:
        """Create `var` and fill it from `pos` on."""
        cls = f"cls_{var}"
        self._names[cls] = self._classes.make(spec, keys)
        self._source.line(f"{var} = new({cls})", path)
        run = _Run()
        for field in spec.plain:
            here = join(path, field)
            if field.kind in FIXED and not field.is_array:
                run.add(FIXED[field.kind], f"{var}.{field.name}", here)
            else:
                self._read_variable(field, spec.flexible, run, f"{var}.{field.name}", here, (*keys, field.name))
                run = _Run()
        if spec.flexible:
            self._read_tags(spec, run, var, path, keys)
        else:
            self._flush(run)

    def _flush(self, run: _Run) -> None:
        if not run.codes:
            return
        codes = "".join(run.codes)
        if codes == "B":
            self._source.line(f"{run.targets[0]} = view[pos]; pos += 1", run.path)
            return
        reader = f"read_{codes.replace('?', 'o')}"
        self._names[reader] = struct.Struct(">" + codes).unpack_from
        targets = ", ".join(run.targets) + ("," if len(run.targets) == 1 else "")
        self._source.line(f"{targets} = {reader}(view, pos); pos += {struct.calcsize('>' + codes)}", run.path)

    def _read_variable(
        self, field: Field, flexible: bool, run: _Run, target: str, path: str, keys: tuple[str, ...]
    ) -> None:
        """Read a value of no fixed width into `target`, after the fixed ones in `run`."""
        if field.struct is not None and not field.is_array:
            self._read_single_struct(field, run, target, path, keys)
            return
        line = self._source.line
        size = self._source.name("n")
        if flexible:
            run.add("B", size, path)
            self._flush(run)
            line(f"if {size} > 127: {size}, pos = read_uvarint(view, pos - 1)", path)
            line(f"{size} -= 1", path)
        else:
            run.add("h" if field.kind == "string" and not field.is_array else "i", size, path)
            self._flush(run)
        if field.nullable:
            line(f"if {size} == -1: {target} = None", path)
            line("else:", path)
            self._source.depth += 1
        if field.is_array:
            self._read_array(field, flexible, size, target, path, keys)
        else:
            self._read_sized(field.kind, size, target, path)
        if field.nullable:
            self._source.depth -= 1

    def _read_sized(self, kind: str, size: str, target: str, path: str) -> None:
        line = self._source.line
        line(f"if not 0 <= {size} <= end - pos: raise too_long({size}, end - pos)", path)
        piece = f"view[pos:pos + {size}]"
        value = {"string": f"str({piece}, 'utf-8')", "bytes": f"bytes({piece})", "records": piece}[kind]
        line(f"{target} = {value}; pos += {size}", path)

    def _read_array(
        self, field: Field, flexible: bool, size: str, target: str, path: str, keys: tuple[str, ...]
    ) -> None:
        line = self._source.line
        least = smallest_bytes(field, flexible)
        assert least > 0, f"{self._title}: elements of {path} may take no bytes at all"
        if self._checked:
            bound = f"{size} * {least} > end - pos"
            line(f"if {size} < 0 or {bound} or {size} > left: raise too_many({size}, end - pos)", path)
            line(f"left -= {size}", path)
        if field.kind == "uuid":
            line(f"{target} = [bytes(view[at:at + 16]) for at in range(pos, pos + 16 * {size}, 16)]", path)
            line(f"pos += 16 * {size}", path)
            return
        if field.kind in FIXED:
            line(f"{target} = list(unpack_from(f'>{{{size}}}{FIXED[field.kind]}', view, pos))", path)
            line(f"pos += {least} * {size}", path)
            return
        items = self._source.name("items")
        index = self._source.name("i")
        line(f"{target} = {items} = [None] * {size}", path)
        line(f"for {index} in range({size}):", path)
        self._source.depth += 1
        if field.struct is not None:
            element = self._source.name("m")
            self._read_struct(field.struct, element, f"{path}[]", keys)
            line(f"{items}[{index}] = {element}", path)
        else:
            single = Field("", field.kind, None, False, False, None, None, False)
            self._read_variable(single, flexible, _Run(), f"{items}[{index}]", f"{path}[]", keys)
        self._source.depth -= 1

    def _read_single_struct(self, field: Field, run: _Run, target: str, path: str, keys: tuple[str, ...]) -> None:
        assert field.struct is not None
        line = self._source.line
        inner = self._source.name("m")
        if not field.nullable:
            self._flush(run)
            self._read_struct(field.struct, inner, path, keys)
            line(f"{target} = {inner}", path)
            return
        marker = self._source.name("n")
        run.add("b", marker, path)
        self._flush(run)
        line(f"if {marker} < 0: {target} = None", path)
        line("else:", path)
        self._source.depth += 1
        self._read_struct(field.struct, inner, path, keys)
        line(f"{target} = {inner}", path)
        self._source.depth -= 1

    def _read_tags(self, spec: Struct, run: _Run, var: str, path: str, keys: tuple[str, ...]) -> None:
        line = self._source.line
        where = f"{path}.tags" if path else "tags"
        count = self._source.name("n")
        run.add("B", count, where)
        self._flush(run)
        if not spec.tagged:
            line(f"if {count}: pos = skip_tags(view, pos - 1)", where)
            return
        stop, tag, size = (self._source.name(prefix) for prefix in ("stop", "tag", "size"))
        line(f"if {count}:", where)
        self._source.depth += 1
        line(f"if {count} > 127: {count}, pos = read_uvarint(view, pos - 1)", where)
        line(f"if {count} * 2 > end - pos: raise too_many({count}, end - pos)", where)
        line(f"for _ in range({count}):", where)
        self._source.depth += 1
        line(f"{tag}, pos = read_uvarint(view, pos)", where)
        line(f"{size}, pos = read_uvarint(view, pos)", where)
        line(f"if {size} > end - pos: raise too_long({size}, end - pos)", where)
        line(f"{stop} = pos + {size}", where)
        for nth, field in enumerate(spec.tagged):
            here = join(path, field)
            line(f"{'if' if nth == 0 else 'elif'} {tag} == {field.tag}:", here)
            self._source.depth += 1
            self._read_tagged(field, f"{var}.{field.name}", here, (*keys, field.name))
            line(f"if pos != {stop}: raise Refused(f'{{pos - {stop}:+}} bytes beyond the size of its tag')", here)
            self._source.depth -= 1
        line(f"else: pos = {stop}", where)
        self._source.depth -= 2

    def _read_tagged(self, field: Field, target: str, path: str, keys: tuple[str, ...]) -> None:
        run = _Run()
        if field.kind in FIXED and not field.is_array:
            run.add(FIXED[field.kind], target, path)
            self._flush(run)
        else:
            self._read_variable(field, True, run, target, path, keys)


class _MessageClasses:
    """Makes the classes of decoded messages, whose class attributes answer for absent fields."""

    def __init__(self, api_key: int, direction: Direction) -> None:
        versions = schema.versions_with_all_fields(api_key)
        self._ever: dict[tuple[str, ...], dict[str, Field]] = {}
        for version in versions:
            for keys, spec in walk(schema.load(api_key, version, direction)):
                self._ever.setdefault(keys, {}).update((field.name, field) for field in spec.fields)

    def make(self, spec: Struct, keys: tuple[str, ...]) -> type[Message]:
        fields = {**self._ever.get(keys, {}), **{field.name: field for field in spec.fields}}
        answers = {name: self._answer(field, keys) for name, field in fields.items()}
        return type(spec.name, (Message,), answers)

    def _answer(self, field: Field, keys: tuple[str, ...]) -> Any:
        if field.is_array:
            return None if field.default is None else FreshDefault(list)
        if field.kind == STRUCT and not field.nullable and field.struct is not None:
            return FreshDefault(self.make(field.struct, (*keys, field.name)))
        return field.default if field.has_default else None


def walk(spec: Struct, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Struct]]:
    """Every struct of a message with the names of the fields that lead to it."""
    yield keys, spec
    for field in spec.fields:
        if field.struct is not None:
            yield from walk(field.struct, (*keys, field.name))
