/* Memory: device memory that the host cannot read, pinned and pageable host memory, pools, and copies.
 *
 * The bytes of a device are pages of a file, mapped twice: at the addresses that the program gets, without any access,
 * and at addresses that only the stand-in knows. A host that reads a device pointer crashes, as with a GPU. */
#include "runtime.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* A run of pages of a device's file. */
struct block {
    struct block *next;
    size_t offset, bytes;
    int is_free;
};

/* Addresses of a device. */
struct region {
    struct region *next;
    char *begin, *alias;
    size_t bytes;
    int device;
};

struct host_range {
    struct host_range *next;
    char *begin;
    size_t bytes;
    int is_allocated;
};

/* What cuMemCreate returns. */
struct physical {
    int device;
    size_t offset, bytes;
};

struct pool {
    int device;
    uint64_t release_threshold;
};

static size_t capacity_bytes;
static double bytes_per_s;
static int files[MAX_DEVICES];
static struct block *blocks[MAX_DEVICES];
static size_t used_bytes[MAX_DEVICES], most_used_bytes[MAX_DEVICES];
/* The first region of a device has its whole file; the others are reserved addresses. */
static struct region whole[MAX_DEVICES];
static struct region *regions;
static struct host_range *pinned;
static struct pool pools[MAX_DEVICES];
static long pageable_bytes[3];

static size_t in_pages(size_t bytes) { return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES; }

/* Map a range of addresses that begins at a multiple of the page size. */
static char *reserve(size_t bytes, int protection) {
    char *begin = mmap(NULL, bytes + PAGE_BYTES, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return begin == MAP_FAILED ? NULL : (char *)in_pages((uintptr_t)begin);
}

void open_memory(int devices) {
    capacity_bytes = in_pages((size_t)setting("CUDA_RUNTIME_BYTES", 4.0 * (1 << 30)));
    bytes_per_s = 1e9 * setting("CUDA_RUNTIME_GBPS", 20);
    for (int device = 0; device < devices; device++) {
        files[device] = memfd_create("cuda_runtime", MFD_CLOEXEC);
        if (files[device] < 0 || ftruncate(files[device], (off_t)capacity_bytes)) {
            perror("cuda_runtime: no memory for a device");
            exit(1);
        }
        char *alias =
            mmap(NULL, capacity_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, files[device], 0);
        whole[device] = (struct region){regions, reserve(capacity_bytes, PROT_NONE), alias, capacity_bytes, device};
        regions = &whole[device];
        blocks[device] = calloc(1, sizeof *blocks[device]);
        *blocks[device] = (struct block){NULL, 0, capacity_bytes, 1};
        pools[device].device = device;
    }
}

static struct region *region_of(const void *pointer) {
    for (struct region *region = regions; region; region = region->next)
        if ((char *)pointer >= region->begin && (char *)pointer < region->begin + region->bytes) return region;
    return NULL;
}

int device_of(const void *pointer) {
    struct region *region = region_of(pointer);
    return region ? region->device : -1;
}

void *cuda_runtime_alias(const void *pointer) {
    struct region *region = region_of(pointer);
    return region ? region->alias + ((char *)pointer - region->begin) : (void *)pointer;
}

static struct host_range *pinned_range(const void *pointer) {
    for (struct host_range *range = pinned; range; range = range->next)
        if ((char *)pointer >= range->begin && (char *)pointer < range->begin + range->bytes) return range;
    return NULL;
}

int is_pinned(const void *pointer) { return pinned_range(pointer) != NULL; }

/* Take pages of a device, with the lock held. Returns NULL if there are none in a row. */
static struct block *take_block(int device, size_t bytes) {
    struct block *block = blocks[device];
    while (block && !(block->is_free && block->bytes >= bytes)) block = block->next;
    if (!block) return NULL;
    if (block->bytes > bytes) {
        struct block *rest = malloc(sizeof *rest);
        *rest = (struct block){block->next, block->offset + bytes, block->bytes - bytes, 1};
        block->next = rest;
        block->bytes = bytes;
    }
    block->is_free = 0;
    used_bytes[device] += bytes;
    count_used(device, (int64_t)bytes);
    if (used_bytes[device] > most_used_bytes[device]) most_used_bytes[device] = used_bytes[device];
    /* Whoever reads memory that nobody has written gets NaN. */
    memset(whole[device].alias + block->offset, 0xff, bytes);
    return block;
}

/* Give pages back, with the lock held. Returns whether they were taken. */
static int give_block(int device, size_t offset) {
    struct block *before = NULL, *block = blocks[device];
    while (block && block->offset != offset) before = block, block = block->next;
    if (!block || block->is_free) return 0;
    madvise(whole[device].alias + offset, block->bytes, MADV_REMOVE);
    block->is_free = 1;
    used_bytes[device] -= block->bytes;
    count_used(device, -(int64_t)block->bytes);
    struct block *next = block->next;
    if (next && next->is_free) {
        block->bytes += next->bytes;
        block->next = next->next;
        free(next);
    }
    if (before && before->is_free) {
        before->bytes += block->bytes;
        before->next = block->next;
        free(block);
    }
    return 1;
}

void release_block(int device, void *pointer) { give_block(device, (size_t)((char *)pointer - whole[device].begin)); }

static cudaError_t allocate(void **pointer, size_t bytes, int device, const char *function) {
    /* As with CUDA, nothing has no address. */
    *pointer = NULL;
    touch_device(device);
    if (!bytes) return cudaSuccess;
    pthread_mutex_lock(&runtime_lock);
    struct block *block = take_block(device, in_pages(bytes));
    if (block) *pointer = whole[device].begin + block->offset;
    pthread_mutex_unlock(&runtime_lock);
    return block ? cudaSuccess : failed(cudaErrorMemoryAllocation, function);
}

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    ENTER_OUTSIDE_CAPTURE("cudaMalloc");
    return allocate(pointer, bytes, *current_device(), "cudaMalloc");
}

