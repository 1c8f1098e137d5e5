// What csrc/device and csrc/pager rely on a driver for, each contract by itself: driver_program checks.
#pragma once

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <semaphore>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/cuda_event.h"
#include "device/cuda_stream.h"
#include "driver_machine.cuh"
#include "pager/pager.h"
#include "pager/tier_store.h"

namespace torch_offload::checks {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using Clock = std::chrono::steady_clock;

/// Long enough for the host to be ahead; a rehearsal shares its processors with others.
inline constexpr milliseconds kLongKernel{Machine::kIsRehearsal ? 1000 : 50};
inline constexpr double kWellBeforeItsEndMs = 0.8 * kLongKernel.count();

inline double milliseconds_since(Clock::time_point since) {
    return std::chrono::duration<double, std::milli>(Clock::now() - since).count();
}

/// A reserved range that ends with its scope.
class Range {
public:
    Range(Memory& memory, std::size_t size_bytes) : memory_(memory), range_(memory.reserve(size_bytes, nullptr)) {}
    ~Range() { memory_.release(range_); }
    Range(const Range&) = delete;
    Range& operator=(const Range&) = delete;
    std::span<std::byte> get() const { return range_; }
    std::span<std::byte> committed() const {
        memory_.commit(range_, HugePages::never);
        return range_;
    }

private:
    Memory& memory_;
    std::span<std::byte> range_;
};

inline std::vector<std::byte> random_bytes(std::size_t count, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::byte> bytes(round_up(count, sizeof(std::uint64_t)));
    for (std::size_t i = 0; i < bytes.size(); i += sizeof(std::uint64_t)) {
        const std::uint64_t word = random();
        std::memcpy(&bytes[i], &word, sizeof(word));
    }
    bytes.resize(count);
    return bytes;
}

inline bool are_all(std::span<const std::byte> bytes, int value) {
    return std::ranges::all_of(bytes, [&](std::byte byte) { return std::to_integer<int>(byte) == value; });
}

// --- Memory -------------------------------------------------------------------------------------------------------

inline std::string granularity(Machine& machine) {
    require(machine.granule_bytes() == 2 * kMiB, "granules of ", machine.granule_bytes(), " bytes");
    constexpr int kRecommended = 1;
    const CuAllocationProperties properties;
    std::size_t recommended_bytes = 0;
    const CuResult result =
        machine.functions().cuMemGetAllocationGranularity(&recommended_bytes, &properties, kRecommended);
    require(result == CuResult::success, machine.text_of(result));
    return concat(machine.granule_bytes(), " bytes, recommended ", recommended_bytes);
}

/// Others, the driver itself among them, may take or give a little meanwhile.
inline void require_equally_free(const Machine& machine, std::size_t before) {
    const std::size_t now = machine.free_bytes();
    const std::size_t slack = Machine::kIsRehearsal ? 0 : 2 * kMiB;
    require(now <= before + slack && before <= now + slack, before, " bytes were free before, ", now, " after");
}

/// Memory that is committed can be filled and read, and goes back to the device.
inline std::string commit_and_decommit(Machine& machine) {
    CudaMemory& memory = machine.memory();
    const std::size_t free_before = machine.free_bytes();
    std::size_t free_with = 0;
    {
        const Range range(memory, 8 * machine.granule_bytes());
        require(!machine.is_mapped(range.get()), "reserved addresses have memory");
        memory.commit(range.get(), HugePages::never);
        free_with = machine.free_bytes();
        require(machine.is_mapped(range.get()), "committed memory is not mapped");
        memory.poison(range.get());
        require(are_all(machine.read_back(range.get()), 0xFF), "poison() left other bytes");
        memory.fill_zero(range.get());
        require(are_all(machine.read_back(range.get()), 0), "fill_zero() left other bytes");
        memory.decommit(range.get());
        require(!machine.is_mapped(range.get()), "decommitted memory is mapped");
        memory.commit(range.get().first(machine.granule_bytes()), HugePages::never);  // release() gives that back
    }
    const std::size_t free_after = machine.free_bytes();
    require_equally_free(machine, free_before);
    return concat("free bytes: ", free_before, ", with 8 granules ", free_with, ", then ", free_after);
}

/// Memory that moves is where it was committed as well, and comes back.
inline std::string move_keeps_contents(Machine& machine, std::size_t granules) {
    CudaMemory& memory = machine.memory();
    const std::size_t size_bytes = granules * machine.granule_bytes();
    const Range slot(memory, size_bytes);
    const Range place(memory, size_bytes);
    machine.write(slot.committed(), random_bytes(size_bytes, granules));
    for (std::uint64_t round = 0; round < 3; ++round) {
        const std::vector<std::byte> bytes = random_bytes(size_bytes, 10 + round);
        memory.move(slot.get(), place.get().data(), Protection::read_write);
        machine.write(place.get(), bytes);
        require(machine.read_back(slot.get()) == bytes, "other bytes where it was committed, round ", round);
        memory.move(place.get(), slot.get().data(), Protection::read_write);
        require(machine.read_back(slot.get()) == bytes, "other bytes after it came back, round ", round);
        require(!machine.is_mapped(place.get()), "it is still mapped where it was, round ", round);
    }
    return concat("3 moves of ", size_bytes, " bytes, there and back");
}

inline std::string part_is_refused(Machine& machine) {
    CudaMemory& memory = machine.memory();
    const std::size_t granule = machine.granule_bytes();
    const Range first(memory, 4 * granule);
    const Range second(memory, 4 * granule);
    machine.write(first.committed(), random_bytes(4 * granule, 9));
    try {
        memory.move(first.get().subspan(granule, granule), second.get().data(), Protection::read_write);
    } catch (const LogicError& error) {
        return error.what();
    }
    require(false, "one granule of four has moved");
    return {};
}

/// Pages of the host are copied where they lie, under their own address too.
inline std::string locked_memory_is_copied(Machine& machine) {
    LockedMemory& memory = machine.host_memory();
    const std::size_t size_bytes = 8 * kMiB;
    const Range slot(memory, size_bytes);
    const Range place(memory, size_bytes);
    const Range there(machine.memory(), size_bytes);
    static_cast<void>(there.committed());
    const std::span<std::byte> page = slot.committed();
    require(memory.is_locked(page), "the driver does not register a file in memory");
    const auto up = machine.device().make_stream(LinkDirection::to_device);
    const auto down = machine.device().make_stream(LinkDirection::to_host);
    for (std::uint64_t round = 0; round < 3; ++round) {
        const std::vector<std::byte> bytes = random_bytes(size_bytes, round);
        memory.move(page, place.get().data(), Protection::read_write);
        std::ranges::copy(bytes, place.get().begin());
        up->copy(there.get(), page);
        up->record()->wait();
        std::ranges::fill(place.get(), std::byte{0});
        down->copy(page, there.get());
        down->record()->wait();
        require(std::ranges::equal(place.get(), bytes), "other bytes, round ", round);
        memory.move(place.get(), page.data(), Protection::read_write);
    }
    return concat(size_bytes, " bytes there and back, 3 times");
}

/// All of the device's memory but some 64 MiB.
class RestOfMemory {
public:
    explicit RestOfMemory(Machine& machine) : machine_(machine) {
        const CudaContext::Scope scope(machine.context());
        CuAllocationProperties properties;
        CuResult result = CuResult::out_of_memory;
        for (std::size_t left = 64 * kMiB; result == CuResult::out_of_memory && left < 4 * kGiB; left *= 2) {
            const std::size_t free_bytes = machine.free_bytes();
            if (free_bytes <= left) break;
            size_bytes_ = (free_bytes - left) / machine.granule_bytes() * machine.granule_bytes();
            result = machine.functions().cuMemCreate(&memory_, size_bytes_, &properties, 0);
        }
        require(result == CuResult::success, "taking ", size_bytes_, " bytes: ", machine.text_of(result));
    }
    ~RestOfMemory() {
        if (machine_.context().is_lost()) return;
        const CudaContext::Scope scope(machine_.context());
        static_cast<void>(machine_.functions().cuMemRelease(memory_));
    }
    RestOfMemory(const RestOfMemory&) = delete;
    RestOfMemory& operator=(const RestOfMemory&) = delete;
    std::size_t size_bytes() const { return size_bytes_; }

private:
    Machine& machine_;
    CuMemory memory_ = 0;
    std::size_t size_bytes_ = 0;
};

/// Others have the memory: said as such, and nothing was committed. It works once there is some.
inline std::string out_of_memory(Machine& machine) {
    CudaMemory& memory = machine.memory();
    const std::size_t free_first = machine.free_bytes();
    std::string said;
    std::size_t wanted_bytes = 0;
    std::size_t taken_bytes = 0;
    double refused_ms = 0;
    {
        const RestOfMemory rest(machine);
        taken_bytes = rest.size_bytes();
        const std::size_t free_before = machine.free_bytes();
        wanted_bytes = round_up(free_before, machine.granule_bytes()) + 32 * machine.granule_bytes();
        const Range range(memory, wanted_bytes);
        const auto since = Clock::now();
        try {
            memory.commit(range.get(), HugePages::never);
        } catch (const OutOfTierMemory& error) {
            said = error.what();
        }
        refused_ms = milliseconds_since(since);
        require(!said.empty(), wanted_bytes, " bytes were committed where ", free_before, " were free");
        require(!machine.context().is_lost(), "the device is lost");
        require(!machine.is_mapped(range.get()), "the refused range has memory");
        require_equally_free(machine, free_before);
        memory.commit(range.get().first(machine.granule_bytes()), HugePages::never);
    }
    require_equally_free(machine, free_first);
    return concat("others had ", taken_bytes, ", wanted ", wanted_bytes, ", refused after ", refused_ms, " ms: ", said);
}

// --- Copies and events --------------------------------------------------------------------------------------------

inline std::string staging_is_registered(Machine& machine) {
    const CudaStaging staging(machine.context(), 4 * kMiB);
    require(staging.is_registered(), "cuMemHostRegister_v2 was refused: copies are pageable; see ulimit -l");
    return "4 buffers of 4 MiB";
}

/// Random bytes of odd lengths go there, are changed by a kernel, and come back; several copies are under way at once.
inline std::string copies_both_ways(Machine& machine) {
    constexpr std::array<std::size_t, 7> kLengths = {
        4, 4 * kKiB, kMiB + 4, 4 * kMiB, 4 * kMiB + 4, 9 * kMiB + 12 * kKiB, 13 * kMiB - 4};
    CudaDevice& device = machine.device();
    const auto there = device.make_stream(LinkDirection::to_device);
    const auto back = device.make_stream(LinkDirection::to_host);
    const Range range(machine.memory(), 40 * kMiB);
    const std::span<std::byte> memory = range.committed();
    std::size_t total_bytes = 0;
    for (int round = 0; round < 2; ++round) {
        std::vector<std::vector<std::byte>> sent;
        std::vector<std::vector<std::byte>> came;
        std::size_t offset = 0;
        for (const std::size_t length : kLengths) {
            sent.push_back(random_bytes(length, length + static_cast<std::size_t>(round)));
            there->copy(memory.subspan(offset, length), sent.back());
            offset += length;
        }
        there->record()->wait();
        machine.launch_add_one(memory.first(offset), milliseconds(5));
        device.fence_use()->wait();
        offset = 0;
        for (const std::size_t length : kLengths) {
            came.emplace_back(length);
            back->copy(came.back(), memory.subspan(offset, length));
            offset += length;
        }
        const auto arrived = back->record();
        if (round == 0) arrived->wait();
        while (!arrived->has_passed()) std::this_thread::yield();
        for (std::size_t i = 0; i < kLengths.size(); ++i) {
            auto* const words = reinterpret_cast<std::uint32_t*>(sent[i].data());
            for (std::size_t k = 0; k < kLengths[i] / sizeof(*words); ++k) words[k] += 1;
            require(came[i] == sent[i], "a copy of ", kLengths[i], " bytes in round ", round, " came back changed");
        }
        total_bytes += 2 * offset;
    }
    return concat(total_bytes, " bytes; one round waited for, one asked whether it had passed");
}

inline std::string events_tell_the_end_of_kernels(Machine& machine) {
    const auto pool = CudaEventPool::make(machine.context());
    const auto idle = pool->record(machine.compute());
    idle->wait();
    require(idle->has_passed(), "an event of an idle stream has not passed");
    const auto since = Clock::now();
    machine.launch_wait(kLongKernel);
    const auto event = machine.device().fence_use();
    require(event != nullptr, "fence_use() gave no event");
    const double queued_ms = milliseconds_since(since);
    require(!event->has_passed(), "an event behind a long kernel has passed after ", queued_ms, " ms");
    require(queued_ms < kWellBeforeItsEndMs, "launching and recording took ", queued_ms,
            " ms: it waits for the kernel");
    event->wait();
    const double ended_ms = milliseconds_since(since);
    require(event->has_passed(), "an event that was waited for has not passed");
    require(ended_ms > kWellBeforeItsEndMs, "the wait for a long kernel took ", ended_ms, " ms");
    return concat("recorded after ", queued_ms, " ms, passed after ", ended_ms, " ms");
}

/// A stream beside the one of kernels.
class OtherStream {
public:
    explicit OtherStream(Machine& machine) : machine_(machine) {
        const CudaContext::Scope scope(machine.context());
        const CuResult result = machine.functions().cuStreamCreateWithPriority(&stream_, kCuStreamNonBlocking, 0);
        require(result == CuResult::success, machine.text_of(result));
    }
    ~OtherStream() {
        if (machine_.context().is_lost()) return;
        const CudaContext::Scope scope(machine_.context());
        static_cast<void>(machine_.functions().cuStreamDestroy_v2(stream_));
    }
    OtherStream(const OtherStream&) = delete;
    OtherStream& operator=(const OtherStream&) = delete;
    CuStream get() const { return stream_; }

private:
    Machine& machine_;
    CuStream stream_ = nullptr;
};

/// An event that is recorded again, in another stream, tells of that one only: pools give away what nobody waits for.
inline std::string events_tell_of_their_last_recording(Machine& machine) {
    const OtherStream other(machine);
    const auto pool = CudaEventPool::make(machine.context());
    machine.launch_wait(kLongKernel);
    const auto since = Clock::now();
    pool->record(machine.compute()).reset();
    const auto event = pool->record(other.get());
    event->wait();
    const double waited_ms = milliseconds_since(since);
    require(waited_ms < kWellBeforeItsEndMs, "an idle stream was waited for ", waited_ms,
            " ms, as for the long kernel");
    machine.wait_for_kernels();
    require(event->has_passed(), "it has not passed any more once its first recording has");
    return concat("waited ", waited_ms, " ms beside a kernel of ", kLongKernel.count(), " ms");
}

/// Copies and memory of pages do not wait for the program's kernels.
inline std::string copies_run_beside_kernels(Machine& machine) {
    const auto there = machine.device().make_stream(LinkDirection::to_device);
    const Range range(machine.memory(), 8 * kMiB);
    const std::vector<std::byte> bytes = random_bytes(8 * kMiB, 5);
    there->copy(range.committed(), bytes);
    there->record()->wait();
    machine.launch_wait(2 * kLongKernel);
    const auto kernel = machine.device().fence_use();
    const auto since = Clock::now();
    there->copy(range.get(), bytes);
    there->record()->wait();
    const double copied_ms = milliseconds_since(since);
    const bool was_running = !kernel->has_passed();
    kernel->wait();
    require(was_running, "8 MiB had arrived after ", copied_ms, " ms, when a kernel of ", 2 * kLongKernel.count(),
            " ms had ended");
    return concat("8 MiB within ", copied_ms, " ms");
}

// --- The pager ----------------------------------------------------------------------------------------------------

/// A device's pager over a host's over scratch files, with pages of one granule.
struct Tiers {
    static constexpr std::size_t kDevicePages = 8;
    static constexpr std::size_t kHostPages = 18;

