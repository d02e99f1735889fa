// A driver made up for tests: two GPUs, and three processes of which one is whoever asks.
// With -DOLD it does not know the questions that came later, with -DBROKEN it does not start.
#include <cstdio>
#include <cstring>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, UNKNOWN = 999 };

struct Gpu {
    const char *uuid, *name;
    int major, minor;
    unsigned long long total, free;
};
struct Memory { unsigned long long total, free, used; };
struct Utilisation { unsigned gpu, memory; };
struct Process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };

static Gpu gpus[] = {
    {"GPU-aaaa", "NVIDIA Made Up", 9, 0, 80ull << 30, 60ull << 30},
    {"MIG-bbbb", "NVIDIA Made Up MIG 1g.10gb", 9, 0, 10ull << 30, 10ull << 30},
};
static const unsigned long long NOT_AVAILABLE = ~0ull;

static int text(const char *what, char *answer, unsigned length) {
    if (std::strlen(what) >= length) return TOO_SMALL;
    std::strcpy(answer, what);
    return SUCCESS;
}

extern "C" {
#ifdef BROKEN
int nvmlInit_v2() { return UNKNOWN; }
#else
int nvmlInit_v2() { return SUCCESS; }
#endif

int nvmlSystemGetDriverVersion(char *answer, unsigned length) { return text("580.65.06", answer, length); }

int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **found) {
    for (Gpu &gpu : gpus)
        if (!std::strcmp(gpu.uuid, uuid)) return *found = &gpu, SUCCESS;
    return NOT_FOUND;
}

int nvmlDeviceGetName(Gpu *gpu, char *answer, unsigned length) { return text(gpu->name, answer, length); }

int nvmlDeviceGetMemoryInfo(Gpu *gpu, Memory *memory) {
    *memory = {gpu->total, gpu->free, gpu->total - gpu->free};
    return SUCCESS;
}

#ifndef OLD
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 13010, SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) { return *count = 2, SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **found) {
    return index < 2 ? (*found = &gpus[index], SUCCESS) : INVALID_ARGUMENT;
}

int nvmlDeviceGetUUID(Gpu *gpu, char *answer, unsigned length) { return text(gpu->uuid, answer, length); }

int nvmlDeviceGetCudaComputeCapability(Gpu *gpu, int *major, int *minor) {
    return *major = gpu->major, *minor = gpu->minor, SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Gpu *gpu, Utilisation *told) {
    if (gpu != gpus) return NOT_SUPPORTED;  // as of a slice
    *told = {87, 41};
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *gpu, unsigned *count, Process *told) {
    unsigned running = gpu == gpus ? 2 : 0;
    if (*count < running) return *count = running, TOO_SMALL;
    *count = running;
    if (running) {
        told[0] = {(unsigned)getpid(), 3ull << 30, 0, 0};
        told[1] = {77, NOT_AVAILABLE, ~0u, ~0u};
    }
    return SUCCESS;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Gpu *gpu, unsigned *count, Process *told) {
    *count = gpu == gpus;
    if (*count) told[0] = {4242, 16ull << 30, 0, 0};
    return SUCCESS;
}

int nvmlSystemGetProcessName(unsigned pid, char *answer, unsigned length) {
    return pid == 4242 ? text("/usr/bin/viewer", answer, length) : NOT_FOUND;
}
#endif
}
