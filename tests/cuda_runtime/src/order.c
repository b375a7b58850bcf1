/* Looks for operations that touch the same bytes, one of them writing, without an order by streams and events.
 *
 * Each stream numbers its operations. `after[i]` of a stream is the last operation of stream i that whatever it does
 * next comes after; events carry such a list from where they are recorded to who waits for them. All threads of the
 * host are one: what one of them has seen to be over is over for all, so that no order by locks is missed. */
#include "runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SITE_BYTES 160

/* An operation that is not known to be over. */
struct touch {
    struct touch *next;
    struct access access;
    unsigned stream;
    uint64_t number;
    char name[64], site[SITE_BYTES];
};

static uint64_t numbers[MAX_STREAMS], host_after[MAX_STREAMS];
static struct touch *touches;
static long races;
/* Writes who issues an operation, as text. */
static void (*site_writer)(char *text, int bytes);

static int is_on(void) {
    static int state = -1;
    if (state < 0) state = setting("CUDA_RUNTIME_ORDER", 0) != 0;
    return state;
}

long cuda_runtime_races(void) { return races; }
void cuda_runtime_set_site_writer(void (*writer)(char *, int)) { site_writer = writer; }

static uint64_t *list_of(uint64_t **after) {
    if (!*after) *after = calloc(MAX_STREAMS, sizeof **after);
    return *after;
}

static void join(uint64_t *into, const uint64_t *from) {
    for (unsigned stream = 0; stream < MAX_STREAMS; stream++)
        if (from[stream] > into[stream]) into[stream] = from[stream];
}

static int overlap(const struct access *one, const struct access *other) {
    return one->begin < other->begin + other->bytes && other->begin < one->begin + one->bytes;
}

static void drop_touches_that_are_over(void) {
    struct touch **place = &touches;
    while (*place) {
        struct touch *touch = *place;
        if (host_after[touch->stream] < touch->number) {
            place = &touch->next;
            continue;
        }
        *place = touch->next;
        free(touch);
    }
}

static void compare(const struct touch *touch, const uint64_t *after) {
    for (struct touch *earlier = touches; earlier; earlier = earlier->next) {
        int writes = earlier->access.writes || touch->access.writes;
        int is_ordered = earlier->stream == touch->stream || after[earlier->stream] >= earlier->number;
        if (is_ordered || !writes || !overlap(&earlier->access, &touch->access)) continue;
        races++;
        fprintf(stderr,
                "cuda_runtime: race: %s (%s) on stream %u and %s (%s) on stream %u %s the same bytes at %#lx\n",
                earlier->name, earlier->site, earlier->stream, touch->name, touch->site, touch->stream,
                earlier->access.writes && touch->access.writes ? "write" : "read and write",
                (unsigned long)touch->access.begin);
    }
}

/* Join what a stream comes after without a call: the legacy stream and blocking ones of a device wait for each other. */
static void join_host_and_legacy(cudaStream_t stream) {
    uint64_t *after = list_of(&stream->after);
    join(after, host_after);
    for (cudaStream_t other = all_streams; other; other = other->next) {
        int waits = (stream->is_legacy && other->is_blocking) || (stream->is_blocking && other->is_legacy);
        if (waits && other->device == stream->device && other->after) join(after, other->after);
    }
}

/* Take an operation that a stream is about to get, with the lock held, and report races with earlier ones. */
void order_issue(cudaStream_t stream, const char *name, const struct access *accesses, int count) {
    if (!is_on() || stream->capture || stream->id >= MAX_STREAMS) return;
    join_host_and_legacy(stream);
    uint64_t *after = stream->after;
    after[stream->id] = ++numbers[stream->id];
    char site[SITE_BYTES] = "";
    if (site_writer) {
        pthread_mutex_unlock(&runtime_lock);
        site_writer(site, SITE_BYTES);
        pthread_mutex_lock(&runtime_lock);
    }
    drop_touches_that_are_over();
    for (int number = 0; number < count; number++) {
        if (!accesses[number].bytes) continue;
        struct touch *touch = malloc(sizeof *touch);
        *touch = (struct touch){NULL, accesses[number], stream->id, after[stream->id], "", ""};
        snprintf(touch->name, sizeof touch->name, "%s", name);
        memcpy(touch->site, site, SITE_BYTES);
        compare(touch, after);
        touch->next = touches;
        touches = touch;
    }
}

void order_record(cudaEvent_t event, cudaStream_t stream) {
    if (!is_on() || stream->id >= MAX_STREAMS) return;
    join_host_and_legacy(stream);
    memcpy(list_of(&event->after), stream->after, MAX_STREAMS * sizeof *stream->after);
}

void order_wait_event(cudaStream_t stream, cudaEvent_t event) {
    if (is_on() && event->after) join(list_of(&stream->after), event->after);
}

void order_host_saw_event(cudaEvent_t event) {
    if (is_on() && event->after) join(host_after, event->after);
}

void order_host_saw_stream(cudaStream_t stream) {
    if (is_on() && stream->after) join(host_after, stream->after);
}