    Tiers(Machine& machine, const std::string& directory)
        : host(options_of_host(machine, directory)),
          top(options_of_device(machine, directory), std::make_unique<TierStore>(host, machine.device())) {}

    static PagerOptions options_with(Machine& machine, const std::string& directory, std::size_t pages) {
        PagerOptions options;
        options.page_elements = machine.granule_bytes() / sizeof(std::uint32_t);
        options.budget_bytes = pages * machine.granule_bytes();
        options.directories = {directory};
        options.device = &machine.device();
        return options;
    }
    static PagerOptions options_of_host(Machine& machine, const std::string& directory) {
        PagerOptions options = options_with(machine, directory, kHostPages);
        options.memory = &machine.host_memory();
        return options;
    }
    static PagerOptions options_of_device(Machine& machine, const std::string& directory) {
        PagerOptions options = options_with(machine, directory, kDevicePages);
        options.tier = Tier::device;
        options.memory = &machine.memory();
        return options;
    }

    Pager host;
    Pager top;
};

inline PinGuard pin(Pager& pager, const std::shared_ptr<Segment>& segment, Access access) {
    const PinRequest request{segment, access};
    return pager.pin({&request, 1});
}

inline std::uint32_t first_value(std::size_t segment, std::size_t word) {
    return static_cast<std::uint32_t>(segment * 2654435761u + word);
}

/// Segments of one to three pages, every other one of zeros, and how often a kernel has added 1 to all words of each.
struct Counted {
    std::shared_ptr<Segment> segment;
    std::uint32_t count = 0;
    bool begins_as_zeros = false;
};

inline std::vector<Counted> make_counted(Machine& machine, Pager& pager, std::size_t how_many) {
    const auto stream = machine.device().make_stream(LinkDirection::to_device);
    std::vector<Counted> all;
    for (std::size_t i = 0; i < how_many; ++i) {
        const std::size_t size_bytes = (1 + i % 3) * machine.granule_bytes() - (i % 4 == 3 ? 60 : 0);
        Counted counted{pager.create_segment(size_bytes, sizeof(std::uint32_t), SegmentKind::parameter), 0, i % 2 == 1};
        counted.segment->label = concat("segment ", i);
        if (!counted.begins_as_zeros) {
            std::vector<std::uint32_t> words(size_bytes / sizeof(std::uint32_t));
            for (std::size_t k = 0; k < words.size(); ++k) words[k] = first_value(i, k);
            const PinGuard guard = pin(pager, counted.segment, Access::overwrite);
            stream->copy(counted.segment->range(), std::as_bytes(std::span(words)));
            stream->record()->wait();
        }
        all.push_back(std::move(counted));
    }
    return all;
}

/// How many words of all segments are not what they were plus the count.
inline std::size_t wrong_words(Machine& machine, Pager& pager, std::span<const Counted> all) {
    const auto stream = machine.device().make_stream(LinkDirection::to_host);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
        const PinGuard guard = pin(pager, all[i].segment, Access::read);
        machine.wait_for_kernels();
        std::vector<std::uint32_t> words(all[i].segment->size_bytes() / sizeof(std::uint32_t));
        stream->copy(std::as_writable_bytes(std::span(words)), all[i].segment->range());
        stream->record()->wait();
        for (std::size_t k = 0; k < words.size(); ++k) {
            wrong += words[k] != (all[i].begins_as_zeros ? 0 : first_value(i, k)) + all[i].count;
        }
    }
    return wrong;
}

