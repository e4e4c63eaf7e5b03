/* Ready-made record batches, dealt to many topics: a load that costs far less than the broker it is sent to.
 *
 * Called as  load_topics HOST PORT PLAN PRODUCERS TOPICS_PER_REQUEST WINDOW CONSUMERS
 * PLAN is a file in the machine's own byte order: uint32 topics, then for each: uint16 length and the name, uint32 records
 * and uint32 length and the batch. A batch is sent again and again as it is: offset and epoch, which the broker stamps,
 * are not under its checksum. Topics have one partition and a batch of their own, so that none can pass for another.
 *
 * PRODUCERS connections share the topics out between them (all send to the same ones when there are fewer topics). Each
 * has requests of TOPICS_PER_REQUEST topics, one batch each, sends them in turn with acks=-1 and keeps WINDOW unanswered.
 * CONSUMERS connections share the topics likewise and ask for all of theirs in each fetch.
 *
 * Prints `ready`, then answers each line on its input with a line of JSON:
 *   produce SECONDS BATCHES   send for so long, or so many, whichever ends first, and wait for every answer
 *   both SECONDS BATCHES      the same with the consumers at work, until they have every acknowledged record
 *   read FIRST END            the topics FIRST to END, from where this program found them to what it had acknowledged,
 *                             every batch compared with the one in the plan
 *   whole                     later reads begin at offset 0
 * Ends, by force, at the first refusal, gap or foreign byte.
 */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <arpa/inet.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#include "load.h"

#define PRODUCE 0
#define FETCH 1
#define LIST_OFFSETS 2
#define IOVS 64
#define WINDOW_MAX 1000
#define LATENCIES_MAX (1 << 22)
#define FETCH_BYTES (8 << 20)
#define PARTITION_BYTES (1 << 20)
#define FETCH_LEAST_BYTES (64 << 10)
#define FETCH_WAIT_MS 10
#define ANSWER_BYTES (FETCH_BYTES + (4 << 20))
/* A batch: offset 8, length 4, epoch 4, then what the broker leaves alone; the count of records is at 57. */
#define BATCH_OWN 16
#define BATCH_COUNT 57
#define BATCH_HEADER 61

struct topic {
    char *name, *batch;
    uint16_t name_size;
    uint32_t records, batch_size;
    int64_t begin, acknowledged, next; /* offsets: found here, answered up to, read up to */
};

struct bytes {
    char *data;
    size_t size, room;
};

struct connection {
    int fd, producer;
    int topic_count, *topics;
    struct bytes *requests; /* of a producer, sent in turn */
    int request_count;
    int64_t sent, answered;
    size_t partial;
    int64_t sent_at_ns[WINDOW_MAX];
    struct bytes in;
    int asked; /* a consumer's fetch is on its way */
};

static struct topic *topics;
static int topic_count, producers, consumers, per_request, window;
static struct connection *connections;
static int epoll_fd;
static int64_t *latencies_ns, latency_count, batches_sent, batches_answered;
static int64_t stop_at_ns, batches_max, last_answer_ns, last_record_ns;
static int stopped, comparing, read_first, read_end;
static int64_t records_read, bytes_read;

/* Big-endian fields, in and out. */
static void need(struct bytes *b, size_t more) {
    if (b->size + more <= b->room) return;
    b->room = (b->size + more) * 2;
    b->data = realloc(b->data, b->room);
    if (!b->data) fail("memory", "out of it");
}
static void put(struct bytes *b, const void *data, size_t size) {
    need(b, size);
    memcpy(b->data + b->size, data, size);
    b->size += size;
}
static void put_int(struct bytes *b, int64_t value, int size) {
    unsigned char out[8];
    for (int i = 0; i < size; i++) out[i] = (unsigned char)((uint64_t)value >> 8 * (size - 1 - i));
    put(b, out, (size_t)size);
}
static void put_name(struct bytes *b, const struct topic *t) {
    put_int(b, t->name_size, 2);
    put(b, t->name, t->name_size);
}
static int64_t get_int(const char *at, int size) {
    uint64_t value = 0;
    for (int i = 0; i < size; i++) value = value << 8 | (unsigned char)at[i];
    if (size < 8 && value >> (8 * size - 1)) value -= (uint64_t)1 << 8 * size;
    return (int64_t)value;
}

