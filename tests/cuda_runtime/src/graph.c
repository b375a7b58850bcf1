/* CUDA graphs: capture modes, capture, and replay of the captured operations in the order of their calls. */
#include "runtime.h"

#include <stdlib.h>

static struct graph *captures;
static unsigned long long graph_ids;
static __thread enum cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

/* Refuse a call that is unsafe while this thread, or another one in global mode, captures a graph. */
cudaError_t check_capture(const char *function) {
    if (mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
    int is_refused = 0;
    pthread_mutex_lock(&runtime_lock);
    for (struct graph *graph = captures; graph; graph = graph->next) {
        int is_own = pthread_equal(graph->owner, pthread_self());
        int is_global = graph->mode == cudaStreamCaptureModeGlobal && mode == cudaStreamCaptureModeGlobal;
        if (graph->mode == cudaStreamCaptureModeRelaxed || !(is_own || is_global)) continue;
        graph->is_invalid = is_refused = 1;
    }
    pthread_mutex_unlock(&runtime_lock);
    return is_refused ? failed(cudaErrorStreamCaptureUnsupported, function) : cudaSuccess;
}

void append_node(struct graph *graph, struct work *work) {
    work->next = NULL;
    if (graph->tail) graph->tail->next = work;
    else graph->head = work;
    graph->tail = work;
    graph->nodes++;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *other) {
    enum cudaStreamCaptureMode before = mode;
    mode = *other;
    *other = before;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode capture_mode) {
    ENTER("cudaStreamBeginCapture");
    if (!stream || stream == cudaStreamLegacy)
        return failed(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture of the legacy stream");
    struct graph *graph = calloc(1, sizeof *graph);
    pthread_mutex_lock(&runtime_lock);
    int is_captured = stream->capture != NULL;
    if (!is_captured) {
        *graph = (struct graph){.next = captures, .id = ++graph_ids, .mode = capture_mode, .owner = pthread_self()};
        stream->capture = captures = graph;
    }
    pthread_mutex_unlock(&runtime_lock);
    if (is_captured) free(graph);
    return is_captured ? failed(cudaErrorIllegalState, "cudaStreamBeginCapture") : cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *result) {
    ENTER("cudaStreamEndCapture");
    *result = NULL;
    pthread_mutex_lock(&runtime_lock);
    struct graph *graph = stream->capture, **place = &captures;
    for (cudaStream_t other = all_streams; graph && other; other = other->next)
        if (other->capture == graph) other->capture = NULL;
    while (*place && *place != graph) place = &(*place)->next;
    if (*place) *place = graph->next;
    pthread_mutex_unlock(&runtime_lock);
    if (!graph) return failed(cudaErrorIllegalState, "cudaStreamEndCapture");
    if (graph->is_invalid) return failed(cudaErrorStreamCaptureInvalidated, "cudaStreamEndCapture");
    *result = (cudaGraph_t)graph;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    struct graph *graph = stream_of(stream)->capture;
    *status = !graph              ? cudaStreamCaptureStatusNone
              : graph->is_invalid ? cudaStreamCaptureStatusInvalidated
                                  : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *result, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    struct graph *graph = stream_of(stream)->capture;
    if (id) *id = graph ? graph->id : 0;
    if (result) *result = (cudaGraph_t)graph;
    if (dependencies) *dependencies = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *result, cudaGraph_t graph, unsigned long long flags) {
    (void)flags;
    ENTER("cudaGraphInstantiate");
    *result = (cudaGraphExec_t)graph;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    ENTER("cudaGraphLaunch");
    return issue(stream, (struct work){.kind = RUN_GRAPH, .graph = (struct graph *)graph});
}

/* Graphs are not freed: a stream may still run them. */
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    (void)graph;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    (void)graph;
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    (void)nodes;
    *count = ((struct graph *)graph)->nodes;
    return cudaSuccess;
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *dependencies, cudaGraphEdgeData *edges,
                                         size_t *count) {
    (void)node, (void)dependencies, (void)edges;
    *count = 0;
    return cudaSuccess;
}

cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned flags) {
    (void)graph, (void)path, (void)flags;
    return cudaSuccess;
}