inline std::uint64_t total(const std::uint64_t (&by_kind)[kSegmentKindCount]) {
    std::uint64_t sum = 0;
    for (const std::uint64_t value : by_kind) sum += value;
    return sum;
}

/// Pages move below and come back while kernels that were given them are still running; every word holds the count.
/// Five times the device's memory, twice the host's.
inline std::string pages_hold_counts_of_kernels(Machine& machine, const std::string& directory) {
    Tiers tiers(machine, directory);
    std::vector<Counted> all = make_counted(machine, tiers.top, 20);
    const auto events = CudaEventPool::make(machine.context());
    std::mt19937_64 random(1);
    constexpr int kKernels = 400;
    const auto since = Clock::now();
    int still_running = 0;
    for (int step = 0; step < kKernels; ++step) {
        Counted& counted = all[random() % all.size()];
        {
            const PinGuard guard = pin(tiers.top, counted.segment, Access::write);
            machine.launch_add_one(counted.segment->range(), std::chrono::microseconds(random() % 1000));
        }
        ++counted.count;
        still_running += !events->record(machine.compute())->has_passed();
        if (random() % 3 == 0) tiers.top.prefetch(all[random() % all.size()].segment);
        if (step % 50 == 49) tiers.top.evict(counted.segment);
    }
    const double launched_ms = milliseconds_since(since);
    const std::size_t wrong = wrong_words(machine, tiers.top, all);
    const PagerStatistics top = tiers.top.statistics();
    const PagerStatistics host = tiers.host.statistics();
    const std::string seen = concat(
        kKernels, " kernels in ", launched_ms, " ms, ", still_running, " guards ended before their kernel; MiB down ",
        total(top.written_bytes) / kMiB, ", up ", total(top.read_bytes) / kMiB, "; to disk ",
        total(host.written_bytes) / kMiB, ", from disk ", total(host.read_bytes) / kMiB, "; device's peak ",
        top.memory.peak_bytes / kMiB, " of ", top.memory.limit_bytes / kMiB, "; wrong words ", wrong);
    require(wrong == 0, seen);
    require(still_running > kKernels / 4, seen, ": the kernels were too short to prove anything");
    require(top.memory.peak_bytes <= Tiers::kDevicePages * machine.granule_bytes(), seen);
    require(total(top.written_bytes) > 0 && total(top.read_bytes) > 0, seen);
    require(total(host.written_bytes) > 0 && total(host.read_bytes) > 0, seen);
    return seen;
}

