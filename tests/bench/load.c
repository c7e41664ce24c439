/* A load generator that checks what it gets. Prints one JSON object.
 *
 *   load rps     --port N [--connections C] [--seconds S] [--warmup-seconds S] [--think-ms M] [--requests R]
 *   load streams --port N [--connections C] [--events N] [--interval-ms M] [--ramp-seconds S]
 *   both:        [--host 127.0.0.1] [--path /v1/chat/completions] [--model stub] [--rewritten 1]
 *
 * rps: each connection sends its next request when it has the answer to the one before, and after R of them (0:
 * without end) it is closed and another one opened. Latency runs from before the request is written until the last
 * byte of the answer is read; where R is 1, from before connect().
 *
 * streams: each connection is one stream of N events, one every M ms. They are opened over the ramp, off the
 * interval's beat, so that they do not tick together. An event's delay runs from the moment that the engine
 * wrote into it to the moment that it is read here. It is in time when it comes within 250 ms of the end of its
 * stream's schedule, which begins with the stream's first event, and within 250 ms of the end of the run (ramp
 * and the time a stream takes). Time to first byte runs from before connect() to the first byte of the body. A
 * stream that is not over 5 s after the run's end is cut and counted as unfinished.
 *
 * Every byte of every answer and event is compared with what stub_engine.c sends (the texts below). Lines that
 * SSE calls comments are allowed. With --rewritten 1 the relay writes its own JSON, and of an answer (rps) only the
 * text and the number of its connection are looked for.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define LATE (SECOND / 4)
#define PATIENCE (5 * SECOND)
#define MOST_ERRORS 1000 /* more of them, and there is nothing to measure */

static const char ANSWER[] =
    "{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"%s\","
    "\"system_fingerprint\":\"fp_%d\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":"
    "\"The relay should hand these bytes on as they are, and take no longer over it than it must.\"},"
    "\"logprobs\":null,\"finish_reason\":\"stop\"}],"
    "\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":40,\"total_tokens\":52}}";
static const char TEXT[] = "The relay should hand these bytes on as they are, and take no longer over it than it must.";
static const char EVENT_START[] =
    "data: {\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"%s\","
    "\"system_fingerprint\":\"fp_%d\",\"choices\":[";
static const char EVENT_TOKEN[] = "{\"index\":0,\"delta\":{\"content\":\" ";
static const char EVENT_MOMENT[] = "\"},\"finish_reason\":null}],\"t_ns\":";
static const char USAGE[] = "],\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":%lld,\"total_tokens\":%lld}}";
static const char REQUEST[] =
    "POST %s HTTP/1.1\r\nHost: %s:%d\r\nUser-Agent: OpenAI/Python 1.99.0\r\nAccept: application/json\r\n"
    "Accept-Encoding: identity\r\nAuthorization: Bearer sk-bench\r\nContent-Type: application/json\r\n"
    "Content-Length: %d\r\n\r\n%s";
static const char BODY[] =
    "{\"model\":\"%s\",\"messages\":[{\"role\":\"system\",\"content\":\"You are a helpful assistant.\"},"
    "{\"role\":\"user\",\"content\":\"Write one sentence about relays.\"}],\"temperature\":0.2,"
    "\"max_tokens\":%lld,\"stream\":%s,\"interval_ms\":%lld,\"think_ms\":%lld,\"seed\":%d}";

static const char *host = "127.0.0.1", *path = "/v1/chat/completions", *model = "stub";
static int port, connections = 1;
static double seconds = 3, warmup = 0.5, ramp = 1;
static long long events = 500, interval_ms = 20, think_ms, requests;
static bool streams, rewritten;

static struct {
    long long connect, status, bytes, cut, no_done;
} errors;
static long long finished, reconnects, events_seen, events_in_time;

enum at { CONNECTING, HEAD, SIZED, CHUNK_SIZE, CHUNK, CHUNK_END, TRAILER, TO_THE_END, DONE };

struct conn {
    int fd, number;
    long long asked; /* requests on this connection */
    enum at at;
    char *request;
    size_t request_size;
    int64_t began, deadline; /* deadline: of a stream's events */
    char line[4096]; /* the head, a line of framing, a line of events, or the answer, while they are incomplete */
    size_t line_size;
    char text[2048]; /* the data of chunks, while a line of it is incomplete */
    size_t text_size;
    unsigned long long left;
    bool closes, first, wrong, usage, done;
    long long next;
    char start[512];
    size_t start_size;
};

