/*
 * A replacement of libnvidia-ml.so.1 for tests: the functions that ebbtide calls through pynvml, over cards that the
 * file named by NVML_MOCK describes. Each line of the file is KEY=VALUE; `0.KEY` is a property of card 0, `0.1.KEY` one
 * of its MIG device 1 (tests/nvml_mock/cards.py writes these files, and lists the keys).
 *
 * Everything is a function of time (CLOCK_MONOTONIC, or a time that a test sets), so that a test can compute the value
 * of each reading. Structures and numbers follow NVML's public header as pynvml declares it.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, ARGUMENT_VERSION_MISMATCH = 25,
};
enum { FIELD_C2C_COUNT = 170, FIELD_C2C_STATUS = 171, FIELD_POWER_INSTANT = 186, FIELD_SENT = 197, FIELD_RECEIVED = 198 };
enum { TYPE_DOUBLE = 0, TYPE_UNSIGNED_INT = 1, TYPE_UNSIGNED_LONG_LONG = 3 };
enum { THROUGHPUT_SENT = 0, THROUGHPUT_RECEIVED = 1 };
enum { CLOCK_SM = 1, CLOCK_MEMORY = 2 };
enum { GPM_SENT = 20, GPM_RECEIVED = 21, GPM_METRICS = 333 };
enum { MAX_LINES = 4096, MAX_CARDS = 32, MAX_INSTANCES = 8, WHOLE_CARD = -1, FIRST_BUS = 0x18 };

#define GPM_MIN_WINDOW_NS 100000000LL
#define THROUGHPUT_WINDOW_NS 20000000LL

typedef struct { int card, instance; } Device;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} PciInfo;
typedef union { double d; unsigned ui; unsigned long long ull; } Value;
typedef struct {
    uint32_t field, scope;
    int64_t timestamp, latency_us;
    unsigned type;
    int result;
    Value value;
} FieldValue;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { Device *device; int64_t t_ns; } GpmSample;
typedef struct { const char *short_name, *long_name, *unit; } MetricInfo;
typedef struct { unsigned id; int result; double value; MetricInfo info; } GpmMetric;
/* The array's length differs between versions of NVML; a caller asks for at most `count` metrics. */
typedef struct { unsigned version, count; GpmSample *first, *second; GpmMetric metrics[GPM_METRICS]; } GpmRequest;
typedef struct { unsigned version, supported; } GpmSupport;

static char *keys[MAX_LINES], *values[MAX_LINES];
static int lines, initialized;
static int64_t initialized_ns, test_time_ns;
static Device devices[MAX_CARDS][MAX_INSTANCES + 1];

/* Called by tests: stop the clock at a time; 0 lets it run. */
void nvml_mock_set_time_ns(int64_t t_ns) { test_time_ns = t_ns; }