/// Everything goes to the host and on to disk, on request, and comes back the same.
inline std::string pages_come_back_from_disk(Machine& machine, const std::string& directory) {
    Tiers tiers(machine, directory);
    std::vector<Counted> all = make_counted(machine, tiers.top, 12);
    for (Counted& counted : all) {
        require(tiers.top.evict(counted.segment) == 0, counted.segment->label, " stays on the device");
        require(!tiers.top.is_resident(*counted.segment), counted.segment->label, " is on the device");
        if (const auto backing = counted.segment->backing()) tiers.host.evict(backing);
    }
    tiers.host.flush();
    const std::size_t wrong = wrong_words(machine, tiers.top, all);
    const PagerStatistics host = tiers.host.statistics();
    const std::string seen = concat("MiB to disk ", total(host.written_bytes) / kMiB, ", from disk ",
                                    total(host.read_bytes) / kMiB, "; wrong words ", wrong);
    require(wrong == 0 && total(host.read_bytes) > 0, seen);
    return seen;
}

// --- Capture into a graph -----------------------------------------------------------------------------------------

inline std::string own_capture_is_refused(Machine& machine) {
    std::string said;
    machine.capture_own_stream(true);
    try {
        machine.device().check_use();
    } catch (const InvalidArgument& error) {
        said = error.what();
    }
    machine.capture_own_stream(false);
    machine.device().check_use();
    require(!said.empty(), "check_use() accepts a stream that is captured");
    return said;
}

