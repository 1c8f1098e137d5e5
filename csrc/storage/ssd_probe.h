// What a directory's disk gives at a queue depth, measured by the engine that pages will use. Layer storage: includes
// base only.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "storage/block_file.h"
#include "storage/io_engine.h"

namespace torch_offload {

struct SsdProbeOptions {
    std::string directory;  // on a real disk
    IoEngineKind engine = IoEngineKind::automatic;
    std::size_t block_bytes = std::size_t{2} << 20;   // per transfer, a multiple of kSectorBytes
    std::size_t file_bytes = std::size_t{256} << 20;  // rounded down to blocks; at least 2 * max_depth blocks
    std::size_t max_depth = 16;                       // memory taken: max_depth * block_bytes
    /// Called with the memory before it is touched, such as to ask for huge pages: with them a disk may give twice as
    /// much, and the pager's frames have them.
    void (*prepare_memory)(std::span<std::byte>) noexcept = nullptr;
};

/// mix: reads and writes in turns.
enum class SsdPattern : std::uint8_t { read, write, mix };

struct SsdLoad {
    SsdPattern pattern = SsdPattern::read;
    std::size_t depth = 16;  // transfers in flight, at most max_depth
    std::chrono::milliseconds duration{1000};
};

/// Whole transfers only; `seconds` ends when the last of them came back.
struct SsdBandwidth {
    std::uint64_t read_bytes = 0;
    std::uint64_t written_bytes = 0;
    double seconds = 0;

    double bytes_per_second() const noexcept {
        return seconds > 0 ? static_cast<double>(read_bytes + written_bytes) / seconds : 0;
    }
};

/// Random blocks of an unnamed, preallocated, fully written scratch file. Every block carries stamps that say which
/// block it is; every read is checked against them.
/// Threads: one, the constructing one: it owns the I/O engine.
class SsdProbe {
public:
    /// Makes the file and writes all of it once.
    /// Throws: InvalidArgument if an option or the directory cannot be used; TierIoError if the disk is full or a
    ///         transfer fails.
    explicit SsdProbe(const SsdProbeOptions& options);
    ~SsdProbe();

    /// Keeps `load.depth` transfers in flight for `load.duration`, then waits for the last.
    /// Throws: InvalidArgument for a depth of 0 or above max_depth; TierIoError if a transfer fails; CorruptPage if
    ///         a read brings other bytes than were written. The probe cannot be used after an error.
    SsdBandwidth measure(const SsdLoad& load);

    std::string engine_name() const { return engine_->name(); }
    std::uint64_t file_bytes() const noexcept { return block_count_ * block_bytes_; }

    /// Whether transfers pass by the page cache. Where not, the figures are those of memory.
    bool is_direct() const noexcept;

private:
    struct Slot;
    struct Run;

    std::span<std::byte> buffer_of(std::size_t slot) const noexcept;
    void fill_file();
    void start(Slot& slot, IoDirection direction, std::size_t block);
    void finish(const Slot& slot);
    void pump(Run& run);
    void collect(Run& run);
    std::size_t next_block();

    struct Free {
        void operator()(std::byte* memory) const noexcept;
    };

    const std::size_t block_bytes_;
    const std::size_t block_count_;
    const std::size_t max_depth_;
    std::mt19937_64 random_;
    std::vector<bool> is_busy_;  // per block: a transfer is in flight
    BlockFile file_;
    Extent extent_;
    std::unique_ptr<std::byte, Free> memory_;  // max_depth blocks
    std::vector<Slot> slots_;
    std::unique_ptr<IoEngine> engine_;  // destroyed first: it waits for what is in flight
};

}  // namespace torch_offload