cudaError_t cudaFree(void *pointer) {
    ENTER_OUTSIDE_CAPTURE("cudaFree");
    if (!pointer) {
        touch_device(*current_device());
        return cudaSuccess;
    }
    int device = device_of(pointer), is_taken = 0;
    pthread_mutex_lock(&runtime_lock);
    if (device >= 0) {
        drain_device(device);
        is_taken = give_block(device, (size_t)((char *)pointer - whole[device].begin));
    }
    pthread_mutex_unlock(&runtime_lock);
    return is_taken ? cudaSuccess : failed(cudaErrorInvalidValue, "cudaFree");
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    ENTER_OUTSIDE_CAPTURE("cudaMemGetInfo");
    *free_bytes = capacity_bytes - used_bytes[*current_device()];
    *total_bytes = capacity_bytes;
    return cudaSuccess;
}

/* ---- Pools: memory is taken at once, and given back in the order of a stream. */

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    *pool = (cudaMemPool_t)&pools[device];
    return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    struct pool *own = (struct pool *)pool;
    if (attribute == cudaMemPoolAttrReleaseThreshold) own->release_threshold = *(uint64_t *)value;
    if (attribute == cudaMemPoolAttrReservedMemHigh || attribute == cudaMemPoolAttrUsedMemHigh)
        most_used_bytes[own->device] = used_bytes[own->device];
    return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    struct pool *own = (struct pool *)pool;
    switch (attribute) {
    case cudaMemPoolAttrReleaseThreshold: *(uint64_t *)value = own->release_threshold; break;
    case cudaMemPoolAttrReservedMemCurrent:
    case cudaMemPoolAttrUsedMemCurrent: *(uint64_t *)value = used_bytes[own->device]; break;
    case cudaMemPoolAttrReservedMemHigh:
    case cudaMemPoolAttrUsedMemHigh: *(uint64_t *)value = most_used_bytes[own->device]; break;
    default: *(int *)value = 1;
    }
    return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes) {
    (void)pool, (void)bytes;
    return cudaSuccess;
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *access, size_t count) {
    (void)pool, (void)access, (void)count;
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) {
    (void)stream;
    ENTER("cudaMallocAsync");
    return allocate(pointer, bytes, *current_device(), "cudaMallocAsync");
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) {
    ENTER("cudaFreeAsync");
    return issue(stream, (struct work){.kind = FREE, .target = pointer});
}

/* ---- Virtual memory, for expandable segments (the driver's functions are in driver.c). */

size_t cuda_runtime_page_bytes(void) { return PAGE_BYTES; }