static int poller;
static int64_t now, opened_at, measured_from, measured_to, run_end;
static int open_streams;

static int64_t clock_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * SECOND + t.tv_nsec;
}

static void die(const char *what) {
    fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* Samples in nanoseconds, up to 4.29 s */

struct samples {
    uint32_t *ns;
    size_t size, room;
};
static struct samples latency, delay, first_byte;

static void sample(struct samples *s, int64_t ns) {
    if (s->size == s->room) {
        s->room = s->room ? 2 * s->room : 1 << 16;
        s->ns = realloc(s->ns, s->room * sizeof *s->ns);
        if (!s->ns) die("realloc");
    }
    s->ns[s->size++] = ns < 0 ? 0 : ns > UINT32_MAX ? UINT32_MAX : (uint32_t)ns;
}

static int by_value(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void print_samples(const char *name, struct samples *s, double unit) {
    static const struct {
        const char *name;
        double share;
    } shown[] = {{"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}, {"max", 1}};
    qsort(s->ns, s->size, sizeof *s->ns, by_value);
    printf(", \"%s\": {", name);
    for (size_t i = 0; i < 4; i++) {
        size_t rank = (size_t)ceil(shown[i].share * (double)s->size);
        printf("%s\"%s\": ", i ? ", " : "", shown[i].name);
        if (s->size) printf("%.3f", s->ns[rank ? rank - 1 : 0] / unit);
        else printf("null");
    }
    printf("}");
}

/* Connections */

static void watch(struct conn *c, int how, uint32_t what) {
    struct epoll_event e = {.events = what, .data.ptr = c};
    if (epoll_ctl(poller, how, c->fd, &e)) die("epoll_ctl");
}

static void reset_answer(struct conn *c) {
    c->at = HEAD;
    c->line_size = c->text_size = 0;
    c->first = c->wrong = c->usage = c->done = c->closes = false;
    c->next = 0;
}

static void send_request(struct conn *c) {
    reset_answer(c);
    if (!streams && requests != 1) c->began = clock_ns();
    c->asked++;
    /* A request is a few hundred bytes: an idle socket takes it whole, or is broken, which the poller tells. */
    if (send(c->fd, c->request, c->request_size, MSG_NOSIGNAL) >= 0) return;
    if (errno == EAGAIN) die("send");
}

static void connect_to(struct conn *c) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    inet_pton(AF_INET, host, &to.sin_addr);
    c->began = clock_ns();
    c->asked = 0;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0) die("socket");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    c->at = CONNECTING;
    connect(c->fd, (struct sockaddr *)&to, sizeof to); /* how it went is seen by the poller */
    watch(c, EPOLL_CTL_ADD, EPOLLOUT);
}

static void hang_up(struct conn *c) {
    close(c->fd);
    c->at = DONE;
}

/* The stream is over, or the answer: `whole` if it came to its end. */
static void end_answer(struct conn *c, bool whole) {
    bool right = whole && !c->wrong;
    errors.cut += !whole;
    errors.bytes += whole && c->wrong;
    if (streams) {
        bool complete = c->done && c->usage && c->next == events;
        errors.no_done += right && !complete;
        finished += right && complete;
        open_streams--;
        hang_up(c);
        return;
    }
    if (right && now >= measured_from && now < measured_to) {
        finished++;
        sample(&latency, now - c->began);
    }
    if (whole && !c->closes && c->asked != requests) {
        send_request(c);
    } else {
        reconnects++;
        hang_up(c);
        connect_to(c);
    }
}

static void fail(struct conn *c, long long *counter) {
    ++*counter;
    hang_up(c);
    if (streams) open_streams--;
    else if (counter != &errors.connect) connect_to(c);
}

/* What is in the body */

static bool skip(const char **at, const char *end, const char *text, size_t size) {
    if ((size_t)(end - *at) < size || memcmp(*at, text, size) != 0) return false;
    *at += size;
    return true;
}

static bool skip_number(const char **at, const char *end, long long *number) {
    const char *from = *at;
    for (*number = 0; *at < end && **at >= '0' && **at <= '9'; ++*at) *number = *number * 10 + (**at - '0');
    return *at > from;
}

static void take_event(struct conn *c, long long sent_at) {
    if (c->next++ == 0) {
        int64_t end = sent_at + events * interval_ms * 1000000;
        c->deadline = LATE + (end < run_end ? end : run_end);
    }
    events_seen++;
    events_in_time += now <= c->deadline;
    sample(&delay, now - sent_at);
}

static bool check_event(struct conn *c, const char *line, const char *end) {
    long long token, sent_at;
    char usage[256];
    if (end - line == 12 && memcmp(line, "data: [DONE]", 12) == 0) {
        bool last = c->usage && !c->done;
        c->done = true;
        return last;
    }
    if (!skip(&line, end, c->start, c->start_size)) return false;
    if (skip(&line, end, EVENT_TOKEN, sizeof EVENT_TOKEN - 1)) {
        if (!skip_number(&line, end, &token) || !skip(&line, end, EVENT_MOMENT, sizeof EVENT_MOMENT - 1) ||
            !skip_number(&line, end, &sent_at) || !skip(&line, end, "}", 1) || line != end)
            return false;
        bool in_order = token == c->next && token < events && !c->usage;
        take_event(c, sent_at);
        return in_order;
    }
    int size = snprintf(usage, sizeof usage, USAGE, events, events + 12);
    bool once = !c->usage;
    c->usage = true;
    return once && skip(&line, end, usage, (size_t)size) && line == end;
}

static void take_lines(struct conn *c, const char *at, size_t size) {
    const char *end = at + size;
    for (const char *stop; (stop = memchr(at, '\n', (size_t)(end - at))); at = stop + 1) {
        const char *from = at, *to = stop;
        if (c->text_size) {
            size_t more = (size_t)(stop - at);
            if (c->text_size + more > sizeof c->text) more = 0, c->wrong = true;
            memcpy(c->text + c->text_size, at, more);
            from = c->text;
            to = from + c->text_size + more;
            c->text_size = 0;
        }
        if (to == from || *from == ':') continue;
        if (!check_event(c, from, to)) c->wrong = true;
    }
    size = (size_t)(end - at);
    if (c->text_size + size > sizeof c->text) size = 0, c->wrong = true;
    memcpy(c->text + c->text_size, at, size);
    c->text_size += size;
}

static void take_body(struct conn *c, const char *bytes, size_t size) {
    if (!c->first && size) {
        c->first = true;
        if (streams) sample(&first_byte, now - c->began);
    }
    if (streams) {
        take_lines(c, bytes, size);
    } else if (c->text_size + size > sizeof c->text) {
        c->wrong = true;
    } else {
        memcpy(c->text + c->text_size, bytes, size);
        c->text_size += size;
    }
}

static bool has(struct conn *c, const char *text) {
    return memmem(c->text, c->text_size, text, strlen(text)) != NULL;
}

static bool is_our_answer(struct conn *c) {
    char number[32];
    if (!rewritten) return c->text_size == c->start_size && memcmp(c->text, c->start, c->start_size) == 0;
    snprintf(number, sizeof number, "\"fp_%d\"", c->number);
    return has(c, TEXT) && has(c, number);
}

static void end_body(struct conn *c) {
    if (streams ? c->text_size > 0 : !is_our_answer(c)) c->wrong = true;
    end_answer(c, true);
}

/* Framing, byte for byte as it comes */

static const char *header(const char *head, const char *name) {
    const char *at = strcasestr(head, name);
    if (!at) return "";
    at += strlen(name);
    return at + strspn(at, " ");
}

static void read_head(struct conn *c) {
    const char *length = header(c->line, "\r\ncontent-length:");
    bool chunked = strncasecmp(header(c->line, "\r\ntransfer-encoding:"), "chunked", 7) == 0;
    c->closes = strncasecmp(header(c->line, "\r\nconnection:"), "close", 5) == 0;
    c->left = strtoull(length, NULL, 10);
    c->line_size = 0;
    if (memcmp(c->line, "HTTP/1.1 200 ", 13) != 0) fail(c, &errors.status);
    else if (chunked) c->at = CHUNK_SIZE;
    else if (*length && c->left) c->at = SIZED;
    else if (*length) end_body(c);
    else c->at = TO_THE_END;
}

/* Gathers bytes up to and with `stop`; true when the line is complete and ends with a NUL in its place. */
static bool gather(struct conn *c, const char **at, const char *end, const char *stop) {
    size_t width = strlen(stop);
    while (*at < end && c->line_size < sizeof c->line - 1) {
        c->line[c->line_size++] = *(*at)++;
        if (c->line_size >= width && memcmp(c->line + c->line_size - width, stop, width) == 0) {
            c->line[c->line_size - width] = 0;
            return true;
        }
    }
    if (c->line_size == sizeof c->line - 1) fail(c, &errors.bytes);
    return false;
}

static void read_chunk_size(struct conn *c) {
    char *stop;
    c->left = strtoull(c->line, &stop, 16);
    c->line_size = 0;
    if (stop == c->line || (*stop && *stop != ';')) fail(c, &errors.bytes);
    else c->at = c->left ? CHUNK : TRAILER;
}

static void feed(struct conn *c, const char *at, const char *end) {
    int fd = c->fd;
    while (at < end && c->at != DONE && c->at != CONNECTING && c->fd == fd) {
        size_t size = (size_t)(end - at);
        switch (c->at) {
        case HEAD:
            if (gather(c, &at, end, "\r\n\r\n")) read_head(c);
            break;
        case CHUNK_SIZE:
            if (gather(c, &at, end, "\r\n")) read_chunk_size(c);
            break;
        case CHUNK:
        case SIZED:
            if (size > c->left) size = c->left;
            c->left -= size;
            take_body(c, at, size);
            at += size;
            if (c->left) break;
            if (c->at == CHUNK) c->at = CHUNK_END;
            else end_body(c);
            break;
        case CHUNK_END:
            if (!gather(c, &at, end, "\r\n")) break;
            if (c->line_size != 2) c->wrong = true;
            c->line_size = 0;
            c->at = CHUNK_SIZE;
            break;
        case TRAILER:
            if (!gather(c, &at, end, "\r\n")) break;
            if (c->line_size == 2) end_body(c);
            else c->line_size = 0;
            break;
        default:
            take_body(c, at, size);
            at = end;
        }
    }
}

static void attend(struct conn *c) {
    static char bytes[1 << 16];
    if (c->at == CONNECTING) {
        int error = 0;
        getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &(socklen_t){sizeof error});
        if (error) {
            fail(c, &errors.connect);
        } else {
            watch(c, EPOLL_CTL_MOD, EPOLLIN);
            send_request(c);
        }
        return;
    }
    if (c->at == DONE) return;
    ssize_t got = recv(c->fd, bytes, sizeof bytes, 0);
    now = clock_ns();
    if (got > 0) {
        feed(c, bytes, bytes + got);
    } else if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    } else if (c->at == TO_THE_END && got == 0) {
        c->closes = true;
        end_body(c);
    } else {
        end_answer(c, false);
    }
}

