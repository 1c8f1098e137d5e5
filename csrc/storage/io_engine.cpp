#include "storage/io_engine.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/units.h"
#include "storage/fallback_engine.h"
#include "storage/file_descriptor.h"
#include "storage/thread_engine.h"
#include "storage/uring_engine.h"

namespace torch_offload {
namespace {

struct alignas(kSectorBytes) Sector {
    std::array<std::byte, kSectorBytes> bytes;
};

/// One transfer through `engine`, start to end.
void probe_transfer(IoEngine& engine, IoRequest request) {
    using namespace std::chrono_literals;
    IoRequest* pointer = &request;
    OFFLOAD_CHECK(engine.submit({&pointer, 1}) == 1, InvalidArgument, "a test transfer was not taken by ",
                  engine.name());
    IoRequest* finished = nullptr;
    OFFLOAD_CHECK(engine.reap({&finished, 1}, 5000ms) == 1, InvalidArgument, "a test transfer did not come back from ",
                  engine.name());
    OFFLOAD_CHECK(request.error == 0, InvalidArgument, "a test transfer by ", engine.name(),
                  " failed: ", std::strerror(request.error));
}

/// Writes a sector to a file in memory, reads it back and compares, through a registered buffer if `kind` has them.
/// Throws: InvalidArgument with the reason if any of that does not work.
void probe(IoEngine& engine, IoEngineKind kind) {
    const FileDescriptor file(::memfd_create("torch_offload_probe", MFD_CLOEXEC));
    OFFLOAD_CHECK(file, InvalidArgument, "memfd_create failed: ", std::strerror(errno));
    // On the heap: the kernel may still own it when an engine that failed the probe is torn down.
    const auto sector = std::make_unique<Sector>();
    const std::span<std::byte> memory(sector->bytes);
    std::ranges::fill(memory, std::byte{0x5a});
    IoRequest request{.direction = IoDirection::write, .file_descriptor = file.get(), .buffer = memory};
    request.fixed_index = engine.register_buffer(memory);
    request.fixed_address = memory.data();
    OFFLOAD_CHECK(kind != IoEngineKind::uring_fixed || request.fixed_index != kUnregistered, InvalidArgument,
                  "the kernel registers no buffer; raise the limit on locked memory (ulimit -l)");
    probe_transfer(engine, request);
    std::ranges::fill(memory, std::byte{0});
    request.direction = IoDirection::read;
    probe_transfer(engine, request);
    OFFLOAD_CHECK(std::ranges::count(memory, std::byte{0x5a}) == static_cast<std::ptrdiff_t>(memory.size()),
                  InvalidArgument, "a test transfer by ", engine.name(), " brought other bytes back");
}

std::unique_ptr<IoEngine> make_unproven(IoEngineKind kind, std::size_t capacity) {
    switch (kind) {
        case IoEngineKind::uring_fixed:
            return make_uring_engine(UringBuffers::fixed, capacity);
        case IoEngineKind::uring:
            return make_uring_engine(UringBuffers::plain, capacity);
        case IoEngineKind::threads:
            return std::make_unique<ThreadEngine>(capacity);
        case IoEngineKind::automatic:
            break;
    }
    throw InvalidArgument("not a kind of I/O engine");
}

/// The probe has an engine of its own: the first call decides which thread owns one.
std::unique_ptr<IoEngine> make_proven(IoEngineKind kind, std::size_t capacity) {
    if (kind == IoEngineKind::threads) return make_unproven(kind, capacity);  // calls that no system lacks
    probe(*make_unproven(kind, 1), kind);
    return std::make_unique<FallbackEngine>(make_unproven(kind, capacity));
}

}  // namespace

Next settle(IoRequest& request, std::int64_t result) noexcept {
    const auto finish_with = [&request](int error) {
        request.error = error;
        return Next::finished;
    };
    if (result == -EIO && request.retries == 0) {
        ++request.retries;
        return Next::resubmit;
    }
    const bool interrupted = result == -EINTR || result == -EAGAIN;
    if (result < 0 && !interrupted) return finish_with(static_cast<int>(-result));
    if (result == 0) return finish_with(EIO);
    if (result > 0) {
        const auto moved_bytes = static_cast<std::size_t>(result);
        if (moved_bytes > request.size_bytes() - request.done_bytes) return finish_with(EIO);
        request.done_bytes += moved_bytes / kSectorBytes * kSectorBytes;  // direct I/O restarts on a sector
    }
    if (request.done_bytes == request.size_bytes()) return finish_with(0);
    if (++request.rounds < kMaxRounds) return Next::resubmit;
    return finish_with(interrupted ? static_cast<int>(-result) : EIO);
}

std::span<const iovec> pieces_left(IoRequest& request) noexcept {
    const std::size_t of_buffer = std::min(request.done_bytes, request.buffer.size());
    std::size_t count = 0;
    for (const std::span<std::byte> memory :
         {request.buffer.subspan(of_buffer), request.tail.subspan(request.done_bytes - of_buffer)}) {
        if (!memory.empty()) request.pieces[count++] = {memory.data(), memory.size()};
    }
    return std::span(request.pieces).first(count);
}

bool may_pass(int error) noexcept {
    constexpr std::array<int, 17> kPassing = {EIO,       EAGAIN,    EINTR,    EBUSY,    ENOMEM,     ENOBUFS,
                                              ETIMEDOUT, ECANCELED, ENODEV,   ENXIO,    EREMOTEIO,  ESTALE,
                                              ENOLINK,   EHOSTDOWN, ENOTCONN, ENETDOWN, ENETUNREACH};
    return std::ranges::find(kPassing, error) != kPassing.end();
}

void check_request(const IoRequest& request) {
    OFFLOAD_CHECK(!request.buffer.empty() && request.offset_bytes % kSectorBytes == 0, InvalidArgument,
                  "a transfer needs memory and an offset that is a multiple of ", kSectorBytes, " bytes, got ",
                  request.buffer.size(), " bytes at ", request.offset_bytes);
    for (const std::span<std::byte> memory : {request.buffer, request.tail}) {
        const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
        OFFLOAD_CHECK(memory.size() % kSectorBytes == 0 && address % kSectorBytes == 0, InvalidArgument,
                      "a transfer's address and size must be multiples of ", kSectorBytes, " bytes, got ",
                      static_cast<const void*>(memory.data()), ", ", memory.size());
    }
    OFFLOAD_CHECK(request.tail.empty() || request.fixed_index == kUnregistered, InvalidArgument,
                  "a transfer of registered memory has no tail, got one of ", request.tail.size(), " bytes");
}

void start_over(IoRequest& request) noexcept {
    request.done_bytes = 0;
    request.rounds = 0;
    request.retries = 0;
    request.error = 0;
}

std::unique_ptr<IoEngine> make_io_engine(IoEngineKind kind, std::size_t capacity) {
    OFFLOAD_CHECK(capacity > 0, InvalidArgument, "an I/O engine needs a capacity of at least 1, got 0");
    if (kind != IoEngineKind::automatic) return make_proven(kind, capacity);
    std::string passed_over;
    const auto make_or_note = [&](IoEngineKind candidate, const char* name) -> std::unique_ptr<IoEngine> {
        try {
            return make_proven(candidate, capacity);
        } catch (const InvalidArgument& reason) {
            passed_over += concat("; no ", name, ": ", reason.what());
            return nullptr;
        }
    };
    auto engine = make_or_note(IoEngineKind::uring_fixed, "io_uring with fixed buffers");
    if (!engine) engine = make_or_note(IoEngineKind::uring, "io_uring");
    if (engine) {
        OFFLOAD_LOG(info, "I/O engine: ", engine->name(), ", capacity ", capacity, passed_over);
        return engine;
    }
    engine = make_proven(IoEngineKind::threads, capacity);
    OFFLOAD_LOG(warning, "I/O engine: ", engine->name(), ", which take more processor time", passed_over);
    return engine;
}

}  // namespace torch_offload