/// Another thread captures a stream of its own, in global mode, while a body runs. Not in a rehearsal.
class CaptureElsewhere {
public:
    explicit CaptureElsewhere(Machine& machine) : machine_(machine), thread_([this] { run(); }) { begun_.acquire(); }
    ~CaptureElsewhere() {
        if (thread_.joinable()) end();
    }
    CaptureElsewhere(const CaptureElsewhere&) = delete;
    CaptureElsewhere& operator=(const CaptureElsewhere&) = delete;

    CuResult begun_with() const { return begun_with_; }
    /// What the end of the capture says: success, or that somebody made it invalid.
    CuResult end() {
        ending_.release();
        thread_.join();
        return ended_with_;
    }

private:
    void run() {
        const CudaContext::Scope scope(machine_.context());
        const CudaFunctions& driver = machine_.functions();
        CuStream stream = nullptr;
        begun_with_ = driver.cuStreamCreateWithPriority(&stream, kCuStreamNonBlocking, 0);
        if (begun_with_ == CuResult::success) {
            begun_with_ = machine_.more().cuStreamBeginCapture_v2(stream, kCuCaptureModeGlobal);
        }
        begun_.release();
        ending_.acquire();
        CuGraph graph = nullptr;
        ended_with_ = machine_.more().cuStreamEndCapture(stream, &graph);
        if (graph) static_cast<void>(machine_.more().cuGraphDestroy(graph));
        static_cast<void>(driver.cuStreamDestroy_v2(stream));
    }

