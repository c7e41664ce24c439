/* An engine that costs nothing, so that a benchmark sees the relay in front of it.
 *
 *   stub_engine [--port N] [--model NAME] [--load-seconds S]      (or PORT, MODEL, and HOST, in the environment)
 *
 * One thread, one epoll, HTTP/1.1 keep-alive on 127.0.0.1. GET /health, GET /v1/models and
 * POST /v1/chat/completions, whose JSON body may hold
 *
 *   "stream": true     server-sent events, one to a chunk and one chunk to a write, as engines send them:
 *   "max_tokens": N      this many, the first at once,
 *   "interval_ms": M     then one every M ms (0: as fast as the socket takes them),
 *   "think_ms": M      or else one answer of about 400 bytes, after M ms
 *   "seed": N          comes back in every answer and event, so that mixed-up answers are seen
 *
 * An event carries the moment at which it was written ("t_ns", CLOCK_MONOTONIC). An event whose time has come
 * while the socket is full is written when there is room; the schedule stays. Until --load-seconds have passed
 * every answer is 503. load.c knows the texts of the answers: change both.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MOST_REQUEST (64u << 20)
#define BURST 16 /* events of one unpaced stream before the others have their turn */

static const char ANSWER[] =
    "{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"%s\","
    "\"system_fingerprint\":\"fp_%lld\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":"
    "\"The relay should hand these bytes on as they are, and take no longer over it than it must.\"},"
    "\"logprobs\":null,\"finish_reason\":\"stop\"}],"
    "\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":40,\"total_tokens\":52}}";
static const char EVENT[] =
    "data: {\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"%s\","
    "\"system_fingerprint\":\"fp_%lld\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" %lld\"},"
    "\"finish_reason\":null}],\"t_ns\":%lld}\n\n";
static const char USAGE[] =
    "data: {\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"%s\","
    "\"system_fingerprint\":\"fp_%lld\",\"choices\":[],"
    "\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":%lld,\"total_tokens\":%lld}}\n\n";
