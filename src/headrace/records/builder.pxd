# C types for builder.py.
cimport cython
from headrace.records.batch cimport HEADER_BYTES, LENGTH_END, CRC_AT, ATTRIBUTES_AT, MAGIC, MOST_BATCH_BYTES, MOST
from headrace.records.memory cimport copy, octets
from headrace.records.varints cimport put_varint, varint_size
from cpython.bytearray cimport PyByteArray_Resize

cdef void put_number(unsigned char* out, Py_ssize_t pos, Py_ssize_t size, long long value) noexcept

cdef Py_ssize_t put_bytes(unsigned char* out, Py_ssize_t pos, Py_ssize_t length, bytes content) noexcept

cpdef bytes as_bytes(object field, str what)

@cython.locals(
    found=tuple, fields=list, size=cython.Py_ssize_t, text=bytes, field=bytes, buffer=bytearray, out="unsigned char*",
    pos=cython.Py_ssize_t,
)
cpdef bytes encoded_headers(object headers)

cdef class SentBatch:
    cdef public object topic
    cdef public int partition
    cdef public object owner
    cdef public long long base_offset, append_ms
    cdef public object error
    cdef public bint done
    cdef public list parts
    cdef public object callbacks

    cpdef bint finish(self, long long base_offset, long long append_ms=*) except -1
    cpdef bint fail(self, object error) except -1

@cython.final
cdef class Delivery:
    cdef public SentBatch sent
    cdef public long long timestamp_ms
    cdef public int place

    cpdef SentBatch batch(self)

cdef class OpenBatch:
    cdef public SentBatch sent
    cdef readonly int codec
    cdef readonly Py_ssize_t room, size, record_bytes
    cdef readonly long long first_ms, max_ms
    cdef readonly int count
    cdef readonly bint sealed
    cdef public bint pinned
    cdef Py_ssize_t allocated
    cdef bytearray buffer

    cpdef int append(self, long long timestamp_ms, object key, object value, object headers=*) except -2

    @cython.locals(
        out="unsigned char*",
        pos=cython.Py_ssize_t,
        end=cython.Py_ssize_t,
        length=cython.Py_ssize_t,
        key_length=cython.Py_ssize_t,
        value_length=cython.Py_ssize_t,
        tail_length=cython.Py_ssize_t,
        delta_ms="long long",
    )
    cdef int put(self, long long timestamp_ms, bytes key, bytes value, bytes tail) except -2

    @cython.locals(buffer=bytearray, out="unsigned char*")
    cpdef bytearray seal(self, long long producer_id=*, int epoch=*, int base_sequence=*, int attributes=*)

    cpdef int reuse(self) except -1
    cdef int grow(self, Py_ssize_t needed) except -1
    cdef int pack(self) except -1