struct reader {
    const char *at, *end;
};
static int64_t take(struct reader *r, int size) {
    if (r->end - r->at < size) fail("answer", "it is cut short");
    r->at += size;
    return get_int(r->at - size, size);
}
static void take_name(struct reader *r, const struct topic *t) {
    int64_t size = take(r, 2);
    if (size != t->name_size || r->end - r->at < size || memcmp(r->at, t->name, (size_t)size))
        fail(t->name, "the answer names another topic");
    r->at += size;
}
static void take_no_error(struct reader *r, const struct topic *t) {
    char code[40];
    int64_t error = take(r, 2);
    snprintf(code, sizeof code, "refused with error code %d", (int)error);
    if (error) fail(t->name, code);
}

static void begin_request(struct bytes *b, int api_key, int version) {
    b->size = 0;
    put_int(b, 0, 4);
    put_int(b, api_key, 2);
    put_int(b, version, 2);
    put_int(b, 1, 4);
    put_int(b, 5, 2);
    put(b, "bench", 5);
}
static void end_request(struct bytes *b) {
    size_t size = b->size;
    b->size = 0;
    put_int(b, (int64_t)size - 4, 4);
    b->size = size;
}

/* Produce v7 of one batch to each of these topics. */
static void build_produce(struct bytes *b, const int *chosen, int count) {
    begin_request(b, PRODUCE, 7);
    put_int(b, -1, 2);
    put_int(b, -1, 2);
    put_int(b, STALL_MS, 4);
    put_int(b, count, 4);
    for (int i = 0; i < count; i++) {
        const struct topic *t = &topics[chosen[i]];
        put_name(b, t);
        put_int(b, 1, 4);
        put_int(b, 0, 4);
        put_int(b, t->batch_size, 4);
        put(b, t->batch, t->batch_size);
    }
    end_request(b);
}

static void take_produced(struct connection *c, struct reader r) {
    int first = (int)(c->answered % c->request_count) * per_request;
    int64_t count = take(&r, 4), now = now_ns();
    for (int64_t i = 0; i < count; i++) {
        if (first + i >= c->topic_count) fail("produce", "the answer has more topics than the request");
        struct topic *t = &topics[c->topics[first + i]];
        take_name(&r, t);
        if (take(&r, 4) != 1) fail(t->name, "the answer has not one partition");
        take(&r, 4);
        take_no_error(&r, t);
        take(&r, 8);
        take(&r, 8);
        take(&r, 8);
        t->acknowledged += t->records;
    }
    batches_answered += count;
    if (latency_count < LATENCIES_MAX) latencies_ns[latency_count++] = now - c->sent_at_ns[c->answered % WINDOW_MAX];
    c->answered++;
    last_answer_ns = now;
}

static int request_batches(const struct connection *c, int64_t request) {
    int left = c->topic_count - (int)(request % c->request_count) * per_request;
    return left < per_request ? left : per_request;
}

/* As many requests as the window allows, many in one write: what arrives together is one turn of the broker. */
static void send_more(struct connection *c) {
    for (;;) {
        struct iovec parts[IOVS];
        int count = 0;
        int64_t now = now_ns(), request = c->sent;
        if (now >= stop_at_ns || batches_sent >= batches_max) stopped = 1;
        for (; count < IOVS && request - c->answered < window && (!stopped || (c->partial && !count)); request++) {
            struct bytes *b = &c->requests[request % c->request_count];
            size_t skipped = count ? 0 : c->partial;
            parts[count].iov_base = b->data + skipped;
            parts[count++].iov_len = b->size - skipped;
            if (batches_sent + count * per_request >= batches_max) {
                request++;
                break;
            }
        }
        if (!count) return;
        ssize_t wrote = writev(c->fd, parts, count);
        if (wrote < 0) {
            if (errno == EAGAIN) return;
            fail("send", strerror(errno));
        }
        for (int i = 0; i < count && (size_t)wrote >= parts[i].iov_len; i++) {
            wrote -= (ssize_t)parts[i].iov_len;
            c->partial = 0;
            c->sent_at_ns[c->sent % WINDOW_MAX] = now;
            batches_sent += request_batches(c, c->sent);
            c->sent++;
        }
        c->partial += (size_t)wrote;
        if (wrote) return; /* the socket is full */
    }
}

