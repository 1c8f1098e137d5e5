#include "pager/deadlines.h"

#include <algorithm>

namespace torch_offload {

std::int64_t transfer_ns(std::size_t size_bytes, double bytes_per_second) {
    constexpr double kNanosecondsPerSecond = 1e9;
    return static_cast<std::int64_t>(static_cast<double>(size_bytes) / bytes_per_second * kNanosecondsPerSecond);
}

std::vector<std::int64_t> slack_of(std::span<const DueReads> reads, double bytes_per_second) {
    std::vector<std::int64_t> slack;
    slack.reserve(reads.size());
    std::size_t missing_bytes = 0;
    for (const DueReads& read : reads) {
        missing_bytes += read.missing_bytes;
        slack.push_back(read.due_ns - transfer_ns(missing_bytes, bytes_per_second));
    }
    std::int64_t tightest_ns = INT64_MAX;
    for (auto entry = slack.rbegin(); entry != slack.rend(); ++entry) {
        *entry = tightest_ns = std::min(tightest_ns, *entry);
    }
    return slack;
}

}  // namespace torch_offload
