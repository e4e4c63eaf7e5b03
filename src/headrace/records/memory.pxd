# The functions of memory.py for kernels that are compiled, on pointers, inlined where they are used.
from cpython.bytearray cimport PyByteArray_AS_STRING
from libc.string cimport memcpy

cdef inline unsigned char* octets(bytearray buffer) noexcept:
    return <unsigned char*>PyByteArray_AS_STRING(buffer)

cdef inline int* ints(bytearray buffer) noexcept:
    return <int*>PyByteArray_AS_STRING(buffer)

cdef inline long long* longs(bytearray buffer) noexcept:
    return <long long*>PyByteArray_AS_STRING(buffer)

cdef inline void copy(
    unsigned char* out, Py_ssize_t at, const unsigned char* data, Py_ssize_t start, Py_ssize_t size
) noexcept:
    memcpy(out + at, data + start, size)

cdef inline long long number(const unsigned char* data, Py_ssize_t pos, Py_ssize_t size) noexcept:
    cdef unsigned long long raw = 0
    cdef Py_ssize_t at
    cdef int bits = 64 - 8 * <int>size
    for at in range(pos, pos + size):
        raw = raw << 8 | data[at]
    return <long long>(raw << bits) >> bits