/* Fetch v4 of everything that this consumer has not read; nothing to ask is no request. */
static void ask_more(struct connection *c, int least_bytes) {
    static struct bytes b;
    int count = 0;
    size_t count_at;
    begin_request(&b, FETCH, 4);
    put_int(&b, -1, 4);
    put_int(&b, FETCH_WAIT_MS, 4);
    put_int(&b, least_bytes, 4);
    put_int(&b, FETCH_BYTES, 4);
    put_int(&b, 0, 1);
    count_at = b.size;
    put_int(&b, 0, 4);
    for (int i = 0; i < c->topic_count; i++) {
        const struct topic *t = &topics[c->topics[i]];
        /* Beside a producer that goes on, a consumer waits at the end of every topic. */
        if (c->topics[i] < read_first || c->topics[i] >= read_end || (stopped && t->next >= t->acknowledged)) continue;
        put_name(&b, t);
        put_int(&b, 1, 4);
        put_int(&b, 0, 4);
        put_int(&b, t->next, 8);
        put_int(&b, PARTITION_BYTES, 4);
        count++;
    }
    if (!count) return;
    end_request(&b);
    size_t size = b.size;
    b.size = count_at;
    put_int(&b, count, 4);
    b.size = size;
    for (size_t done = 0; done < size;) {
        ssize_t wrote = write(c->fd, b.data + done, size - done);
        if (wrote < 0 && errno != EAGAIN) fail("send", strerror(errno));
        if (wrote > 0) done += (size_t)wrote;
    }
    c->asked = 1;
}

static void take_records(struct topic *t, const char *at, const char *end) {
    while (end - at >= BATCH_HEADER) {
        int64_t size = get_int(at + 8, 4) + 12;
        if (size > end - at) return; /* cut off, as the protocol allows: it comes whole with the next fetch */
        if (get_int(at, 8) != t->next) fail(t->name, "an offset is missing or comes twice");
        if (size != t->batch_size || get_int(at + BATCH_COUNT, 4) != t->records)
            fail(t->name, "a batch is not the one that was sent");
        if (comparing && memcmp(at + BATCH_OWN, t->batch + BATCH_OWN, t->batch_size - BATCH_OWN))
            fail(t->name, "a batch has other bytes than were sent");
        t->next += t->records;
        records_read += t->records;
        bytes_read += size;
        at += size;
    }
}

static struct topic *topic_named(const struct connection *c, struct reader *r, int *guess) {
    int64_t size = take(r, 2);
    const char *name = r->at;
    if (size < 0 || r->end - r->at < size) fail("fetch", "a name is cut short");
    r->at += size;
    for (int tried = 0; tried < c->topic_count; tried++, ++*guess) {
        struct topic *t = &topics[c->topics[*guess % c->topic_count]];
        if (t->name_size == size && !memcmp(t->name, name, (size_t)size)) return t;
    }
    fail("fetch", "the answer has a topic that was not asked for");
    return NULL;
}

static void take_fetched(struct connection *c, struct reader r) {
    int guess = 0;
    int64_t before = records_read;
    take(&r, 4);
    int64_t count = take(&r, 4);
    for (int64_t i = 0; i < count; i++) {
        struct topic *t = topic_named(c, &r, &guess);
        if (take(&r, 4) != 1) fail(t->name, "the answer has not one partition");
        take(&r, 4);
        take_no_error(&r, t);
        if (take(&r, 8) != t->acknowledged && comparing) fail(t->name, "it does not end where the acknowledged ends");
        take(&r, 8);
        for (int64_t aborted = take(&r, 4); aborted > 0; aborted--) take(&r, 8), take(&r, 8);
        int64_t size = take(&r, 4);
        if (size > r.end - r.at) fail(t->name, "records are cut short");
        if (size > 0) {
            take_records(t, r.at, r.at + size);
            r.at += size;
        }
    }
    c->asked = 0;
    if (records_read > before) last_record_ns = now_ns();
}

/* Everything that has arrived; answers that are whole are worked on. */
static void receive(struct connection *c) {
    for (;;) {
        need(&c->in, 64 << 10);
        ssize_t got = recv(c->fd, c->in.data + c->in.size, c->in.room - c->in.size, 0);
        if (got == 0) fail("receive", "the broker closed the connection");
        if (got < 0) {
            if (errno == EAGAIN) return;
            fail("receive", strerror(errno));
        }
        c->in.size += (size_t)got;
        size_t used = 0;
        while (c->in.size - used >= 4) {
            int64_t size = get_int(c->in.data + used, 4);
            if (size < 4 || size > ANSWER_BYTES) fail("receive", "an answer has an impossible size");
            if ((int64_t)(c->in.size - used) < size + 4) break;
            struct reader r = {c->in.data + used + 8, c->in.data + used + 4 + size};
            if (c->producer) take_produced(c, r);
            else take_fetched(c, r);
            used += (size_t)size + 4;
        }
        memmove(c->in.data, c->in.data + used, c->in.size - used);
        c->in.size -= used;
    }
}

static int behind(void) {
    for (int i = read_first; i < read_end; i++)
        if (topics[i].next < topics[i].acknowledged) return 1;
    return 0;
}

static int unanswered(void) {
    for (int i = 0; i < producers; i++)
        if (connections[i].sent > connections[i].answered || connections[i].partial) return 1;
    return 0;
}

