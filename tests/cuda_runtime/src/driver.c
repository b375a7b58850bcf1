/* libcuda.so.1: the entry points that torch, Triton's launcher and ctypes callers use. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

#include <cuda.h>

struct physical;
size_t cuda_runtime_page_bytes(void);
void *cuda_runtime_reserve(size_t bytes);
void cuda_runtime_unreserve(void *begin);
struct physical *cuda_runtime_create(int device, size_t bytes);
void cuda_runtime_destroy(struct physical *physical);
int cuda_runtime_map(void *begin, struct physical *physical);
void cuda_runtime_unmap(void *begin, size_t bytes);
int cuda_runtime_has_context(int device);
cudaError_t cuda_runtime_launch(cudaStream_t stream, void (*function)(void *), void *data, const char *name,
                                const struct access *accesses, int count);

#define MAX_ARGUMENTS 32

/* A kernel that Triton has compiled. */
struct function {
    char name[128];
};

/* A launch of one: Triton's kernels here have arguments of at most eight bytes. */
struct triton_launch {
    struct function *function;
    unsigned programs;
    uint64_t arguments[MAX_ARGUMENTS];
};

/* Runs a kernel of Triton, by its name, on the host: a function of the program. */
static void (*triton_kernel)(const char *name, unsigned programs, const uint64_t *arguments);
/* Return the bytes of accesses of a launch: a function of the program. */
static int (*triton_accesses)(const char *name, unsigned programs, const uint64_t *arguments, struct access *accesses,
                              int most);
static int module;

void cuda_runtime_set_triton(void (*kernel)(const char *, unsigned, const uint64_t *),
                             int (*accesses)(const char *, unsigned, const uint64_t *, struct access *, int)) {
    triton_kernel = kernel;
    triton_accesses = accesses;
}

CUresult cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    static __thread char buffer[48];
    snprintf(buffer, sizeof buffer, "error %d of the stand-in's driver", (int)error);
    *text = buffer;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    return (CUresult)cudaThreadExchangeStreamCaptureMode((enum cudaStreamCaptureMode *)mode);
}

/* ---- Devices and contexts: a device's primary context is its number plus one. */

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return ordinal < device_count() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetCount(int *count) { return (CUresult)cudaGetDeviceCount(count); }

CUresult cuDeviceGetName(char *name, int bytes, CUdevice device) {
    (void)device;
    snprintf(name, (size_t)bytes, "Stand-in for a GPU");
    return CUDA_SUCCESS;
}

/* The figures of an H100. */
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 232448; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1980000; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 2619000; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 5120; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
    if (flags) *flags = 0;
    *is_active = cuda_runtime_has_context(device);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    touch_device(device);
    *context = (CUcontext)(intptr_t)(device + 1);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    int device = *current_device();
    *context = cuda_runtime_has_context(device) ? (CUcontext)(intptr_t)(device + 1) : NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    return context ? (CUresult)cudaSetDevice((int)(intptr_t)context - 1) : CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = *current_device();
    return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    (void)limit;
    *value = 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    (void)limit, (void)value;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)value = pointer;
    else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)value = device_of((void *)pointer);
    else return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **values, CUdeviceptr pointer) {
    CUresult result = CUDA_SUCCESS;
    for (unsigned number = 0; number < count && !result; number++)
        result = cuPointerGetAttribute(values[number], attributes[number], pointer);
    return result;
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    return (CUresult)cudaStreamCreateWithFlags((cudaStream_t *)stream, flags);
}

/* ---- Virtual memory, for torch's expandable segments */

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags flags) {
    (void)properties, (void)flags;
    *bytes = cuda_runtime_page_bytes();
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *begin, size_t bytes, size_t alignment, CUdeviceptr address,
                             unsigned long long flags) {
    (void)alignment, (void)address, (void)flags;
    *begin = (CUdeviceptr)cuda_runtime_reserve(bytes);
    return *begin ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr begin, size_t bytes) {
    (void)bytes;
    cuda_runtime_unreserve((void *)begin);
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    (void)flags;
    cudaError_t error = enter("cuMemCreate");
    struct physical *physical = error ? NULL : cuda_runtime_create(properties->location.id, bytes);
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return physical ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    cuda_runtime_destroy((struct physical *)(uintptr_t)handle);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr begin, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    (void)bytes, (void)offset, (void)flags;
    int is_mapped = cuda_runtime_map((void *)begin, (struct physical *)(uintptr_t)handle);
    return is_mapped ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemSetAccess(CUdeviceptr begin, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    (void)begin, (void)bytes, (void)access, (void)count;
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr begin, size_t bytes) {
    cuda_runtime_unmap((void *)begin, bytes);
    return CUDA_SUCCESS;
}

/* ---- Triton's launcher */

CUresult cuModuleLoadData(CUmodule *result, const void *image) {
    /* A compiled kernel is an ELF file. */
    if (memcmp(image, "\177ELF", 4)) return CUDA_ERROR_INVALID_IMAGE;
    *result = (CUmodule)&module;
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule loaded) {
    (void)loaded;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *result, CUmodule loaded, const char *name) {
    (void)loaded;
    struct function *function = malloc(sizeof *function);
    snprintf(function->name, sizeof function->name, "%s", name);
    *result = (CUfunction)function;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    (void)function;
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    (void)function, (void)attribute, (void)value;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
    (void)function, (void)config;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
    (void)clusters, (void)function, (void)config;
    return CUDA_ERROR_NOT_SUPPORTED;
}

static void run_triton(void *data) {
    struct triton_launch *launch = data;
    triton_kernel(launch->function->name, launch->programs, launch->arguments);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    if (config->gridDimY != 1 || config->gridDimZ != 1 || extra || !triton_kernel) return CUDA_ERROR_NOT_SUPPORTED;
    /* Not freed: a graph may run it again. */
    struct triton_launch *launch = calloc(1, sizeof *launch);
    launch->function = (struct function *)function;
    launch->programs = config->gridDimX;
    struct access accesses[256];
    int count = triton_accesses(launch->function->name, 0, NULL, NULL, 0);
    /* The count of arguments is the first answer: their sizes are at most eight bytes. */
    for (int number = 0; number < count && number < MAX_ARGUMENTS; number++)
        memcpy(&launch->arguments[number], arguments[number], 8);
    int touched = triton_accesses(launch->function->name, launch->programs, launch->arguments, accesses, 256);
    return (CUresult)cuda_runtime_launch((cudaStream_t)config->hStream, run_triton, launch, launch->function->name,
                                         accesses, touched);
}
