/* Forwards TCP connections and holds back what passes, each way, for so long: a longer wire, for kernels without netem.
 *
 * Called as  delay_proxy LISTEN:TARGET [LISTEN:TARGET ...]  with ports on loopback. Prints `ready`. A line with
 * milliseconds on its input sets the delay each way for what arrives from then on, and is repeated as the answer.
 *
 * What arrives is read at once, as from a wire that holds any number of bytes, and copied twice in all: in and out.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>
#include "load.h"

#define PIECE_BYTES (256 << 10)
#define SPARE_PIECES 256
#define EVENTS 64

struct piece {
    struct piece *next;
    int64_t due_ns;
    size_t begin, end;
    char data[PIECE_BYTES];
};

struct watched {
    enum { LISTENER, END, INPUT } kind;
    int fd;
};

struct end {
    struct watched watched;
    struct end *other, *next;
    struct piece *first, *last; /* on the way to this end */
    int connecting, blocked, closing;
    int64_t close_at_ns;
};

struct listener {
    struct watched watched;
    int target_port;
};

static int epoll_fd;
static int64_t delay_ns;
static struct end *ends;
static struct piece *spare;
static int spares;

static struct piece *new_piece(void) {
    struct piece *p = spare;
    if (p) {
        spare = p->next;
        spares--;
    } else if (!(p = malloc(sizeof *p))) fail("memory", "out of it");
    p->next = NULL;
    return p;
}

static void drop_piece(struct piece *p) {
    if (spares == SPARE_PIECES) {
        free(p);
        return;
    }
    p->next = spare;
    spare = p;
    spares++;
}

static void watch(struct watched *w, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = w};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, w->fd, &event)) fail("epoll", strerror(errno));
}

static struct sockaddr_in loopback(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

static struct end *new_end(int fd) {
    struct end *e = calloc(1, sizeof *e);
    int yes = 1;
    if (!e) fail("memory", "out of it");
    e->watched.kind = END;
    e->watched.fd = fd;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    e->next = ends;
    ends = e;
    return e;
}

/* The peer of this end is gone: the other side hears of it after all that is on the way. */
static void ended(struct end *e) {
    if (e->watched.fd >= 0) close(e->watched.fd);
    e->watched.fd = -1;
    if (!e->other->closing) {
        e->other->closing = 1;
        e->other->close_at_ns = now_ns() + delay_ns;
    }
}

static void deliver(struct end *e, int64_t now) {
    while (!e->connecting && !e->blocked && e->first && e->first->due_ns <= now) {
        struct piece *p = e->first;
        ssize_t sent = e->watched.fd < 0 ? (ssize_t)(p->end - p->begin)
                                         : send(e->watched.fd, p->data + p->begin, p->end - p->begin, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EAGAIN) e->blocked = 1;
            else ended(e);
            continue;
        }
        p->begin += (size_t)sent;
        if (p->begin < p->end) continue;
        if (!(e->first = p->next)) e->last = NULL;
        drop_piece(p);
    }
    if (e->closing && !e->first && e->close_at_ns <= now && e->watched.fd >= 0) {
        close(e->watched.fd);
        e->watched.fd = -1;
    }
}

static void receive(struct end *e) {
    struct end *to = e->other;
    while (e->watched.fd >= 0) {
        struct piece *p = new_piece();
        ssize_t got = recv(e->watched.fd, p->data, PIECE_BYTES, 0);
        if (got <= 0) {
            drop_piece(p);
            if (got < 0 && errno == EAGAIN) return;
            ended(e);
            return;
        }
        p->begin = 0;
        p->end = (size_t)got;
        p->due_ns = now_ns() + delay_ns;
        if (to->last && to->last->due_ns > p->due_ns) p->due_ns = to->last->due_ns; /* in order, though the wire got shorter */
        if (to->last) to->last->next = p;
        else to->first = p;
        to->last = p;
        deliver(to, now_ns());
        if (got < PIECE_BYTES) return;
    }
}