static int64_t now_ns(void) {
    struct timespec t;
    if (test_time_ns) return test_time_ns;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void wait_ns(int64_t duration_ns) {
    struct timespec t = {0, duration_ns};
    if (test_time_ns) test_time_ns += duration_ns;
    else nanosleep(&t, NULL);
}

static int read_description(void) {
    static char line[1024];
    const char *path = getenv("NVML_MOCK");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return 0;
    while (lines > 0) free(keys[--lines]);
    while (lines < MAX_LINES && fgets(line, sizeof line, file)) {
        char *separator = strchr(line, '=');
        if (!separator) continue;
        line[strcspn(line, "\n")] = 0;
        *separator = 0;
        keys[lines] = strdup(line);
        /* One allocation holds both: key, 0, value. */
        keys[lines] = realloc(keys[lines], strlen(line) + strlen(separator + 1) + 2);
        values[lines] = strcpy(keys[lines] + strlen(line) + 1, separator + 1);
        lines++;
    }
    fclose(file);
    return 1;
}

static const char *lookup(const char *key) {
    for (int i = 0; i < lines; i++) if (!strcmp(keys[i], key)) return values[i];
    return NULL;
}

/* The value of a property of a card or a MIG device; NULL where the description has none. */
static const char *property(const Device *d, const char *name) {
    char key[256];
    if (d->instance == WHOLE_CARD) snprintf(key, sizeof key, "%d.%s", d->card, name);
    else snprintf(key, sizeof key, "%d.%d.%s", d->card, d->instance, name);
    return lookup(key);
}

static unsigned long long number(const Device *d, const char *name) {
    const char *value = property(d, name);
    return value ? strtoull(value, NULL, 10) : 0;
}

/* The result of every call on a device before it reads anything. */
static int check(const Device *d, const char *function) {
    char name[128];
    const char *error;
    Device card = {d->card, WHOLE_CARD};
    if (!initialized) return UNINITIALIZED;
    if (property(&card, "lost_ns") && now_ns() - initialized_ns >= (int64_t)number(&card, "lost_ns")) return GPU_IS_LOST;
    snprintf(name, sizeof name, "error.%s", function);
    error = property(d, name);
    return error ? atoi(error) : SUCCESS;
}

#define ENTER(device)                                     \
    do {                                                  \
        int result_ = check(device, __func__);            \
        if (result_ != SUCCESS) return result_;           \
    } while (0)
/* Most functions do not take a MIG device. */
#define ENTER_CARD(device)                                          \
    do {                                                            \
        ENTER(device);                                              \
        if ((device)->instance != WHOLE_CARD) return NOT_SUPPORTED; \
    } while (0)

/* Bytes since the clock's 0 at `rate` bytes/s; with `burst_ns`, only in the first half of each such period. */
static unsigned long long bytes_until(const Device *d, const char *rate, int64_t t_ns) {
    int64_t period = (int64_t)number(d, "burst_ns"), active = t_ns;
    if (period) {
        int64_t rest = t_ns % period, half = period / 2;
        active = t_ns / period * half + (rest < half ? rest : half);
    }
    return (unsigned long long)((unsigned __int128)number(d, rate) * (unsigned __int128)active / 1000000000u);
}

/* With `live`, a path, bytes are those that the stand-in for the CUDA runtime counts in that file, by card. */
static unsigned long long live_bytes(const Device *d, const char *path, unsigned place) {
    unsigned long long counters[4] = {0};
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    if (pread(file, counters, sizeof counters, d->card * (off_t)sizeof counters) < 0) counters[place] = 0;
    close(file);
    return counters[place];
}

enum { LIVE_USED, LIVE_H2D = 2, LIVE_D2H };

static int copy_text(const char *text, char *out, unsigned length) {
    if (!text) return NOT_SUPPORTED;
    if (strlen(text) + 1 > length) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

static int read_unsigned(const Device *d, const char *name, unsigned *out) {
    if (!property(d, name)) return NOT_SUPPORTED;
    *out = (unsigned)number(d, name);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    const char *error;
    (void)flags;
    if (!read_description()) return DRIVER_NOT_LOADED;
    error = lookup("init_error");
    if (error) return atoi(error);
    if (!initialized) initialized_ns = now_ns();
    initialized++;
    return SUCCESS;
}

int nvmlShutdown(void) {
    if (!initialized) return UNINITIALIZED;
    initialized--;
    return SUCCESS;
}

const char *nvmlErrorString(int result) {
    static __thread char text[64];
    snprintf(text, sizeof text, "NVML error %d", result);
    return text;
}

int nvmlSystemGetDriverVersion(char *out, unsigned length) {
    return initialized ? copy_text(lookup("driver"), out, length) : UNINITIALIZED;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    const char *cards = lookup("cards");
    if (!initialized) return UNINITIALIZED;
    *count = cards ? (unsigned)atoi(cards) : 0;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
    unsigned count;
    int result = nvmlDeviceGetCount_v2(&count);
    if (result != SUCCESS) return result;
    if (index >= count || index >= MAX_CARDS) return INVALID_ARGUMENT;
    *out = &devices[index][MAX_INSTANCES];
    **out = (Device){(int)index, WHOLE_CARD};
    ENTER(*out);
    return SUCCESS;
}

/* These are what torch calls to name other processes in an OutOfMemoryError. */
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, Device **out) {
    unsigned domain, bus;
    if (sscanf(bus_id, "%x:%x:", &domain, &bus) != 2 || domain || bus < FIRST_BUS) return NOT_FOUND;
    return nvmlDeviceGetHandleByIndex_v2(bus - FIRST_BUS, out);
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return SUCCESS;
}

/* As in a container, no process is shown. */
int nvmlDeviceGetComputeRunningProcesses(Device *d, unsigned *count, void *processes) {
    (void)processes;
    ENTER_CARD(d);
    *count = 0;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(Device *d, unsigned link, int *type) {
    (void)d, (void)link, (void)type;
    return NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device *d, unsigned link, PciInfo *out) {
    (void)d, (void)link, (void)out;
    return NOT_SUPPORTED;
}

int nvmlDeviceGetMigMode(Device *d, unsigned *current, unsigned *pending) {
    ENTER_CARD(d);
    *pending = property(d, "mig_devices") != NULL;
    return read_unsigned(d, "mig_mode", current);
}

int nvmlDeviceGetMaxMigDeviceCount(Device *d, unsigned *count) {
    ENTER_CARD(d);
    *count = property(d, "mig_mode") ? MAX_INSTANCES - 1 : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *d, unsigned index, Device **out) {
    ENTER_CARD(d);
    if (index >= MAX_INSTANCES) return INVALID_ARGUMENT;
    *out = &devices[d->card][index];
    **out = (Device){d->card, (int)index};
    return property(*out, "uuid") ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetName(Device *d, char *out, unsigned length) {
    ENTER(d);
    return copy_text(property(d, "name"), out, length);
}

int nvmlDeviceGetUUID(Device *d, char *out, unsigned length) {
    ENTER(d);
    return copy_text(property(d, "uuid"), out, length);
}

int nvmlDeviceGetPciInfo_v3(Device *d, PciInfo *out) {
    ENTER_CARD(d);
    memset(out, 0, sizeof *out);
    out->bus = FIRST_BUS + (unsigned)d->card;
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", out->bus);
    snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "0000:%02X:00.0", out->bus);
    return SUCCESS;
}

/* With `wave_ns`, memory in use is `used_high` in the second half of each such period. */
int nvmlDeviceGetMemoryInfo(Device *d, Memory *out) {
    int64_t period;
    const char *live;
    ENTER(d);
    if (!property(d, "total")) return NOT_SUPPORTED;
    period = (int64_t)number(d, "wave_ns");
    live = property(d, "live");
    out->total = number(d, "total");
    out->used = number(d, period && now_ns() % period >= period / 2 ? "used_high" : "used");
    if (live) out->used = live_bytes(d, live, LIVE_USED);
    out->free = out->total - out->used;
    return SUCCESS;
}

#define LINK_FUNCTION(name, key)          \
    int name(Device *d, unsigned *out) {  \
        ENTER_CARD(d);                    \
        return read_unsigned(d, key, out); \
    }
LINK_FUNCTION(nvmlDeviceGetCurrPcieLinkGeneration, "generation")
LINK_FUNCTION(nvmlDeviceGetCurrPcieLinkWidth, "width")
LINK_FUNCTION(nvmlDeviceGetMaxPcieLinkGeneration, "max_generation")
LINK_FUNCTION(nvmlDeviceGetMaxPcieLinkWidth, "max_width")

static void read_counter(const Device *d, FieldValue *out, const char *rate) {
    const char *counter = property(d, "counters"), *live = property(d, "live");
    unsigned live_place = strcmp(rate, "h2d") ? LIVE_D2H : LIVE_H2D;
    unsigned long long bytes = live ? live_bytes(d, live, live_place) : bytes_until(d, rate, now_ns());
    if (!counter) return;
    out->result = SUCCESS;
    if (!strcmp(counter, "uint32")) {
        out->type = TYPE_UNSIGNED_INT;
        out->value.ui = (unsigned)bytes;
    } else if (!strcmp(counter, "double")) {
        out->type = TYPE_DOUBLE;
        out->value.d = (double)bytes;
    } else {
        /* "wraps32": 64 bits that count up to 2**32. */
        out->type = TYPE_UNSIGNED_LONG_LONG;
        out->value.ull = strcmp(counter, "wraps32") ? bytes : (unsigned)bytes;
    }
}

static void read_integer(const Device *d, FieldValue *out, const char *key) {
    if (!property(d, key)) return;
    out->result = SUCCESS;
    out->type = TYPE_UNSIGNED_INT;
    out->value.ui = (unsigned)number(d, key);
}

int nvmlDeviceGetFieldValues(Device *d, int count, FieldValue *out) {
    ENTER_CARD(d);
    for (int i = 0; i < count; i++) {
        out[i].result = NOT_SUPPORTED;
        out[i].timestamp = now_ns() / 1000;
        switch (out[i].field) {
            case FIELD_RECEIVED: read_counter(d, &out[i], "h2d"); break;
            case FIELD_SENT: read_counter(d, &out[i], "d2h"); break;
            case FIELD_POWER_INSTANT: read_integer(d, &out[i], "instant_power_mw"); break;
            case FIELD_C2C_COUNT: read_integer(d, &out[i], "c2c_links"); break;
            case FIELD_C2C_STATUS:
                if (out[i].scope < number(d, "c2c_links")) read_integer(d, &out[i], "c2c_status");
                break;
        }
    }
    return SUCCESS;
}

int nvmlDeviceGetPcieThroughput(Device *d, int counter, unsigned *out) {
    int64_t begin_ns, end_ns;
    const char *rate = counter == THROUGHPUT_RECEIVED ? "h2d" : "d2h";
    ENTER_CARD(d);
    if (!property(d, "throughput")) return NOT_SUPPORTED;
    begin_ns = now_ns();
    wait_ns(THROUGHPUT_WINDOW_NS);
    end_ns = now_ns();
    *out = (unsigned)((double)(bytes_until(d, rate, end_ns) - bytes_until(d, rate, begin_ns)) * 1e6 /
                      (double)(end_ns - begin_ns));
    return SUCCESS;
}

int nvmlGpmQueryDeviceSupport(Device *d, GpmSupport *out) {
    ENTER_CARD(d);
    if (out->version != 1) return ARGUMENT_VERSION_MISMATCH;
    out->supported = property(d, "gpm") != NULL;
    return SUCCESS;
}

int nvmlGpmSampleAlloc(GpmSample **out) {
    if (!initialized) return UNINITIALIZED;
    *out = calloc(1, sizeof **out);
    return SUCCESS;
}

int nvmlGpmSampleFree(GpmSample *sample) {
    free(sample);
    return SUCCESS;
}

int nvmlGpmSampleGet(Device *d, GpmSample *sample) {
    ENTER_CARD(d);
    if (!property(d, "gpm")) return NOT_SUPPORTED;
    *sample = (GpmSample){d, now_ns()};
    return SUCCESS;
}

int nvmlGpmMetricsGet(GpmRequest *request) {
    const GpmSample *first = request->first, *second = request->second;
    int64_t window_ns = second->t_ns - first->t_ns;
    if (request->version != 1) return ARGUMENT_VERSION_MISMATCH;
    if (!first->device || first->device != second->device || request->count > GPM_METRICS) return INVALID_ARGUMENT;
    ENTER(first->device);
    if (window_ns < GPM_MIN_WINDOW_NS) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < request->count; i++) {
        GpmMetric *metric = &request->metrics[i];
        const char *rate = metric->id == GPM_RECEIVED ? "h2d" : metric->id == GPM_SENT ? "d2h" : NULL;
        metric->result = rate ? SUCCESS : NOT_SUPPORTED;
        if (!rate) continue;
        metric->value = (double)(bytes_until(first->device, rate, second->t_ns) -
                                 bytes_until(first->device, rate, first->t_ns)) * 1e9 / (double)window_ns / 1048576;
    }
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Device *d, Utilization *out) {
    ENTER_CARD(d);
    if (!property(d, "utilization")) return NOT_SUPPORTED;
    *out = (Utilization){(unsigned)number(d, "utilization"), (unsigned)number(d, "memory_utilization")};
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(Device *d, unsigned *out) {
    ENTER_CARD(d);
    return read_unsigned(d, "power_mw", out);
}

int nvmlDeviceGetClockInfo(Device *d, int clock, unsigned *out) {
    ENTER_CARD(d);
    if (clock != CLOCK_SM && clock != CLOCK_MEMORY) return INVALID_ARGUMENT;
    return read_unsigned(d, clock == CLOCK_SM ? "sm_clock_mhz" : "memory_clock_mhz", out);
}

int nvmlDeviceGetTemperature(Device *d, int sensor, unsigned *out) {
    ENTER_CARD(d);
    return sensor == 0 ? read_unsigned(d, "temperature_celsius", out) : INVALID_ARGUMENT;
}

static int read_reasons(const Device *d, unsigned long long *out) {
    if (!property(d, "throttle_reasons")) return NOT_SUPPORTED;
    *out = number(d, "throttle_reasons");
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *d, unsigned long long *out) {
    ENTER_CARD(d);
    return read_reasons(d, out);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *d, unsigned long long *out) {
    ENTER_CARD(d);
    return read_reasons(d, out);
}
