/* Load for NATS JetStream, by the NATS C client. One stream in files, a partition is a subject of it: TOPIC.0 to TOPIC.n-1.
 *
 * produce    asynchronous publish, up to 4,000 unanswered, every acknowledgement counted
 * pipelined  asynchronous publish, each written to the socket at once, WINDOW unanswered
 * sync       publish and wait for the acknowledgement
 * consume    ordered push consumer over the whole stream, every sequence number counted
 */
#include "load.h"
#include <nats/nats.h>
#include <pthread.h>

#define ASYNC_PENDING 4000

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int64_t answered, failed, received, received_bytes, gaps, window = ASYNC_PENDING;
static uint64_t next_sequence = 1;
static int64_t *sent_ns;

static void check(natsStatus status, const char *what) {
    if (status != NATS_OK) fail(what, natsStatus_GetText(status));
}

/* Acknowledgements of one stream come in the order of the publishes, so the n-th answer belongs to the n-th send. */
static void on_ack(jsCtx *js, natsMsg *msg, jsPubAck *ack, jsPubAckErr *err, void *closure) {
    (void)js, (void)ack, (void)closure;
    pthread_mutex_lock(&lock);
    if (err && failed++ == 0) fprintf(stderr, "load: first refusal: %s\n", err->ErrText ? err->ErrText : "?");
    if (sent_ns) sent_ns[answered] = now_ns() - sent_ns[answered];
    answered++;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
    natsMsg_Destroy(msg);
}

static void on_message(natsConnection *nc, natsSubscription *sub, natsMsg *msg, void *closure) {
    (void)nc, (void)sub, (void)closure;
    received++;
    received_bytes += natsMsg_GetDataLength(msg);
    /* The reply subject ends in ...stream.consumer.delivered.STREAM_SEQUENCE.consumer_sequence.time.pending;
     * read by hand, because asking for the whole metadata costs more than the message. */
    const char *at = natsMsg_GetReply(msg);
    for (int dots = 0; at && dots < 5; dots++)
        if ((at = strchr(at, '.'))) at++;
    if (at) {
        uint64_t sequence = strtoull(at, NULL, 10);
        gaps += sequence != next_sequence;
        next_sequence = sequence + 1;
    }
    natsMsg_Destroy(msg);
    pthread_mutex_lock(&lock);
    answered = received;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
}

/* Call with the lock held. */
static void await_answered(int64_t at_least) {
    while (answered < at_least) {
        int64_t before = answered;
        struct timespec deadline;
        clock_gettime(CLOCK_REALTIME, &deadline);
        deadline.tv_sec += STALL_MS / 1000;
        if (pthread_cond_timedwait(&changed, &lock, &deadline) && answered == before) fail("load", "no progress for 30 s");
    }
}

static void subject_of(char *subject, size_t room, const struct load *load, int64_t i) {
    snprintf(subject, room, "%s.%d", load->topic, (int)(i % load->partitions));
}

static void produce_async(jsCtx *js, const struct load *load) {
    char subject[128];
    for (int64_t i = 0; i < load->count; i++) {
        natsMsg *msg;
        subject_of(subject, sizeof subject, load, i);
        check(natsMsg_Create(&msg, subject, NULL, load->payload, (int)load->size), "message");
        pthread_mutex_lock(&lock);
        await_answered(i + 1 - window);
        if (sent_ns) sent_ns[i] = now_ns();
        pthread_mutex_unlock(&lock);
        check(js_PublishMsgAsync(js, &msg, NULL), "publish");
    }
    pthread_mutex_lock(&lock);
    await_answered(load->count);
    pthread_mutex_unlock(&lock);
}

static void produce_sync(jsCtx *js, const struct load *load) {
    char subject[128];
    for (; answered < load->count; answered++) {
        subject_of(subject, sizeof subject, load, answered);
        sent_ns[answered] = now_ns();
        check(js_Publish(NULL, js, subject, load->payload, (int)load->size, NULL, NULL), "publish");
        sent_ns[answered] = now_ns() - sent_ns[answered];
    }
}

static void produce(jsCtx *js, const struct load *load) {
    int throughput = strcmp(load->mode, "produce") == 0, sync = strcmp(load->mode, "sync") == 0;
    if (!throughput) {
        sent_ns = calloc((size_t)load->count + 1, sizeof *sent_ns);
        window = load->window;
    }
    int64_t start_ns = begin_load();
    if (sync) produce_sync(js, load);
    else produce_async(js, load);
    print_sent(load, 0, answered - failed, failed, seconds_since(start_ns), sent_ns);
}

static void consume(jsCtx *js, const struct load *load) {
    jsStreamInfo *info;
    check(js_GetStreamInfo(&info, js, load->topic, NULL, NULL), "stream info");
    int64_t stored = (int64_t)info->State.Msgs, start_ns = begin_load();
    char subjects[128];
    snprintf(subjects, sizeof subjects, "%s.*", load->topic);
    jsSubOptions options;
    jsSubOptions_Init(&options);
    options.Ordered = true;
    natsSubscription *sub;
    check(js_Subscribe(&sub, js, subjects, on_message, NULL, NULL, &options, NULL), "subscribe");
    check(natsSubscription_SetPendingLimits(sub, -1, -1), "pending limits");
    pthread_mutex_lock(&lock);
    await_answered(stored);
    pthread_mutex_unlock(&lock);
    print_received(load, received, received_bytes, gaps, seconds_since(start_ns));
}

int main(int argc, char **argv) {
    struct load load = parse_load(argc, argv);
    natsOptions *options;
    natsConnection *nc;
    jsCtx *js;
    jsOptions js_options;
    char url[128], subjects[128];
    snprintf(url, sizeof url, "nats://%s:%d", load.host, load.port);
    check(natsOptions_Create(&options), "options");
    check(natsOptions_SetURL(options, url), "url");
    check(natsOptions_SetSendAsap(options, strcmp(load.mode, "produce") != 0), "send asap");
    check(natsConnection_Connect(&nc, options), "connect");
    check(jsOptions_Init(&js_options), "options");
    js_options.Wait = STALL_MS;
    js_options.PublishAsync.MaxPending = ASYNC_PENDING + 1;
    js_options.PublishAsync.AckHandler = on_ack;
    check(natsConnection_JetStream(&js, nc, &js_options), "JetStream");

    if (strcmp(load.mode, "create") == 0) {
        jsStreamConfig stream;
        jsStreamConfig_Init(&stream);
        snprintf(subjects, sizeof subjects, "%s.*", load.topic);
        const char *list[] = {subjects};
        stream.Name = load.topic, stream.Subjects = list, stream.SubjectsLen = 1, stream.Storage = js_FileStorage;
        check(js_AddStream(NULL, js, &stream, NULL, NULL), "create");
        printf("{\"mode\": \"create\"}\n");
    } else if (strcmp(load.mode, "delete") == 0) {
        check(js_DeleteStream(js, load.topic, NULL, NULL), "delete");
        printf("{\"mode\": \"delete\"}\n");
    } else if (strcmp(load.mode, "consume") == 0) {
        consume(js, &load);
    } else {
        produce(js, &load);
    }
    fflush(stdout);
    _Exit(failed ? 1 : 0);
}
