/* What the load programs share: a clock, percentiles, a payload, and the arguments.
 *
 * Every program is called as  PROGRAM MODE HOST PORT TOPIC PARTITIONS COUNT SIZE WINDOW
 * and prints one line of JSON. MODE is create, delete, produce, pipelined, sync or consume; Kafka's has more. Those that
 * load print `ready` once they are connected and wait for a line on their input, so that the caller can read the
 * broker's clocks at the very ends of the load: the birth of a topic or a connection is no part of it.
 * WINDOW is how many sends may be unanswered at once in the pipelined mode, and how many make a portion.
 */
#ifndef LOAD_H
#define LOAD_H

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A load that makes no progress for this long is broken, not slow. */
#define STALL_MS 30000

struct load {
    const char *mode, *host, *topic;
    int port, partitions, window;
    int64_t count;
    size_t size;
    char *payload;
};

static inline int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline double seconds_since(int64_t start_ns) { return (double)(now_ns() - start_ns) / 1e9; }

static inline void fail(const char *what, const char *why) {
    fprintf(stderr, "load: %s: %s\n", what, why ? why : "no reason given");
    exit(1);
}

static inline struct load parse_load(int argc, char **argv) {
    if (argc != 9) fail("usage", "MODE HOST PORT TOPIC PARTITIONS COUNT SIZE WINDOW");
    struct load load = {.mode = argv[1], .host = argv[2], .port = atoi(argv[3]), .topic = argv[4],
                        .partitions = atoi(argv[5]), .count = atoll(argv[6]),
                        .size = (size_t)atoll(argv[7]), .window = atoi(argv[8])};
    if (load.partitions < 1 || load.count < 0 || load.window < 1) fail("usage", "a number is out of range");
    load.payload = malloc(load.size + 1);
    if (!load.payload) fail("payload", "out of memory");
    /* Letters in no order that a compressor could use; fixed, so that each contestant gets the same bytes. */
    uint32_t state = 2463534242u;
    for (size_t i = 0; i < load.size; i++) {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        load.payload[i] = (char)('A' + state % 58);
    }
    load.payload[load.size] = 0;
    return load;
}

/* Tells the caller that the load can begin, waits for its word, and answers when that was. */
static inline int64_t begin_load(void) {
    char line[16];
    printf("ready\n");
    fflush(stdout);
    if (!fgets(line, sizeof line, stdin)) fail("start", "the caller is gone");
    return now_ns();
}

static inline int compare_ns(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static inline double percentile_us(const int64_t *sorted_ns, int64_t count, double share) {
    if (count == 0) return 0;
    int64_t at = (int64_t)(share * (double)count);
    return (double)sorted_ns[at < count ? at : count - 1] / 1e3;
}

static inline void print_latencies(int64_t *latencies_ns, int64_t count) {
    qsort(latencies_ns, (size_t)count, sizeof *latencies_ns, compare_ns);
    printf(", \"p50_us\": %.1f, \"p99_us\": %.1f, \"p999_us\": %.1f", percentile_us(latencies_ns, count, 0.5),
           percentile_us(latencies_ns, count, 0.99), percentile_us(latencies_ns, count, 0.999));
}

/* warmed: acknowledged messages sent before the clock started; they are on the topic as well.
 * latencies_ns may be NULL: the mode measured throughput only. */
static inline void print_sent(const struct load *load, int64_t warmed, int64_t delivered, int64_t failed,
                              double seconds, int64_t *latencies_ns) {
    printf("{\"mode\": \"%s\", \"warmed\": %" PRId64 ", \"delivered\": %" PRId64 ", \"failed\": %" PRId64
           ", \"seconds\": %.6f", load->mode, warmed, delivered, failed, seconds);
    if (latencies_ns) print_latencies(latencies_ns, delivered);
    printf("}\n");
    fflush(stdout);
}

/* latencies_ns: of the ends of all portions, not of single messages. */
static inline void print_portions(const struct load *load, int64_t warmed, int64_t delivered, int64_t failed,
                                  double seconds, int64_t *latencies_ns, int64_t portions) {
    printf("{\"mode\": \"%s\", \"warmed\": %" PRId64 ", \"delivered\": %" PRId64 ", \"failed\": %" PRId64
           ", \"seconds\": %.6f", load->mode, warmed, delivered, failed, seconds);
    print_latencies(latencies_ns, portions);
    printf("}\n");
    fflush(stdout);
}

static inline void print_received(const struct load *load, int64_t received, int64_t bytes, int64_t gaps,
                                  double seconds) {
    printf("{\"mode\": \"%s\", \"received\": %" PRId64 ", \"bytes\": %" PRId64 ", \"gaps\": %" PRId64
           ", \"seconds\": %.6f}\n", load->mode, received, bytes, gaps, seconds);
    fflush(stdout);
}

#endif
