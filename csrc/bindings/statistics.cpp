#include "bindings/statistics.h"

#include <array>

namespace py = pybind11;

namespace torch_offload {
namespace {

constexpr std::array<const char*, kSegmentKindCount> kKindNames = {"parameter", "gradient", "state", "activation",
                                                                   "other"};
constexpr std::array<const char*, kStallCauseCount> kCauseNames = {"read", "memory", "update", "fault", "network"};
constexpr std::array<const char*, 5> kUseNames = {"read", "write", "create", "drop", "pass"};
constexpr double kNanosecondsPerSecond = 1e9;

py::dict by_kind(const std::uint64_t (&values)[kSegmentKindCount]) {
    py::dict result;
    for (std::size_t kind = 0; kind < kSegmentKindCount; ++kind) result[kKindNames[kind]] = values[kind];
    return result;
}

py::dict seconds_by_cause(const std::uint64_t (&nanoseconds)[kStallCauseCount]) {
    py::dict result;
    for (std::size_t cause = 0; cause < kStallCauseCount; ++cause) {
        result[kCauseNames[cause]] = static_cast<double>(nanoseconds[cause]) / kNanosecondsPerSecond;
    }
    return result;
}

/// Of each bin that has any: its bounds in seconds, and how many reads took so long.
py::list spread_of(const ReadTimes::Counts& counts) {
    py::list result;
    for (std::size_t bin = 0; bin < counts.size(); ++bin) {
        if (counts[bin] == 0) continue;
        result.append(py::make_tuple(static_cast<double>(ReadTimes::begin_ns(bin)) / kNanosecondsPerSecond,
                                     static_cast<double>(ReadTimes::begin_ns(bin + 1)) / kNanosecondsPerSecond,
                                     counts[bin]));
    }
    return result;
}

py::dict share_of(const ShareStatistics& share) {
    py::dict result;
    result["shared_bytes"] = share.shared_bytes;
    result["equal_bytes"] = share.equal_bytes;
    result["guaranteed_bytes"] = share.guaranteed_bytes;
    result["leased_bytes"] = share.leased_bytes;
    result["most_leased_bytes"] = share.most_leased_bytes;
    result["given_back_bytes"] = share.given_back_bytes;
    return result;
}

/// The host's memory, and what goes between it and the SSD.
void add_host(py::dict& result, const PagerStatistics& pager) {
    result["memory"] = memory_of(pager.memory);
    if (pager.share.shared_bytes != 0) result["share"] = share_of(pager.share);
    result["stored_bytes"] = pager.store.stored_bytes;
    result["file_bytes"] = pager.store.file_bytes;
    result["read_bytes"] = by_kind(pager.read_bytes);
    result["written_bytes"] = by_kind(pager.written_bytes);
    result["retried_reads"] = pager.store.retried_reads;
    result["retried_writes"] = pager.store.retried_writes;
    result["healed_mismatches"] = pager.store.healed_mismatches;
    result["quarantined_bytes"] = pager.store.quarantined_bytes;
    result["home_bytes"] = pager.store.home_bytes;
    result["read_times"] = spread_of(pager.store.read_times);
    result["engine"] = pager.store.engine;
}

/// A device's memory, and what goes between it and the host's.
void add_device(py::dict& result, const PagerStatistics& pager) {
    py::dict device;
    device["name"] = pager.store.engine;
    device["memory"] = memory_of(pager.memory);
    device["to_device_bytes"] = by_kind(pager.read_bytes);
    device["to_host_bytes"] = by_kind(pager.written_bytes);
    result["device"] = device;
}

/// What the program waited for in either memory.
void add_stalls(PagerStatistics& sum, const PagerStatistics& other) {
    for (std::size_t cause = 0; cause < kStallCauseCount; ++cause) sum.stall_ns[cause] += other.stall_ns[cause];
}

/// Compute memory, whosever it is.
void add_compute(py::dict& result, const PagerStatistics& pager) {
    result["pins"] = pager.pins;
    result["misses"] = pager.misses;
    result["faults"] = pager.faults;
    result["evictions"] = pager.evictions;
    result["clean_drops"] = pager.clean_drops;
    result["prefetches"] = pager.prefetches;
    result["stall_seconds"] = seconds_by_cause(pager.stall_ns);
    result["updates_in_rank_waits"] = pager.updates_in_rank_waits;
    result["own_update_seconds"] = static_cast<double>(pager.own_update_ns) / kNanosecondsPerSecond;
}

void add_deferred(py::dict& result, const DeferredStatistics& deferred) {
    result["recorded_elements"] = deferred.recorded_elements;
    result["applied_pages"] = deferred.applied_pages;
    result["applied_at_once"] = deferred.applied_at_once;
    result["applied_remotely"] = deferred.applied_remotely;
    result["forced_chains"] = deferred.forced_chains;
}

void add_counters(py::dict& result, const EngineCounters& counters) {
    result["norms_from_cache"] = counters.norms_from_cache.get();
    result["gradients_applied"] = counters.gradients_applied.get();
    result["fallback_calls"] = counters.fallback_calls.get();
    result["split_list_calls"] = counters.split_list_calls.get();
    result["adopted_bytes"] = counters.adopted_bytes.get();
    result["copied_bytes"] = counters.copied_bytes.get();
    result["direct_bytes"] = counters.direct_bytes.get();
    result["left_in_file_bytes"] = counters.home_bytes.get();
    result["saved_bytes"] = counters.saved_bytes.get();
    result["zero_segments"] = counters.zero_segments.get();
}

}  // namespace

const char* cause_name(StallCause cause) noexcept { return kCauseNames[static_cast<std::size_t>(cause)]; }

py::dict memory_of(const ArenaUsage& usage) {
    py::dict result;
    result["limit_bytes"] = usage.limit_bytes;
    result["most_limit_bytes"] = usage.most_limit_bytes;
    result["frame_bytes"] = usage.frame_bytes;
    result["free_frame_bytes"] = usage.free_frame_bytes;
    result["range_bytes"] = usage.range_bytes;
    result["idle_range_bytes"] = usage.idle_range_bytes;
    result["small_bytes"] = usage.small_bytes;
    result["used_bytes"] = usage.used_bytes();
    result["available_bytes"] = usage.available_bytes();
    result["peak_bytes"] = usage.peak_bytes;
    return result;
}

py::dict statistics_of(Engine& engine) {
    PagerStatistics compute;
    PagerStatistics host;
    {
        const py::gil_scoped_release no_gil;
        compute = engine.pager().statistics();
        host = engine.has_device() ? engine.host_pager().statistics() : compute;
    }
    py::dict result;
    if (engine.has_device()) add_stalls(compute, host);
    add_compute(result, compute);
    add_host(result, host);
    if (engine.has_device()) add_device(result, compute);
    add_deferred(result, engine.deferred().statistics());
    add_counters(result, engine.counters);
    return result;
}

py::list uses_of(Engine& engine) {
    py::list result;
    for (const UseEvent& use : engine.pager().take_use_log()) {
        result.append(py::make_tuple(kUseNames[static_cast<std::size_t>(use.kind)], use.segment_id, use.first_page,
                                     use.page_count, use.page_bytes, use.size_bytes, use.other_bytes,
                                     use.most_other_bytes));
    }
    return result;
}

}  // namespace torch_offload