/* Until every producer has its answers and, where they take part, every consumer has every acknowledged record. */
static void run(int producing, int consuming, int least_bytes) {
    struct epoll_event events[64];
    for (;;) {
        if (producing)
            for (int i = 0; i < producers; i++) send_more(&connections[i]);
        if (consuming)
            for (int i = producers; i < producers + consumers; i++)
                if (!connections[i].asked) ask_more(&connections[i], stopped ? 1 : least_bytes);
        if ((!producing || (stopped && !unanswered())) && (!consuming || !behind())) break;
        int count = epoll_wait(epoll_fd, events, 64, STALL_MS);
        if (count < 0 && errno != EINTR) fail("epoll", strerror(errno));
        if (count == 0) fail("load", "nothing was answered for 30 s");
        for (int i = 0; i < count; i++) {
            struct connection *c = &connections[events[i].data.u32];
            if (events[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP)) receive(c);
        }
    }
    for (int i = read_first; consuming && i < read_end; i++)
        if (topics[i].next != topics[i].acknowledged) fail(topics[i].name, "more came out than was acknowledged");
    /* A consumer that waits at the end gets its answer in a moment: it must not be taken for one of the next load. */
    for (int i = producers; i < producers + consumers; i++)
        while (connections[i].asked) {
            struct epoll_event event;
            if (epoll_wait(epoll_fd, &event, 1, STALL_MS) == 0) fail("load", "a fetch was not answered for 30 s");
            receive(&connections[event.data.u32]);
        }
}

static double cpu_seconds(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

static void produce(double seconds, int64_t batches, int consuming) {
    int64_t start_ns = now_ns(), before = 0, after = 0;
    for (int i = 0; i < topic_count; i++) before += topics[i].acknowledged, topics[i].next = topics[i].acknowledged;
    double cpu_s = cpu_seconds();
    stop_at_ns = start_ns + (int64_t)(seconds * 1e9);
    last_answer_ns = last_record_ns = start_ns;
    batches_sent = batches_answered = latency_count = records_read = bytes_read = 0;
    batches_max = batches;
    stopped = comparing = read_first = 0;
    read_end = topic_count;
    run(1, consuming, FETCH_LEAST_BYTES);
    for (int i = 0; i < topic_count; i++) after += topics[i].acknowledged;
    qsort(latencies_ns, (size_t)latency_count, sizeof *latencies_ns, compare_ns);
    printf("{\"acknowledged\": %" PRId64 ", \"batches\": %" PRId64 ", \"seconds\": %.6f, \"consumed\": %" PRId64
           ", \"consumed_seconds\": %.6f, \"p50_us\": %.1f, \"p99_us\": %.1f, \"client_cpu_s\": %.6f}\n",
           after - before, batches_answered, (double)(last_answer_ns - start_ns) / 1e9, records_read,
           (double)(last_record_ns - start_ns) / 1e9, percentile_us(latencies_ns, latency_count, 0.5),
           percentile_us(latencies_ns, latency_count, 0.99), cpu_seconds() - cpu_s);
}

static void read_back(int first, int end) {
    int64_t start_ns = now_ns();
    double cpu_s = cpu_seconds();
    if (first < 0 || end > topic_count || first >= end) fail("read", "there are no such topics");
    for (int i = first; i < end; i++) topics[i].next = topics[i].begin;
    records_read = bytes_read = 0;
    last_record_ns = start_ns;
    stopped = comparing = 1;
    read_first = first;
    read_end = end;
    run(0, 1, 1);
    printf("{\"read\": %" PRId64 ", \"bytes\": %" PRId64 ", \"seconds\": %.6f, \"client_cpu_s\": %.6f}\n", records_read,
           bytes_read, (double)(last_record_ns - start_ns) / 1e9, cpu_seconds() - cpu_s);
}

static void load_plan(const char *path) {
    FILE *file = fopen(path, "rb");
    uint32_t count;
    if (!file || fread(&count, 4, 1, file) != 1) fail(path, "the plan cannot be read");
    topic_count = (int)count;
    topics = calloc(count, sizeof *topics);
    for (uint32_t i = 0; i < count; i++) {
        struct topic *t = &topics[i];
        if (fread(&t->name_size, 2, 1, file) != 1) fail(path, "the plan is cut short");
        t->name = calloc(t->name_size + 1u, 1);
        if (fread(t->name, t->name_size, 1, file) != 1 || fread(&t->records, 4, 1, file) != 1 ||
            fread(&t->batch_size, 4, 1, file) != 1)
            fail(path, "the plan is cut short");
        t->batch = malloc(t->batch_size);
        if (t->batch_size <= BATCH_HEADER || fread(t->batch, t->batch_size, 1, file) != 1) fail(path, "a batch is cut");
    }
    fclose(file);
}

static int open_socket(const char *host, int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1) fail(host, "not an IPv4 address");
    if (connect(fd, (struct sockaddr *)&address, sizeof address)) fail("connect", strerror(errno));
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    return fd;
}

