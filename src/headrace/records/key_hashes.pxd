# C types for key_hashes.py.
cimport cython
from headrace.records.batch cimport HEADER_BYTES, LENGTH_END, MAGIC_AT, MAGIC, CODEC_MASK, APPEND_TIME, CONTROL, MOST
from headrace.records.memory cimport number
from headrace.records.varints cimport varint

cdef Py_ssize_t FIELDS
cdef unsigned long long ALL_BITS
cdef long long LOW_HALF
cdef long long MOST_SECONDS
cdef long long LEAST_SECONDS
cdef unsigned long long BASIS
cdef unsigned long long PRIME
cdef unsigned long long MIX

@cython.locals(found="unsigned long long", at=cython.Py_ssize_t)
cdef unsigned long long hash_of(const unsigned char* data, Py_ssize_t pos, Py_ssize_t length) noexcept

cdef long long whole_seconds(long long span_ms) noexcept

@cython.final
cdef class KeyTable:
    cdef readonly long long first_offset, base_ms
    cdef readonly unsigned long long hash_mask
    cdef public Py_ssize_t count
    cdef readonly Py_ssize_t room, slot_count, unreadable, wanted
    cdef public long long next_offset, last_base, last_crc, last_epoch
    cdef readonly int stopped
    cdef unsigned int[::1] slots, entries
    cdef const unsigned char[::1] payload, unpacked

    @cython.locals(
        data="const unsigned char*",
        start=cython.Py_ssize_t,
        end=cython.Py_ssize_t,
        size=cython.Py_ssize_t,
        base_offset="long long",
        last_delta="long long",
        record_count="long long",
    )
    cpdef Py_ssize_t add(self, object records) except -1

    @cython.locals(attributes=cython.int, whole=cython.bint, before=cython.Py_ssize_t)
    cdef int add_batch(self, object view, const unsigned char* data, Py_ssize_t start, Py_ssize_t size) except -1

    @cython.locals(
        base_ms="long long",
        append_ms="long long",
        append_time=cython.bint,
        record_count="long long",
        last_delta="long long",
        relative="long long",
        previous_delta="long long",
        length="long long",
        delta="long long",
        delta_ms="long long",
        timestamp_ms="long long",
        record_end=cython.Py_ssize_t,
        _="long long",
    )
    cdef bint add_records(
        self, const unsigned char* head, Py_ssize_t start, Py_ssize_t pos, Py_ssize_t end, const unsigned char* data
    ) noexcept

    @cython.locals(seconds="long long", at=cython.Py_ssize_t)
    cdef int put(self, unsigned long long found, long long relative, long long timestamp_ms) noexcept

    @cython.locals(nth=cython.Py_ssize_t, at=cython.Py_ssize_t, slot="unsigned int", slot_count="unsigned int")
    cdef int chain(self, Py_ssize_t first) noexcept

    cpdef long long newest(self, unsigned long long found)

    @cython.locals(
        low="unsigned int",
        high="unsigned int",
        least="long long",
        greatest="long long",
        at=cython.Py_ssize_t,
        offset="long long",
        seconds="long long",
        before="long long",
        offsets=list,
    )
    cpdef tuple find(
        self, unsigned long long found, long long entry, long long first_offset, long long next_offset,
        long long from_ms, long long to_ms, long long steps
    )

    @cython.locals(at=cython.Py_ssize_t)
    cpdef bint cut(self, long long offset, long long steps) except -1

    @cython.locals(nth=cython.Py_ssize_t, at=cython.Py_ssize_t, slot=cython.Py_ssize_t)
    cpdef bint link(self, Py_ssize_t first, Py_ssize_t end) except -1
