// In which order and how deep transfers are put to the disk, found out on the transfers themselves. Layer pager:
// includes base, storage.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <vector>

#include "storage/io_engine.h"

namespace torch_offload {

/// One way to feed a disk.
struct IoShape {
    std::size_t depth = 0;  // transfers under way
    std::size_t batch = 0;  // of one direction in a row while the other waits as well
};

/// What waits and what is under way.
struct IoLoad {
    std::size_t waiting_reads = 0;
    std::size_t waiting_writes = 0;
    std::size_t under_way = 0;
};

/// Chooses what is submitted next. A disk may give less for a mix than for either direction alone, and differently from
/// minute to minute; so the arbiter tries its shapes on the traffic there is, each for some hundred MiB, keeps to the
/// fastest and tries the others again from time to time. Only time in which more waits than is under way counts: else
/// the program sets the pace.
/// Threads: none; the store's.
class IoArbiter {
public:
    /// `capacity`: transfers that the I/O engine takes at once.
    explicit IoArbiter(std::size_t capacity);

    /// The direction to submit next, or nothing while enough is under way.
    std::optional<IoDirection> next(const IoLoad& load);

    /// What came back in the time since the last call, at the load that there was then.
    void note(std::size_t finished_bytes, std::chrono::nanoseconds elapsed, const IoLoad& load);

    const IoShape& shape() const noexcept { return trials_[current_].shape; }
    std::size_t trials() const noexcept { return finished_trials_; }

private:
    struct Trial {
        IoShape shape;
        double bytes_per_second = 0;  // running mean; 0: not tried yet
    };

    std::size_t choose();

    std::vector<Trial> trials_;
    std::size_t current_ = 0;
    std::size_t finished_trials_ = 0;
    std::size_t retried_ = 0;  // the last that was tried again in turn
    std::size_t trial_bytes_ = 0;
    std::chrono::nanoseconds trial_time_{0};
    IoDirection direction_ = IoDirection::read;
    std::size_t in_a_row_ = 0;
};

}  // namespace torch_offload
