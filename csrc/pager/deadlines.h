// How long reads may wait. Layer pager: includes base.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace torch_offload {

/// Reads that are due together, in the order of their uses.
struct DueReads {
    std::int64_t due_ns = 0;  // from now; below zero: already waited for
    std::size_t missing_bytes = 0;
};

/// What so many bytes take at a rate.
std::int64_t transfer_ns(std::size_t size_bytes, double bytes_per_second);

/// For each entry, how long reading may still be put off if it then goes on in order at `bytes_per_second` and nothing
/// from that entry on is to come late. A burst that is due together casts its shadow on what is due before it, so the
/// result never falls.
std::vector<std::int64_t> slack_of(std::span<const DueReads> reads, double bytes_per_second);

}  // namespace torch_offload