    Machine& machine_;
    std::binary_semaphore begun_{0};
    std::binary_semaphore ending_{0};
    CuResult begun_with_ = CuResult::success;
    CuResult ended_with_ = CuResult::success;
    std::thread thread_;  // begins last
};

/// One call of the driver that this library makes, and how to undo it.
struct Tried {
    const char* name;
    std::function<CuResult()> call;
    std::function<void()> undo = [] {};
};

/// Everything that the calls need, made before anybody captures.
struct CallsDuringCapture {
    explicit CallsDuringCapture(Machine& machine)
        : driver(machine.functions()), size_bytes(machine.granule_bytes()), host(size_bytes), more_host(size_bytes) {
        const auto done = [&](CuResult result) { require(result == CuResult::success, machine.text_of(result)); };
        done(driver.cuEventCreate(&event, kCuEventDisableTiming | kCuEventBlockingSync));
        done(driver.cuStreamCreateWithPriority(&stream, kCuStreamNonBlocking, 0));
        done(driver.cuEventRecord(event, stream));
        done(driver.cuStreamSynchronize(stream));
        done(driver.cuMemAddressReserve(&address, 2 * size_bytes, 0, 0, 0));
        done(driver.cuMemCreate(&memory, size_bytes, &properties, 0));
        done(driver.cuMemCreate(&mapped, size_bytes, &properties, 0));
        done(driver.cuMemCreate(&spare, size_bytes, &properties, 0));
        done(driver.cuMemMap(other(), size_bytes, 0, mapped, 0));
        done(driver.cuMemSetAccess(other(), size_bytes, &access, 1));
        done(driver.cuMemHostRegister_v2(host.data(), host.size(), kCuHostRegisterPortable));
    }
    ~CallsDuringCapture() {
        const std::array results = {driver.cuMemHostUnregister(host.data()),
                                    driver.cuMemUnmap(other(), size_bytes),
                                    driver.cuMemRelease(mapped),
                                    driver.cuMemRelease(memory),
                                    driver.cuMemAddressFree(address, 2 * size_bytes),
                                    driver.cuStreamDestroy_v2(stream),
                                    driver.cuEventDestroy_v2(event),
                                    driver.cuMemRelease(spare)};
        for (const CuResult result : results) {
            if (result != CuResult::success) std::fprintf(stderr, "left behind: %d\n", static_cast<int>(result));
        }
    }
    CallsDuringCapture(const CallsDuringCapture&) = delete;
    CallsDuringCapture& operator=(const CallsDuringCapture&) = delete;

    CuAddress other() const { return address + size_bytes; }

