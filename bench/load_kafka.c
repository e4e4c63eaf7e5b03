/* Load for whatever speaks the Kafka protocol, by librdkafka: Headrace and Apache Kafka get this same program.
 *
 * prime      some kilobytes to each partition, so that no load pays for a newborn topic; answers how many messages
 * produce    linger 5 ms, acks 1, messages dealt to the partitions in turn, every delivery report counted
 * pipelined  one message per request, WINDOW requests unanswered at once, latency of each
 * sync       one message at a time, latency of each
 * transactions  WINDOW messages in each, dealt as above, delivered, then committed: latency of each commit
 * portions   the same without a transactional id: WINDOW messages and their reports, then the next ones
 * consume    every partition from its beginning to its end, every record and offset counted
 */
#include "load.h"
#include <librdkafka/rdkafka.h>

/* More than the 4 KiB of log between two index entries that brokers of this protocol keep by default. */
#define PRIME_BYTES 6000
/* A batch is handed over when it is full or after this time. */
#define CONSUME_WAIT_MS 5

static int64_t delivered, failed;
static int64_t *latencies_ns;

static void set(rd_kafka_conf_t *conf, const char *name, const char *value) {
    char why[256];
    if (rd_kafka_conf_set(conf, name, value, why, sizeof why) != RD_KAFKA_CONF_OK) fail(name, why);
}

static void on_delivery(rd_kafka_t *rk, const rd_kafka_message_t *message, void *opaque) {
    (void)rk;
    (void)opaque;
    if (message->err) {
        if (failed++ == 0) fprintf(stderr, "load: first refusal: %s\n", rd_kafka_err2str(message->err));
        return;
    }
    if (latencies_ns) latencies_ns[delivered] = now_ns() - (int64_t)(intptr_t)message->_private;
    delivered++;
}

static rd_kafka_t *client(rd_kafka_type_t type, rd_kafka_conf_t *conf, const struct load *load) {
    char why[256], bootstrap[128];
    snprintf(bootstrap, sizeof bootstrap, "%s:%d", load->host, load->port);
    set(conf, "bootstrap.servers", bootstrap);
    set(conf, "socket.nagle.disable", "true");
    set(conf, "log_level", "3");
    rd_kafka_t *rk = rd_kafka_new(type, conf, why, sizeof why);
    if (!rk) fail("client", why);
    return rk;
}

static void administer(const struct load *load) {
    rd_kafka_t *rk = client(RD_KAFKA_PRODUCER, rd_kafka_conf_new(), load);
    rd_kafka_queue_t *queue = rd_kafka_queue_new(rk);
    char why[256];
    if (strcmp(load->mode, "create") == 0) {
        rd_kafka_NewTopic_t *topic = rd_kafka_NewTopic_new(load->topic, load->partitions, 1, why, sizeof why);
        if (!topic) fail("create", why);
        rd_kafka_CreateTopics(rk, &topic, 1, NULL, queue);
    } else {
        rd_kafka_DeleteTopic_t *topic = rd_kafka_DeleteTopic_new(load->topic);
        rd_kafka_DeleteTopics(rk, &topic, 1, NULL, queue);
    }
    rd_kafka_event_t *event = rd_kafka_queue_poll(queue, STALL_MS);
    if (!event) fail(load->mode, "no answer");
    if (rd_kafka_event_error(event)) fail(load->mode, rd_kafka_event_error_string(event));
    size_t results = 0;
    const rd_kafka_topic_result_t **result =
        strcmp(load->mode, "create") == 0
            ? rd_kafka_CreateTopics_result_topics(rd_kafka_event_CreateTopics_result(event), &results)
            : rd_kafka_DeleteTopics_result_topics(rd_kafka_event_DeleteTopics_result(event), &results);
    if (results != 1) fail(load->mode, "not one result");
    if (rd_kafka_topic_result_error(result[0])) fail(load->mode, rd_kafka_topic_result_error_string(result[0]));
    printf("{\"mode\": \"%s\"}\n", load->mode);
}

/* Waits until every partition has a leader, so that no load pays for the topic's birth. */
static void await_leaders(rd_kafka_t *rk, rd_kafka_topic_t *topic, const struct load *load) {
    int64_t start_ns = now_ns();
    for (;;) {
        const struct rd_kafka_metadata *metadata;
        int led = 0;
        if (!rd_kafka_metadata(rk, 0, topic, &metadata, STALL_MS)) {
            for (int i = 0; metadata->topic_cnt == 1 && i < metadata->topics[0].partition_cnt; i++)
                led += metadata->topics[0].partitions[i].leader >= 0;
            rd_kafka_metadata_destroy(metadata);
        }
        if (led == load->partitions) return;
        if (seconds_since(start_ns) * 1000 > STALL_MS) fail("topic", "its partitions have no leader");
        rd_kafka_poll(rk, 20);
    }
}

