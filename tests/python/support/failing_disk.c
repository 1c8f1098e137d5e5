// Stands before the C library: from a transfer on, preadv and pwritev fail. Built and loaded by failing_disk.py.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <sys/uio.h>

static atomic_long seen;       // transfers since the disk was armed
static atomic_long first_bad;  // 0: none fails
static atomic_int error_number;

// From the transfer `first` on, counted from 1, all fail.
void failing_disk_arm(long first, int error) {
    atomic_store(&seen, 0);
    atomic_store(&error_number, error);
    atomic_store(&first_bad, first);
}

// Returns how many transfers there were.
long failing_disk_disarm(void) {
    atomic_store(&first_bad, 0);
    return atomic_load(&seen);
}

static int fails(void) {
    const long number = atomic_fetch_add(&seen, 1) + 1;
    const long first = atomic_load(&first_bad);
    return first != 0 && number >= first;
}

typedef ssize_t (*transfer_t)(int, const struct iovec*, int, off_t);

static ssize_t pass_on(const char* name, int file, const struct iovec* pieces, int count, off_t offset) {
    if (fails()) {
        errno = atomic_load(&error_number);
        return -1;
    }
    return ((transfer_t)dlsym(RTLD_NEXT, name))(file, pieces, count, offset);
}

ssize_t preadv(int file, const struct iovec* pieces, int count, off_t offset) {
    return pass_on("preadv", file, pieces, count, offset);
}

ssize_t pwritev(int file, const struct iovec* pieces, int count, off_t offset) {
    return pass_on("pwritev", file, pieces, count, offset);
}

ssize_t preadv64(int file, const struct iovec* pieces, int count, off64_t offset) {
    return pass_on("preadv64", file, pieces, count, offset);
}

ssize_t pwritev64(int file, const struct iovec* pieces, int count, off64_t offset) {
    return pass_on("pwritev64", file, pieces, count, offset);
}