    std::vector<Tried> all() {
        const auto ignore = [](CuResult) {};
        return {
            {"cuEventQuery", [this] { return driver.cuEventQuery(event); }},
            {"cuEventRecord", [this] { return driver.cuEventRecord(event, stream); }},
            {"cuEventSynchronize", [this] { return driver.cuEventSynchronize(event); }},
            {"cuStreamSynchronize", [this] { return driver.cuStreamSynchronize(stream); }},
            {"cuStreamIsCapturing",
             [this] {
                 int status = 0;
                 return driver.cuStreamIsCapturing(stream, &status);
             }},
            {"cuEventCreate", [this] { return driver.cuEventCreate(&made_event, kCuEventDisableTiming); },
             [=, this] { ignore(driver.cuEventDestroy_v2(made_event)); }},
            {"cuStreamCreateWithPriority",
             [this] { return driver.cuStreamCreateWithPriority(&made_stream, kCuStreamNonBlocking, 0); },
             [=, this] { ignore(driver.cuStreamDestroy_v2(made_stream)); }},
            {"cuMemAddressReserve", [this] { return driver.cuMemAddressReserve(&made_address, size_bytes, 0, 0, 0); },
             [=, this] { ignore(driver.cuMemAddressFree(made_address, size_bytes)); }},
            {"cuMemCreate", [this] { return driver.cuMemCreate(&made_memory, size_bytes, &properties, 0); },
             [=, this] { ignore(driver.cuMemRelease(made_memory)); }},
            {"cuMemMap", [this] { return driver.cuMemMap(address, size_bytes, 0, memory, 0); },
             [=, this] { ignore(driver.cuMemUnmap(address, size_bytes)); }},
            {"cuMemSetAccess", [this] { return driver.cuMemSetAccess(other(), size_bytes, &access, 1); }},
            {"cuMemUnmap", [this] { return driver.cuMemUnmap(other(), size_bytes); },
             [=, this] {
                 ignore(driver.cuMemMap(other(), size_bytes, 0, mapped, 0));
                 ignore(driver.cuMemSetAccess(other(), size_bytes, &access, 1));
             }},
            {"cuMemRelease", [this] { return driver.cuMemRelease(spare); },
             [this] { require(driver.cuMemCreate(&spare, size_bytes, &properties, 0) == CuResult::success, "spare"); }},
            {"cuMemHostRegister_v2",
             [this] { return driver.cuMemHostRegister_v2(more_host.data(), size_bytes, kCuHostRegisterPortable); },
             [=, this] { ignore(driver.cuMemHostUnregister(more_host.data())); }},
            {"cuMemsetD8Async", [this] { return driver.cuMemsetD8Async(other(), 1, size_bytes, stream); }},
            {"cuMemcpyHtoDAsync_v2",
             [this] { return driver.cuMemcpyHtoDAsync_v2(other(), host.data(), size_bytes, stream); }},
            {"cuMemcpyDtoHAsync_v2",
             [this] { return driver.cuMemcpyDtoHAsync_v2(host.data(), other(), size_bytes, stream); }},
        };
    }

    const CudaFunctions& driver;
    const std::size_t size_bytes;
    std::vector<std::byte> host;
    std::vector<std::byte> more_host;
    CuAllocationProperties properties;
    CuAccessDescription access;
    CuEvent event = nullptr;
    CuStream stream = nullptr;
    CuAddress address = 0;
    CuMemory memory = 0;
    CuMemory mapped = 0;
    CuMemory spare = 0;
    CuEvent made_event = nullptr;
    CuStream made_stream = nullptr;
    CuAddress made_address = 0;
    CuMemory made_memory = 0;
};

/// What each call says while another thread captures, and whether the capture survived it. `mode`: of this thread. A
/// relaxed one is to be refused nothing; the other is only looked at.
inline std::string calls_during_capture(Machine& machine, int mode) {
    if (Machine::kIsRehearsal) throw NotInARehearsal();
    const CudaContext::Scope scope(machine.context());
    CallsDuringCapture calls(machine);
    std::string refused;
    std::string spoiled;
    std::string fine;
    for (const Tried& tried : calls.all()) {
        static_cast<void>(machine.functions().cuStreamSynchronize(calls.stream));
        CaptureElsewhere capture(machine);
        require(capture.begun_with() == CuResult::success, "capturing: ", machine.text_of(capture.begun_with()));
        int exchanged = mode;
        const CuResult asked = machine.more().cuThreadExchangeStreamCaptureMode(&exchanged);
        const CuResult result = tried.call();
        if (asked == CuResult::success) static_cast<void>(machine.more().cuThreadExchangeStreamCaptureMode(&exchanged));
        const CuResult ended = capture.end();
        if (result == CuResult::success) tried.undo();
        require(asked == CuResult::success, "cuThreadExchangeStreamCaptureMode: ", machine.text_of(asked));
        const bool is_answer = result == CuResult::success || result == CuResult::not_ready;
        if (!is_answer) refused += concat(tried.name, " = ", machine.text_of(result), "; ");
        if (ended != CuResult::success) spoiled += concat(tried.name, " (", machine.text_of(ended), "); ");
        if (is_answer && ended == CuResult::success) fine += concat(tried.name, "; ");
    }
    const std::string seen = concat("refused: ", refused, "captures spoiled by: ", spoiled, "fine: ", fine);
    require(mode != kCuCaptureModeRelaxed || (refused.empty() && spoiled.empty()), seen);
    return seen;
}

/// Another thread of the program captures something of its own: the device is not lost to this library, what it does
/// works, and the capture stays valid.
inline std::string capture_elsewhere_harms_nobody(Machine& machine) {
    if (Machine::kIsRehearsal) throw NotInARehearsal();
    const CudaContext context(machine.driver(), 0);  // of its own, as it may be lost
    const auto pool = CudaEventPool::make(context);
    CudaMemory memory(context);
    const Range range(memory, 2 * memory.granularity_bytes());
    const auto event = pool->record(machine.compute());
    event->wait();
    CaptureElsewhere capture(machine);
    require(capture.begun_with() == CuResult::success, "capturing: ", machine.text_of(capture.begun_with()));
    std::string seen;
    const auto attempt = [&](const char* what, const std::function<void()>& call) {
        const bool was_lost = context.is_lost();
        try {
            call();
        } catch (const std::exception& error) {
            seen += concat(what, ": ", error.what(), "; ");
        }
        if (!was_lost && context.is_lost()) seen += concat(what, " loses the device; ");
    };
    attempt("has_passed()", [&] { static_cast<void>(event->has_passed()); });
    attempt("wait()", [&] { event->wait(); });
    attempt("commit()", [&] { memory.commit(range.get(), HugePages::never); });
    attempt("fill_zero()", [&] { memory.fill_zero(range.get()); });
    attempt("decommit()", [&] { memory.decommit(range.get()); });
    const CuResult ended = capture.end();
    if (ended != CuResult::success) seen += concat("the capture ends with ", machine.text_of(ended));
    require(seen.empty(), seen);
    return "event, memory and capture";
}

