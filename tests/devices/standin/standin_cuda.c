/* A stand-in for NVIDIA's driver library: the same symbols, streams that are threads, copies between host addresses.
 *
 * Host memory plays the device's memory. What the driver's documentation forbids is refused here with the code that
 * it names, also where a real driver would let it pass. Compile as a shared library and load it instead of
 * libcuda.so.1; the functions that start with standin_ control it.
 *
 * One mutex guards everything, one condition tells of every change. Copies are made outside of it. Handles are
 * never freed, so that one that is used after its end is known.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef STANDIN_NVIDIA_HEADER
#define __CUDA_API_VERSION_INTERNAL /* declares the old versions too, and renames nothing */
#include <cuda.h>
#else
#include "cuda_subset.h"
#endif

#define EXPORT __attribute__((visibility("default")))
#define DEVICE_COUNT 2
#define PAGE_BYTES 4096ULL
#define MOST_DESCRIPTORS 32768 /* real drivers have crashed at some 50,000 */
#define MOST_REGISTRATIONS 4096
#define MOST_STREAMS 256

enum magic { ALIVE = 0x5ca1ab1e, DEAD = 0x0ddba11 };

/* What an event stood for when it was recorded: waits refer to this, not to the event, which may be recorded again. */
struct mark {
    int is_done;
    double seconds;
};

struct CUctx_st {
    int device;
    int retain_count;
    CUresult sticky;
};

struct CUevent_st {
    enum magic magic;
    CUcontext context;
    struct mark *mark;
};

enum kind { COPY, MARK, WAIT, CALL, BREAK };

struct operation {
    struct operation *next;
    enum kind kind;
    CUdeviceptr destination, source;
    void *staged; /* the source's bytes, if they were read when the copy was submitted */
    size_t bytes;
    struct mark *mark;
    CUhostFn function;
    void *argument;
    CUresult code;
};

struct CUstream_st {
    enum magic magic;
    CUcontext context;
    pthread_t thread;
    struct operation *first, **last;
    int is_capturing;
};

struct registration {
    CUdeviceptr start, end;
};

