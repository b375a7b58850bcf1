/* Bytes of all processes on the stand-in, by device, in a file that the mock of libnvidia-ml.so.1 reads. */
#include "runtime.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

struct counters {
    /* Bytes that are allocated now, and that copies have moved so far. */
    uint64_t used, copied[3];
};

static struct counters nobody_reads[MAX_DEVICES];
static struct counters *counters = nobody_reads;
/* What this process has allocated, which ends with it. */
static int64_t own_used[MAX_DEVICES];
static pid_t owner;

void open_counters(void) {
    const char *path = getenv("CUDA_RUNTIME_COUNTERS");
    int file = path && *path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
    owner = getpid();
    if (file < 0) return;
    void *map = MAP_FAILED;
    if (!ftruncate(file, sizeof nobody_reads))
        map = mmap(NULL, sizeof nobody_reads, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (map == MAP_FAILED) perror("cuda_runtime: no counters");
    else counters = map;
}

void count_used(int device, int64_t bytes) {
    own_used[device] += bytes;
    __atomic_add_fetch(&counters[device].used, (uint64_t)bytes, __ATOMIC_RELAXED);
}

void count_copied(int device, enum direction direction, size_t bytes) {
    __atomic_add_fetch(&counters[device].copied[direction], bytes, __ATOMIC_RELAXED);
}

__attribute__((destructor)) static void close_counters(void) {
    for (int device = 0; device < MAX_DEVICES && owner == getpid(); device++) count_used(device, -own_used[device]);
}