static void accepted(struct listener *l) {
    int fd = accept4(l->watched.fd, NULL, NULL, SOCK_NONBLOCK);
    if (fd < 0) return;
    struct sockaddr_in address = loopback(l->target_port);
    int target = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (target < 0) fail("socket", strerror(errno));
    struct end *near = new_end(fd), *far = new_end(target);
    near->other = far;
    far->other = near;
    far->connecting = 1;
    if (connect(target, (struct sockaddr *)&address, sizeof address) && errno != EINPROGRESS) ended(far);
    else watch(&far->watched, EPOLLIN | EPOLLOUT | EPOLLET);
    watch(&near->watched, EPOLLIN | EPOLLOUT | EPOLLET);
}

/* Frees pairs of which nothing is left; answers when something is due next, or 0. */
static int64_t deliver_all(void) {
    int64_t now = now_ns(), next = 0;
    for (struct end *e = ends; e; e = e->next) {
        deliver(e, now);
        int64_t due = e->first ? (e->connecting || e->blocked ? 0 : e->first->due_ns)
                      : e->closing && e->watched.fd >= 0 ? e->close_at_ns : 0;
        if (due && (!next || due < next)) next = due;
    }
    for (struct end **at = &ends; *at;) {
        struct end *e = *at, *o = e->other;
        if (e->watched.fd >= 0 || (o && o->watched.fd >= 0)) {
            at = &e->next;
            continue;
        }
        *at = e->next;
        if (o) o->other = NULL;
        for (struct piece *p; (p = e->first); drop_piece(p)) e->first = p->next;
        free(e);
    }
    return next;
}

static void take_command(void) {
    static char line[64];
    double ms;
    if (!fgets(line, sizeof line, stdin)) exit(0);
    if (sscanf(line, "%lf", &ms) != 1 || ms < 0) fail("command", line);
    delay_ns = (int64_t)(ms * 1e6);
    fputs(line, stdout);
    fflush(stdout);
}

static void listen_on(const char *pair) {
    struct listener *l = calloc(1, sizeof *l);
    int port, yes = 1;
    if (!l || sscanf(pair, "%d:%d", &port, &l->target_port) != 2) fail("usage", "LISTEN:TARGET [LISTEN:TARGET ...]");
    struct sockaddr_in address = loopback(port);
    l->watched.kind = LISTENER;
    l->watched.fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(l->watched.fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(l->watched.fd, (struct sockaddr *)&address, sizeof address) || listen(l->watched.fd, 64))
        fail(pair, strerror(errno));
    watch(&l->watched, EPOLLIN);
}

int main(int argc, char **argv) {
    struct epoll_event events[EVENTS];
    struct watched input = {.kind = INPUT, .fd = 0};
    if (argc < 2) fail("usage", "LISTEN:TARGET [LISTEN:TARGET ...]");
    prctl(PR_SET_TIMERSLACK, 1000); /* a microsecond, not fifty */
    setvbuf(stdin, NULL, _IONBF, 0);
    epoll_fd = epoll_create1(0);
    for (int i = 1; i < argc; i++) listen_on(argv[i]);
    watch(&input, EPOLLIN);
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        int64_t next = deliver_all(), left = next - now_ns();
        if (left < 0) left = 0;
        struct timespec wait = {.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};
        int count = epoll_pwait2(epoll_fd, events, EVENTS, next ? &wait : NULL, NULL);
        if (count < 0 && errno != EINTR) fail("epoll", strerror(errno));
        for (int i = 0; i < count; i++) {
            struct watched *w = events[i].data.ptr;
            if (w->kind == INPUT) take_command();
            else if (w->kind == LISTENER) accepted((struct listener *)w);
            else {
                struct end *e = (struct end *)w;
                if (events[i].events & EPOLLOUT) e->connecting = e->blocked = 0;
                if (events[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP)) receive(e);
            }
        }
    }
}