struct fault {
    char name[64];
    int skip;
    CUresult code;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int is_initialized, driver_version = 13000, can_use_host_pointer = 1;
static struct CUctx_st contexts[DEVICE_COUNT];
static struct CUstream_st *live_streams[MOST_STREAMS];
static struct registration registrations[MOST_REGISTRATIONS];
static int registration_count, live_event_count, live_stream_count;
static struct fault fault;
static long batch_calls, single_calls, largest_batch, early_reads;
static _Thread_local CUcontext stack[16];
static _Thread_local int stack_depth;
static _Thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

/* Inside; `lock` is held. */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static CUcontext current(void)
{
    return stack_depth ? stack[stack_depth - 1] : NULL;
}

/* What every call checks first: a fault that was asked for, a current context, and that nothing has broken it. */
static CUresult enter(const char *name)
{
    if (!is_initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (fault.name[0] && strcmp(fault.name, name) == 0 && fault.skip-- == 0) {
        fault.name[0] = 0;
        return fault.code;
    }
    if (!current() || !current()->retain_count)
        return CUDA_ERROR_INVALID_CONTEXT;
    return current()->sticky;
}

static int is_alive_stream(CUstream stream)
{
    return stream && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD && stream->magic == ALIVE;
}

/* What some calls check too: that they spoil no capture. */
static CUresult enter_unsafe(const char *name)
{
    CUresult result = enter(name);
    for (int i = 0; i < MOST_STREAMS && !result && capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL; i++)
        if (live_streams[i] && live_streams[i]->is_capturing)
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return result;
}

static int is_alive_event(CUevent event)
{
    return event && event->magic == ALIVE;
}

static struct operation *put(CUstream stream, enum kind kind)
{
    struct operation *operation = calloc(1, sizeof *operation);
    operation->kind = kind;
    *stream->last = operation;
    stream->last = &operation->next;
    pthread_cond_broadcast(&changed);
    return operation;
}

/* Registered as a whole or not at all, as the notes on cuMemcpy ask; 0 if neither. */
static int is_copyable(CUdeviceptr address, size_t bytes)
{
    for (int i = 0; i < registration_count; i++) {
        struct registration *r = &registrations[i];
        if (address < r->end && r->start < address + bytes)
            return r->start <= address && address + bytes <= r->end;
    }
    return 1;
}

static CUresult put_copy(CUstream stream, CUdeviceptr destination, CUdeviceptr source, size_t bytes, int reads_early)
{
    struct operation *operation = put(stream, COPY);
    operation->destination = destination;
    operation->source = source;
    operation->bytes = bytes;
    if (reads_early) {
        operation->staged = malloc(bytes);
        memcpy(operation->staged, (void *)(uintptr_t)source, bytes);
        early_reads++;
    }
    return CUDA_SUCCESS;
}

static void *run_stream(void *argument)
{
    CUstream stream = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!stream->first && stream->magic == ALIVE)
            pthread_cond_wait(&changed, &lock);
        struct operation *operation = stream->first;
        if (!operation)
            break; /* destroyed, and nothing is left to do */
        while (operation->kind == WAIT && !operation->mark->is_done && !stream->context->sticky)
            pthread_cond_wait(&changed, &lock);
        int is_broken = stream->context->sticky != CUDA_SUCCESS;
        if (operation->kind == BREAK) {
            stream->context->sticky = operation->code;
        } else if (operation->kind == MARK) {
            operation->mark->is_done = 1;
            operation->mark->seconds = now();
        } else if (!is_broken && (operation->kind == COPY || operation->kind == CALL)) {
            pthread_mutex_unlock(&lock);
            if (operation->kind == CALL)
                operation->function(operation->argument);
            else
                memcpy((void *)(uintptr_t)operation->destination,
                       operation->staged ? operation->staged : (void *)(uintptr_t)operation->source, operation->bytes);
            pthread_mutex_lock(&lock);
        }
        stream->first = operation->next;
        if (!stream->first)
            stream->last = &stream->first;
        free(operation->staged);
        free(operation);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static int is_in_use(CUdeviceptr start, CUdeviceptr end)
{
    for (int i = 0; i < MOST_STREAMS; i++)
        for (struct operation *o = live_streams[i] ? live_streams[i]->first : NULL; o; o = o->next)
            if (o->kind == COPY && ((o->source < end && start < o->source + o->bytes) ||
                                    (o->destination < end && start < o->destination + o->bytes)))
                return 1;
    return 0;
}

#define LEAVE(result)                                                                                                  \
    do {                                                                                                               \
        CUresult leaving_with = (result);                                                                              \
        pthread_mutex_unlock(&lock);                                                                                   \
        return leaving_with;                                                                                           \
    } while (0)

#define ENTER(name) ENTER_BY(enter, name)

#define ENTER_BY(check, name)                                                                                          \
    pthread_mutex_lock(&lock);                                                                                         \
    do {                                                                                                               \
        CUresult entered_with = check(name);                                                                           \
        if (entered_with)                                                                                              \
            LEAVE(entered_with);                                                                                       \
    } while (0)

/* The driver, its devices, contexts */

EXPORT CUresult CUDAAPI cuInit(unsigned int Flags)
{
    if (Flags)
        return CUDA_ERROR_INVALID_VALUE;
    is_initialized = 1;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuDriverGetVersion(int *driverVersion)
{
    *driverVersion = driver_version;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuGetErrorName(CUresult error, const char **pStr)
{
    *pStr = error == CUDA_ERROR_INVALID_VALUE                    ? "CUDA_ERROR_INVALID_VALUE"
            : error == CUDA_ERROR_OUT_OF_MEMORY                  ? "CUDA_ERROR_OUT_OF_MEMORY"
            : error == CUDA_ERROR_INVALID_DEVICE                 ? "CUDA_ERROR_INVALID_DEVICE"
            : error == CUDA_ERROR_INVALID_CONTEXT                ? "CUDA_ERROR_INVALID_CONTEXT"
            : error == CUDA_ERROR_INVALID_HANDLE                 ? "CUDA_ERROR_INVALID_HANDLE"
            : error == CUDA_ERROR_ILLEGAL_ADDRESS                ? "CUDA_ERROR_ILLEGAL_ADDRESS"
            : error == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED ? "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
            : error == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED     ? "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"
            : error == CUDA_ERROR_LAUNCH_FAILED                  ? "CUDA_ERROR_LAUNCH_FAILED"
                                                                 : NULL;
    return *pStr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult CUDAAPI cuGetErrorString(CUresult error, const char **pStr)
{
    CUresult result = cuGetErrorName(error, pStr);
    if (!result)
        *pStr = "said by the stand-in";
    return result;
}

EXPORT CUresult CUDAAPI cuDeviceGetCount(int *count)
{
    *count = DEVICE_COUNT;
    return is_initialized ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

EXPORT CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal)
{
    if (!is_initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (ordinal < 0 || ordinal >= DEVICE_COUNT)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev)
{
    if (dev < 0 || dev >= DEVICE_COUNT)
        return CUDA_ERROR_INVALID_DEVICE;
    if (attrib != CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)
        return CUDA_ERROR_INVALID_VALUE;
    *pi = can_use_host_pointer;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
    if (dev < 0 || dev >= DEVICE_COUNT)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    contexts[dev].device = dev;
    contexts[dev].retain_count++;
    *pctx = &contexts[dev];
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
    pthread_mutex_lock(&lock);
    if (dev < 0 || dev >= DEVICE_COUNT || !contexts[dev].retain_count)
        LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (--contexts[dev].retain_count == 0)
        contexts[dev].sticky = CUDA_SUCCESS;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuCtxGetCurrent(CUcontext *pctx)
{
    *pctx = current();
    return is_initialized ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

EXPORT CUresult CUDAAPI cuCtxPushCurrent_v2(CUcontext ctx)
{
    if (!ctx || !ctx->retain_count || stack_depth == 16)
        return CUDA_ERROR_INVALID_CONTEXT;
    stack[stack_depth++] = ctx;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxPopCurrent_v2(CUcontext *pctx)
{
    if (!stack_depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUcontext popped = stack[--stack_depth];
    if (pctx)
        *pctx = popped;
    return CUDA_SUCCESS;
}

/* Streams */

EXPORT CUresult CUDAAPI cuStreamCreate(CUstream *phStream, unsigned int Flags)
{
    ENTER("cuStreamCreate");
    /* A blocking stream would wait for the legacy default stream; nothing here should ask for one. */
    if (Flags != CU_STREAM_NON_BLOCKING)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    CUstream stream = calloc(1, sizeof *stream);
    stream->magic = ALIVE;
    stream->context = current();
    stream->last = &stream->first;
    for (int i = 0; i < MOST_STREAMS; i++)
        if (!live_streams[i]) {
            live_streams[i] = stream;
            break;
        }
    live_stream_count++;
    pthread_create(&stream->thread, NULL, run_stream, stream);
    pthread_detach(stream->thread);
    *phStream = stream;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuStreamDestroy_v2(CUstream hStream)
{
    ENTER("cuStreamDestroy");
    if (!is_alive_stream(hStream))
        LEAVE(CUDA_ERROR_INVALID_HANDLE);
    hStream->magic = DEAD;
    live_stream_count--;
    for (int i = 0; i < MOST_STREAMS; i++)
        if (live_streams[i] == hStream)
            live_streams[i] = NULL;
    pthread_cond_broadcast(&changed);
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus *captureStatus)
{
    ENTER("cuStreamIsCapturing");
    if (hStream && hStream != CU_STREAM_LEGACY && !is_alive_stream(hStream))
        LEAVE(CUDA_ERROR_INVALID_HANDLE);
    *captureStatus = is_alive_stream(hStream) && hStream->is_capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                                                       : CU_STREAM_CAPTURE_STATUS_NONE;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    CUstreamCaptureMode before = capture_mode;
    if ((unsigned)*mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags)
{
    ENTER("cuStreamWaitEvent");
    if ((hStream && !is_alive_stream(hStream)) || !is_alive_event(hEvent) || Flags)
        LEAVE(CUDA_ERROR_INVALID_HANDLE);
    if (!hStream) /* nothing ever runs on it here */
        LEAVE(CUDA_SUCCESS);
    if (hEvent->mark)
        put(hStream, WAIT)->mark = hEvent->mark;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData)
{
    ENTER("cuLaunchHostFunc");
    if (!is_alive_stream(hStream))
        LEAVE(CUDA_ERROR_INVALID_HANDLE);
    struct operation *operation = put(hStream, CALL);
    operation->function = fn;
    operation->argument = userData;
    LEAVE(CUDA_SUCCESS);
}

/* Events */

EXPORT CUresult CUDAAPI cuEventCreate(CUevent *phEvent, unsigned int Flags)
{
    ENTER("cuEventCreate");
    if (Flags) /* timing is asked for, and nobody blocks on an event */
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    CUevent event = calloc(1, sizeof *event);
    event->magic = ALIVE;
    event->context = current();
    live_event_count++;
    *phEvent = event;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuEventDestroy_v2(CUevent hEvent)
{
    ENTER("cuEventDestroy");
    if (!is_alive_event(hEvent))
        LEAVE(CUDA_ERROR_INVALID_HANDLE);
    hEvent->magic = DEAD;
    live_event_count--;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuEventRecord(CUevent hEvent, CUstream hStream)
{
    ENTER("cuEventRecord");
    if (!is_alive_event(hEvent))
        LEAVE(CUDA_ERROR_INVALID_HANDLE);
    struct mark *mark = calloc(1, sizeof *mark);
    if (hStream == NULL || hStream == CU_STREAM_LEGACY) { /* nothing ever runs on it here */
        mark->is_done = 1;
        mark->seconds = now();
    } else if (!is_alive_stream(hStream) || hStream->context != hEvent->context) {
        LEAVE(CUDA_ERROR_INVALID_HANDLE);
    } else {
        put(hStream, MARK)->mark = mark;
    }
    hEvent->mark = mark;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuEventQuery(CUevent hEvent)
{
    ENTER_BY(enter_unsafe, "cuEventQuery");
    if (!is_alive_event(hEvent))
        LEAVE(CUDA_ERROR_INVALID_HANDLE);
    LEAVE(!hEvent->mark || hEvent->mark->is_done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

EXPORT CUresult CUDAAPI cuEventElapsedTime(float *pMilliseconds, CUevent hStart, CUevent hEnd)
{
    ENTER("cuEventElapsedTime");
    if (!is_alive_event(hStart) || !is_alive_event(hEnd) || !hStart->mark || !hEnd->mark)
        LEAVE(CUDA_ERROR_INVALID_HANDLE);
    if (!hStart->mark->is_done || !hEnd->mark->is_done)
        LEAVE(CUDA_ERROR_NOT_READY);
    *pMilliseconds = (float)((hEnd->mark->seconds - hStart->mark->seconds) * 1e3);
    LEAVE(CUDA_SUCCESS);
}

/* Memory */

EXPORT CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
    ENTER_BY(enter_unsafe, "cuMemAlloc");
    *dptr = bytesize ? (CUdeviceptr)(uintptr_t)calloc(1, bytesize) : 0;
    LEAVE(*dptr ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

EXPORT CUresult CUDAAPI cuMemFree_v2(CUdeviceptr dptr)
{
    ENTER("cuMemFree");
    free((void *)(uintptr_t)dptr);
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags)
{
    ENTER_BY(enter_unsafe, "cuMemHostRegister");
    if (!p || !bytesize || (Flags & ~3u))
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    /* Whole pages are locked, so two ranges cannot share one. */
    CUdeviceptr start = (CUdeviceptr)(uintptr_t)p, end = start + bytesize;
    for (int i = 0; i < registration_count; i++)
        if (start / PAGE_BYTES <= (registrations[i].end - 1) / PAGE_BYTES &&
            registrations[i].start / PAGE_BYTES <= (end - 1) / PAGE_BYTES)
            LEAVE(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    if (registration_count == MOST_REGISTRATIONS)
        LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    registrations[registration_count++] = (struct registration){start, end};
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuMemHostUnregister(void *p)
{
    ENTER("cuMemHostUnregister");
    for (int i = 0; i < registration_count; i++)
        if (registrations[i].start == (CUdeviceptr)(uintptr_t)p) {
            if (is_in_use(registrations[i].start, registrations[i].end))
                LEAVE(CUDA_ERROR_ILLEGAL_STATE);
            registrations[i] = registrations[--registration_count];
            LEAVE(CUDA_SUCCESS);
        }
    LEAVE(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

/* Copies */

EXPORT CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream)
{
    ENTER("cuMemcpyAsync");
    if (!is_alive_stream(hStream))
        LEAVE(CUDA_ERROR_INVALID_HANDLE);
    if (!dst || !src || !is_copyable(dst, ByteCount) || !is_copyable(src, ByteCount))
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    single_calls++;
    LEAVE(put_copy(hStream, dst, src, ByteCount, 0));
}

static int is_attribute(const CUmemcpyAttributes *attribute)
{
    return attribute->srcAccessOrder >= CU_MEMCPY_SRC_ACCESS_ORDER_STREAM &&
           attribute->srcAccessOrder <= CU_MEMCPY_SRC_ACCESS_ORDER_ANY && attribute->flags <= 1 &&
           (unsigned)attribute->srcLocHint.type <= 4 && (unsigned)attribute->dstLocHint.type <= 4;
}

/* Everything is read from the arrays before the call returns. */
EXPORT CUresult CUDAAPI cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                              CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs,
                                              CUstream hStream)
{
    ENTER("cuMemcpyBatchAsync");
    if (hStream == NULL || hStream == CU_STREAM_LEGACY)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (!is_alive_stream(hStream))
        LEAVE(CUDA_ERROR_INVALID_HANDLE);
    if (!can_use_host_pointer || !count || !numAttrs || numAttrs > count || attrsIdxs[0])
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (count > MOST_DESCRIPTORS) {
        hStream->context->sticky = CUDA_ERROR_LAUNCH_FAILED;
        LEAVE(CUDA_ERROR_LAUNCH_FAILED);
    }
    for (size_t k = 0; k < numAttrs; k++)
        if (!is_attribute(&attrs[k]) || attrsIdxs[k] >= count || (k && attrsIdxs[k] <= attrsIdxs[k - 1]))
            LEAVE(CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++)
        if (!dsts[i] || !srcs[i] || !sizes[i] || !is_copyable(dsts[i], sizes[i]) || !is_copyable(srcs[i], sizes[i]))
            LEAVE(CUDA_ERROR_INVALID_VALUE);
    batch_calls++;
    largest_batch = largest_batch > (long)count ? largest_batch : (long)count;
    size_t k = 0;
    for (size_t i = 0; i < count; i++) {
        while (k + 1 < numAttrs && attrsIdxs[k + 1] <= i)
            k++;
        put_copy(hStream, dsts[i], srcs[i], sizes[i], attrs[k].srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
    }
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                           CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs,
                                           size_t *failIdx, CUstream hStream)
{
    *failIdx = SIZE_MAX;
    return cuMemcpyBatchAsync_v2(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, hStream);
}

EXPORT CUresult CUDAAPI cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
                                            CUdriverProcAddressQueryResult *symbolStatus)
{
    *pfn = NULL;
    if (cudaVersion > driver_version || flags > 2)
        return CUDA_ERROR_INVALID_VALUE;
    CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    if (strcmp(symbol, "cuMemcpyBatchAsync") == 0) {
        status = cudaVersion < 12080 ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT : CU_GET_PROC_ADDRESS_SUCCESS;
        if (cudaVersion >= 13000)
            *pfn = (void *)cuMemcpyBatchAsync_v2;
        else if (cudaVersion >= 12080)
            *pfn = (void *)cuMemcpyBatchAsync;
    }
    if (symbolStatus)
        *symbolStatus = status;
    return CUDA_SUCCESS;
}

/* Control */

EXPORT void standin_set_driver_version(int version)
{
    driver_version = version;
}

EXPORT void standin_set_can_use_host_pointer(int value)
{
    can_use_host_pointer = value;
}

/* Let the call of `name` after `skip` more of them return `code` and do nothing. */
EXPORT void standin_fail_call(const char *name, int skip, int code)
{
    pthread_mutex_lock(&lock);
    snprintf(fault.name, sizeof fault.name, "%s", name);
    fault.skip = skip;
    fault.code = (CUresult)code;
    pthread_mutex_unlock(&lock);
}

/* Break the stream's context, for good, once the stream comes to it. */
EXPORT void standin_break(CUstream stream, int code)
{
    pthread_mutex_lock(&lock);
    put(stream, BREAK)->code = (CUresult)code;
    pthread_mutex_unlock(&lock);
}

EXPORT void standin_set_capturing(CUstream stream, int value)
{
    stream->is_capturing = value;
}

enum count { BATCH_CALLS, SINGLE_CALLS, LARGEST_BATCH, EARLY_READS, STREAMS, EVENTS, REGISTRATIONS, RETAINED };

EXPORT long standin_count(int which)
{
    pthread_mutex_lock(&lock);
    long counts[] = {batch_calls,       single_calls,     largest_batch,      early_reads,
                     live_stream_count, live_event_count, registration_count, contexts[0].retain_count + contexts[1].retain_count};
    pthread_mutex_unlock(&lock);
    return counts[which];
}

/* Forget faults, counts, settings, and what a test that failed has left registered. */
EXPORT void standin_reset(void)
{
    pthread_mutex_lock(&lock);
    fault.name[0] = 0;
    driver_version = 13000;
    can_use_host_pointer = 1;
    batch_calls = single_calls = largest_batch = early_reads = 0;
    registration_count = 0;
    for (int i = 0; i < DEVICE_COUNT; i++)
        contexts[i].sticky = CUDA_SUCCESS;
    pthread_mutex_unlock(&lock);
}