static const char STREAM_HEAD[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
                                  "Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n";

enum state { READING, THINKING, STREAMING };

struct conn {
    int fd;
    enum state state;
    bool wants_room, closes;
    int heap_at; /* where it stands in the heap of timers, or -1 */
    int64_t due;
    long long events, sent, interval_ns, seed;
    char *in;
    size_t in_size, in_room;
    char *out; /* what the socket has not taken yet */
    size_t out_size, out_room;
};

static int poller, listener, ends;
static const char *model = "stub";
static int64_t healthy_at;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void *grown(void *block, size_t *room, size_t need) {
    if (need <= *room) return block;
    while (*room < need) *room = *room ? *room * 2 : 1024;
    block = realloc(block, *room);
    if (!block) die("realloc");
    return block;
}

/* Timers: a binary heap of connections by `due`. */

static struct conn **heap;
static size_t heap_size, heap_room;

static void put_at(size_t at, struct conn *c) {
    heap[at] = c;
    c->heap_at = (int)at;
}

static void settle(size_t at, struct conn *c) {
    while (at > 0 && c->due < heap[(at - 1) / 2]->due) {
        put_at(at, heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    for (size_t child; (child = 2 * at + 1) < heap_size; at = child) {
        if (child + 1 < heap_size && heap[child + 1]->due < heap[child]->due) child++;
        if (heap[child]->due >= c->due) break;
        put_at(at, heap[child]);
    }
    put_at(at, c);
}

static void set_timer(struct conn *c, int64_t due) {
    c->due = due;
    if (c->heap_at < 0) {
        heap = grown(heap, &heap_room, (heap_size + 1) * sizeof *heap);
        c->heap_at = (int)heap_size++;
    }
    settle((size_t)c->heap_at, c);
}

static void drop_timer(struct conn *c) {
    if (c->heap_at < 0) return;
    size_t at = (size_t)c->heap_at;
    struct conn *last = heap[--heap_size];
    c->heap_at = -1;
    if (last != c) settle(at, last);
}

/* Connections */

static void watch(struct conn *c, int how, bool wants_room) {
    uint32_t what = EPOLLIN | EPOLLRDHUP | (wants_room ? EPOLLOUT : 0);
    struct epoll_event e = {.events = what, .data.ptr = c};
    c->wants_room = wants_room;
    if (epoll_ctl(poller, how, c->fd, &e)) die("epoll_ctl");
}

static void send_bytes(struct conn *c, const char *bytes, size_t size) {
    if (c->out_size == 0) {
        ssize_t took = send(c->fd, bytes, size, MSG_NOSIGNAL);
        if (took < 0) took = 0; /* a broken connection is seen by the poller */
        bytes += took;
        size -= (size_t)took;
    }
    if (size == 0) return;
    c->out = grown(c->out, &c->out_room, c->out_size + size);
    memcpy(c->out + c->out_size, bytes, size);
    c->out_size += size;
}

static void flush(struct conn *c) {
    ssize_t took = send(c->fd, c->out, c->out_size, MSG_NOSIGNAL);
    if (took <= 0) return;
    c->out_size -= (size_t)took;
    memmove(c->out, c->out + took, c->out_size);
}

static void answer(struct conn *c, const char *status, const char *body) {
    char text[2048];
    int size = snprintf(text, sizeof text,
                        "HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n%s\r\n%s", status,
                        strlen(body), c->closes ? "Connection: close\r\n" : "", body);
    send_bytes(c, text, (size_t)size);
    c->state = READING;
}

static void answer_chat(struct conn *c) {
    char body[1024];
    snprintf(body, sizeof body, ANSWER, model, c->seed);
    answer(c, "200 OK", body);
}

/* Puts `data` as one chunk into `into`; returns its end. */
static char *chunk(char *into, const char *data, int size) {
    into += sprintf(into, "%x\r\n", (unsigned)size);
    memcpy(into, data, (size_t)size);
    into += size;
    *into++ = '\r';
    *into++ = '\n';
    return into;
}

static void send_event(struct conn *c) {
    char data[1024], framed[1100];
    int size = snprintf(data, sizeof data, EVENT, model, c->seed, c->sent, (long long)now_ns());
    send_bytes(c, framed, (size_t)(chunk(framed, data, size) - framed));
    c->sent++;
}

static void end_stream(struct conn *c) {
    char data[1024], framed[1200], *end;
    int size = snprintf(data, sizeof data, USAGE, model, c->seed, c->events, c->events + 12);
    end = chunk(framed, data, size);
    end = chunk(end, "data: [DONE]\n\n", 14);
    end += sprintf(end, "0\r\n\r\n");
    send_bytes(c, framed, (size_t)(end - framed));
    c->state = READING;
}

/* Sends the events whose time has come, and sets the timer for the next. */
static void stream(struct conn *c, int64_t now) {
    for (int burst = 0; c->out_size == 0 && c->sent < c->events && c->due <= now && burst < BURST; burst++) {
        send_event(c);
        c->due += c->interval_ns;
    }
    if (c->out_size) {
        drop_timer(c); /* goes on when there is room */
    } else if (c->sent < c->events) {
        set_timer(c, c->due);
    } else {
        drop_timer(c);
        end_stream(c);
    }
}

/* The value of `"key":` anywhere in the body; a benchmark sends no traps. */
static const char *value(const char *body, size_t size, const char *key) {
    const char *at = memmem(body, size, key, strlen(key));
    if (!at) return "";
    at += strlen(key);
    while (*at == ' ' || *at == ':') at++;
    return at;
}

static long long number(const char *body, size_t size, const char *key, long long otherwise) {
    const char *at = value(body, size, key);
    return *at ? atoll(at) : otherwise;
}

static void chat(struct conn *c, const char *body, size_t size, int64_t now) {
    c->seed = number(body, size, "\"seed\"", 0);
    if (*value(body, size, "\"stream\"") == 't') {
        c->events = number(body, size, "\"max_tokens\"", 16);
        c->interval_ns = number(body, size, "\"interval_ms\"", 0) * 1000000;
        c->sent = 0;
        c->due = now;
        c->state = STREAMING;
        send_bytes(c, STREAM_HEAD, sizeof STREAM_HEAD - 1);
        stream(c, now);
        return;
    }
    long long think_ms = number(body, size, "\"think_ms\"", 0);
    if (think_ms > 0) {
        c->state = THINKING;
        set_timer(c, now + think_ms * 1000000);
    } else {
        answer_chat(c);
    }
}

static bool starts(const char *text, const char *with) { return strncmp(text, with, strlen(with)) == 0; }

static void serve(struct conn *c, const char *body, size_t size, int64_t now) {
    char text[1024];
    if (now < healthy_at) {
        answer(c, "503 Service Unavailable", "{\"error\":{\"message\":\"loading\"}}");
    } else if (starts(c->in, "POST /v1/chat/completions ")) {
        chat(c, body, size, now);
    } else if (starts(c->in, "GET /health ")) {
        answer(c, "200 OK", "{}");
    } else if (starts(c->in, "GET /v1/models ")) {
        snprintf(text, sizeof text, "{\"object\":\"list\",\"data\":[{\"id\":\"%s\",\"object\":\"model\"}]}", model);
        answer(c, "200 OK", text);
    } else {
        answer(c, "404 Not Found", "{\"error\":{\"message\":\"no such route\"}}");
    }
}

static const char *header(const char *head, const char *name) {
    const char *at = strcasestr(head, name);
    return at ? at + strlen(name) : NULL;
}

/* Answers the request at the front of the buffer; false if it is not all there. */
static bool take_request(struct conn *c, int64_t now) {
    char *end = memmem(c->in, c->in_size, "\r\n\r\n", 4);
    if (!end) return false;
    end[2] = 0; /* for the string functions; the blank line is not looked at again */
    const char *length = header(c->in, "\r\ncontent-length:"), *connection = header(c->in, "\r\nconnection: ");
    bool chunked = header(c->in, "\r\ntransfer-encoding:");
    end[2] = '\r';
    size_t body = (size_t)(end + 4 - c->in), size = length ? strtoull(length, NULL, 10) : 0;
    if (c->in_size < body + size) return false;
    c->closes = connection && strncasecmp(connection, "close", 5) == 0;
    char after = c->in[body + size]; /* there is always room for this byte */
    c->in[body + size] = 0;
    if (chunked) {
        c->closes = true;
        answer(c, "411 Length Required", "{\"error\":{\"message\":\"send a Content-Length\"}}");
    } else {
        serve(c, c->in + body, size, now);
    }
    c->in[body + size] = after;
    c->in_size -= body + size;
    memmove(c->in, c->in + body + size, c->in_size);
    return true;
}

static void hang_up(struct conn *c) {
    drop_timer(c);
    close(c->fd);
    free(c->in);
    free(c->out);
    free(c);
}

/* False when the client has left or is not worth listening to. */
static bool read_more(struct conn *c) {
    for (;;) {
        c->in = grown(c->in, &c->in_room, c->in_size + 2048);
        size_t room = c->in_room - c->in_size - 1;
        ssize_t got = recv(c->fd, c->in + c->in_size, room, 0);
        if (got < 0) return errno == EAGAIN || errno == EINTR;
        if (got == 0 || c->in_size + (size_t)got > MOST_REQUEST) return false;
        c->in_size += (size_t)got;
        if ((size_t)got < room) return true;
    }
}

static void attend(struct conn *c, uint32_t what, int64_t now) {
    if (what & (EPOLLERR | EPOLLHUP) || (what & (EPOLLIN | EPOLLRDHUP) && !read_more(c))) {
        hang_up(c);
        return;
    }
    if (what & EPOLLOUT && c->out_size) {
        flush(c);
        if (c->out_size == 0 && c->state == STREAMING) stream(c, now);
    }
    while (c->state == READING && !c->closes && c->in_size && take_request(c, now)) {
    }
    if (c->closes && c->state == READING && c->out_size == 0) {
        hang_up(c);
        return;
    }
    if (c->wants_room != (c->out_size > 0)) watch(c, EPOLL_CTL_MOD, c->out_size > 0);
}

static void ring(int64_t now) {
    /* Not more than stood there at first: an unpaced stream is always due. */
    for (size_t turns = heap_size; turns && heap_size && heap[0]->due <= now; turns--) {
        struct conn *c = heap[0];
        if (c->state == THINKING) {
            drop_timer(c);
            answer_chat(c);
        } else {
            stream(c, now);
            if (c->heap_at >= 0 && c->interval_ns == 0) set_timer(c, c->due = now_ns());
        }
        attend(c, 0, now);
    }
}

static void welcome(void) {
    for (int fd; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
        struct conn *c = calloc(1, sizeof *c);
        if (!c) die("calloc");
        c->fd = fd;
        c->heap_at = -1;
        watch(c, EPOLL_CTL_ADD, false);
    }
}

static int listen_on(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (getenv("HOST")) inet_pton(AF_INET, getenv("HOST"), &at.sin_addr);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, 4096)) die("listen");
    return fd;
}

static int end_signals(void) {
    sigset_t ends;
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGINT);
    sigprocmask(SIG_BLOCK, &ends, NULL);
    return signalfd(-1, &ends, SFD_CLOEXEC);
}