static void send_one(rd_kafka_topic_t *topic, rd_kafka_t *rk, const struct load *load, int64_t i) {
    void *sent_at = latencies_ns ? (void *)(intptr_t)now_ns() : NULL;
    /* No copy flag: the payload is ours, constant and outlives every send. */
    while (rd_kafka_produce(topic, (int32_t)(i % load->partitions), 0, load->payload, load->size, NULL, 0, sent_at)) {
        if (rd_kafka_last_error() != RD_KAFKA_RESP_ERR__QUEUE_FULL)
            fail("produce", rd_kafka_err2str(rd_kafka_last_error()));
        rd_kafka_poll(rk, 10);
    }
}

static void await_answers(rd_kafka_t *rk, int64_t answers) {
    int64_t seen = -1, progress_ns = now_ns();
    while (delivered + failed < answers) {
        rd_kafka_poll(rk, 100);
        if (delivered + failed != seen) {
            seen = delivered + failed;
            progress_ns = now_ns();
        } else if (seconds_since(progress_ns) * 1000 > STALL_MS) {
            fail("produce", "no delivery report for 30 s");
        }
    }
}

static void produce(const struct load *load) {
    int throughput = strcmp(load->mode, "produce") == 0, window = load->window;
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    set(conf, "acks", "1");
    set(conf, "linger.ms", throughput ? "5" : "0");
    if (!throughput) set(conf, "batch.num.messages", "1");
    set(conf, "queue.buffering.max.messages", "200000");
    set(conf, "queue.buffering.max.kbytes", "262144");
    rd_kafka_conf_set_dr_msg_cb(conf, on_delivery);
    rd_kafka_t *rk = client(RD_KAFKA_PRODUCER, conf, load);
    rd_kafka_topic_t *topic = rd_kafka_topic_new(rk, load->topic, NULL);
    await_leaders(rk, topic, load);

    /* One message to each partition opens the connection and its files outside the measured time. */
    for (int i = 0; i < load->partitions; i++) send_one(topic, rk, load, i);
    await_answers(rk, load->partitions);
    delivered = 0;

    if (strcmp(load->mode, "sync") == 0) window = 1;
    if (!throughput) latencies_ns = calloc((size_t)load->count + 1, sizeof *latencies_ns);
    int64_t start_ns = begin_load();
    for (int64_t i = 0; i < load->count; i++) {
        send_one(topic, rk, load, i);
        if (!throughput) await_answers(rk, i + 2 - window);
        else if (i % 1000 == 0) rd_kafka_poll(rk, 0);
    }
    await_answers(rk, load->count);
    print_sent(load, load->partitions, delivered, failed, seconds_since(start_ns), latencies_ns);
    rd_kafka_topic_destroy(topic);
    rd_kafka_destroy(rk);
}

static void check(const char *what, rd_kafka_error_t *error) {
    if (error) fail(what, rd_kafka_error_string(error));
}

/* Portions of messages, each flushed before the next: as transactions, or by a producer that is idempotent only. */
static void produce_portions(const struct load *load) {
    int transactional = strcmp(load->mode, "transactions") == 0;
    int64_t portions = (load->count + load->window - 1) / load->window, sent = 0;
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    if (transactional) set(conf, "transactional.id", load->topic);
    set(conf, "enable.idempotence", "true");
    set(conf, "linger.ms", "5");
    set(conf, "queue.buffering.max.messages", "200000");
    set(conf, "queue.buffering.max.kbytes", "262144");
    rd_kafka_conf_set_dr_msg_cb(conf, on_delivery);
    rd_kafka_t *rk = client(RD_KAFKA_PRODUCER, conf, load);
    rd_kafka_topic_t *topic = rd_kafka_topic_new(rk, load->topic, NULL);
    await_leaders(rk, topic, load);
    if (transactional) check("init", rd_kafka_init_transactions(rk, STALL_MS));
    int64_t *commits_ns = calloc((size_t)portions + 1, sizeof *commits_ns), start_ns = 0;
    /* The first portion, of one message to each partition, is no part of the load. */
    for (int64_t portion = -1; portion < portions; portion++) {
        if (portion == 0) {
            delivered = 0;
            start_ns = begin_load();
        }
        int64_t until = portion < 0 ? load->partitions : sent + load->window;
        if (portion >= 0 && until > load->count) until = load->count;
        if (transactional) check("begin", rd_kafka_begin_transaction(rk));
        while (sent < until) {
            send_one(topic, rk, load, sent++);
            if (sent % 1000 == 0) rd_kafka_poll(rk, 0);
        }
        if (portion < 0) sent = 0;
        if (rd_kafka_flush(rk, STALL_MS)) fail("flush", "no delivery report for 30 s");
        int64_t committing_ns = now_ns();
        if (transactional) check("commit", rd_kafka_commit_transaction(rk, STALL_MS));
        if (portion >= 0) commits_ns[portion] = now_ns() - committing_ns;
    }
    print_portions(load, load->partitions, delivered, failed, seconds_since(start_ns), commits_ns, portions);
    rd_kafka_topic_destroy(topic);
    rd_kafka_destroy(rk);
}

