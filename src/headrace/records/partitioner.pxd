# murmur2 of partitioner.py for kernels that are compiled, line by line the same, inlined where it is used.
from libc.string cimport memcpy

# Written out as literals they would be Python objects, being larger than an int.
cdef extern from *:
    """
    #define HEADRACE_MURMUR_SEED 0x9747B28CULL
    #define HEADRACE_MURMUR_FACTOR 0x5BD1E995ULL
    #define HEADRACE_MURMUR_HALF_WORD 0xFFFFFFFFULL
    """
    const unsigned long long SEED "HEADRACE_MURMUR_SEED"
    const unsigned long long FACTOR "HEADRACE_MURMUR_FACTOR"
    const unsigned long long HALF_WORD "HEADRACE_MURMUR_HALF_WORD"

cdef inline unsigned long long little_endian(const unsigned char* data, Py_ssize_t pos, Py_ssize_t size) noexcept:
    cdef unsigned int raw = 0
    memcpy(&raw, data + pos, size)
    return raw

cdef inline unsigned long long murmur2(const unsigned char* data, Py_ssize_t pos, Py_ssize_t length) noexcept:
    cdef unsigned long long hashed, part
    hashed = SEED ^ length
    while length >= 4:
        part = little_endian(data, pos, 4) * FACTOR & HALF_WORD
        part = (part ^ part >> 24) * FACTOR & HALF_WORD
        hashed = (hashed * FACTOR & HALF_WORD) ^ part
        pos += 4
        length -= 4
    if length > 0:
        hashed = (hashed ^ little_endian(data, pos, length)) * FACTOR & HALF_WORD
    hashed = (hashed ^ hashed >> 13) * FACTOR & HALF_WORD
    return hashed ^ hashed >> 15
