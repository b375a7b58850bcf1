/* Streams, a thread each, and events. */
#include "runtime.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

cudaStream_t all_streams;
void (*activity_listener)(const struct activity *);

static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
/* Copies of one direction use the link in turn. */
static pthread_mutex_t link_lock[3] = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER,
                                       PTHREAD_MUTEX_INITIALIZER};
static struct CUstream_st legacy[MAX_DEVICES];
static unsigned stream_ids;
static double jitter_s;
static unsigned correlations;
/* Whether the program ends: no kernel runs any more. */
static int is_closed;

double copy_seconds(size_t bytes);

/* Add a stream to the list, with the lock held. */
static void open_stream(cudaStream_t stream, int device, int priority) {
    stream->device = device;
    stream->priority = priority;
    stream->id = stream_ids++;
    stream->random = (unsigned)setting("CUDA_RUNTIME_SEED", 1) * 7919u + stream->id;
    pthread_cond_init(&stream->wake, NULL);
    stream->next = all_streams;
    all_streams = stream;
}

void open_streams(int devices) {
    jitter_s = 1e-6 * setting("CUDA_RUNTIME_JITTER_US", 0);
    for (int device = 0; device < devices; device++) {
        open_stream(&legacy[device], device, 0);
        legacy[device].is_legacy = 1;
    }
}

/* Return the stream that a program's handle means. */
cudaStream_t stream_of(cudaStream_t stream) {
    touch_device(*current_device());
    int is_default = stream == NULL || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
    return is_default ? &legacy[*current_device()] : stream;
}

/* ---- Execution */

static void copy(const struct work *work) {
    char *target = cuda_runtime_alias(work->target);
    const char *source = work->staged ? work->staged : cuda_runtime_alias(work->source);
    size_t half = work->bytes / 2;
    pthread_mutex_lock(&link_lock[work->direction]);
    /* A half before the time that it takes and one after: both show memory that is used too early or too late. */
    memmove(target, source, half);
    if (work->direction != WITHIN) sleep_s(copy_seconds(work->bytes));
    memmove(target + half, source + half, work->bytes - half);
    count_copied(device_of(work->direction == TO_DEVICE ? work->target : work->source), work->direction, work->bytes);
    pthread_mutex_unlock(&link_lock[work->direction]);
}

static void run(const struct work *work) {
    switch (work->kind) {
    case COPY: copy(work); break;
    case FILL: memset(cuda_runtime_alias(work->target), work->value, work->bytes); break;
    case CALL: work->function(work->data); break;
    case LAUNCH:
        if (!is_closed) work->function(work->data);
        break;
    case RUN_GRAPH:
        for (struct work *node = work->graph->head; node; node = node->next) run(node);
        break;
    default: break;
    }
}

static void report(cudaStream_t stream, const struct work *work, double start_s) {
    int is_activity = work->kind == COPY || work->kind == FILL || work->kind == LAUNCH;
    void (*listener)(const struct activity *) = activity_listener;
    if (!listener || !is_activity) return;
    struct activity activity = {.kind = work->kind,
                                .name = work->name,
                                .issued_s = work->issued_s,
                                .start_s = start_s,
                                .end_s = now_s(),
                                .bytes = work->bytes,
                                .direction = work->direction,
                                .is_pinned = work->is_pinned,
                                .value = work->value,
                                .device = (unsigned)stream->device,
                                .stream = stream->id,
                                .thread = work->thread,
                                .correlation = work->correlation};
    listener(&activity);
}

/* Do one operation of a stream, with the lock held, which is free in between. */
static void perform(cudaStream_t stream, struct work *work) {
    switch (work->kind) {
    case WAIT_EVENT:
        while (work->event->done < work->number) pthread_cond_wait(&changed, &runtime_lock);
        break;
    case WAIT_STREAM:
        while (work->stream->done < work->number) pthread_cond_wait(&changed, &runtime_lock);
        break;
    case RECORD:
        work->event->time_s = now_s();
        if (work->event->done < work->number) work->event->done = work->number;
        break;
    case FREE: release_block(stream->device, work->target); break;
    default:
        pthread_mutex_unlock(&runtime_lock);
        if (jitter_s > 0) sleep_s(jitter_s * rand_r(&stream->random) / RAND_MAX);
        double start_s = now_s();
        run(work);
        report(stream, work, start_s);
        pthread_mutex_lock(&runtime_lock);
    }
    if (work->event) {
        work->event->holders--;
        release_event(work->event);
    }
}

/* Take a stream from the list. It is not freed: others may still wait for what it has done. */
static void remove_stream(cudaStream_t stream) {
    cudaStream_t *place = &all_streams;
    while (*place != stream) place = &(*place)->next;
    *place = stream->next;
}

