# C types for arrow_encoder.py.
cimport cython
from headrace.records.arrow_decoder cimport fresh
from headrace.records.batch cimport MOST
from headrace.records.memory cimport copy, ints, longs, octets
from headrace.records.partitioner cimport murmur2
from headrace.records.varints cimport put_varint, varint_size
from libc.string cimport memcpy

cdef Py_ssize_t MOST_SECTION_BYTES
cdef unsigned long long SEED
cdef unsigned long long FACTOR
cdef unsigned long long WORD

@cython.final
cdef class Cells:
    cdef readonly Py_ssize_t count
    cdef Py_ssize_t first
    cdef bint absent, nullable
    cdef const unsigned char[::1] valid, data
    cdef const int[::1] ends

    cdef Py_ssize_t length(self, Py_ssize_t row) noexcept
    cdef Py_ssize_t start(self, Py_ssize_t row) noexcept
    cdef const unsigned char* pointer(self) noexcept

@cython.final
cdef class Table:
    cdef readonly Py_ssize_t count
    cdef Cells key, value, lists, names, contents
    cdef bint timed
    cdef const long long[::1] times

cdef Py_ssize_t cell_size(Py_ssize_t length) noexcept

@cython.locals(length=cython.Py_ssize_t)
cdef Py_ssize_t put_cell(unsigned char* out, Py_ssize_t pos, Cells cells, Py_ssize_t row) noexcept

@cython.final
cdef class Encoder:
    cdef Table table
    cdef const int[::1] order
    cdef readonly Py_ssize_t taken
    cdef readonly long long base_ms, max_ms

    @cython.locals(
        table=Table,
        room=cython.Py_ssize_t,
        buffer=bytearray,
        before=bytearray,
        out="unsigned char*",
        pos=cython.Py_ssize_t,
        place=cython.Py_ssize_t,
        row=cython.Py_ssize_t,
        length=cython.Py_ssize_t,
        size=cython.Py_ssize_t,
        at_ms="long long",
    )
    cpdef bytearray encode(self, Py_ssize_t first, Py_ssize_t end, Py_ssize_t max_bytes, long long now_ms)

    @cython.locals(lists=Cells, count=cython.Py_ssize_t, size=cython.Py_ssize_t, start=cython.Py_ssize_t,
                   item=cython.Py_ssize_t, length=cython.Py_ssize_t)
    cdef Py_ssize_t headers_size(self, Py_ssize_t row) except -1

    @cython.locals(lists=Cells, count=cython.Py_ssize_t, start=cython.Py_ssize_t, item=cython.Py_ssize_t)
    cdef Py_ssize_t put_headers(self, unsigned char* out, Py_ssize_t pos, Py_ssize_t row) noexcept

cdef unsigned long long mixed(unsigned long long state, unsigned long long number) noexcept

@cython.locals(raw="unsigned long long")
cdef unsigned long long word(const unsigned char* data, Py_ssize_t pos, Py_ssize_t size) noexcept

cdef unsigned long long take_in(
    unsigned long long state, const unsigned char* data, Py_ssize_t pos, Py_ssize_t length) noexcept

cdef unsigned long long take_in_bytes(unsigned long long state, object field) except? 1

@cython.locals(length=cython.Py_ssize_t)
cdef unsigned long long take_in_cell(unsigned long long state, Cells cells, Py_ssize_t row) noexcept

cdef long long finished(unsigned long long state) noexcept

@cython.locals(state="unsigned long long")
cpdef object digest(object key, object value, object headers)

@cython.locals(buffer=bytearray, out="long long*", lists=Cells, row=cython.Py_ssize_t, state="unsigned long long",
               count=cython.Py_ssize_t, start=cython.Py_ssize_t, item=cython.Py_ssize_t)
cpdef bytearray digests(Table table)

@cython.locals(buffer=bytearray, out="int*", row=cython.Py_ssize_t, length=cython.Py_ssize_t)
cpdef bytearray partitions_of(Cells keys, int partition_count, long long turn=*, long long run=*)

@cython.locals(tally_buffer=bytearray, tally="int*", buffer=bytearray, order="int*", row=cython.Py_ssize_t,
               partition=cython.Py_ssize_t)
cpdef tuple by_partition(const int[::1] partitions, Py_ssize_t count, int partition_count)

@cython.locals(place=cython.Py_ssize_t)
cpdef int put_offsets(long long[::1] out, const int[::1] order, Py_ssize_t first, Py_ssize_t end, long long base_offset) except -1
