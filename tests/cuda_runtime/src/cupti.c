/* libcupti.so: reports copies, fills and kernels of the stand-in's streams, and the calls that issued them. */
#include "runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cuda.h>
#include <cupti.h>

#define KINDS 256

static pthread_mutex_t buffer_lock = PTHREAD_MUTEX_INITIALIZER;
static CUpti_BuffersCallbackRequestFunc request_buffer;
static CUpti_BuffersCallbackCompleteFunc complete_buffer;
static CUpti_TimestampCallbackFunc timestamp;
/* The subscriber's clock, and when it was this. */
static uint64_t first_ticks;
static double first_s;
static int is_enabled[KINDS];
static int subscribers;
static uint8_t *buffer;
static size_t buffer_bytes, used_bytes;

static uint64_t realtime_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    return (uint64_t)time.tv_sec * 1000000000ull + (uint64_t)time.tv_nsec;
}

/* Convert a time of the stand-in's clock to that of the records. The subscriber's clock may count ticks of a CPU. */
static uint64_t record_time(double time_s) {
    double now = now_s();
    if (!timestamp) return realtime_ns() - (uint64_t)(1e9 * (now - time_s));
    uint64_t ticks = timestamp();
    double ticks_per_s = (double)(ticks - first_ticks) / (now - first_s);
    return ticks - (uint64_t)(ticks_per_s * (now - time_s));
}

/* Give the buffer to the subscriber, with the lock held. */
static void flush(void) {
    if (!buffer) return;
    uint8_t *full = buffer;
    buffer = NULL;
    complete_buffer(NULL, 0, full, buffer_bytes, used_bytes);
}

/* Append a record, with the lock held. */
static void append(const void *record, size_t bytes) {
    if (buffer && used_bytes + bytes > buffer_bytes) flush();
    if (!buffer) {
        size_t records = 0;
        request_buffer(&buffer, &buffer_bytes, &records);
        used_bytes = 0;
    }
    if (!buffer || bytes > buffer_bytes) return;
    memcpy(buffer + used_bytes, record, bytes);
    used_bytes += bytes;
}

/* The function whose call issued an activity, and its name as CUPTI has it. */
#define CALL(function) {CUPTI_RUNTIME_TRACE_CBID_##function, #function}
static const struct {
    CUpti_CallbackId id;
    const char *name;
} calls[] = {[COPY] = CALL(cudaMemcpyAsync_v3020),
             [FILL] = CALL(cudaMemsetAsync_v3020),
             [LAUNCH] = CALL(cudaLaunchKernel_v7000)};

static void append_call(const struct activity *activity) {
    CUpti_ActivityAPI call = {.kind = CUPTI_ACTIVITY_KIND_RUNTIME,
                              .cbid = calls[activity->kind].id,
                              .start = record_time(activity->issued_s - 2e-6),
                              .end = record_time(activity->issued_s),
                              .processId = (uint32_t)getpid(),
                              .threadId = activity->thread,
                              .correlationId = activity->correlation};
    append(&call, sizeof call);
}

static void append_copy(const struct activity *activity) {
    static const uint8_t kinds[] = {CUPTI_ACTIVITY_MEMCPY_KIND_DTOD, CUPTI_ACTIVITY_MEMCPY_KIND_HTOD,
                                    CUPTI_ACTIVITY_MEMCPY_KIND_DTOH};
    uint8_t host = activity->is_pinned ? CUPTI_ACTIVITY_MEMORY_KIND_PINNED : CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE;
    uint8_t device = CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
    CUpti_ActivityMemcpy6 copy = {.kind = CUPTI_ACTIVITY_KIND_MEMCPY,
                                  .copyKind = kinds[activity->direction],
                                  .srcKind = activity->direction == TO_DEVICE ? host : device,
                                  .dstKind = activity->direction == TO_HOST ? host : device,
                                  .flags = CUPTI_ACTIVITY_FLAG_MEMCPY_ASYNC,
                                  .bytes = activity->bytes,
                                  .start = record_time(activity->start_s),
                                  .end = record_time(activity->end_s),
                                  .deviceId = activity->device,
                                  .contextId = 1,
                                  .streamId = activity->stream,
                                  .correlationId = activity->correlation,
                                  .copyCount = 1};
    append(&copy, sizeof copy);
}

static void append_fill(const struct activity *activity) {
    CUpti_ActivityMemset4 fill = {.kind = CUPTI_ACTIVITY_KIND_MEMSET,
                                  .value = (uint32_t)activity->value,
                                  .bytes = activity->bytes,
                                  .start = record_time(activity->start_s),
                                  .end = record_time(activity->end_s),
                                  .deviceId = activity->device,
                                  .contextId = 1,
                                  .streamId = activity->stream,
                                  .correlationId = activity->correlation,
                                  .memoryKind = CUPTI_ACTIVITY_MEMORY_KIND_DEVICE};
    append(&fill, sizeof fill);
}

static void append_kernel(const struct activity *activity) {
    CUpti_ActivityKernel10 kernel = {.kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                     .start = record_time(activity->start_s),
                                     .end = record_time(activity->end_s),
                                     .deviceId = activity->device,
                                     .contextId = 1,
                                     .streamId = activity->stream,
                                     .gridX = 1,
                                     .gridY = 1,
                                     .gridZ = 1,
                                     .blockX = 128,
                                     .blockY = 1,
                                     .blockZ = 1,
                                     .correlationId = activity->correlation,
                                     .name = activity->name};
    append(&kernel, sizeof kernel);
}