static void *serve(void *argument) {
    cudaStream_t stream = argument;
    pthread_mutex_lock(&runtime_lock);
    for (;;) {
        while (!stream->head && !stream->is_destroyed) pthread_cond_wait(&stream->wake, &runtime_lock);
        struct work *work = stream->head;
        if (!work) break;
        perform(stream, work);
        stream->head = work->next;
        if (!stream->head) stream->tail = NULL;
        stream->done++;
        free(work->staged);
        free(work);
        pthread_cond_broadcast(&changed);
    }
    remove_stream(stream);
    pthread_mutex_unlock(&runtime_lock);
    return NULL;
}

static void append(cudaStream_t stream, struct work work) {
    struct work *own = malloc(sizeof *own);
    *own = work;
    own->next = NULL;
    if (!stream->has_thread) {
        pthread_t thread;
        stream->has_thread = 1;
        pthread_create(&thread, NULL, serve, stream);
        pthread_detach(thread);
    }
    if (stream->tail) stream->tail->next = own;
    else stream->head = own;
    stream->tail = own;
    stream->issued++;
    pthread_cond_signal(&stream->wake);
}

/* Let a stream wait for what another has so far. */
static void append_wait(cudaStream_t stream, cudaStream_t other) {
    if (other == stream || other->done == other->issued) return;
    append(stream, (struct work){.kind = WAIT_STREAM, .stream = other, .number = other->issued});
}

/* Add an operation to a stream or to the graph that it captures, with the lock held. */
void add_work(cudaStream_t stream, struct work work) {
    work.correlation = ++correlations;
    work.issued_s = now_s();
    work.thread = (unsigned)gettid();
    if (work.event) work.event->holders++;
    if (stream->capture) {
        struct work *node = malloc(sizeof *node);
        *node = work;
        append_node(stream->capture, node);
        return;
    }
    /* The legacy stream and blocking ones of a device wait for each other. */
    if (stream->is_legacy) {
        for (cudaStream_t other = all_streams; other; other = other->next)
            if (other->is_blocking && other->device == stream->device) append_wait(stream, other);
    } else if (stream->is_blocking) {
        append_wait(stream, &legacy[stream->device]);
    }
    append(stream, work);
}

cudaError_t issue(cudaStream_t stream, struct work work) {
    pthread_mutex_lock(&runtime_lock);
    add_work(stream_of(stream), work);
    pthread_mutex_unlock(&runtime_lock);
    return cudaSuccess;
}

/* ---- Waits of the host. Kernels are functions of Python here, which need its lock; those of a GPU do not. */

static void *(*release_python)(void);
static void (*acquire_python)(void *);
static int (*has_python)(void);

/* Wait until a stream has done something, with the lock held, which is free in between. */
void wait_for_change(void) {
    static int is_resolved;
    if (!is_resolved) {
        has_python = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
        release_python = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
        acquire_python = (void (*)(void *))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
        is_resolved = 1;
    }
    if (is_closed || !has_python || !has_python()) {
        pthread_cond_wait(&changed, &runtime_lock);
        return;
    }
    void *state = release_python();
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_cond_timedwait(&changed, &runtime_lock, &until);
    pthread_mutex_unlock(&runtime_lock);
    acquire_python(state);
    pthread_mutex_lock(&runtime_lock);
}

/* Wait for what a stream has so far, with the lock held. */
void drain(cudaStream_t stream) {
    uint64_t until = stream->issued;
    while (stream->done < until) wait_for_change();
    order_host_saw_stream(stream);
}

void drain_device(int device) {
    for (cudaStream_t stream = all_streams; stream; stream = stream->next)
        if (stream->device == device) drain(stream);
}

/* Wait for a stream and for those that it waits for without a call. */
static void drain_with_blocking(cudaStream_t stream) {
    for (cudaStream_t other = all_streams; stream->is_legacy && other; other = other->next)
        if (other->is_blocking && other->device == stream->device) drain(other);
    drain(stream);
}

/* Let all streams end, and no kernel run after that: the interpreter is about to end. */
void cuda_runtime_close(void) {
    pthread_mutex_lock(&runtime_lock);
    for (int device = 0; device < device_count(); device++) drain_device(device);
    is_closed = 1;
    pthread_mutex_unlock(&runtime_lock);
}

/* ---- Entry points */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    ENTER_OUTSIDE_CAPTURE("cudaStreamCreate");
    touch_device(*current_device());
    *stream = calloc(1, sizeof **stream);
    (*stream)->is_blocking = !(flags & cudaStreamNonBlocking);
    pthread_mutex_lock(&runtime_lock);
    open_stream(*stream, *current_device(), priority);
    pthread_mutex_unlock(&runtime_lock);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