/* Reserve addresses of a device. Returns NULL if there are none. */
void *cuda_runtime_reserve(size_t bytes) {
    struct region *region = malloc(sizeof *region);
    *region = (struct region){NULL, reserve(bytes, PROT_NONE), reserve(bytes, PROT_NONE), bytes, *current_device()};
    pthread_mutex_lock(&runtime_lock);
    region->next = regions;
    regions = region;
    pthread_mutex_unlock(&runtime_lock);
    return region->begin;
}

void cuda_runtime_unreserve(void *begin) {
    pthread_mutex_lock(&runtime_lock);
    struct region **place = &regions;
    while (*place && (*place)->begin != begin) place = &(*place)->next;
    struct region *region = *place;
    if (region) {
        *place = region->next;
        munmap(region->begin, region->bytes);
        munmap(region->alias, region->bytes);
        free(region);
    }
    pthread_mutex_unlock(&runtime_lock);
}

/* Take pages of a device without addresses. Returns NULL if there are none. */
struct physical *cuda_runtime_create(int device, size_t bytes) {
    pthread_mutex_lock(&runtime_lock);
    struct block *block = take_block(device, in_pages(bytes));
    struct physical *physical = block ? malloc(sizeof *physical) : NULL;
    if (physical) *physical = (struct physical){device, block->offset, block->bytes};
    pthread_mutex_unlock(&runtime_lock);
    return physical;
}

void cuda_runtime_destroy(struct physical *physical) {
    pthread_mutex_lock(&runtime_lock);
    give_block(physical->device, physical->offset);
    pthread_mutex_unlock(&runtime_lock);
    free(physical);
}

/* Let reserved addresses have the bytes of pages. */
int cuda_runtime_map(void *begin, struct physical *physical) {
    void *alias = cuda_runtime_alias(begin);
    void *mapped = mmap(alias, physical->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                        files[physical->device], (off_t)physical->offset);
    return mapped == alias;
}

