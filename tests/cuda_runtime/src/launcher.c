/* libcuda.so.1: the entry points that Triton's launcher uses. Machine code does not run: each launch calls a function
 * of the program with what a GPU would get. Without the runtime it lies over host_device.c. */
#include "runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda.h>

/* A kernel that Triton has compiled. */
struct function {
    char name[128];
};

/* A launch. `arguments` points to the arguments, until the call returns. */
struct launch {
    const char *kernel;
    CUfunction function;
    CUstream stream;
    unsigned programs, threads;
    void **arguments;
};

/* Called with each launch by the thread that launches; returns an error. */
static int (*on_launch)(const struct launch *);
static int module;

void cuda_runtime_set_on_launch(int (*function)(const struct launch *)) { on_launch = function; }

CUresult cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = cudaGetErrorString((cudaError_t)error);
    return CUDA_SUCCESS;
}

/* ---- Devices and contexts: a device's primary context is its number plus one. */

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return ordinal < device_count() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
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
    if (!context) return CUDA_SUCCESS;
    *current_device() = (int)(intptr_t)context - 1;
    touch_device(*current_device());
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
    int device = device_of((void *)pointer);
    int is_accessible = device >= 0 || is_pinned((void *)pointer);
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)value = device;
    else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER && is_accessible) *(CUdeviceptr *)value = pointer;
    else return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **values, CUdeviceptr pointer) {
    CUresult result = CUDA_SUCCESS;
    for (unsigned number = 0; number < count && !result; number++)
        result = cuPointerGetAttribute(values[number], attributes[number], pointer);
    return result;
}

/* ---- Kernels */

CUresult cuModuleLoadData(CUmodule *result, const void *image) {
    /* A compiled kernel is an ELF file. */
    if (memcmp(image, "\177ELF", 4)) return CUDA_ERROR_INVALID_IMAGE;
    *result = (CUmodule)&module;
    return (CUresult)enter("cuModuleLoadData");
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

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    int is_flat = config->gridDimY == 1 && config->gridDimZ == 1 && config->blockDimY == 1 && config->blockDimZ == 1;
    if (!is_flat || extra || !on_launch) return CUDA_ERROR_NOT_SUPPORTED;
    struct launch launch = {((struct function *)function)->name, function, config->hStream, config->gridDimX,
                            config->blockDimX, arguments};
    return (CUresult)on_launch(&launch);
}
