# The functions of varints.py for kernels that are compiled, line by line the same, inlined where they are used.
cdef inline (long long, Py_ssize_t) long_varint(const unsigned char* data, Py_ssize_t pos, Py_ssize_t end) noexcept:
    cdef unsigned long long raw, byte
    cdef int shift
    raw = 0
    shift = 0
    while pos < end and shift <= 63:
        byte = data[pos]
        pos += 1
        if shift == 63 and byte > 1:
            break
        raw |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (raw >> 1) ^ -(raw & 1), pos
        shift += 7
    return 0, -1

cdef inline (long long, Py_ssize_t) varint(const unsigned char* data, Py_ssize_t pos, Py_ssize_t end) noexcept:
    cdef unsigned long long raw
    if pos < 0 or pos >= end:
        return 0, -1
    raw = data[pos]
    if raw < 0x80:
        return (raw >> 1) ^ -(raw & 1), pos + 1
    if pos + 1 < end and data[pos + 1] < 0x80:
        raw = (raw & 0x7F) | (data[pos + 1] << 7)
        return (raw >> 1) ^ -(raw & 1), pos + 2
    return long_varint(data, pos, end)

cdef inline Py_ssize_t skip(Py_ssize_t pos, long long length, Py_ssize_t end) noexcept:
    if pos < 0 or length < -1 or length > end - pos:
        return -1
    return pos + length if length > 0 else pos

cdef inline Py_ssize_t skip_headers(const unsigned char* data, Py_ssize_t pos, long long count, Py_ssize_t end) noexcept:
    cdef long long length
    while count > 0 and pos >= 0:
        length, pos = varint(data, pos, end)
        if length < 0:
            return -1
        pos = skip(pos, length, end)
        length, pos = varint(data, pos, end)
        pos = skip(pos, length, end)
        count -= 1
    return pos if count == 0 else -1

cdef inline Py_ssize_t varint_size(long long value) noexcept:
    cdef unsigned long long raw
    cdef Py_ssize_t size
    raw = (value << 1) ^ (value >> 63)
    size = 1
    while raw >= 0x80:
        raw >>= 7
        size += 1
    return size

cdef inline Py_ssize_t put_varint(unsigned char* out, Py_ssize_t pos, long long value) noexcept:
    cdef unsigned long long raw
    raw = (value << 1) ^ (value >> 63)
    while raw >= 0x80:
        out[pos] = (raw & 0x7F) | 0x80
        pos += 1
        raw >>= 7
    out[pos] = raw
    return pos + 1