/* Three rounds, because an index entry is written by the append that follows enough bytes. */
static void prime(const struct load *load) {
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    set(conf, "acks", "1");
    set(conf, "linger.ms", "5");
    rd_kafka_conf_set_dr_msg_cb(conf, on_delivery);
    rd_kafka_t *rk = client(RD_KAFKA_PRODUCER, conf, load);
    rd_kafka_topic_t *topic = rd_kafka_topic_new(rk, load->topic, NULL);
    await_leaders(rk, topic, load);
    int64_t each = PRIME_BYTES / (int64_t)(load->size + 1) + 1, sent = 0;
    for (int round = 0; round < 3; round++) {
        for (int64_t i = 0; i < each * load->partitions; i++, sent++) send_one(topic, rk, load, i);
        await_answers(rk, sent);
    }
    printf("{\"mode\": \"prime\", \"primed\": %" PRId64 "}\n", delivered);
}

static void consume(const struct load *load) {
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    set(conf, "group.id", "bench");
    set(conf, "enable.auto.commit", "false");
    set(conf, "enable.partition.eof", "true");
    set(conf, "fetch.wait.max.ms", "100");
    rd_kafka_t *rk = client(RD_KAFKA_CONSUMER, conf, load);
    /* A client that does not know the topic yet looks for it once a second: known beforehand, that second is not timed. */
    rd_kafka_topic_t *topic = rd_kafka_topic_new(rk, load->topic, NULL);
    await_leaders(rk, topic, load);
    rd_kafka_poll_set_consumer(rk);
    int64_t *next_offset = calloc((size_t)load->partitions, sizeof *next_offset);
    rd_kafka_topic_partition_list_t *all = rd_kafka_topic_partition_list_new(load->partitions);
    for (int i = 0; i < load->partitions; i++) rd_kafka_topic_partition_list_add(all, load->topic, i)->offset = 0;

    int64_t received = 0, bytes = 0, gaps = 0, start_ns = begin_load(), last_record_ns = start_ns;
    int ended = 0;
    static rd_kafka_message_t *messages[10000];
    if (rd_kafka_assign(rk, all)) fail("consume", "assign refused");
    rd_kafka_queue_t *queue = rd_kafka_queue_get_consumer(rk);
    while (ended < load->partitions) {
        ssize_t got = rd_kafka_consume_batch_queue(queue, CONSUME_WAIT_MS, messages, 10000);
        if (got <= 0) {
            if (seconds_since(last_record_ns) * 1000 > STALL_MS) fail("consume", "no record for 30 s");
            continue;
        }
        int64_t before = received;
        for (ssize_t i = 0; i < got; i++) {
            rd_kafka_message_t *m = messages[i];
            if (m->err == RD_KAFKA_RESP_ERR__PARTITION_EOF) {
                ended++;
            } else if (m->err) {
                fail("consume", rd_kafka_message_errstr(m));
            } else {
                gaps += m->offset != next_offset[m->partition];
                next_offset[m->partition] = m->offset + 1;
                received++;
                bytes += (int64_t)m->len;
            }
            rd_kafka_message_destroy(m);
        }
        /* The ends of the partitions come only after an empty long poll: they prove the count, they are not the load. */
        if (received > before) last_record_ns = now_ns();
    }
    print_received(load, received, bytes, gaps, (double)(last_record_ns - start_ns) / 1e9);
    _Exit(0); /* leaving the group politely would only add to the broker's bill */
}

int main(int argc, char **argv) {
    struct load load = parse_load(argc, argv);
    if (strcmp(load.mode, "create") == 0 || strcmp(load.mode, "delete") == 0) administer(&load);
    else if (strcmp(load.mode, "prime") == 0) prime(&load);
    else if (strcmp(load.mode, "consume") == 0) consume(&load);
    else if (strcmp(load.mode, "transactions") == 0 || strcmp(load.mode, "portions") == 0) produce_portions(&load);
    else produce(&load);
    return failed ? 1 : 0;
}