/* The stream goes when it has done what it has. */
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    ENTER("cudaStreamDestroy");
    pthread_mutex_lock(&runtime_lock);
    stream->is_destroyed = 1;
    if (stream->has_thread) pthread_cond_signal(&stream->wake);
    else remove_stream(stream);
    pthread_mutex_unlock(&runtime_lock);
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = stream_of(stream)->priority;
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    ENTER_OUTSIDE_CAPTURE("cudaStreamQuery");
    pthread_mutex_lock(&runtime_lock);
    cudaStream_t own = stream_of(stream);
    int is_busy = own->done < own->issued;
    if (!is_busy) order_host_saw_stream(own);
    pthread_mutex_unlock(&runtime_lock);
    return is_busy ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    ENTER_OUTSIDE_CAPTURE("cudaStreamSynchronize");
    pthread_mutex_lock(&runtime_lock);
    cudaStream_t own = stream_of(stream);
    int is_captured = own->capture != NULL;
    if (is_captured) own->capture->is_invalid = 1;
    else drain_with_blocking(own);
    pthread_mutex_unlock(&runtime_lock);
    return is_captured ? failed(cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize") : cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)flags;
    ENTER("cudaStreamWaitEvent");
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&runtime_lock);
    cudaStream_t own = stream_of(stream);
    if (event->capture && own->is_legacy) {
        event->capture->is_invalid = 1;
        error = cudaErrorStreamCaptureImplicit;
    } else if (event->capture) {
        /* The stream joins the capture, whose nodes run in the order of their calls. */
        own->capture = event->capture;
    } else if (own->capture && event->recorded) {
        own->capture->is_invalid = 1;
        error = cudaErrorStreamCaptureIsolation;
    } else if (event->recorded) {
        order_wait_event(own, event);
        if (event->done < event->recorded)
            add_work(own, (struct work){.kind = WAIT_EVENT, .event = event, .number = event->recorded});
    }
    pthread_mutex_unlock(&runtime_lock);
    return error ? failed(error, "cudaStreamWaitEvent") : cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    ENTER("cudaLaunchHostFunc");
    return issue(stream, (struct work){.kind = CALL, .function = function, .data = data});
}

/* ---- Events */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    ENTER("cudaEventCreate");
    touch_device(*current_device());
    *event = calloc(1, sizeof **event);
    (*event)->flags = flags;
    (*event)->device = *current_device();
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

/* Free a destroyed event that no operation holds, with the lock held. */
void release_event(cudaEvent_t event) {
    if (!event->is_destroyed || event->holders) return;
    free(event->after);
    free(event);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    ENTER("cudaEventDestroy");
    pthread_mutex_lock(&runtime_lock);
    event->is_destroyed = 1;
    release_event(event);
    pthread_mutex_unlock(&runtime_lock);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    (void)flags;
    ENTER("cudaEventRecord");
    pthread_mutex_lock(&runtime_lock);
    cudaStream_t own = stream_of(stream);
    int is_own = own->device == event->device;
    if (is_own) {
        event->capture = own->capture;
        if (!own->capture) {
            event->recorded++;
            order_record(event, own);
            add_work(own, (struct work){.kind = RECORD, .event = event, .number = event->recorded});
        }
    }
    pthread_mutex_unlock(&runtime_lock);
    return is_own ? cudaSuccess : failed(cudaErrorInvalidResourceHandle, "cudaEventRecord on another device");
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    ENTER_OUTSIDE_CAPTURE("cudaEventQuery");
    if (event->capture) return failed(cudaErrorCapturedEvent, "cudaEventQuery");
    pthread_mutex_lock(&runtime_lock);
    int is_busy = event->done < event->recorded;
    if (!is_busy) order_host_saw_event(event);
    pthread_mutex_unlock(&runtime_lock);
    return is_busy ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    ENTER_OUTSIDE_CAPTURE("cudaEventSynchronize");
    if (event->capture) return failed(cudaErrorCapturedEvent, "cudaEventSynchronize");
    pthread_mutex_lock(&runtime_lock);
    uint64_t until = event->recorded;
    while (event->done < until) wait_for_change();
    order_host_saw_event(event);
    pthread_mutex_unlock(&runtime_lock);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *elapsed_ms, cudaEvent_t start, cudaEvent_t end) {
    ENTER("cudaEventElapsedTime");
    int is_timed = !((start->flags | end->flags) & cudaEventDisableTiming);
    if (!is_timed || !start->recorded || !end->recorded || start->device != end->device)
        return failed(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime");
    pthread_mutex_lock(&runtime_lock);
    int is_ready = start->done == start->recorded && end->done == end->recorded;
    *elapsed_ms = (float)(1e3 * (end->time_s - start->time_s));
    pthread_mutex_unlock(&runtime_lock);
    return is_ready ? cudaSuccess : failed(cudaErrorNotReady, "cudaEventElapsedTime");
}