// --- A lost device ------------------------------------------------------------------------------------------------

/// A kernel meets an address without memory: it is said as an error, to whatever comes after as well, and everything
/// ends quietly. Ends the use of the device in this process.
inline std::string lost_device_is_said(Machine& machine) {
    CudaMemory& memory = machine.memory();
    const Range range(memory, machine.granule_bytes());
    const Range other(memory, machine.granule_bytes());
    static_cast<void>(other.committed());
    machine.break_device(range.get());
    const auto event = machine.device().fence_use();
    std::string said = event || !machine.context().is_lost() ? "" : "fence_use() met it, see the log";
    try {
        if (event) event->wait();
    } catch (const TierIoError& error) {
        said = error.what();
    }
    require(!said.empty(), "no error");
    require(machine.context().is_lost(), "the device does not count as lost");
    require(!event || event->has_passed(), "an event of a lost device has not passed");
    require(machine.device().fence_use() == nullptr, "a lost device still gives events");
    const auto is_refused = [](const std::function<void()>& call) {
        try {
            call();
        } catch (const TierIoError&) {
            return true;
        }
        return false;
    };
    require(is_refused([&] { memory.commit(range.get(), HugePages::never); }), "commit() did not say so");
    require(is_refused([&] { memory.fill_zero(other.get()); }), "fill_zero() did not say so");
    require(is_refused([&] { machine.device().check_use(); }), "check_use() did not say so");
    return said;
}

/// The same in a process of its own, which has to end well.
inline std::string lost_device_ends_quietly(const std::string& program) {
    FILE* const child = ::popen(concat("'", program, "' lost 2>&1").c_str(), "r");
    require(child != nullptr, "no process could be started");
    std::string output;
    std::array<char, 4096> piece{};
    while (std::fgets(piece.data(), piece.size(), child)) output += piece.data();
    const int status = ::pclose(child);
    require(status == 0, "status ", status, ": ", output);
    return output;
}

// --- All ----------------------------------------------------------------------------------------------------------

inline void run_all(Machine& machine, Report& report, const std::string& directory, const std::string& program) {
    const auto check = [&](const char* name, const std::function<std::string()>& contract) {
        report.check(name, contract);
    };
    check("granules are of 2 MiB", [&] { return granularity(machine); });
    check("memory is committed, filled and given back", [&] { return commit_and_decommit(machine); });
    check("a move of 1 granule keeps contents", [&] { return move_keeps_contents(machine, 1); });
    check("a move of 4 granules keeps contents", [&] { return move_keeps_contents(machine, 4); });
    check("a part does not move alone", [&] { return part_is_refused(machine); });
    check("locked memory is copied where it lies", [&] { return locked_memory_is_copied(machine); });
    check("a lack of memory is said and leaves nothing behind", [&] { return out_of_memory(machine); });
    check("staging buffers are registered", [&] { return staging_is_registered(machine); });
    check("copies through staging keep bytes", [&] { return copies_both_ways(machine); });
    check("events tell the end of kernels", [&] { return events_tell_the_end_of_kernels(machine); });
    check("events tell of their last recording", [&] { return events_tell_of_their_last_recording(machine); });
    check("copies run beside kernels", [&] { return copies_run_beside_kernels(machine); });
    check("pages hold the counts of asynchronous kernels",
          [&] { return pages_hold_counts_of_kernels(machine, directory); });
    check("pages come back from disk", [&] { return pages_come_back_from_disk(machine, directory); });
    check("a capture of the own stream is refused", [&] { return own_capture_is_refused(machine); });
    check("calls during a capture elsewhere, this thread relaxed",
          [&] { return calls_during_capture(machine, kCuCaptureModeRelaxed); });
    check("calls during a capture elsewhere, this thread as it is",
          [&] { return calls_during_capture(machine, kCuCaptureModeGlobal); });
    check("a capture elsewhere harms nobody", [&] { return capture_elsewhere_harms_nobody(machine); });
    check("a lost device is said and ends quietly", [&] { return lost_device_ends_quietly(program); });
}

}  // namespace torch_offload::checks
