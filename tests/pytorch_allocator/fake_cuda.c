/* What PyTorch's caching allocator asks of CUDA, without a GPU: addresses, and a count of the bytes handed out.
   Preloaded, it stands before libcudart, and as libcuda.so.1 for the driver. $FAKE_CUDA_BYTES is the device's memory. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long u64;
enum { SUCCESS = 0, INVALID = 1, OUT_OF_MEMORY = 2, SEGMENTS = 1 << 14 };
static const size_t granularity = (size_t)2 << 20;

static size_t used, next_address = (size_t)1 << 44;
static struct { size_t address, bytes; } segments[SEGMENTS];

static size_t capacity(void) {
    const char *text = getenv("FAKE_CUDA_BYTES");
    return text ? strtoull(text, NULL, 10) : (size_t)80 << 30;
}

int cudaMalloc(void **pointer, size_t bytes) {
    size_t length = (bytes + granularity - 1) / granularity * granularity;
    for (int i = 0; used + length <= capacity() && i < SEGMENTS; i++)
        if (!segments[i].address) {
            segments[i].address = next_address;
            segments[i].bytes = length;
            *pointer = (void *)next_address;
            next_address += length;
            used += length;
            return SUCCESS;
        }
    return OUT_OF_MEMORY;
}

int cudaFree(void *pointer) {
    for (int i = 0; i < SEGMENTS; i++)
        if (segments[i].address == (size_t)pointer) {
            used -= segments[i].bytes;
            segments[i].address = 0;
            return SUCCESS;
        }
    return pointer ? INVALID : SUCCESS;
}

int cudaMemGetInfo(size_t *available, size_t *total) {
    *total = capacity();
    *available = *total - used;
    return SUCCESS;
}

int cudaGetDeviceProperties(void *properties, int device) {
    (void)device;
    struct { char name[256], ids[32]; size_t total_bytes; } head = {"no GPU", "", capacity()};
    memset(properties, 0, 512);
    memcpy(properties, &head, sizeof head);
    return SUCCESS;
}

int cudaGetDeviceCount(int *count) { *count = 1; return SUCCESS; }
int cudaGetDevice(int *device) { *device = 0; return SUCCESS; }
int cudaSetDevice(int device) { return device ? INVALID : SUCCESS; }
int cudaGetLastError(void) { return SUCCESS; }
int cudaDeviceSynchronize(void) { return SUCCESS; }
int cudaDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cudaStreamIsCapturing(void *stream, int *status) { (void)stream; *status = 0; return SUCCESS; }
int cudaThreadExchangeStreamCaptureMode(int *mode) { (void)mode; return SUCCESS; }
int cudaStreamSynchronize(void *stream) { (void)stream; return SUCCESS; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { (void)flags; *event = malloc(1); return SUCCESS; }
int cudaEventDestroy(void *event) { free(event); return SUCCESS; }
int cudaEventRecord(void *event, void *stream) { (void)event; (void)stream; return SUCCESS; }
int cudaEventQuery(void *event) { (void)event; return SUCCESS; }
int cudaEventSynchronize(void *event) { (void)event; return SUCCESS; }

int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return SUCCESS; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { (void)flags; (void)priority; *stream = malloc(1); return SUCCESS; }
int cudaPeekAtLastError(void) { return SUCCESS; }
int cuInit(unsigned flags) { (void)flags; return SUCCESS; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { (void)device; *flags = 0; *active = 1; return SUCCESS; }

/* The driver's virtual memory, for expandable segments. */
static int reserve(u64 *pointer, size_t size, size_t alignment, u64 at, u64 flags) {
    (void)alignment; (void)at; (void)flags;
    *pointer = next_address;
    next_address += size;
    return SUCCESS;
}
static int create(u64 *handle, size_t size, const void *properties, u64 flags) {
    (void)properties; (void)flags;
    if (used + size > capacity()) return OUT_OF_MEMORY;
    used += size;
    *handle = size;
    return SUCCESS;
}
static int release(u64 handle) { used -= handle; return SUCCESS; }
static int finest(size_t *bytes, const void *properties, int option) {
    (void)properties; (void)option;
    *bytes = granularity;
    return SUCCESS;
}
static int attribute(int *value, int name, int device) { (void)name; (void)device; *value = 0; return SUCCESS; }
static int context(void **current) { *current = &used; return SUCCESS; }
static int done(void) { return SUCCESS; }

int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, u64 flags, int *result) {
    (void)version; (void)flags;
    static const struct { const char *name; void *function; } table[] = {
        {"cuMemAddressReserve", reserve}, {"cuMemCreate", create}, {"cuMemRelease", release},
        {"cuMemGetAllocationGranularity", finest}, {"cuDeviceGetAttribute", attribute}, {"cuCtxGetCurrent", context},
    };
    *function = done;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(table[i].name, name)) *function = table[i].function;
    if (result) *result = 0;
    return SUCCESS;
}
