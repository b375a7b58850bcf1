/* Kernels. Their machine code does not run: fills do in C, all others as functions that the program registers. */
#include "runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BUCKETS (1 << 16)

/* A kernel of a library, by the address of its stub on the host. */
struct kernel {
    struct kernel *next;
    const void *stub;
    const char *name;
    int is_reported;
};

/* A fill of elements, as torch's kernel of this name does it. */
struct fill {
    int count;
    size_t element_bytes;
    char value[16];
    char *target;
};

static struct kernel *buckets[BUCKETS];
static __thread struct {
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
} configuration;

void **__cudaRegisterFatBinary(void *data) {
    static void *handle[4];
    (void)data;
    return handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }

char __cudaInitModule(void **handle) {
    (void)handle;
    return 1;
}

void __cudaRegisterVar(void **handle, char *variable, char *address, const char *name, int external, size_t bytes,
                       int constant, int global) {
    (void)handle, (void)variable, (void)address, (void)name, (void)external, (void)bytes, (void)constant, (void)global;
}

static struct kernel **bucket_of(const void *stub) { return &buckets[((uintptr_t)stub >> 4) % BUCKETS]; }

void __cudaRegisterFunction(void **handle, const char *stub, char *address, const char *name, int threads,
                            uint3 *thread, uint3 *block, dim3 *block_size, dim3 *grid_size, int *warp_size) {
    (void)handle, (void)address, (void)threads, (void)thread, (void)block, (void)block_size, (void)grid_size;
    (void)warp_size;
    struct kernel *kernel = malloc(sizeof *kernel), **bucket = bucket_of(stub);
    *kernel = (struct kernel){*bucket, stub, name, 0};
    *bucket = kernel;
}

static struct kernel *kernel_of(const void *stub) {
    struct kernel *kernel = *bucket_of(stub);
    while (kernel && kernel->stub != stub) kernel = kernel->next;
    return kernel;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, struct CUstream_st *stream) {
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared_bytes = shared_bytes;
    configuration.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared_bytes = configuration.shared_bytes;
    *(cudaStream_t *)stream = configuration.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *stub) {
    *kernel = (cudaKernel_t)kernel_of(stub);
    return *kernel ? cudaSuccess : failed(cudaErrorInvalidDeviceFunction, "__cudaGetKernel");
}

/* ---- Functions that the program runs as kernels */

/* Let a function run on a stream as a kernel, with the bytes that it reads and writes. */
cudaError_t cuda_runtime_launch(cudaStream_t stream, void (*function)(void *), void *data, const char *name,
                                const struct access *accesses, int count) {
    ENTER("cudaLaunchKernel");
    pthread_mutex_lock(&runtime_lock);
    cudaStream_t own = stream_of(stream);
    order_issue(own, name, accesses, count);
    add_work(own, (struct work){.kind = LAUNCH, .function = function, .data = data, .name = name});
    pthread_mutex_unlock(&runtime_lock);
    return cudaSuccess;
}

/* ---- Kernels of torch's libraries */

static void run_fill(void *data) {
    struct fill *fill = data;
    char *target = cuda_runtime_alias(fill->target);
    for (long number = 0; number < fill->count; number++)
        memcpy(target + (size_t)number * fill->element_bytes, fill->value, fill->element_bytes);
}

/* Return the bytes of an element by the mangled name of its C++ type. */
static size_t element_bytes(const char *type) {
    if (strchr("dlm", *type)) return 8;
    if (strchr("fij", *type)) return 4;
    return strchr("bha", *type) ? 1 : 2;
}

static void run_nothing(void *data) { (void)data; }

static cudaError_t launch(struct kernel *kernel, void **arguments, cudaStream_t stream) {
    if (!kernel) return failed(cudaErrorInvalidDeviceFunction, "cudaLaunchKernel");
    const char *functor = strstr(kernel->name, "FillFunctorI");
    if (!functor || !strstr(kernel->name, "vectorized_elementwise")) {
        if (!kernel->is_reported++) fprintf(stderr, "cuda_runtime: this kernel does not run here: %s\n", kernel->name);
        if (setting("CUDA_RUNTIME_STRICT", 0)) abort();
        return cuda_runtime_launch(stream, run_nothing, NULL, kernel->name, NULL, 0);
    }
    /* Not freed: a graph may run it again. */
    struct fill *fill = malloc(sizeof *fill);
    fill->element_bytes = element_bytes(functor + strlen("FillFunctorI"));
    memcpy(&fill->count, arguments[0], sizeof fill->count);
    memcpy(fill->value, arguments[1], fill->element_bytes);
    memcpy(&fill->target, arguments[2], sizeof fill->target);
    struct access access = {(uintptr_t)fill->target, (size_t)fill->count * fill->element_bytes, 1};
    return cuda_runtime_launch(stream, run_fill, fill, kernel->name, &access, 1);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                               cudaStream_t stream) {
    (void)grid, (void)block, (void)shared_bytes;
    return launch((struct kernel *)kernel, arguments, stream);
}

cudaError_t cudaLaunchKernel(const void *stub, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                             cudaStream_t stream) {
    (void)grid, (void)block, (void)shared_bytes;
    return launch(kernel_of(stub), arguments, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *stub, dim3 grid, dim3 block, void **arguments,
                                        size_t shared_bytes, cudaStream_t stream) {
    return cudaLaunchKernel(stub, grid, block, arguments, shared_bytes, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *stub, void **arguments) {
    return launch(kernel_of(stub), arguments, config->stream);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *stub) {
    (void)stub;
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *stub, enum cudaFuncAttribute attribute, int value) {
    (void)stub, (void)attribute, (void)value;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *stub, int block_size,
                                                                   size_t shared_bytes, unsigned flags) {
    (void)stub, (void)block_size, (void)shared_bytes, (void)flags;
    *blocks = 2;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *stub, int block_size,
                                                          size_t shared_bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, stub, block_size, shared_bytes, 0);
}
