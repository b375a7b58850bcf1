/* Devices, errors, and failures that tests ask for. */
#include "runtime.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

pthread_mutex_t runtime_lock = PTHREAD_MUTEX_INITIALIZER;

static int devices = 1;
static int is_verbose, is_forked;
static int has_context[MAX_DEVICES];
static __thread int current;
static __thread cudaError_t last_error;

/* The failure that a test asks for: at the n-th call of entry points whose names contain a text. */
static struct {
    char function[64];
    long calls_left;
    cudaError_t error;
    int is_sticky;
} failure;
/* An error after which the context is of no use: each call returns it. */
static cudaError_t sticky_error;
static long calls;

/* Return a number from the environment. */
double setting(const char *name, double otherwise) {
    const char *text = getenv(name);
    return text && *text ? atof(text) : otherwise;
}

double now_s(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

void sleep_s(double seconds) {
    if (seconds <= 0) return;
    time_t whole = (time_t)seconds;
    struct timespec time = {whole, (long)((seconds - (double)whole) * 1e9)};
    nanosleep(&time, NULL);
}

static void mark_forked(void) {
    for (int device = 0; device < devices; device++) is_forked |= has_context[device];
}

/* Let the n-th call from now on fail of the entry points whose names contain a text ("" for all). */
void cuda_runtime_fail(const char *function, long nth, int error, int sticky) {
    pthread_mutex_lock(&runtime_lock);
    snprintf(failure.function, sizeof failure.function, "%s", function);
    failure.calls_left = nth;
    failure.error = error;
    failure.is_sticky = sticky;
    if (!nth) sticky_error = cudaSuccess;
    pthread_mutex_unlock(&runtime_lock);
}

/* Return how many calls of entry points there were. */
long cuda_runtime_calls(void) { return calls; }

/* CUDA_RUNTIME_FAIL is "FUNCTION:N[:ERROR[:sticky]]". */
static void read_failure(void) {
    const char *text = getenv("CUDA_RUNTIME_FAIL");
    char function[64] = "", sticky[8] = "";
    int error = cudaErrorMemoryAllocation;
    long nth = 0;
    if (!text) return;
    if (*text == ':') sscanf(text, ":%ld:%d:%7s", &nth, &error, sticky);
    else sscanf(text, "%63[^:]:%ld:%d:%7s", function, &nth, &error, sticky);
    cuda_runtime_fail(function, nth, error, *sticky == 's');
}

__attribute__((constructor)) static void open_runtime(void) {
    devices = (int)setting("CUDA_RUNTIME_DEVICES", 1);
    is_verbose = (int)setting("CUDA_RUNTIME_LOG", 0);
    read_failure();
    open_counters();
    open_memory(devices);
    open_streams(devices);
    /* As with CUDA, a forked child cannot use devices that its parent has used. */
    pthread_atfork(NULL, NULL, mark_forked);
}

/* Take an error as the thread's last one. */
cudaError_t failed(cudaError_t error, const char *function) {
    if (is_verbose) fprintf(stderr, "cuda_runtime: %s returns %d\n", function, error);
    last_error = error;
    return error;
}

/* Begin each entry point that can fail. */
cudaError_t enter(const char *function) {
    if (is_forked) return failed(cudaErrorInitializationError, function);
    calls++;
    if (sticky_error) return failed(sticky_error, function);
    if (!failure.calls_left || !strstr(function, failure.function)) return cudaSuccess;
    pthread_mutex_lock(&runtime_lock);
    int fails = failure.calls_left > 0 && !--failure.calls_left;
    if (fails && failure.is_sticky) sticky_error = failure.error;
    pthread_mutex_unlock(&runtime_lock);
    return fails ? failed(failure.error, function) : cudaSuccess;
}

int device_count(void) { return devices; }
int *current_device(void) { return &current; }
void touch_device(int device) { has_context[device] = 1; }
int cuda_runtime_has_context(int device) { return has_context[device]; }

cudaError_t cudaGetDeviceCount(int *count) {
    *count = is_forked ? 0 : devices;
    if (is_forked) return failed(cudaErrorInitializationError, "cudaGetDeviceCount");
    return devices ? cudaSuccess : failed(cudaErrorNoDevice, "cudaGetDeviceCount");
}

cudaError_t cudaGetDevice(int *device) {
    *device = current;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (is_forked) return failed(cudaErrorInitializationError, "cudaSetDevice");
    if (device < 0 || device >= devices) return failed(cudaErrorInvalidDevice, "cudaSetDevice");
    current = device;
    touch_device(device);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    ENTER_OUTSIDE_CAPTURE("cudaDeviceSynchronize");
    pthread_mutex_lock(&runtime_lock);
    drain_device(current);
    pthread_mutex_unlock(&runtime_lock);
    return cudaSuccess;
}

/* The figures of an H100, but for the name and the memory. */
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    size_t free_bytes;
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "Stand-in for a GPU");
    cudaMemGetInfo(&free_bytes, &properties->totalGlobalMem);
    properties->sharedMemPerBlock = 49152;
    properties->sharedMemPerBlockOptin = 232448;
    properties->sharedMemPerMultiprocessor = 233472;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->major = 9;
    properties->multiProcessorCount = 132;
    properties->l2CacheSize = 60 << 20;
    properties->asyncEngineCount = 3;
    properties->canMapHostMemory = properties->concurrentKernels = properties->unifiedAddressing = 1;
    properties->streamPrioritiesSupported = properties->memoryPoolsSupported = 1;
    /* As in the mock of libnvidia-ml.so.1. */
    properties->pciBusID = 0x18 + device;
    properties->textureAlignment = 512;
    memcpy(&properties->uuid, "ebbtide-standin0", 16);
    ((char *)&properties->uuid)[15] = (char)('0' + device);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    (void)device;
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
    default: *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int device) {
    snprintf(text, (size_t)bytes, "0000:%02x:00.0", 1 + device);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can_access, int device, int peer) {
    *can_access = device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    (void)peer, (void)flags;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = sticky_error;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorName(cudaError_t error) {
    static __thread char text[40];
    snprintf(text, sizeof text, "cudaError%d", error);
    return text;
}

const char *cudaGetErrorString(cudaError_t error) {
    static __thread char text[40];
    switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorInitializationError: return "initialization error";
    default: snprintf(text, sizeof text, "error %d of the stand-in", error); return text;
    }
}

/* Look up a function of the driver. */
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    static void *driver;
    (void)version, (void)flags;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    *function = driver ? dlsym(driver, symbol) : NULL;
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    if (!*function && is_verbose) fprintf(stderr, "cuda_runtime: the driver has no %s\n", symbol);
    return *function ? cudaSuccess : failed(cudaErrorSymbolNotFound, "cudaGetDriverEntryPointByVersion");
}

cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *result) {
    return cudaGetDriverEntryPointByVersion(symbol, function, 0, flags, result);
}
