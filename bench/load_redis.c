/* Load for Redis Streams, by hiredis. A partition is a stream of its own, TOPIC:0 to TOPIC:n-1.
 *
 * produce    XADD pipelined, up to 1,000 unanswered
 * pipelined  XADD, each written to the socket at once, WINDOW unanswered
 * sync       XADD, one at a time
 * consume    XREAD over all streams from 0 until none has more
 */
#include "load.h"
#include <hiredis/hiredis.h>

#define PIPELINE_COMMANDS 1000
#define XREAD_REPLY_BYTES 4194304

static redisContext *connect_to(const struct load *load) {
    redisContext *c = redisConnect(load->host, load->port);
    if (!c || c->err) fail("connect", c ? c->errstr : NULL);
    struct timeval stall = {.tv_sec = STALL_MS / 1000};
    redisSetTimeout(c, stall);
    return c;
}

static redisReply *take_reply(redisContext *c) {
    void *reply;
    if (redisGetReply(c, &reply) != REDIS_OK) fail("reply", c->errstr);
    return reply;
}

static void flush_out(redisContext *c) {
    for (int done = 0; !done;)
        if (redisBufferWrite(c, &done) != REDIS_OK) fail("write", c->errstr);
}

static void append_xadd(redisContext *c, const struct load *load, int64_t i) {
    char key[128];
    int length = snprintf(key, sizeof key, "%s:%d", load->topic, (int)(i % load->partitions));
    const char *argv[] = {"XADD", key, "*", "v", load->payload};
    const size_t lengths[] = {4, (size_t)length, 1, 1, load->size};
    if (redisAppendCommandArgv(c, 5, argv, lengths) != REDIS_OK) fail("XADD", c->errstr);
}

static int count_reply(redisContext *c) {
    redisReply *reply = take_reply(c);
    int added = reply->type == REDIS_REPLY_STRING;
    if (!added) fprintf(stderr, "load: XADD refused: %s\n", reply->str ? reply->str : "?");
    freeReplyObject(reply);
    return added;
}

static void produce(const struct load *load) {
    int throughput = strcmp(load->mode, "produce") == 0;
    int64_t window = throughput ? PIPELINE_COMMANDS : strcmp(load->mode, "sync") == 0 ? 1 : load->window;
    int64_t *sent_ns = throughput ? NULL : calloc((size_t)load->count + 1, sizeof *sent_ns);
    redisContext *c = connect_to(load);
    int64_t answered = 0, delivered = 0, start_ns = begin_load();
    for (int64_t i = 0; i < load->count; i++) {
        append_xadd(c, load, i);
        if (sent_ns) {
            sent_ns[i] = now_ns();
            flush_out(c);
        } else if (i % 100 == 99) {
            flush_out(c);
        }
        while (i + 1 - answered >= window) {
            delivered += count_reply(c);
            if (sent_ns) sent_ns[answered] = now_ns() - sent_ns[answered];
            answered++;
        }
    }
    for (; answered < load->count; answered++) {
        delivered += count_reply(c);
        if (sent_ns) sent_ns[answered] = now_ns() - sent_ns[answered];
    }
    print_sent(load, 0, delivered, load->count - delivered, seconds_since(start_ns), sent_ns);
}

/* One stream's [key, [[id, [field, value]]...]] of an XREAD reply. */
static int64_t count_stream(const redisReply *stream, const struct load *load, char (*last_ids)[48], int64_t *bytes) {
    const redisReply *entries = stream->element[1];
    int partition = atoi(strrchr(stream->element[0]->str, ':') + 1);
    if (partition < 0 || partition >= load->partitions) fail("XREAD", "an unknown stream answered");
    for (size_t i = 0; i < entries->elements; i++) *bytes += (int64_t)entries->element[i]->element[1]->element[1]->len;
    snprintf(last_ids[partition], sizeof *last_ids, "%s", entries->element[entries->elements - 1]->element[0]->str);
    return (int64_t)entries->elements;
}

static void consume(const struct load *load) {
    redisContext *c = connect_to(load);
    int parts = load->partitions;
    char(*last_ids)[48] = calloc((size_t)parts, sizeof *last_ids), (*keys)[128] = calloc((size_t)parts, sizeof *keys);
    const char **argv = calloc((size_t)parts * 2 + 4, sizeof *argv);
    int64_t per_stream = XREAD_REPLY_BYTES / ((int64_t)(load->size + 1) * parts);
    char limit[32];
    snprintf(limit, sizeof limit, "%" PRId64, per_stream < 1 ? 1 : per_stream > 1000 ? 1000 : per_stream);
    argv[0] = "XREAD", argv[1] = "COUNT", argv[2] = limit, argv[3] = "STREAMS";
    for (int i = 0; i < parts; i++) {
        snprintf(keys[i], sizeof *keys, "%s:%d", load->topic, i);
        strcpy(last_ids[i], "0");
        argv[4 + i] = keys[i];
        argv[4 + parts + i] = last_ids[i];
    }
    int64_t received = 0, bytes = 0, start_ns = begin_load();
    for (;;) {
        redisReply *reply = redisCommandArgv(c, parts * 2 + 4, argv, NULL);
        if (!reply) fail("XREAD", c->errstr);
        if (reply->type == REDIS_REPLY_ERROR) fail("XREAD", reply->str);
        if (reply->type == REDIS_REPLY_NIL) break;
        for (size_t i = 0; i < reply->elements; i++) received += count_stream(reply->element[i], load, last_ids, &bytes);
        freeReplyObject(reply);
    }
    print_received(load, received, bytes, 0, seconds_since(start_ns));
}

int main(int argc, char **argv) {
    struct load load = parse_load(argc, argv);
    if (strcmp(load.mode, "consume") == 0) consume(&load);
    else if (strcmp(load.mode, "delete") == 0) {
        redisContext *c = connect_to(&load);
        for (int i = 0; i < load.partitions; i++) freeReplyObject(redisCommand(c, "DEL %s:%d", load.topic, i));
        printf("{\"mode\": \"delete\"}\n");
    } else if (strcmp(load.mode, "create") == 0) {
        printf("{\"mode\": \"create\"}\n"); /* the first XADD makes the stream */
    } else produce(&load);
    return 0;
}
