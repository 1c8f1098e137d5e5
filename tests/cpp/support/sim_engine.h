// A simulated disk behind the IoEngine interface that fails on purpose, the same way for the same seed.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "storage/io_engine.h"
#include "storage/wake_event.h"

namespace torch_offload::test {

/// What can go wrong with one attempt at a transfer.
enum class SimFault : std::uint8_t {
    short_transfer,     // part of it, up to any byte
    interrupted,        // EINTR
    again,              // EAGAIN
    late,               // completes only after others
    io_error_once,      // EIO
    io_error_forever,   // EIO now and whenever this place is touched again
    no_space,           // ENOSPC; writes only
    torn_write,         // part of it is written, then EIO
    silent_torn_write,  // part of it is written, reported as done
    silent_bit_flip,    // one bit of what is read differs
};
inline constexpr std::size_t kSimFaultCount = 10;

/// Chances in a thousand, one for each SimFault.
using SimChances = std::array<std::uint32_t, kSimFaultCount>;

/// What an attempt comes to: an errno, or at most so many bytes of it.
struct SimAnswer {
    int error = 0;
    std::size_t most_bytes = SIZE_MAX;
};

/// The bytes of each file, by descriptor.
using SimFiles = std::map<int, std::vector<std::byte>>;

/// Keeps each file descriptor's bytes in memory; the descriptors need not be open. Time is simulated: a reap() with
/// transfers in flight runs until one is finished. Waits really only when nothing is in flight.
/// Threads: as IoEngine says.
class SimEngine final : public IoEngine {
public:
    /// files: those of another engine that has ended.
    SimEngine(std::size_t capacity, std::uint64_t seed, const SimChances& chances = {},
              std::shared_ptr<SimFiles> files = std::make_shared<SimFiles>())
        : capacity_(capacity), random_(seed), chances_(chances), files_(std::move(files)) {}

    /// The next attempts fail like this, in order, before chance is asked.
    void script(SimFault fault) { scripted_.push_back(fault); }

    std::size_t submit(std::span<IoRequest* const> requests) override;
    std::size_t reap(std::span<IoRequest*> finished, std::chrono::milliseconds timeout) override;
    void wake() noexcept override;
    BufferIndex register_buffer(std::span<std::byte>) override { return next_buffer_++; }
    void unregister_buffer(BufferIndex) override {}
    bool quiesce() noexcept override {
        pending_.clear();
        return true;
    }
    std::size_t capacity() const noexcept override { return capacity_; }
    std::string name() const override { return "simulated"; }

    /// Before the first transfer. `answer` is called at every attempt, on the engine's thread.
    void answer_with(std::function<SimAnswer(const IoRequest&)> answer) { answer_ = std::move(answer); }
    /// While nothing is in flight, any thread may change what they hold.
    const std::shared_ptr<SimFiles>& files() const noexcept { return files_; }

    /// Every attempt in a direction fails with this errno from now on; 0: none does. Threads: any.
    void refuse(IoDirection direction, int error) noexcept { refusals_[static_cast<std::size_t>(direction)] = error; }

    std::uint64_t injected_count(SimFault fault) const { return injected_[static_cast<std::size_t>(fault)]; }
    std::uint64_t write_count() const noexcept { return write_count_; }  // requests that were finished
    std::uint64_t read_count() const noexcept { return read_count_; }

private:
    struct Pending {
        IoRequest* request = nullptr;
        std::uint64_t due_tick = 0;
    };

    std::optional<SimFault> draw(const IoRequest& request);
    std::int64_t attempt(IoRequest& request, std::optional<SimFault> fault);
    void make_as_long_as(int file_descriptor, std::size_t size_bytes);
    std::int64_t move_bytes(IoRequest& request, std::size_t size_bytes);
    std::size_t step(std::span<IoRequest*> finished);
    std::uint64_t below(std::uint64_t limit) { return random_() % limit; }

    const std::size_t capacity_;
    std::mt19937_64 random_;
    const SimChances chances_;
    std::deque<SimFault> scripted_;
    std::array<std::atomic<int>, 2> refusals_{};
    std::function<SimAnswer(const IoRequest&)> answer_;
    std::shared_ptr<SimFiles> files_;
    std::set<std::pair<int, std::uint64_t>> bad_sectors_;
    std::deque<Pending> pending_;
    std::uint64_t tick_ = 0;
    BufferIndex next_buffer_ = 0;
    std::array<std::uint64_t, kSimFaultCount> injected_{};
    std::uint64_t write_count_ = 0;
    std::uint64_t read_count_ = 0;
    WakeEvent event_;
    std::atomic<bool> woken_{false};
};

}  // namespace torch_offload::test