/* Nanoseconds where the kernel can (Linux 5.11), milliseconds where it cannot. */
static int wait_for(struct epoll_event *events, int most, int64_t nanoseconds) {
    static bool coarse;
    if (nanoseconds < 0) return epoll_wait(poller, events, most, -1);
    if (!coarse) {
        struct timespec t = {nanoseconds / 1000000000, nanoseconds % 1000000000};
        int count = epoll_pwait2(poller, events, most, &t, NULL);
        if (count >= 0 || errno != ENOSYS) return count;
        coarse = true;
    }
    return epoll_wait(poller, events, most, (int)((nanoseconds + 999999) / 1000000));
}

static void run(void) {
    static struct epoll_event events[1024];
    for (;;) {
        int64_t wait = -1;
        if (heap_size) wait = heap[0]->due - now_ns();
        int count = wait_for(events, 1024, heap_size && wait < 0 ? 0 : wait);
        int64_t now = now_ns();
        for (int i = 0; i < count; i++) {
            void *who = events[i].data.ptr;
            if (who == &ends) return;
            if (who == &listener) welcome();
        }
        for (int i = 0; i < count; i++)
            if (events[i].data.ptr != &listener && events[i].data.ptr != &ends)
                attend(events[i].data.ptr, events[i].events, now);
        ring(now);
    }
}

static void watch_special(int fd, void *mark) {
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = mark};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &e)) die("epoll_ctl");
}

int main(int argc, char **argv) {
    int port = getenv("PORT") ? atoi(getenv("PORT")) : 0;
    if (getenv("MODEL")) model = getenv("MODEL");
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 < argc && strcmp(argv[i], "--port") == 0) {
            port = atoi(argv[i + 1]);
        } else if (i + 1 < argc && strcmp(argv[i], "--model") == 0) {
            model = argv[i + 1];
        } else if (i + 1 < argc && strcmp(argv[i], "--load-seconds") == 0) {
            healthy_at = now_ns() + (int64_t)(atof(argv[i + 1]) * 1e9);
        } else {
            fprintf(stderr, "usage: stub_engine [--port N] [--model NAME] [--load-seconds S]\n");
            return 2;
        }
    }
    if (port <= 0 || port > 65535 || strlen(model) > 200) {
        fprintf(stderr, "stub_engine: needs a port (--port N) and a model name of at most 200 bytes\n");
        return 2;
    }
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    poller = epoll_create1(EPOLL_CLOEXEC);
    listener = listen_on(port);
    ends = end_signals();
    watch_special(listener, &listener);
    watch_special(ends, &ends);
    run();
    return 0;
}
