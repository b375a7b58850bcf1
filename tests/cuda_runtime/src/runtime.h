/* Parts of the stand-in for the CUDA runtime: docs/cuda-runtime.md says what is real and what is not.
 *
 * Written from the public documentation and headers of CUDA. One lock guards all state; nothing that waits for a stream
 * or runs foreign code holds it. */
#ifndef EBBTIDE_CUDA_RUNTIME_H
#define EBBTIDE_CUDA_RUNTIME_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

#define PAGE_BYTES (2ull << 20)
#define MAX_DEVICES 8
#define MAX_STREAMS 512

/* The direction of a copy, as an index. */
enum direction { WITHIN, TO_DEVICE, TO_HOST };

enum work_kind { COPY, FILL, RECORD, WAIT_EVENT, WAIT_STREAM, CALL, LAUNCH, RUN_GRAPH, FREE };

struct graph;
struct kernel;

/* Bytes that an operation reads or writes. */
struct access {
    uintptr_t begin;
    size_t bytes;
    int writes;
};

/* One operation of a stream, or a node of a graph. */
struct work {
    struct work *next;
    enum work_kind kind;
    /* COPY and FILL; `staged` holds what the host had when it issued a copy of pageable memory. */
    char *target, *source, *staged;
    size_t bytes;
    int value;
    enum direction direction;
    int is_pinned;
    /* RECORD and WAIT_EVENT: the event, and which of its records; WAIT_STREAM: a stream, and how far. */
    cudaEvent_t event;
    cudaStream_t stream;
    uint64_t number;
    /* CALL and LAUNCH. */
    void (*function)(void *);
    void *data;
    const char *name;
    struct graph *graph;
    /* When and by which thread the operation was issued, and a number that CUPTI has for both. */
    double issued_s;
    unsigned thread, correlation;
};

struct CUstream_st {
    struct CUstream_st *next;
    struct work *head, *tail;
    /* Operations that were issued, and that have ended. */
    uint64_t issued, done;
    unsigned id;
    int device, priority;
    /* Whether it waits for the legacy stream, and that one for it. */
    int is_blocking, is_legacy;
    int has_thread, is_destroyed;
    struct graph *capture;
    pthread_cond_t wake;
    unsigned random;
    /* By stream: how far operations that are issued from now on come after it (order.c). */
    uint64_t *after;
};

struct CUevent_st {
    uint64_t recorded, done;
    double time_s;
    unsigned flags;
    int device;
    /* Operations that hold it, and whether the job has destroyed it. */
    int holders, is_destroyed;
    struct graph *capture;
    uint64_t *after;
};

struct graph {
    struct graph *next;
    struct work *head, *tail;
    size_t nodes;
    unsigned long long id;
    enum cudaStreamCaptureMode mode;
    pthread_t owner;
    int is_invalid;
};

/* An activity of a device, for CUPTI. */
struct activity {
    enum work_kind kind;
    const char *name;
    double issued_s, start_s, end_s;
    size_t bytes;
    enum direction direction;
    int is_pinned, value;
    unsigned device, stream, thread, correlation;
};

extern pthread_mutex_t runtime_lock;
extern cudaStream_t all_streams;

/* device.c */
double setting(const char *name, double otherwise);
double now_s(void);
void sleep_s(double seconds);
int device_count(void);
int *current_device(void);
void touch_device(int device);
int cuda_runtime_has_context(int device);
cudaError_t enter(const char *function);
cudaError_t failed(cudaError_t error, const char *function);

/* counters.c */
void open_counters(void);
void count_used(int device, int64_t bytes);
void count_copied(int device, enum direction direction, size_t bytes);

/* memory.c */
void open_memory(int devices);
int device_of(const void *pointer);
int is_pinned(const void *pointer);
void release_block(int device, void *pointer);
/* Return the address at which the host can read and write what a pointer points to. */
void *cuda_runtime_alias(const void *pointer);

/* stream.c */
void open_streams(int devices);
cudaStream_t stream_of(cudaStream_t stream);
void add_work(cudaStream_t stream, struct work work);
cudaError_t issue(cudaStream_t stream, struct work work);
void wait_for_change(void);
void drain(cudaStream_t stream);
void drain_device(int device);
void release_event(cudaEvent_t event);

/* graph.c */
cudaError_t check_capture(const char *function);
void append_node(struct graph *graph, struct work *work);

/* order.c */
void order_issue(cudaStream_t stream, const char *name, const struct access *accesses, int count);
void order_record(cudaEvent_t event, cudaStream_t stream);
void order_wait_event(cudaStream_t stream, cudaEvent_t event);
void order_host_saw_event(cudaEvent_t event);
void order_host_saw_stream(cudaStream_t stream);

/* cupti.c (in a library of its own) */
extern void (*activity_listener)(const struct activity *);

/* Return from an entry point that may not be called while a graph is captured. */
#define ENTER(function)                          \
    do {                                         \
        cudaError_t error_ = enter(function);    \
        if (error_) return error_;               \
    } while (0)
#define ENTER_OUTSIDE_CAPTURE(function)              \
    do {                                             \
        ENTER(function);                             \
        cudaError_t error_ = check_capture(function); \
        if (error_) return error_;                   \
    } while (0)

#endif
