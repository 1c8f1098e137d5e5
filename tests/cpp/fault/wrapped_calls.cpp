// System calls of the engine that fail when asked to. The linker puts these functions before the C library's (--wrap):
// see CMakeLists.txt.
#include <fcntl.h>
#include <sys/types.h>

#include <cerrno>
#include <cstdarg>
#include <cstddef>

#include "fault/injector.h"

namespace torch_offload::test {
namespace {

std::atomic<int> error_of_calls{0};
std::atomic<Lacking> lacking_now{Lacking::nothing};
std::atomic<off_t> most_file_bytes{-1};
std::atomic<std::uint64_t> full_count{0};

bool fails(FaultCall call) noexcept {
    if (!is_due(call)) return false;
    errno = error_of_calls.load();
    return true;
}

bool is_lacking(Lacking what) noexcept {
    if (lacking_now.load() != what) return false;
    errno = EOPNOTSUPP;
    return true;
}

/// Of a disk that is full beyond.
bool is_too_long(off_t size_bytes) noexcept {
    const off_t most = most_file_bytes.load();
    if (most < 0 || size_bytes <= most) return false;
    errno = ENOSPC;
    return true;
}

}  // namespace

void fail_system_calls_with(int error) noexcept { error_of_calls = error; }
void limit_files_to(std::int64_t size_bytes) noexcept { most_file_bytes = size_bytes; }
std::uint64_t times_full() noexcept { return full_count.load(); }
void let_filesystem_lack(Lacking lacking) noexcept { lacking_now = lacking; }

}  // namespace torch_offload::test

using torch_offload::test::fails;
using torch_offload::test::FaultCall;
using torch_offload::test::is_lacking;
using torch_offload::test::is_too_long;
using torch_offload::test::Lacking;

extern "C" {
void* __real_mmap(void*, std::size_t, int, int, int, off_t);
void* __real_mremap(void*, std::size_t, std::size_t, int, void*);
int __real_mprotect(void*, std::size_t, int);
int __real_madvise(void*, std::size_t, int);
int __real_munmap(void*, std::size_t);
int __real_fallocate(int, int, off_t, off_t);
int __real_ftruncate(int, off_t);
int __real_fcntl(int, int, long);
int __real_open(const char*, int, unsigned);
int __real_mkostemp(char*, int);
int __real_unlink(const char*);
int __real_eventfd(unsigned, int);
int __real_pipe2(int*, int);

void* __wrap_mmap(void* address, std::size_t size, int protection, int flags, int file, off_t offset) {
    void* const failed = reinterpret_cast<void*>(-1);
    return fails(FaultCall::mmap) ? failed : __real_mmap(address, size, protection, flags, file, offset);
}

void* __wrap_mremap(void* address, std::size_t size, std::size_t new_size, int flags, ...) {
    std::va_list arguments;
    va_start(arguments, flags);
    void* const target = va_arg(arguments, void*);
    va_end(arguments);
    void* const failed = reinterpret_cast<void*>(-1);
    return fails(FaultCall::mremap) ? failed : __real_mremap(address, size, new_size, flags, target);
}

int __wrap_mprotect(void* address, std::size_t size, int protection) {
    return fails(FaultCall::mprotect) ? -1 : __real_mprotect(address, size, protection);
}

int __wrap_madvise(void* address, std::size_t size, int advice) {
    return fails(FaultCall::madvise) ? -1 : __real_madvise(address, size, advice);
}

int __wrap_munmap(void* address, std::size_t size) {
    return fails(FaultCall::munmap) ? -1 : __real_munmap(address, size);
}

int __wrap_fallocate(int file, int mode, off_t offset, off_t size) {
    if (is_lacking(Lacking::preallocation)) return -1;
    if (fails(FaultCall::fallocate)) return -1;
    const int result = is_too_long(offset + size) ? -1 : __real_fallocate(file, mode, offset, size);
    if (result != 0 && errno == ENOSPC) ++torch_offload::test::full_count;
    return result;
}

int __wrap_ftruncate(int file, off_t size) { return fails(FaultCall::ftruncate) ? -1 : __real_ftruncate(file, size); }

int __wrap_fcntl(int file, int command, ...) {
    std::va_list arguments;
    va_start(arguments, command);
    const long argument = va_arg(arguments, long);
    va_end(arguments);
    return fails(FaultCall::fcntl) ? -1 : __real_fcntl(file, command, argument);
}

int __wrap_open(const char* path, int flags, ...) {
    std::va_list arguments;
    va_start(arguments, flags);
    const auto mode = va_arg(arguments, unsigned);
    va_end(arguments);
    if ((flags & O_TMPFILE) == O_TMPFILE && is_lacking(Lacking::nameless_files)) return -1;
    return fails(FaultCall::open) ? -1 : __real_open(path, flags, mode);
}

int __wrap_mkostemp(char* name, int flags) { return fails(FaultCall::mkostemp) ? -1 : __real_mkostemp(name, flags); }
int __wrap_unlink(const char* path) { return fails(FaultCall::unlink) ? -1 : __real_unlink(path); }
int __wrap_eventfd(unsigned count, int flags) { return fails(FaultCall::eventfd) ? -1 : __real_eventfd(count, flags); }
int __wrap_pipe2(int* ends, int flags) { return fails(FaultCall::pipe2) ? -1 : __real_pipe2(ends, flags); }
}