/* The two modes */

static struct conn *make_connection(int number) {
    struct conn *c = calloc(1, sizeof *c);
    char body[1024], request[2048];
    if (!c) die("calloc");
    c->number = number;
    int size = snprintf(body, sizeof body, BODY, model, events, streams ? "true" : "false", interval_ms, think_ms, number);
    c->request_size = (size_t)snprintf(request, sizeof request, REQUEST, path, host, port, size, body);
    c->request = strdup(request);
    c->start_size = (size_t)snprintf(c->start, sizeof c->start, streams ? EVENT_START : ANSWER, model, number);
    return c;
}

static void wait_until(int64_t moment) {
    static struct epoll_event ready[1024];
    static bool coarse;
    int count = -1;
    int64_t left = moment - clock_ns();
    if (left < 0) left = 0;
    struct timespec t = {left / SECOND, left % SECOND};
    if (!coarse && (count = epoll_pwait2(poller, ready, 1024, &t, NULL)) < 0 && errno == ENOSYS) coarse = true;
    if (coarse) count = epoll_wait(poller, ready, 1024, (int)((left + 999999) / 1000000));
    for (int i = 0; i < count; i++) attend(ready[i].data.ptr);
    now = clock_ns();
}

static long long error_count(void) {
    return errors.connect + errors.status + errors.bytes + errors.cut + errors.no_done;
}

