"""Compiles the encoder of one (API, version, direction) from its schema.

The encoder is one generated function of a message. A field that the message does not carry takes the default of
the schema; a field that the version does not have is ignored; a tagged field at its default is left out. A value
that does not fit its field is a fault of the caller: the exception is passed on with a note naming the field.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from headrace.wire import schema
from headrace.wire.message import Message
from headrace.wire.schema import FIXED, Direction, Field, Struct
from headrace.wire.source import Source, join
from headrace.wire.varint import write_uvarint

Encode = Callable[[Message], bytes]


def compile_encoder(api_key: int, version: int, direction: Direction) -> Encode:
    return _Encoder(api_key, version, direction).compile()


class _Run:
    """Consecutive fixed-width values that one `struct` call writes; a code `x` is a zero byte without a value."""

    def __init__(self) -> None:
        self.codes: list[str] = []
        self.values: list[str] = []
        self._paths: list[str] = []

    @property
    def path(self) -> str:
        return self._paths[0] if len(self._paths) == 1 else f"{self._paths[0]} .. {self._paths[-1]}"

    def add(self, code: str, value: str | None, path: str) -> None:
        self._paths.append(path)
        self.codes.append(code)
        if value is not None:
            self.values.append(value)


class _Encoder:
    def __init__(self, api_key: int, version: int, direction: Direction) -> None:
        self._title = f"{schema.api_name(api_key)} v{version} {direction}"
        self._struct = schema.load(api_key, version, direction)
        self._source = Source("def codec(message):")
        self._names: dict[str, Any] = {
            "NOTHING": {}.get,
            "pack": struct.pack,
            "write_uvarint": write_uvarint,
            "annotate": self._annotate,
        }

    def compile(self) -> Encode:
        source = self._source
        source.line("parts = []; write = parts.append", "")
        source.line("try:", "")
        source.depth += 1
        source.line("get = message.__dict__.get", "")
        self._flush(self._write_struct(self._struct, "get", ""))
        source.depth -= 1
        source.line("except Exception as error:", "")
        source.line("    annotate(error)", "")
        source.line("    raise", "")
        source.line("return b''.join(parts)", "")
        return source.compile(self._title, self._names)

    def _annotate(self, error: Exception) -> None:
        field = self._source.field_at(error.__traceback__)
        error.add_note(f"while encoding field {field} of {self._title}")

    def _write_struct(self, spec: Struct, get: str, path: str) -> _Run:
        """Write all fields but the last run of fixed ones, which is handed back."""
        run = _Run()
        for field in spec.plain:
            value = self._value(field, get)
            run = self._write_field(field, spec.flexible, run, value, join(path, field))
        if not spec.flexible:
            return run
        where = f"{path}.tags" if path else "tags"
        if not spec.tagged:
            run.add("x", None, where)
            return run
        self._flush(run)
        self._write_tags(spec, get, path, where)
        return _Run()

    def _value(self, field: Field, get: str) -> str:
        if field.default is None:
            return f"{get}({field.name!r})"
        return f"{get}({field.name!r}, {field.default!r})"

    def _flush(self, run: _Run) -> None:
        if run.codes:
            self._source.line(f"write({self._packed(run)})", run.path)

    def _packed(self, run: _Run) -> str:
        """The expression for the bytes of a run."""
        codes = "".join(run.codes)
        if not run.values:
            return repr(bytes(len(codes)))
        writer = f"pack_{codes.replace('?', 'o')}"
        self._names[writer] = struct.Struct(">" + codes).pack
        return f"{writer}({', '.join(run.values)})"

    def _flush_with_length(self, run: _Run, code: str, flexible: bool, length: str, path: str) -> None:
        """Write `run` and then a length or count: of the width of `code`, or as a varint of one more."""
        if not flexible:
            run.add(code, length, path)
            self._flush(run)
            return
        line = self._source.line
        size = self._source.name("n")
        line(f"{size} = {length} + 1", path)
        long = f"{self._packed(run)} + write_uvarint({size})" if run.codes else f"write_uvarint({size})"
        run.add("B", size, path)
        line(f"write({self._packed(run)} if {size} < 128 else {long})", run.path)

    def _write_field(self, field: Field, flexible: bool, run: _Run, value: str, path: str) -> _Run:
        """Write the field or add it to the run; answers the run that the next field joins."""
        if field.kind in FIXED and not field.is_array:
            run.add(FIXED[field.kind], value, path)
            return run
        line = self._source.line
        var = self._source.name("v")
        line(f"{var} = {value}", path)
        if field.nullable:
            self._flush(run)
            run = _Run()
            null = {True: b"\0", False: b"\xff\xff" if field.kind == "string" and not field.is_array else b"\xff" * 4}
            marker = b"\xff" if field.struct is not None and not field.is_array else null[flexible]
            line(f"if {var} is None: write({marker!r})", path)
            line("else:", path)
            self._source.depth += 1
        if field.is_array:
            self._flush_with_length(run, "i", flexible, f"len({var})", path)
            self._write_elements(field, flexible, var, path)
        elif field.struct is not None:
            if field.nullable:
                line("write(b'\\x01')", path)
            self._flush(run)
            get = self._source.name("get")
            line(f"{get} = NOTHING if {var} is None else {var}.__dict__.get", path)
            self._flush(self._write_struct(field.struct, get, path))
        else:
            self._write_sized(field.kind, flexible, run, var, path)
        if field.nullable:
            self._source.depth -= 1
        return _Run()

    def _write_sized(self, kind: str, flexible: bool, run: _Run, var: str, path: str) -> None:
        line = self._source.line
        if kind == "string":
            line(f"{var} = {var}.encode()", path)
        self._flush_with_length(run, "h" if kind == "string" else "i", flexible, f"len({var})", path)
        line(f"write({var})", path)

    def _write_elements(self, field: Field, flexible: bool, var: str, path: str) -> None:
        line = self._source.line
        if field.kind == "uuid":
            line(f"write(pack('16s' * len({var}), *{var}))", path)
            return
        if field.kind in FIXED:
            line(f"write(pack(f'>{{len({var})}}{FIXED[field.kind]}', *{var}))", path)
            return
        element = self._source.name("e")
        line(f"for {element} in {var}:", path)
        self._source.depth += 1
        if field.struct is not None:
            get = self._source.name("get")
            line(f"{get} = {element}.__dict__.get", path)
            self._flush(self._write_struct(field.struct, get, f"{path}[]"))
        else:
            self._write_sized(field.kind, flexible, _Run(), element, f"{path}[]")
        self._source.depth -= 1

    def _write_tags(self, spec: Struct, get: str, path: str, where: str) -> None:
        line = self._source.line
        tags, start = self._source.name("tags"), self._source.name("start")
        line(f"{tags} = []; {start} = len(parts)", where)
        for field in spec.tagged:
            here = join(path, field)
            var = self._source.name("v")
            line(f"{var} = {self._value(field, get)}", here)
            line(f"if {self._differs(field, var)}:", here)
            self._source.depth += 1
            single = Field(field.name, field.kind, field.struct, field.is_array, False, None, None, False)
            self._flush(self._write_field(single, True, _Run(), var, here))
            line(f"body = b''.join(parts[{start}:]); del parts[{start}:]", here)
            line(f"{tags}.append({write_uvarint(field.tag or 0)!r} + write_uvarint(len(body)) + body)", here)
            self._source.depth -= 1
        line(f"write(write_uvarint(len({tags}))); parts += {tags}", where)

    def _differs(self, field: Field, var: str) -> str:
        """The expression for: the tagged value is not its default, so it must be written."""
        if field.is_array:
            return f"{var}"
        if field.struct is None:
            return f"{var} is not None" if field.default is None else f"{var} != {field.default!r}"
        inner = (f"{var}.__dict__.get({f.name!r}, {f.default!r}) != {f.default!r}" for f in field.struct.fields)
        return f"{var} is not None and ({' or '.join(inner)})"