/* ListOffsets v1 for the end of every topic, on a connection that is still blocking. */
static void find_ends(int fd) {
    struct bytes b = {0};
    begin_request(&b, LIST_OFFSETS, 1);
    put_int(&b, -1, 4);
    put_int(&b, topic_count, 4);
    for (int i = 0; i < topic_count; i++) {
        put_name(&b, &topics[i]);
        put_int(&b, 1, 4);
        put_int(&b, 0, 4);
        put_int(&b, -1, 8);
    }
    end_request(&b);
    if (write(fd, b.data, b.size) != (ssize_t)b.size) fail("list offsets", strerror(errno));
    char head[4];
    if (recv(fd, head, 4, MSG_WAITALL) != 4) fail("list offsets", "no answer");
    size_t size = (size_t)get_int(head, 4);
    b.size = 0;
    need(&b, size);
    if (recv(fd, b.data, size, MSG_WAITALL) != (ssize_t)size) fail("list offsets", "the answer is cut short");
    struct reader r = {b.data + 4, b.data + size};
    if (take(&r, 4) != topic_count) fail("list offsets", "the answer has not every topic");
    for (int i = 0; i < topic_count; i++) {
        struct topic *t = &topics[i];
        take_name(&r, t);
        if (take(&r, 4) != 1) fail(t->name, "the answer has not one partition");
        take(&r, 4);
        take_no_error(&r, t);
        take(&r, 8);
        t->begin = t->acknowledged = t->next = take(&r, 8);
    }
    free(b.data);
}

static void share_out(struct connection *c, int nth, int sharers) {
    c->topics = calloc((size_t)topic_count, sizeof *c->topics);
    for (int i = nth % topic_count; i < topic_count; i += sharers) {
        c->topics[c->topic_count++] = i;
        if (sharers > topic_count) break;
    }
}

static void open_connections(const char *host, int port) {
    connections = calloc((size_t)(producers + consumers), sizeof *connections);
    epoll_fd = epoll_create1(0);
    for (int i = 0; i < producers + consumers; i++) {
        struct connection *c = &connections[i];
        c->producer = i < producers;
        c->fd = open_socket(host, port);
        if (i == 0) find_ends(c->fd);
        share_out(c, c->producer ? i : i - producers, c->producer ? producers : consumers);
        if (c->producer) {
            c->request_count = (c->topic_count + per_request - 1) / per_request;
            c->requests = calloc((size_t)c->request_count, sizeof *c->requests);
            for (int j = 0; j < c->request_count; j++)
                build_produce(&c->requests[j], c->topics + j * per_request, request_batches(c, j));
        }
        fcntl(c->fd, F_SETFL, O_NONBLOCK);
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = (uint32_t)i};
        if (c->producer) event.events |= EPOLLOUT | EPOLLET;
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &event);
    }
}

int main(int argc, char **argv) {
    char line[128];
    double seconds;
    int64_t batches;
    int first, end;
    if (argc != 8) fail("usage", "HOST PORT PLAN PRODUCERS TOPICS_PER_REQUEST WINDOW CONSUMERS");
    load_plan(argv[3]);
    producers = atoi(argv[4]);
    per_request = atoi(argv[5]);
    window = atoi(argv[6]);
    consumers = atoi(argv[7]);
    if (producers < 1 || per_request < 1 || window < 1 || window > WINDOW_MAX || consumers < 1 || consumers > topic_count)
        fail("usage", "a number is out of range");
    latencies_ns = calloc(LATENCIES_MAX, sizeof *latencies_ns);
    open_connections(argv[1], atoi(argv[2]));
    printf("ready\n");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "produce %lf %" SCNd64, &seconds, &batches) == 2) produce(seconds, batches, 0);
        else if (sscanf(line, "both %lf %" SCNd64, &seconds, &batches) == 2) produce(seconds, batches, 1);
        else if (sscanf(line, "read %d %d", &first, &end) == 2) read_back(first, end);
        else if (strcmp(line, "whole\n") == 0) {
            for (int i = 0; i < topic_count; i++) topics[i].begin = 0;
            printf("{}\n");
        } else fail("command", line);
        fflush(stdout);
    }
    return 0;
}
