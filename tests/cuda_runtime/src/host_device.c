/* A device whose memory is the host's, in place of the runtime: Triton's launcher under a build of torch for the CPU. */
#include "runtime.h"

int device_count(void) { return 1; }

int *current_device(void) {
    static int current;
    return &current;
}

void touch_device(int device) { (void)device; }
int cuda_runtime_has_context(int device) { return !device; }
int device_of(const void *pointer) { return pointer ? 0 : -1; }
int is_pinned(const void *pointer) { return pointer != NULL; }

cudaError_t enter(const char *function) {
    (void)function;
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error) {
    (void)error;
    return "error of the device on the host";
}