static void run_rps(void) {
    opened_at = now = clock_ns();
    measured_from = now + (int64_t)(warmup * SECOND);
    measured_to = measured_from + (int64_t)(seconds * SECOND);
    for (int i = 0; i < connections; i++) connect_to(make_connection(i));
    while (now < measured_to && error_count() < MOST_ERRORS) wait_until(measured_to);
}

/* Where in the ramp a stream is opened: evenly, but off any beat (the golden section's multiples). */
static int64_t opening(int number) {
    double off_beat = fmod(number * 0.6180339887498949, 1);
    return opened_at + (int64_t)((number + off_beat) * ramp / connections * SECOND);
}

static void run_streams(void) {
    opened_at = now = clock_ns();
    run_end = opened_at + (int64_t)(ramp * SECOND) + events * interval_ms * 1000000;
    int64_t end = run_end + PATIENCE;
    for (int next = 0; now < end && (next < connections || open_streams);) {
        if (next < connections && opening(next) <= now) {
            open_streams++;
            connect_to(make_connection(next++));
        } else {
            wait_until(next < connections ? opening(next) : end);
        }
    }
}

static void print_result(void) {
    printf("{\"mode\": \"%s\", \"connections\": %d, ", streams ? "streams" : "rps", connections);
    if (streams) {
        printf("\"seconds\": %.3f, \"streams_finished\": %lld, \"streams_unfinished\": %d, ",
               (double)(now - opened_at) / SECOND, finished, open_streams);
        printf("\"events_expected\": %lld, \"events_seen\": %lld, \"events_in_time\": %lld", events * connections,
               events_seen, events_in_time);
        print_samples("delay_ms", &delay, 1e6);
        print_samples("first_byte_ms", &first_byte, 1e6);
    } else {
        printf("\"seconds\": %.3f, \"requests\": %lld, \"rps\": %.1f, \"reconnects\": %lld", seconds, finished,
               (double)finished / seconds, reconnects);
        print_samples("latency_us", &latency, 1e3);
    }
    printf(", \"errors\": %lld, \"errors_by_kind\": {\"connect\": %lld, \"status\": %lld, \"bytes\": %lld, "
           "\"cut\": %lld, \"no_done\": %lld}}\n",
           error_count(), errors.connect, errors.status, errors.bytes, errors.cut, errors.no_done);
}

