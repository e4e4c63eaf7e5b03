# C types for kernel.py, so that the compiled one keeps its numbers out of Python objects.
cimport cython
from headrace.records.batch cimport (
    ATTRIBUTES_AT, CODEC_MASK, CRC_AT, HEADER_BYTES, LEAST_RECORD_BYTES, LENGTH_END, MOST_BATCH_BYTES, MOST,
)
from headrace.records.varints cimport skip, skip_headers, varint


@cython.locals(
    data="const unsigned char*",
    offsets="long long[::1]",
    timestamps_ms="long long[::1]",
    key_starts="long long[::1]",
    key_lengths="long long[::1]",
    value_starts="long long[::1]",
    value_lengths="long long[::1]",
    header_starts="long long[::1]",
    header_counts="long long[::1]",
    record_starts="long long[::1]",
    count="long long",
    end=cython.Py_ssize_t,
    pos=cython.Py_ssize_t,
    record_end=cython.Py_ssize_t,
    nth=cython.Py_ssize_t,
    length="long long",
    header_count="long long",
    delta="long long",
    previous_delta="long long",
    last_delta="long long",
    delta_ms="long long",
    base_offset="long long",
    base_ms="long long",
    append_ms="long long",
    append_time=cython.bint,
)
cpdef object decode(object payload, object header)

@cython.locals(raw="unsigned long long")
cdef int put_varint(bytearray out, long long value) except -1

cdef int put_bytes(bytearray out, object value) except -1

@cython.locals(out=bytearray, head=bytearray, tail=bytearray, nth=cython.Py_ssize_t)
cpdef bytearray encode(object new, long long base_ms)
