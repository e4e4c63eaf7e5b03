# C types for arrow_decoder.py.
cimport cython
from headrace.records.batch cimport (
    HEADER_BYTES, LENGTH_END, MAGIC_AT, CRC_AT, ATTRIBUTES_AT, MAGIC, CODEC_MASK, APPEND_TIME, CONTROL,
    LEAST_RECORD_BYTES, MAX_UNPACKED_BYTES, MOST,
)
from headrace.records.memory cimport copy, ints, longs, number, octets
from headrace.records.varints cimport skip, skip_headers, varint
from cpython.bytearray cimport PyByteArray_FromStringAndSize

cdef long long LEAST_MS
cdef long long MOST_MS
cdef long long SEQUENCE_MASK

cpdef bytearray fresh(Py_ssize_t size)

cdef bint is_ascii(const unsigned char* data, Py_ssize_t pos, Py_ssize_t length) noexcept

cdef bytearray trimmed(bytearray buffer, Py_ssize_t size)

cdef long long microseconds(long long timestamp_ms) noexcept

@cython.locals(out="int*", row=cython.Py_ssize_t)
cdef void fill_ints(bytearray buffer, Py_ssize_t start, Py_ssize_t end, int value) noexcept

@cython.locals(out="long long*", row=cython.Py_ssize_t)
cdef void fill_longs(bytearray buffer, Py_ssize_t start, Py_ssize_t end, long long value) noexcept

@cython.final
cdef class Cells:
    cdef Py_ssize_t rows, count, nulls, used, room, first_room
    cdef bytearray data_buffer, end_buffer, valid
    cdef unsigned char* data
    cdef unsigned char* bits
    cdef int* ends
    cdef object pool

    cdef int make_room(self, Py_ssize_t size) except -1
    cdef int start(self, Py_ssize_t room) except -1
    cdef int put(self, const unsigned char* data, Py_ssize_t pos, Py_ssize_t length) except -1
    cdef int put_length(self, Py_ssize_t length) except -1
    cdef int put_null(self) except -1
    @cython.locals(before=bytearray)
    cdef int more_rows(self) except -1
    @cython.locals(before=bytearray)
    cdef int more_room(self, Py_ssize_t length) except -1
    cpdef object take(self)

@cython.final
cdef class Rows:
    cdef readonly Py_ssize_t count
    cdef readonly Cells keys, values, headers, header_names, header_values
    cdef Py_ssize_t rows, data_bytes, used
    cdef bint with_key, with_value, with_headers, append_time, checked
    cdef readonly object wanted
    cdef object view
    cdef frozenset hidden
    cdef readonly long long at_offset
    cdef dict constants
    cdef bytearray offset_buffer, timestamp_buffer
    cdef const unsigned char[::1] records, payload
    cdef Py_ssize_t records_end, batch_end
    cdef long long producer_id, producer_epoch, leader_epoch, base_sequence
    cdef Py_ssize_t pos, end
    cdef long long nth, record_count, previous_delta, last_delta, base_offset, base_ms, append_ms
    cdef long long first_offset, next_offset, expected_offset

    cdef int start(self) except -1
    cpdef int begin(self, object records, long long first_offset, long long next_offset, bint checked=*,
                    frozenset hidden=*) except -1

    @cython.locals(data="const unsigned char*", start=cython.Py_ssize_t, size=cython.Py_ssize_t, attributes=cython.int, crc="long long", wrong=cython.bint, shown=cython.bint)
    cpdef bint advance(self) except -1

    cdef int open(self, const unsigned char* data, Py_ssize_t start, Py_ssize_t size, int attributes) except -1

    @cython.locals(
        data="const unsigned char*",
        offsets="long long*",
        timestamps="long long*",
        before=cython.Py_ssize_t,
        start=cython.Py_ssize_t,
        pos=cython.Py_ssize_t,
        size=cython.Py_ssize_t,
        record_end=cython.Py_ssize_t,
        key_at=cython.Py_ssize_t,
        value_at=cython.Py_ssize_t,
        headers_at=cython.Py_ssize_t,
        length="long long",
        key_length="long long",
        value_length="long long",
        header_count="long long",
        delta="long long",
        delta_ms="long long",
        offset="long long",
    )
    cpdef bint fill(self) except -1

    @cython.locals(length="long long", nth=cython.Py_ssize_t, name=bytes)
    cdef int put_headers(self, const unsigned char* data, Py_ssize_t pos, long long count, Py_ssize_t end) except -1

    cdef int put_constants(self, Py_ssize_t before) except -1

    @cython.locals(sequences="int*", offsets="long long*", row=cython.Py_ssize_t, delta="long long")
    cdef int put_sequences(self, bytearray buffer, Py_ssize_t before, long long base_sequence) except -1

    cpdef dict take_numbers(self)