static bool set_option(const char *name, const char *to) {
    if (strcmp(name, "--host") == 0) host = to;
    else if (strcmp(name, "--port") == 0) port = atoi(to);
    else if (strcmp(name, "--path") == 0) path = to;
    else if (strcmp(name, "--model") == 0) model = to;
    else if (strcmp(name, "--connections") == 0) connections = atoi(to);
    else if (strcmp(name, "--seconds") == 0) seconds = atof(to);
    else if (strcmp(name, "--warmup-seconds") == 0) warmup = atof(to);
    else if (strcmp(name, "--ramp-seconds") == 0) ramp = atof(to);
    else if (strcmp(name, "--events") == 0) events = atoll(to);
    else if (strcmp(name, "--interval-ms") == 0) interval_ms = atoll(to);
    else if (strcmp(name, "--think-ms") == 0) think_ms = atoll(to);
    else if (strcmp(name, "--requests") == 0) requests = atoll(to);
    else if (strcmp(name, "--rewritten") == 0) rewritten = atoi(to);
    else return false;
    return true;
}

static bool read_arguments(int argc, char **argv) {
    struct in_addr ignored;
    if (argc < 2 || argc % 2) return false;
    streams = strcmp(argv[1], "streams") == 0;
    if (!streams && strcmp(argv[1], "rps") != 0) return false;
    for (int i = 2; i < argc; i += 2)
        if (!set_option(argv[i], argv[i + 1])) return false;
    return port > 0 && port < 65536 && connections > 0 && inet_pton(AF_INET, host, &ignored) == 1 &&
           strlen(model) <= 100 && strlen(path) <= 500;
}

int main(int argc, char **argv) {
    if (!read_arguments(argc, argv)) {
        fprintf(stderr, "load: see the head of load.c for the arguments (--host is an IPv4 address)\n");
        return 2;
    }
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    poller = epoll_create1(EPOLL_CLOEXEC);
    if (streams) run_streams();
    else run_rps();
    print_result();
    return 0;
}
