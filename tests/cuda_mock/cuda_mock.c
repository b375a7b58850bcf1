/* A mock of libcuda.so.1 for Triton's launcher. Modules are loaded and launches are counted, but nothing runs: each
 * launch calls a function of the test with what a GPU would get. Device memory is host memory. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

#define MAX_NAME 128

struct function {
    char name[MAX_NAME];
};

typedef void launch_callback(const char *name, unsigned programs, unsigned threads, void **arguments);

static launch_callback *on_launch;
static int context, module;

void cuda_mock_set_callback(launch_callback *callback) { on_launch = callback; }

CUresult cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    static char buffer[32];
    snprintf(buffer, sizeof buffer, "error %d of the mock", (int)error);
    *text = buffer;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
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
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *result, CUdevice device) {
    (void)device;
    *result = (CUcontext)&context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *result) {
    *result = (CUcontext)&context;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext value) { return value ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT; }

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    (void)limit;
    *value = 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    (void)limit, (void)value;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *result, const void *image) {
    /* A compiled kernel is an ELF file. */
    if (memcmp(image, "\177ELF", 4))
        return CUDA_ERROR_INVALID_IMAGE;
    *result = (CUmodule)&module;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *result, CUmodule loaded, const char *name) {
    struct function *function = malloc(sizeof *function);
    if (!function || loaded != (CUmodule)&module || strlen(name) >= MAX_NAME)
        return CUDA_ERROR_INVALID_VALUE;
    strcpy(function->name, name);
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

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        return CUDA_ERROR_INVALID_VALUE;
    *(CUdeviceptr *)value = pointer;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    if (config->gridDimY != 1 || config->gridDimZ != 1 || config->blockDimY != 1 || config->blockDimZ != 1 || extra)
        return CUDA_ERROR_INVALID_VALUE;
    if (on_launch)
        on_launch(((struct function *)function)->name, config->gridDimX, config->blockDimX, arguments);
    return CUDA_SUCCESS;
}

/* Triton links these, and calls them for other kernels only. */
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **values, CUdeviceptr pointer) {
    (void)count, (void)attributes, (void)values, (void)pointer;
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
    (void)clusters, (void)function, (void)config;
    return CUDA_ERROR_NOT_SUPPORTED;
}
