/* Preloaded into a llama-server, it writes down which requests came and which were answered, by the id in their
   text, as the stand-in of tests/clients/frail-engine does: nanoseconds, process, model, what, id. One system call
   for each line, so that a killed engine leaves whole ones.

   LOAD_RECORD names the file, LOAD_MODEL the model. */

#define _GNU_SOURCE
#include <ctype.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define SOCKETS 4096
#define LONGEST 32

static char asked[SOCKETS][LONGEST];       /* by socket, each of which one thread serves: the request's id */
static char tails[SOCKETS][LONGEST];       /* what an id may begin in that the next bytes end */
static char over[SOCKETS];                 /* the engine answers no more there, and drains what still comes */
static int record = -1;
static long long run;
static const char *model = "";
static ssize_t (*real_recv)(int, void *, size_t, int);
static ssize_t (*real_send)(int, const void *, size_t, int);

static long long now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000LL + at.tv_nsec;
}

__attribute__((constructor)) static void begin(void) {
    const char *file = getenv("LOAD_RECORD");
    if (file) record = open(file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (getenv("LOAD_MODEL")) model = getenv("LOAD_MODEL");
    run = now();
    real_recv = dlsym(RTLD_NEXT, "recv");
    real_send = dlsym(RTLD_NEXT, "send");
}

static void note(int socket, const char *what) {
    char line[256];
    int size = snprintf(line, sizeof line, "%lld %lld %s %s %s\n", now(), run, model, what, asked[socket]);
    if (record >= 0 && size < (int)sizeof line && write(record, line, size) < 0) record = -1;
}

static int knows(int socket) { return socket >= 0 && socket < SOCKETS; }

/* The first whole load-NUMBER of some bytes, into found. */
static int find(const char *text, size_t size, char *found) {
    for (const char *at = text; (at = memmem(at, size - (at - text), "load-", 5)); at += 5) {
        size_t length = 5, left = size - (at - text);
        while (length < left && isdigit((unsigned char)at[length])) length++;
        if (length == 5 || length == left || length >= LONGEST) continue;
        memcpy(found, at, length);
        found[length] = 0;
        return 1;
    }
    return 0;
}

ssize_t recv(int socket, void *into, size_t size, int flags) {
    ssize_t got = real_recv(socket, into, size, flags);
    if (got <= 0 || (flags & MSG_PEEK) || !knows(socket) || over[socket]) return got;
    size_t kept = strlen(tails[socket]);
    char *text = malloc(kept + got), found[LONGEST];
    if (!text) return got;
    memcpy(text, tails[socket], kept);
    memcpy(text + kept, into, got);
    if (find(text, kept + got, found) && strcmp(found, asked[socket])) {
        strcpy(asked[socket], found);
        note(socket, "received");
    }
    size_t keep = kept + got < LONGEST - 1 ? kept + got : LONGEST - 1;
    memcpy(tails[socket], text + kept + got - keep, keep);
    tails[socket][keep] = 0;
    free(text);
    return got;
}

/* Whether these are the bytes with which an answer ends, or the head of one that is sent whole. */
static int is_last(const char *text, size_t size) {
    return memmem(text, size, "data: [DONE]", 12) || memmem(text, size, "\"message_stop\"", 14) ||
           (size > 12 && !memcmp(text, "HTTP/1.1 200", 12) && !memmem(text, size, "chunked", 7));
}

ssize_t send(int socket, const void *text, size_t size, int flags) {
    int last = knows(socket) && asked[socket][0] && is_last(text, size);
    if (knows(socket)) tails[socket][0] = 0; /* the request was read */
    if (last) note(socket, "answered");
    ssize_t sent = real_send(socket, text, size, flags);
    if (last) {
        if (sent == (ssize_t)size) note(socket, "sent");
        asked[socket][0] = 0;
    }
    return sent;
}

int shutdown(int socket, int how) {
    static int (*real_shutdown)(int, int);
    if (!real_shutdown) real_shutdown = dlsym(RTLD_NEXT, "shutdown");
    if (knows(socket)) over[socket] = 1;
    return real_shutdown(socket, how);
}

/* The number of a socket that is closed is that of another one soon. */
int close(int socket) {
    static int (*real_close)(int);
    if (!real_close) real_close = dlsym(RTLD_NEXT, "close");
    if (knows(socket)) asked[socket][0] = tails[socket][0] = over[socket] = 0;
    return real_close(socket);
}
