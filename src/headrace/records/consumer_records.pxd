# C types for consumer_records.py.
cimport cython
from headrace.records.batch cimport (
    HEADER_BYTES, LENGTH_END, MAGIC_AT, CRC_AT, ATTRIBUTES_AT, MAGIC, CODEC_MASK, APPEND_TIME, CONTROL,
    LEAST_RECORD_BYTES, MAX_UNPACKED_BYTES, MOST,
)
from headrace.records.memory cimport number
from headrace.records.varints cimport skip, skip_headers, varint
from cpython.bytes cimport PyBytes_FromStringAndSize

cdef object piece(const unsigned char* data, Py_ssize_t pos, Py_ssize_t length)

@cython.locals(data="const unsigned char*", pos=cython.Py_ssize_t, end=cython.Py_ssize_t, length="long long", found=list)
cdef list headers_of(bytes raw)

@cython.final
cdef class ReceivedRecord:
    cdef readonly object topic, key
    cdef public object value
    cdef bytes raw_headers
    cdef list header_list
    cdef readonly long long offset, timestamp_ms
    cdef readonly int partition, leader_epoch
    cdef public int delivery_count

    cpdef tuple fields(self)

@cython.final
cdef class RecordSet:
    cdef readonly object topic
    cdef readonly int partition
    cdef readonly long long next_offset, end_offset, taken_bytes
    cdef readonly bint finished, check_crc
    cdef object view, failed
    cdef frozenset hidden
    cdef const unsigned char[::1] records, payload
    cdef Py_ssize_t records_end, batch_end, pos, end
    cdef bint append_time
    cdef int leader_epoch
    cdef long long nth, record_count, previous_delta, last_delta, base_offset, after_batch, base_ms, append_ms

    @cython.locals(before=cython.Py_ssize_t, most_bytes="long long")
    cpdef Py_ssize_t take(self, list into, Py_ssize_t max_records, long long max_bytes=*) except -1

    cdef object placed(self, object error)

    @cython.locals(data="const unsigned char*", start=cython.Py_ssize_t, size=cython.Py_ssize_t, attributes=cython.int,
                   crc="long long", wrong=cython.bint, count="long long", shown=cython.bint)
    cdef bint advance(self) except -1

    @cython.locals(after="long long")
    cdef int pass_over(self) except -1

    cdef int open(self, const unsigned char* data, Py_ssize_t start, Py_ssize_t size, int attributes, long long count) except -1

    @cython.locals(
        data="const unsigned char*",
        pos=cython.Py_ssize_t,
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
        record=ReceivedRecord,
    )
    cdef int fill(self, list into, Py_ssize_t most, long long most_bytes) except -1

@cython.locals(found=RecordSet)
cpdef long long receive(
    object records, str topic, int partition, long long from_offset, long long end_offset, list into, bint check_crc=*,
    frozenset hidden=*
) except? -1
