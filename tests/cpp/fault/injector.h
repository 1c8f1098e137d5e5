// The one fault of a case: which call, which time, for how long. Engines, wrapped system calls and operator new ask it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace torch_offload::test {

enum class FaultCall : std::uint8_t {
    // of an I/O engine
    submit,
    reap,
    register_buffer,
    unregister_buffer,
    read,
    write,
    // of the C library
    allocation,
    mmap,
    mremap,
    mprotect,
    madvise,
    munmap,
    fallocate,
    ftruncate,
    fcntl,
    open,
    mkostemp,
    unlink,
    eventfd,
    pipe2,
};
inline constexpr std::size_t kFaultCallCount = 20;
const char* name_of(FaultCall call) noexcept;

/// Whose calls fail.
enum class FaultThread : std::uint8_t { any, program, ssd, service, to_device, to_host, planner };
inline constexpr std::size_t kFaultThreadCount = 7;
const char* name_of(FaultThread thread) noexcept;

inline constexpr std::uint64_t kForever = UINT64_MAX;

struct Fault {
    FaultCall call = FaultCall::read;
    std::uint64_t first = 1;  // call of that kind that fails, counted from when it was armed
    std::uint64_t count = 1;  // so many in a row
    FaultThread thread = FaultThread::any;
};

/// Calls of the fault's kind are counted from now on. Not while other threads make such calls.
void arm(const Fault& fault) noexcept;
/// From now on none fails.
void disarm() noexcept;
/// Whether this call fails. Allocates nothing and makes no call that is injected.
bool is_due(FaultCall call) noexcept;
bool is_armed() noexcept;
/// How many calls of the kind there were, and how many of these failed, since arm().
std::uint64_t counted_calls() noexcept;
std::uint64_t injected_faults() noexcept;

/// Allocations and system calls of this thread that are the harness's own: neither counted nor failed.
class Spared {
public:
    Spared() noexcept;
    ~Spared();
    Spared(const Spared&) = delete;
    Spared& operator=(const Spared&) = delete;
};

/// Where in the program the first fault since arm() came to pass: return addresses, innermost first.
struct FaultSite {
    std::array<void*, 24> frames{};
    int depth = 0;
};
/// `site` is filled by the next fault. In memory that outlives this process, it says where one came to pass that ended
/// the process.
void note_site_in(FaultSite* site) noexcept;
/// The engine's functions on the way to it: "Pager::Impl::start_load < Pager::pin".
std::string describe(const FaultSite& site);

/// What a system call fails with in this process.
void fail_system_calls_with(int error) noexcept;
/// What the filesystem is to lack from now on in this process: files without names, preallocation.
enum class Lacking : std::uint8_t { nothing, nameless_files, preallocation };
void let_filesystem_lack(Lacking lacking) noexcept;
/// No file can be made longer than this from now on in this process, as on a full disk; below 0: they can.
void limit_files_to(std::int64_t size_bytes) noexcept;
/// How often a file could not be made longer for lack of space, whoever said so.
std::uint64_t times_full() noexcept;
/// Blocks of memory that operator new gave out and delete did not get back.
std::int64_t live_blocks() noexcept;

}  // namespace torch_offload::test