static void listen(const struct activity *activity) {
    int kind = activity->kind == COPY   ? CUPTI_ACTIVITY_KIND_MEMCPY
               : activity->kind == FILL ? CUPTI_ACTIVITY_KIND_MEMSET
                                        : CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
    pthread_mutex_lock(&buffer_lock);
    if (request_buffer && is_enabled[CUPTI_ACTIVITY_KIND_RUNTIME]) append_call(activity);
    if (request_buffer && is_enabled[kind]) {
        if (activity->kind == COPY) append_copy(activity);
        else if (activity->kind == FILL) append_fill(activity);
        else append_kernel(activity);
    }
    pthread_mutex_unlock(&buffer_lock);
}

CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc request,
                                           CUpti_BuffersCallbackCompleteFunc complete) {
    request_buffer = request;
    complete_buffer = complete;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc callback) {
    timestamp = callback;
    first_s = now_s();
    first_ticks = callback ? callback() : 0;
    return CUPTI_SUCCESS;
}

static void enable(CUpti_ActivityKind kind, int enabled) {
    is_enabled[kind] = enabled;
    int any = 0;
    for (int number = 0; number < KINDS; number++) any |= is_enabled[number];
    activity_listener = any ? listen : NULL;
}

CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind) {
    if ((int)kind >= KINDS) return CUPTI_ERROR_INVALID_KIND;
    enable(kind, 1);
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityDisable(CUpti_ActivityKind kind) {
    if ((int)kind >= KINDS) return CUPTI_ERROR_INVALID_KIND;
    enable(kind, 0);
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityEnableRuntimeApi(CUpti_CallbackId function, uint8_t enabled) {
    (void)function;
    /* Records are of three functions, which nobody leaves out. */
    if (enabled) enable(CUPTI_ACTIVITY_KIND_RUNTIME, 1);
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityEnableDriverApi(CUpti_CallbackId function, uint8_t enabled) {
    (void)function, (void)enabled;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityFlushAll(uint32_t flags) {
    (void)flags;
    pthread_mutex_lock(&buffer_lock);
    flush();
    pthread_mutex_unlock(&buffer_lock);
    return CUPTI_SUCCESS;
}

static size_t record_bytes(CUpti_ActivityKind kind) {
    switch (kind) {
    case CUPTI_ACTIVITY_KIND_RUNTIME: return sizeof(CUpti_ActivityAPI);
    case CUPTI_ACTIVITY_KIND_MEMCPY: return sizeof(CUpti_ActivityMemcpy6);
    case CUPTI_ACTIVITY_KIND_MEMSET: return sizeof(CUpti_ActivityMemset4);
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: return sizeof(CUpti_ActivityExternalCorrelation);
    default: return sizeof(CUpti_ActivityKernel10);
    }
}

CUptiResult cuptiActivityGetNextRecord(uint8_t *begin, size_t valid_bytes, CUpti_Activity **record) {
    uint8_t *next = *record ? (uint8_t *)*record + record_bytes((*record)->kind) : begin;
    if (next >= begin + valid_bytes) return CUPTI_ERROR_MAX_LIMIT_REACHED;
    *record = (CUpti_Activity *)next;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext context, uint32_t stream, size_t *dropped) {
    (void)context, (void)stream;
    *dropped = 0;
    return CUPTI_SUCCESS;
}

/* One subscriber at a time, as before CUDA 13.3. */
CUptiResult cuptiSubscribe(CUpti_SubscriberHandle *subscriber, CUpti_CallbackFunc callback, void *data) {
    (void)callback, (void)data;
    if (subscribers) return CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED;
    subscribers = 1;
    *subscriber = (CUpti_SubscriberHandle)&subscribers;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiUnsubscribe(CUpti_SubscriberHandle subscriber) {
    (void)subscriber;
    subscribers = 0;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiGetVersion(uint32_t *version) {
    *version = CUPTI_API_VERSION;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiGetTimestamp(uint64_t *now_ns) {
    *now_ns = timestamp ? timestamp() : realtime_ns();
    return CUPTI_SUCCESS;
}

CUptiResult cuptiGetCallbackName(CUpti_CallbackDomain domain, uint32_t id, const char **name) {
    if (domain != CUPTI_CB_DOMAIN_RUNTIME_API) return CUPTI_ERROR_INVALID_PARAMETER;
    for (size_t call = 0; call < sizeof calls / sizeof *calls; call++) {
        if (calls[call].id != id) continue;
        *name = calls[call].name;
        return CUPTI_SUCCESS;
    }
    return CUPTI_ERROR_INVALID_PARAMETER;
}

CUptiResult cuptiGetResultString(CUptiResult result, const char **text) {
    static __thread char buffer_text[40];
    snprintf(buffer_text, sizeof buffer_text, "CUPTI result %d of the stand-in", (int)result);
    *text = buffer_text;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityPushExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t id) {
    (void)kind, (void)id;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityPopExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t *id) {
    (void)kind;
    if (id) *id = 0;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivitySetAttribute(CUpti_ActivityAttribute attribute, size_t *bytes, void *value) {
    (void)attribute, (void)bytes, (void)value;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityEnableCudaEventDeviceTimestamps(uint8_t enabled) {
    (void)enabled;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiEnableCallback(uint32_t enabled, CUpti_SubscriberHandle subscriber, CUpti_CallbackDomain domain,
                                CUpti_CallbackId function) {
    (void)enabled, (void)subscriber, (void)domain, (void)function;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiEnableDomain(uint32_t enabled, CUpti_SubscriberHandle subscriber, CUpti_CallbackDomain domain) {
    (void)enabled, (void)subscriber, (void)domain;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiFinalize(void) { return CUPTI_SUCCESS; }
