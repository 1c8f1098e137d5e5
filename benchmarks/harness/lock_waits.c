// Counts how often and how long threads wait for mutexes of one library, for lock_waits.py: preloaded, it stands before
// pthread_mutex_lock and std::mutex::lock. The counts lie in the file $LOCK_WAITS_FILE, which another process may read meanwhile.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { SITES = 4096 };

struct site {
    _Atomic uint64_t mutex;   // its address; 0: the entry is free
    _Atomic uint64_t offset;  // of the return address in the library
    _Atomic uint64_t is_of_engine;
    _Atomic uint64_t calls, waits, waited_ns;
};

static struct site* sites;
static _Atomic uintptr_t library_begin, library_end;
static __thread int is_of_engine = -1;
static int (*lock_really)(pthread_mutex_t*);

static int find_library(struct dl_phdr_info* info, size_t size, void* unused) {
    (void)size, (void)unused;
    const char* wanted = getenv("LOCK_WAITS_LIBRARY");
    if (!wanted || !strstr(info->dlpi_name, wanted)) return 0;
    uintptr_t end = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr)* part = &info->dlpi_phdr[i];
        if (part->p_type == PT_LOAD && part->p_vaddr + part->p_memsz > end) end = part->p_vaddr + part->p_memsz;
    }
    library_end = info->dlpi_addr + end;
    library_begin = info->dlpi_addr;
    return 1;
}

__attribute__((constructor)) static void begin(void) {
    lock_really = (int (*)(pthread_mutex_t*))dlsym(RTLD_NEXT, "pthread_mutex_lock");
    const char* path = getenv("LOCK_WAITS_FILE");
    const int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void* mapped = mmap(NULL, SITES * sizeof(struct site), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) sites = mapped;
}

/// Whether the library is loaded. Looked for now and then only: that costs more than a lock.
static int is_library_there(void) {
    static _Atomic unsigned calls;
    if (!library_begin && ++calls % 64 == 0) dl_iterate_phdr(&find_library, NULL);
    return library_begin != 0;
}

static struct site* site_of(uint64_t mutex, uint64_t offset) {
    if (is_of_engine < 0) {
        char name[16] = "";
        prctl(PR_GET_NAME, name);
        is_of_engine = strncmp(name, "to-", 3) == 0;
    }
    uint64_t i = (mutex / 8 * 31 + offset * 7 + (uint64_t)is_of_engine) % SITES;
    for (int probe = 0; probe < SITES; ++probe, i = (i + 1) % SITES) {
        struct site* site = &sites[i];
        uint64_t seen = site->mutex;
        if (seen == 0 && atomic_compare_exchange_strong(&site->mutex, &seen, mutex)) {
            site->is_of_engine = (uint64_t)is_of_engine;
            site->offset = offset;
            return site;
        }
        while (site->offset == 0) {  // another thread is filling it in
        }
        if (site->mutex == mutex && site->offset == offset && site->is_of_engine == (uint64_t)is_of_engine) return site;
    }
    return NULL;
}

static int lock(pthread_mutex_t* mutex, uintptr_t caller) {
    if (!lock_really) lock_really = (int (*)(pthread_mutex_t*))dlsym(RTLD_NEXT, "pthread_mutex_lock");
    if (!sites || !is_library_there() || caller < library_begin || caller >= library_end) return lock_really(mutex);
    struct site* site = site_of((uint64_t)(uintptr_t)mutex, caller - library_begin);
    if (site) ++site->calls;
    if (pthread_mutex_trylock(mutex) == 0) return 0;
    struct timespec before, after;
    clock_gettime(CLOCK_MONOTONIC, &before);
    const int result = lock_really(mutex);
    clock_gettime(CLOCK_MONOTONIC, &after);
    if (site) {
        ++site->waits;
        site->waited_ns +=
            (uint64_t)((after.tv_sec - before.tv_sec) * 1000000000LL + (after.tv_nsec - before.tv_nsec));
    }
    return result;
}

int pthread_mutex_lock(pthread_mutex_t* mutex) { return lock(mutex, (uintptr_t)__builtin_return_address(0)); }

/// std::mutex::lock(), where it is not inlined.
void _ZNSt5mutex4lockEv(pthread_mutex_t* mutex) {
    if (lock(mutex, (uintptr_t)__builtin_return_address(0)) != 0) abort();
}
