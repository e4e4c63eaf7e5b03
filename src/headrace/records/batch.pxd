# The numbers of batch.py for kernels that are compiled: constants of C, not Python objects.
cdef enum:
    HEADER_BYTES = 61
    LENGTH_END = 12
    MAGIC_AT = 16
    CRC_AT = 17
    ATTRIBUTES_AT = 21
    MAGIC = 2
    CODEC_MASK = 0x07
    APPEND_TIME = 0x08
    CONTROL = 0x20
    LEAST_RECORD_BYTES = 7
    MOST_BATCH_BYTES = 0x7FFFFFFF
    MAX_UNPACKED_BYTES = 0x4000000

cdef extern from *:
    """
    #define HEADRACE_MOST 0x4000000000000000LL
    """
    const long long MOST "HEADRACE_MOST"
