/* A stand-in for libcuda.so.1 that checkpoints nothing.
 *
 * The folder FAKE_CUDA holds what it knows: in a file PID the number of the process's state (a process without
 * one does not use CUDA), in a file PID.ACTION what goes wrong there:
 *
 *   RESULT         the call fails with this CUresult
 *   RESULT STATE   and leaves the process in this state
 *   hang           it never returns
 *
 * With ENFORCED it attaches to the process for a moment before it acts on it, which the kernel may refuse.
 *
 * ACTION is lock, checkpoint, restore, unlock or state; init.fault is read by cuInit. Every call is written to
 * the file "calls", with the time-out of a lock.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RUNNING, LOCKED, CHECKPOINTED };
enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, ILLEGAL_STATE = 401, NOT_PERMITTED = 800 };

struct lock_args {
    unsigned int timeout_ms, reserved0;
    unsigned long long reserved1[7];
};

static int initialized;

static void in_folder(char *path, size_t size, const char *name) {
    snprintf(path, size, "%s/%s", getenv("FAKE_CUDA"), name);
}

static int read_text(const char *name, char *text, size_t size) {
    char path[4096];
    in_folder(path, sizeof path, name);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    text[fread(text, 1, size - 1, file)] = 0;
    fclose(file);
    return 1;
}

static int read_state(int pid) {
    char name[32], text[32];
    snprintf(name, sizeof name, "%d", pid);
    return read_text(name, text, sizeof text) ? atoi(text) : -1;
}

static void write_state(int pid, int state) {
    char path[4096], name[32];
    snprintf(name, sizeof name, "%d", pid);
    in_folder(path, sizeof path, name);
    FILE *file = fopen(path, "w");
    fprintf(file, "%d", state);
    fclose(file);
}

static void note(const char *call) {
    char path[4096];
    in_folder(path, sizeof path, "calls");
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (write(fd, call, strlen(call)) < 0) abort();
    close(fd);
}

/* 1 where it goes wrong, with its result. */
static int fault(const char *name, int pid, int *result) {
    char text[64];
    int state;
    if (!read_text(name, text, sizeof text)) return 0;
    if (!strncmp(text, "hang", 4))
        for (;;) pause();
    if (sscanf(text, "%d %d", result, &state) == 2) write_state(pid, state);
    return 1;
}

/* 0 where the kernel does not let us at the process. */
static int attach(int pid) {
#ifdef ENFORCED
    if (ptrace(PTRACE_SEIZE, pid, 0, 0)) return 0;
    ptrace(PTRACE_INTERRUPT, pid, 0, 0);
    waitpid(pid, NULL, __WALL);
    ptrace(PTRACE_DETACH, pid, 0, 0);
#else
    (void)pid;
#endif
    return 1;
}

static int act(int pid, const char *action, const char *extra, int from, int to) {
    char text[128];
    int result;
    snprintf(text, sizeof text, "%s %d%s\n", action, pid, extra);
    note(text);
    if (!initialized) return NOT_INITIALIZED;
    snprintf(text, sizeof text, "%d.%s", pid, action);
    if (fault(text, pid, &result)) return result;
    int state = read_state(pid);
    if (state < 0) return INVALID_VALUE;
    if (state != from) return ILLEGAL_STATE;
    if (!attach(pid)) return NOT_PERMITTED;
    write_state(pid, to);
    return SUCCESS;
}

int cuInit(unsigned int flags) {
    int result;
    if (fault("init.fault", 0, &result)) return result;
    initialized = 1;
    printf("the driver prints what it likes\n");
    fflush(stdout);
    return flags ? INVALID_VALUE : SUCCESS;
}

int cuGetErrorName(int error, const char **name) {
    *name = error == 600             ? "CUDA_ERROR_NOT_READY"
            : error == ILLEGAL_STATE ? "CUDA_ERROR_ILLEGAL_STATE"
            : error == NOT_PERMITTED ? "CUDA_ERROR_NOT_PERMITTED"
                                     : NULL;
    return *name ? SUCCESS : INVALID_VALUE;
}

#ifndef OLD
int cuCheckpointProcessGetState(int pid, int *state) {
    char text[64];
    int result;
    snprintf(text, sizeof text, "%d.state", pid);
    if (fault(text, pid, &result)) return result;
    *state = read_state(pid);
    if (*state < 0) *state = RUNNING;
    return SUCCESS;
}

int cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) {
    if (read_state(pid) < 0) return INVALID_VALUE;
    *tid = pid + 1;
    return SUCCESS;
}

int cuCheckpointProcessLock(int pid, struct lock_args *args) {
    char timeout[32] = "";
    if (args) snprintf(timeout, sizeof timeout, " %u", args->timeout_ms);
    for (int i = 0; args && i < 7; i++)
        if (args->reserved0 || args->reserved1[i]) return INVALID_VALUE;
    return act(pid, "lock", timeout, RUNNING, LOCKED);
}

int cuCheckpointProcessCheckpoint(int pid, void *args) {
    return args ? INVALID_VALUE : act(pid, "checkpoint", "", LOCKED, CHECKPOINTED);
}

int cuCheckpointProcessRestore(int pid, void *args) {
    return args ? INVALID_VALUE : act(pid, "restore", "", CHECKPOINTED, LOCKED);
}

int cuCheckpointProcessUnlock(int pid, void *args) {
    return args ? INVALID_VALUE : act(pid, "unlock", "", LOCKED, RUNNING);
}
#endif
