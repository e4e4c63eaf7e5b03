# C types for router.py.
cimport cython
from headrace.records.partitioner cimport murmur2
from libc.string cimport memcpy
from posix.time cimport clock_gettime, timespec, CLOCK_REALTIME
from headrace.records.builder cimport Delivery, OpenBatch, SentBatch, as_bytes, encoded_headers

cdef Py_ssize_t RECORD_OVERHEAD_BYTES

@cython.locals(moment=timespec)
cdef long long now_ms() noexcept

@cython.locals(number="long long")
cdef long long as_int64(object given, str what, object topic) except? -1

@cython.final
cdef class Quota:
    cdef public Py_ssize_t max_bytes, max_records, bytes, records

    cpdef int take(self, OpenBatch batch) except -1
    cpdef int give_back(self, OpenBatch batch) except -1

cdef class PartitionSlot:
    cdef readonly object topic
    cdef readonly int partition
    cdef public OpenBatch batch

cdef class TopicSlots:
    cdef readonly object topic
    cdef public list slots
    cdef public PartitionSlot sticky

cdef class Router:
    cdef readonly object owner, lock, encoder
    cdef readonly Quota quota
    cdef readonly int acks
    cdef public Py_ssize_t max_record_bytes
    cdef public dict topics
    cdef public object closed

    @cython.locals(
        tail=bytes, at_ms="long long", chosen=cython.Py_ssize_t, size=cython.Py_ssize_t, found=object, refused=Delivery,
        delivery=Delivery, single=object, batch=OpenBatch,
    )
    cdef object send(
        self, object topic, object value, object key, object headers, object partition, object timestamp_ms,
        object callback, bint lone
    )

    @cython.locals(
        slots=TopicSlots,
        quota=Quota,
        slot=PartitionSlot,
        batch=OpenBatch,
        count=cython.Py_ssize_t,
        before=cython.Py_ssize_t,
        place=cython.int,
        delivery=Delivery,
    )
    cdef object put(
        self, object topic, bytes key, bytes value, bytes tail, Py_ssize_t partition, long long at_ms, Py_ssize_t size
    )
