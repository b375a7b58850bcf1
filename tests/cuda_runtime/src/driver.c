/* libcuda.so.1: the entry points that torch and ctypes callers use, but for those of Triton's launcher. */
#include <stdio.h>

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

CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    return (CUresult)cudaThreadExchangeStreamCaptureMode((enum cudaStreamCaptureMode *)mode);
}

/* ---- Devices and contexts: a device's primary context is its number plus one. */

CUresult cuDeviceGetCount(int *count) { return (CUresult)cudaGetDeviceCount(count); }

CUresult cuDeviceGetName(char *name, int bytes, CUdevice device) {
    (void)device;
    snprintf(name, (size_t)bytes, "Stand-in for a GPU");
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
    if (flags) *flags = 0;
    *is_active = cuda_runtime_has_context(device);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = *current_device();
    return CUDA_SUCCESS;
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
