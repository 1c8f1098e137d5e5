// Asynchronous block I/O: plain requests that go in and come back. Layer storage: includes base only.
#pragma once

#include <sys/uio.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace torch_offload {

enum class IoDirection : std::uint8_t { read, write };

/// A registered buffer's number with one engine; negative: not registered.
using BufferIndex = std::int32_t;
inline constexpr BufferIndex kUnregistered = -1;

/// One transfer between a file and memory. The caller keeps it in place from submit() until reap() gives it back.
/// Units:  `buffer`, `tail` and `offset_bytes` are multiples of kSectorBytes, `buffer` and `tail` are aligned to it.
/// With `fixed_index` set, `fixed_address` is the address under which `buffer`'s memory was registered: the
/// memory may have been moved to another virtual address since, the registration follows the memory.
struct IoRequest {
    IoDirection direction = IoDirection::read;
    int file_descriptor = -1;
    std::uint64_t offset_bytes = 0;
    std::span<std::byte> buffer;
    std::span<std::byte> tail{};  // for the bytes of the file that follow; empty if `fixed_index` is set
    BufferIndex fixed_index = kUnregistered;
    std::byte* fixed_address = nullptr;
    void* context = nullptr;  // the submitter's own; engines leave it alone

    // Filled by the engine.
    std::size_t done_bytes = 0;
    std::uint32_t rounds = 0;   // resubmissions after short or interrupted transfers
    std::uint32_t retries = 0;  // repetitions after EIO
    int error = 0;              // positive errno once finished, 0 on success
    std::array<iovec, 2> pieces{};

    std::size_t size_bytes() const noexcept { return buffer.size() + tail.size(); }
};

/// The memory of what is left of `request`, at most two pieces. Lies in `request.pieces`.
std::span<const iovec> pieces_left(IoRequest& request) noexcept;

/// What an engine does with a request after the kernel answered.
enum class Next { finished, resubmit };

/// Decides what a kernel result means. Short, interrupted and refused-for-now transfers go round again for the rest,
/// restarting on a sector, up to kMaxRounds; EIO is repeated once; anything else ends in `request.error`.
/// `result` is bytes transferred or a negative errno. A result of 0 is EIO: the file is shorter than its extent.
/// What is still refused in the last round ends in what it was refused with.
inline constexpr std::uint32_t kMaxRounds = 64;
Next settle(IoRequest& request, std::int64_t result) noexcept;

/// Whether a transfer that ended in this errno may succeed later, as nothing but time goes by: a controller that is
/// reset, a path that comes back, memory that the kernel lacks. A full disk or a wrong argument does not pass by
/// itself.
bool may_pass(int error) noexcept;

/// What every engine does with a request before it takes it: check_request() before any of a batch is taken, then
/// start_over(), which clears the fields that the engine fills.
/// Throws: InvalidArgument if the units of `request` are not as promised.
void check_request(const IoRequest& request);
void start_over(IoRequest& request) noexcept;

/// Queue of transfers.
/// Threads: submit, reap, register_buffer and unregister_buffer belong to one thread, the one that made the first
/// call; wake() may be called from any. Nothing calls back.
class IoEngine {
public:
    virtual ~IoEngine() = default;

    /// Takes requests from the front of `requests`; returns how many were taken, fewer when the queue is full
    /// (the rest stay the caller's). A taken request belongs to the engine until reap() returns it.
    virtual std::size_t submit(std::span<IoRequest* const> requests) = 0;

    /// Gives back finished requests, at most `finished.size()`. Waits up to `timeout` while there are none, and
    /// returns early, possibly with 0, after a wake(). Every result was looked at: `error` says how it went.
    virtual std::size_t reap(std::span<IoRequest*> finished, std::chrono::milliseconds timeout) = 0;

    /// Makes a reap() that waits, or the next one, return. Threads: any. Async-signal-safe.
    virtual void wake() noexcept = 0;

    /// Registers memory for transfers without per-request pinning, or returns kUnregistered where the engine or the
    /// system has no room for it (a hint, never an error). The memory must stay populated until unregister_buffer().
    virtual BufferIndex register_buffer(std::span<std::byte> memory) = 0;
    virtual void unregister_buffer(BufferIndex index) = 0;

    /// Ends the engine: waits, for some time, until no transfer in flight touches its buffer any more. True if that is
    /// so. Requests in flight are the submitter's then, not finished. Afterwards only quiesce(), wake() and the
    /// destructor may be called.
    virtual bool quiesce() noexcept = 0;

    /// How many requests may be in flight at once.
    virtual std::size_t capacity() const noexcept = 0;

    /// "io_uring with fixed buffers", "io_uring", "threads".
    virtual std::string name() const = 0;
};

enum class IoEngineKind { automatic, uring_fixed, uring, threads };

/// Makes the best engine that works here, in the order fixed buffers, plain io_uring, threads; one log line says
/// which and why the better ones were passed over. A named kind that does not work throws InvalidArgument. If a ring
/// breaks later, threads take over (FallbackEngine).
/// `capacity` is the number of requests in flight.
std::unique_ptr<IoEngine> make_io_engine(IoEngineKind kind, std::size_t capacity);

}  // namespace torch_offload