/* Take the pages from addresses, when all streams have ended. */
void cuda_runtime_unmap(void *begin, size_t bytes) {
    pthread_mutex_lock(&runtime_lock);
    drain_device(device_of(begin));
    pthread_mutex_unlock(&runtime_lock);
    mmap(cuda_runtime_alias(begin), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

/* ---- Pinned memory of the host */

/* Add a range, with the lock held. Returns whether it was not pinned before. */
static int pin(void *begin, size_t bytes, int is_allocated) {
    if (pinned_range(begin)) return 0;
    struct host_range *range = malloc(sizeof *range);
    *range = (struct host_range){pinned, begin, bytes, is_allocated};
    pinned = range;
    return 1;
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    (void)flags;
    ENTER_OUTSIDE_CAPTURE("cudaHostAlloc");
    touch_device(*current_device());
    bytes = bytes ? bytes : 1;
    *pointer = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*pointer == MAP_FAILED) return failed(cudaErrorMemoryAllocation, "cudaHostAlloc");
    pthread_mutex_lock(&runtime_lock);
    pin(*pointer, bytes, 1);
    pthread_mutex_unlock(&runtime_lock);
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    (void)flags;
    ENTER_OUTSIDE_CAPTURE("cudaHostRegister");
    touch_device(*current_device());
    pthread_mutex_lock(&runtime_lock);
    int is_new = pin(pointer, bytes, 0);
    pthread_mutex_unlock(&runtime_lock);
    return is_new ? cudaSuccess : failed(cudaErrorHostMemoryAlreadyRegistered, "cudaHostRegister");
}

static cudaError_t unpin(void *pointer, int is_allocated, const char *function) {
    ENTER_OUTSIDE_CAPTURE(function);
    pthread_mutex_lock(&runtime_lock);
    for (int device = 0; device < device_count(); device++) drain_device(device);
    struct host_range **place = &pinned;
    while (*place && ((*place)->begin != pointer || (*place)->is_allocated != is_allocated)) place = &(*place)->next;
    struct host_range *range = *place;
    if (range) *place = range->next;
    pthread_mutex_unlock(&runtime_lock);
    if (!range) return failed(cudaErrorInvalidValue, function);
    if (is_allocated) munmap(range->begin, range->bytes);
    free(range);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *pointer) { return unpin(pointer, 0, "cudaHostUnregister"); }
cudaError_t cudaFreeHost(void *pointer) { return unpin(pointer, 1, "cudaFreeHost"); }

cudaError_t cudaHostGetDevicePointer(void **device_pointer, void *host_pointer, unsigned flags) {
    (void)flags;
    *device_pointer = host_pointer;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    ENTER("cudaPointerGetAttributes");
    pthread_mutex_lock(&runtime_lock);
    int device = device_of(pointer), is_host = is_pinned(pointer);
    pthread_mutex_unlock(&runtime_lock);
    memset(attributes, 0, sizeof *attributes);
    attributes->device = device >= 0 ? device : is_host ? *current_device() : -2;
    attributes->devicePointer = device >= 0 || is_host ? (void *)pointer : NULL;
    attributes->hostPointer = device >= 0 ? NULL : (void *)pointer;
    attributes->type = device >= 0 ? cudaMemoryTypeDevice : is_host ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    return cudaSuccess;
}

/* ---- Copies */

/* Return the bytes of copies of pageable memory so far, by direction. */
long cuda_runtime_pageable_bytes(int direction) { return pageable_bytes[direction]; }

double copy_seconds(size_t bytes) { return (double)bytes / bytes_per_s; }

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    (void)kind;
    ENTER("cudaMemcpyAsync");
    if (!bytes) return cudaSuccess;
    struct work copy = {.kind = COPY, .target = target, .source = (char *)source, .bytes = bytes};
    pthread_mutex_lock(&runtime_lock);
    int from_device = device_of(source) >= 0, to_device = device_of(target) >= 0;
    copy.direction = from_device == to_device ? WITHIN : to_device ? TO_DEVICE : TO_HOST;
    const void *host = copy.direction == TO_DEVICE ? source : copy.direction == TO_HOST ? target : NULL;
    copy.is_pinned = !host || is_pinned(host);
    cudaStream_t own = stream_of(stream);
    if (!copy.is_pinned && own->capture) {
        own->capture->is_invalid = 1;
        pthread_mutex_unlock(&runtime_lock);
        return failed(cudaErrorStreamCaptureUnsupported, "cudaMemcpyAsync of pageable memory");
    }
    if (!copy.is_pinned) pageable_bytes[copy.direction] += (long)bytes;
    int is_staged = !copy.is_pinned && copy.direction == TO_DEVICE;
    if (is_staged) {
        copy.staged = malloc(bytes);
        memcpy(copy.staged, source, bytes);
    }
    struct access accesses[] = {{(uintptr_t)target, bytes, 1}, {(uintptr_t)source, bytes, 0}};
    order_issue(own, "copy", accesses, is_staged ? 1 : 2);
    add_work(own, copy);
    /* The host waits for what it gets in pageable memory. */
    if (!copy.is_pinned && copy.direction == TO_HOST) drain(own);
    pthread_mutex_unlock(&runtime_lock);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind) {
    ENTER_OUTSIDE_CAPTURE("cudaMemcpy");
    cudaError_t error = cudaMemcpyAsync(target, source, bytes, kind, NULL);
    return error ? error : cudaStreamSynchronize(NULL);
}

cudaError_t cudaMemcpyPeerAsync(void *target, int target_device, const void *source, int source_device, size_t bytes,
                                cudaStream_t stream) {
    (void)target_device, (void)source_device;
    return cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, stream);
}

cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    for (size_t row = 0; row < height && !error; row++)
        error = cudaMemcpyAsync((char *)target + row * target_pitch, (char *)source + row * source_pitch, width, kind,
                                stream);
    return error;
}

cudaError_t cudaMemsetAsync(void *target, int value, size_t bytes, cudaStream_t stream) {
    ENTER("cudaMemsetAsync");
    pthread_mutex_lock(&runtime_lock);
    cudaStream_t own = stream_of(stream);
    order_issue(own, "fill", &(struct access){(uintptr_t)target, bytes, 1}, 1);
    add_work(own, (struct work){.kind = FILL, .target = target, .value = value, .bytes = bytes});
    pthread_mutex_unlock(&runtime_lock);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *target, int value, size_t bytes) {
    cudaError_t error = cudaMemsetAsync(target, value, bytes, NULL);
    return error ? error : cudaStreamSynchronize(NULL);
}
