// What the calls of a driver cost that csrc/device makes, alone and while a kernel runs: driver_program timings.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "device/cuda_event.h"
#include "device/cuda_stream.h"
#include "driver_machine.cuh"

namespace torch_offload::timings {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

inline double microseconds_since(Clock::time_point since) {
    return std::chrono::duration<double, std::micro>(Clock::now() - since).count();
}

enum class During { idle, kernel };

/// Measurements of one thing. `extra`: more fields, as JSON, each with a comma before it.
class Timing {
public:
    Timing(std::string name, std::string unit, std::string extra = "")
        : name_(std::move(name)), unit_(std::move(unit)), extra_(std::move(extra)) {}

    void add(double value) { values_.push_back(value); }
    void note(const std::string& field, const std::string& value) { extra_ += ", " + quoted(field) + ": " + value; }
    void write(Report& report) {
        if (values_.empty()) return;
        std::ranges::sort(values_);
        const std::size_t middle = values_.size() / 2;
        const double median = values_.size() % 2 == 1 ? values_[middle] : (values_[middle - 1] + values_[middle]) / 2;
        std::ostringstream entry;
        entry << "{\"name\": " << quoted(name_) << ", \"unit\": " << quoted(unit_) << ", \"median\": " << median
              << ", \"smallest\": " << values_.front() << ", \"largest\": " << values_.back()
              << ", \"count\": " << values_.size() << extra_ << "}";
        report.add(entry.str());
    }

private:
    std::string name_;
    std::string unit_;
    std::string extra_;
    std::vector<double> values_;
};

inline void done(const Machine& machine, CuResult result, const char* what) {
    require(result == CuResult::success, what, ": ", machine.text_of(result));
}

/// A kernel that is running whenever something is measured.
class LongKernel {
public:
    explicit LongKernel(Machine& machine) : machine_(machine) {}
    ~LongKernel() {
        if (event_) event_->wait();
    }
    LongKernel(const LongKernel&) = delete;
    LongKernel& operator=(const LongKernel&) = delete;

    /// Returns while one runs that has most of its time before it.
    void be_running() {
        if (event_ && !event_->has_passed() && microseconds_since(since_) < 1e3 * kFreshFor.count()) return;
        if (event_) event_->wait();
        machine_.launch_wait(kDuration);
        since_ = Clock::now();
        event_ = machine_.device().fence_use();
        std::this_thread::sleep_for(milliseconds(2));
        require(!event_->has_passed(), "a long kernel has ended at once");
    }
    bool has_ended() const { return event_->has_passed(); }

private:
    static constexpr milliseconds kDuration{Machine::kIsRehearsal ? 1000 : 200};
    static constexpr milliseconds kFreshFor = kDuration / 2;
    Machine& machine_;
    std::shared_ptr<const Event> event_;
    Clock::time_point since_;
};

/// Measures calls, with a kernel running or not, and counts after how many of them the kernel had ended.
class Bench {
public:
    Bench(Machine& machine, During during) : machine_(machine), kernel_(machine), during_(during) {}

    const char* during() const { return during_ == During::idle ? "idle" : "kernel"; }
    /// Whether one more round is worth its time: where each call waits for a kernel there is only one.
    bool goes_on(int round) const {
        const int most = Machine::kIsRehearsal ? 2 : during_ == During::idle ? 15 : 5;
        return round == 0 || (round < most && microseconds_since(since_) < kEnoughUs);
    }

    /// Of one kind of call, several times; `extra` as Timing has it.
    void time(Timing& timing, int& ended, const std::function<void()>& call) {
        if (during_ == During::kernel) kernel_.be_running();
        const auto since = Clock::now();
        call();
        timing.add(microseconds_since(since));
        if (during_ == During::kernel) ended += kernel_.has_ended();
    }

    Machine& machine() { return machine_; }

private:
    static constexpr double kEnoughUs = 10e6;  // in all
    Machine& machine_;
    LongKernel kernel_;
    During during_;
    const Clock::time_point since_ = Clock::now();
};

/// One measurement that fails does not stop the others.
inline void attempt(Report& report, const std::string& name, const std::function<void()>& measure) {
    report.begin(name);
    const auto since = Clock::now();
    try {
        measure();
    } catch (const std::exception& error) {
        report.fail(name, error.what());
    }
    std::fprintf(stderr, "    %.1f s\n", microseconds_since(since) / 1e6);
}

/// One thing that is measured, several at a time in the same rounds.
struct Step {
    const char* name;
    std::function<void()> call;
    bool is_measured = true;
};

/// Rounds of steps, each step measured by itself.
inline void time_rounds(Bench& bench, Report& report, std::span<const Step> steps, const std::string& extra) {
    std::vector<Timing> timings;
    std::vector<int> ended(steps.size(), 0);
    for (const Step& step : steps) {
        timings.emplace_back(step.name, "us", concat(", \"during\": \"", bench.during(), "\"", extra));
    }
    for (int round = 0; bench.goes_on(round); ++round) {
        for (std::size_t i = 0; i < steps.size(); ++i) {
            if (steps[i].is_measured) {
                bench.time(timings[i], ended[i], steps[i].call);
            } else {
                steps[i].call();
            }
        }
    }
    for (std::size_t i = 0; i < steps.size(); ++i) {
        if (std::string(bench.during()) == "kernel") timings[i].note("kernel_had_ended", std::to_string(ended[i]));
        timings[i].write(report);
    }
}

// --- Calls on memory ----------------------------------------------------------------------------------------------

/// `count` handles of equal size under one range of addresses, by the driver's calls.
inline void time_mapping(Bench& bench, Report& report, std::size_t count, std::size_t handle_bytes) {
    Machine& machine = bench.machine();
    const CudaFunctions& driver = machine.functions();
    const std::size_t size_bytes = count * handle_bytes;
    const CuAllocationProperties properties;
    const CuAccessDescription access;
    CuAddress address = 0;
    std::vector<CuMemory> handles(count);
    const auto each = [&](const char* what, const auto& call) {
        for (std::size_t i = 0; i < count; ++i) done(machine, call(address + i * handle_bytes, handles[i]), what);
    };
    const std::array<Step, 7> steps = {{
        {"cuMemAddressReserve",
         [&] { done(machine, driver.cuMemAddressReserve(&address, size_bytes, 0, 0, 0), "reserving"); }},
        {"cuMemCreate",
         [&] {
             each("creating", [&](CuAddress, CuMemory& handle) {
                 return driver.cuMemCreate(&handle, handle_bytes, &properties, 0);
             });
         }},
        {"cuMemMap",
         [&] {
             each("mapping",
                  [&](CuAddress at, CuMemory& handle) { return driver.cuMemMap(at, handle_bytes, 0, handle, 0); });
         }},
        {"cuMemSetAccess",
         [&] { done(machine, driver.cuMemSetAccess(address, size_bytes, &access, 1), "setting access"); }},
        {"cuMemUnmap",
         [&] { each("unmapping", [&](CuAddress at, CuMemory&) { return driver.cuMemUnmap(at, handle_bytes); }); }},
        {"cuMemRelease",
         [&] { each("releasing", [&](CuAddress, CuMemory& handle) { return driver.cuMemRelease(handle); }); }},
        {"cuMemAddressFree", [&] { done(machine, driver.cuMemAddressFree(address, size_bytes), "freeing"); }},
    }};
    time_rounds(bench, report, steps, concat(", \"handles\": ", count, ", \"handle_bytes\": ", handle_bytes));
}

/// Handles that stay mapped at one address and come and go at another.
inline void time_alias(Bench& bench, Report& report, std::size_t count, std::size_t handle_bytes) {
    Machine& machine = bench.machine();
    const CudaFunctions& driver = machine.functions();
    const std::size_t size_bytes = count * handle_bytes;
    const CuAllocationProperties properties;
    const CuAccessDescription access;
    CuAddress slot = 0;
    CuAddress alias = 0;
    done(machine, driver.cuMemAddressReserve(&slot, size_bytes, 0, 0, 0), "reserving");
    done(machine, driver.cuMemAddressReserve(&alias, size_bytes, 0, 0, 0), "reserving");
    std::vector<CuMemory> handles(count);
    for (std::size_t i = 0; i < count; ++i) {
        done(machine, driver.cuMemCreate(&handles[i], handle_bytes, &properties, 0), "creating");
        done(machine, driver.cuMemMap(slot + i * handle_bytes, handle_bytes, 0, handles[i], 0), "mapping");
    }
    done(machine, driver.cuMemSetAccess(slot, size_bytes, &access, 1), "setting access");
    const auto map_alias = [&] {
        for (std::size_t i = 0; i < count; ++i) {
            done(machine, driver.cuMemMap(alias + i * handle_bytes, handle_bytes, 0, handles[i], 0), "mapping twice");
        }
    };
    const auto set_access = [&] { done(machine, driver.cuMemSetAccess(alias, size_bytes, &access, 1), "its access"); };
    const auto unmap_alias = [&] {
        for (std::size_t i = 0; i < count; ++i) {
            done(machine, driver.cuMemUnmap(alias + i * handle_bytes, handle_bytes), "unmapping the alias");
        }
    };
    map_alias();
    set_access();
    done(machine, driver.cuMemsetD8Async(slot, 0x5A, size_bytes, machine.compute()), "filling");
    machine.wait_for_kernels();
    const auto seen = machine.read_back({reinterpret_cast<const std::byte*>(alias), size_bytes});
    require(seen.back() == std::byte{0x5A} && seen.front() == std::byte{0x5A}, "the alias shows other bytes");
    unmap_alias();
    const std::array<Step, 3> steps = {
        {{"alias cuMemMap", map_alias}, {"alias cuMemSetAccess", set_access}, {"alias cuMemUnmap", unmap_alias}}};
    time_rounds(bench, report, steps, concat(", \"handles\": ", count, ", \"handle_bytes\": ", handle_bytes));
    for (std::size_t i = 0; i < count; ++i) {
        done(machine, driver.cuMemUnmap(slot + i * handle_bytes, handle_bytes), "unmapping");
        done(machine, driver.cuMemRelease(handles[i]), "releasing");
    }
    done(machine, driver.cuMemAddressFree(slot, size_bytes), "freeing");
    done(machine, driver.cuMemAddressFree(alias, size_bytes), "freeing");
}

/// The same through a Memory, as a pager moves pages.
inline void time_moves(Bench& bench, Report& report, const char* name, Memory& memory, std::size_t size_bytes) {
    const std::span<std::byte> from = memory.reserve(size_bytes, nullptr);
    const std::span<std::byte> to = memory.reserve(size_bytes, nullptr);
    const std::array<Step, 5> steps = {{
        {"commit", [&] { memory.commit(from, HugePages::never); }},
        {"move", [&] { memory.move(from, to.data(), Protection::read_write); }},
        {"move back", [&] { memory.move(to, from.data(), Protection::read_write); }},
        {"fill_zero", [&] { memory.fill_zero(from); }},
        {"decommit", [&] { memory.decommit(from); }},
    }};
    time_rounds(bench, report, steps, concat(", \"memory\": \"", name, "\", \"size_bytes\": ", size_bytes));
    memory.release(from);
    memory.release(to);
}

inline void time_memory(Machine& machine, Report& report, During during) {
    const CudaContext::Scope scope(machine.context());
    Bench bench(machine, during);
    const auto each = [&](const char* what, std::size_t count, std::size_t size_mib, const auto& measure) {
        attempt(report, concat(what, ", ", count, " of ", size_mib, " MiB, ", bench.during()),
                [&] { measure(bench, report, count, size_mib * kMiB); });
    };
    for (const std::size_t size_mib : {2, 8, 32}) {
        each("CudaMemory", 1, size_mib, [](Bench& b, Report& r, std::size_t, std::size_t size_bytes) {
            time_moves(b, r, "CudaMemory", b.machine().memory(), size_bytes);
        });
        each("LockedMemory", 1, size_mib, [](Bench& b, Report& r, std::size_t, std::size_t size_bytes) {
            time_moves(b, r, "LockedMemory", b.machine().host_memory(), size_bytes);
        });
    }
    for (const std::size_t count : {1, 4, 16}) each("mapping", count, 2, time_mapping);
    for (const std::size_t size_mib : {8, 32, 128}) each("mapping", 1, size_mib, time_mapping);
    for (const std::size_t count : {1, 4, 16}) each("alias", count, 2, time_alias);
    for (const std::size_t size_mib : {8, 32}) each("alias", 1, size_mib, time_alias);
}

// --- Short calls --------------------------------------------------------------------------------------------------

/// The mean of many calls, many times.
inline void time_short(
    Report& report, const std::string& name, int calls, const std::function<void()>& call,
    const std::function<void()>& between = [] {}) {
    Timing timing(name, "us", concat(", \"calls_each\": ", calls));
    for (int batch = 0; batch < (Machine::kIsRehearsal ? 2 : 21); ++batch) {
        const auto since = Clock::now();
        for (int i = 0; i < calls; ++i) call();
        timing.add(microseconds_since(since) / calls);
        between();
    }
    timing.write(report);
}

/// Whether moving memory in one thread holds up the kernels of another.
inline void time_launches_beside_moves(Machine& machine, Report& report, int calls) {
    CudaMemory& memory = machine.memory();
    const std::span<std::byte> from = memory.reserve(8 * kMiB, nullptr);
    const std::span<std::byte> to = memory.reserve(8 * kMiB, nullptr);
    memory.commit(from, HugePages::never);
    std::atomic<bool> is_ending{false};
    std::string error;
    std::thread mover([&] {
        try {
            while (!is_ending) {
                memory.move(from, to.data(), Protection::read_write);
                memory.move(to, from.data(), Protection::read_write);
            }
        } catch (const std::exception& thrown) {
            error = thrown.what();
        }
    });
    time_short(
        report, "launching a kernel while another thread moves 8 MiB", calls,
        [&] { machine.launch_wait(std::chrono::nanoseconds(0)); }, [&] { machine.wait_for_kernels(); });
    is_ending = true;
    mover.join();
    memory.release(from);
    memory.release(to);
    require(error.empty(), error);
}

inline void time_short_calls(Machine& machine, Report& report) {
    const CudaContext::Scope scope(machine.context());
    const CudaFunctions& driver = machine.functions();
    CuEvent event = nullptr;
    done(machine, driver.cuEventCreate(&event, kCuEventDisableTiming | kCuEventBlockingSync), "creating an event");
    const auto wait = [&] { machine.wait_for_kernels(); };
    const int calls = Machine::kIsRehearsal ? 3 : 200;
    time_short(report, "cuEventRecord", calls, [&] { driver.cuEventRecord(event, machine.compute()); }, wait);
    time_short(report, "cuEventQuery, passed", calls, [&] { driver.cuEventQuery(event); });
    time_short(report, "cuEventSynchronize, passed", calls, [&] { driver.cuEventSynchronize(event); });
    machine.launch_wait(milliseconds(Machine::kIsRehearsal ? 5 : 50));
    done(machine, driver.cuEventRecord(event, machine.compute()), "recording");
    time_short(report, "cuEventQuery, not passed", calls, [&] { driver.cuEventQuery(event); });
    wait();
    done(machine, driver.cuEventDestroy_v2(event), "destroying an event");
    time_short(report, "cuCtxPushCurrent and cuCtxPopCurrent", calls,
               [&] { const CudaContext::Scope inner(machine.context()); });
    time_short(report, "cuStreamIsCapturing", calls, [&] {
        int status = 0;
        driver.cuStreamIsCapturing(machine.compute(), &status);
    });
    time_short(report, "CudaDevice::check_use", calls, [&] { machine.device().check_use(); });
    time_short(report, "CudaDevice::fence_use", calls, [&] { static_cast<void>(machine.device().fence_use()); }, wait);
    if (machine.more().cuThreadExchangeStreamCaptureMode) {
        time_short(report, "cuThreadExchangeStreamCaptureMode, there and back", calls, [&] {
            int mode = kCuCaptureModeRelaxed;
            machine.more().cuThreadExchangeStreamCaptureMode(&mode);
            machine.more().cuThreadExchangeStreamCaptureMode(&mode);
        });
    }
    const auto launch = [&] { machine.launch_wait(std::chrono::nanoseconds(0)); };
    time_short(report, "launching a kernel", calls, launch, wait);
    time_launches_beside_moves(machine, report, calls);
}

// --- Copies -------------------------------------------------------------------------------------------------------

/// Host memory that has been touched, registered or not.
class HostMemory {
public:
    HostMemory(const CudaContext& context, std::size_t size_bytes, bool is_registered)
        : context_(context),
          memory_(static_cast<std::byte*>(std::aligned_alloc(kHugePageBytes, round_up(size_bytes, kHugePageBytes)))),
          size_bytes_(size_bytes),
          is_registered_(is_registered) {
        require(memory_ != nullptr, "no host memory");
        std::memset(memory_, 1, size_bytes);
        if (is_registered) require(context.register_host(get()), "host memory cannot be registered");
    }
    ~HostMemory() {
        if (is_registered_ && !context_.is_lost()) context_.unregister_host(get());
        std::free(memory_);
    }
    HostMemory(const HostMemory&) = delete;
    HostMemory& operator=(const HostMemory&) = delete;
    std::span<std::byte> get() const { return {memory_, size_bytes_}; }

private:
    const CudaContext& context_;
    std::byte* memory_;
    std::size_t size_bytes_;
    bool is_registered_;
};

inline constexpr std::size_t kCopiedBytes = Machine::kIsRehearsal ? 32 * kMiB : 256 * kMiB;
inline constexpr std::size_t kThereBytes = Machine::kIsRehearsal ? 16 * kMiB : 64 * kMiB;
inline constexpr int kCopyRepeats = Machine::kIsRehearsal ? 2 : 7;

/// GB/s of `copy`, which moves `size_bytes` and waits for it; the first, which is not counted, warms up.
inline void time_copy(Report& report, const std::string& name, const std::string& extra, std::size_t size_bytes,
                      const std::function<void()>& copy) {
    Timing timing(name, "GB/s", extra);
    for (int repeat = -1; repeat < kCopyRepeats; ++repeat) {
        const auto since = Clock::now();
        copy();
        if (repeat >= 0) timing.add(static_cast<double>(size_bytes) / microseconds_since(since) / 1e3);
    }
    timing.write(report);
}

/// Queues all of the host memory in pieces, to or from memory that is used round and round.
inline void queue_pieces(Machine& machine, LinkDirection direction, std::span<std::byte> host,
                         std::span<std::byte> there, std::size_t piece_bytes, CuStream stream) {
    for (std::size_t begin = 0; begin < host.size(); begin += piece_bytes) {
        std::byte* const here = host.data() + begin;
        const CuAddress at = address_in(there) + begin % there.size();
        done(machine,
             direction == LinkDirection::to_device
                 ? machine.functions().cuMemcpyHtoDAsync_v2(at, here, piece_bytes, stream)
                 : machine.functions().cuMemcpyDtoHAsync_v2(here, at, piece_bytes, stream),
             "copying");
    }
}

inline const char* name_of(LinkDirection direction) {
    return direction == LinkDirection::to_device ? "to device" : "to host";
}

inline void time_pieces(Machine& machine, Report& report, std::span<std::byte> host, std::span<std::byte> there,
                        const std::string& what) {
    for (const LinkDirection direction : {LinkDirection::to_device, LinkDirection::to_host}) {
        for (const std::size_t piece_mib : {1, 4, 16}) {
            time_copy(report, concat("copies ", name_of(direction), ", ", what),
                      concat(", \"piece_bytes\": ", piece_mib * kMiB), host.size(), [&] {
                          queue_pieces(machine, direction, host, there, piece_mib * kMiB, machine.compute());
                          machine.wait_for_kernels();
                      });
        }
    }
}

/// Both directions at once, on two streams: the sum.
inline void time_both_directions(Machine& machine, Report& report, std::span<std::byte> host,
                                 std::span<std::byte> there) {
    CuStream other = nullptr;
    done(machine, machine.functions().cuStreamCreateWithPriority(&other, kCuStreamNonBlocking, 0), "a stream");
    const std::size_t half = host.size() / 2;
    time_copy(report, "copies both ways at once, registered memory, sum", concat(", \"piece_bytes\": ", 4 * kMiB),
              host.size(), [&] {
                  queue_pieces(machine, LinkDirection::to_device, host.first(half), there.first(there.size() / 2),
                               4 * kMiB, machine.compute());
                  queue_pieces(machine, LinkDirection::to_host, host.subspan(half), there.subspan(there.size() / 2),
                               4 * kMiB, other);
                  machine.wait_for_kernels();
                  done(machine, machine.functions().cuStreamSynchronize(other), "waiting");
              });
    done(machine, machine.functions().cuStreamDestroy_v2(other), "ending a stream");
}

/// Pages of the host through the streams of a device; `how`: what memory they lie in.
inline void time_streams(Machine& machine, Report& report, const char* how, std::span<std::byte> host,
                         std::span<std::byte> there) {
    for (const LinkDirection direction : {LinkDirection::to_device, LinkDirection::to_host}) {
        const auto stream = machine.device().make_stream(direction);
        for (const std::size_t page_mib : {2, 8, 16}) {
            const std::size_t page_bytes = page_mib * kMiB;
            time_copy(report, concat("CudaStream ", name_of(direction), ", ", how),
                      concat(", \"piece_bytes\": ", page_bytes), host.size(), [&] {
                          for (std::size_t begin = 0; begin < host.size(); begin += page_bytes) {
                              const auto here = host.subspan(begin, page_bytes);
                              const auto at = there.subspan(begin % there.size(), page_bytes);
                              const bool is_up = direction == LinkDirection::to_device;
                              is_up ? stream->copy(at, here) : stream->copy(here, at);
                          }
                          stream->record()->wait();
                      });
        }
    }
}

/// What memory that does not come in granules would give: the runtime's way to allocate, and copies that wait.
inline void time_other_memory(Machine& machine, Report& report, std::span<std::byte> host, std::span<std::byte> there) {
    const MoreCudaFunctions& more = machine.more();
    CuAddress allocated = 0;
    done(machine, more.cuMemAlloc_v2(&allocated, kThereBytes), "cuMemAlloc_v2");
    time_pieces(machine, report, host, {reinterpret_cast<std::byte*>(allocated), kThereBytes},
                "registered memory, cuMemAlloc");
    done(machine, more.cuMemFree_v2(allocated), "cuMemFree_v2");
    time_copy(report, "cuMemcpyHtoD, registered memory", "", there.size(), [&] {
        done(machine, more.cuMemcpyHtoD_v2(address_in(there), host.data(), there.size()), "cuMemcpyHtoD_v2");
    });
    time_copy(report, "cuMemcpyDtoH, registered memory", "", there.size(), [&] {
        done(machine, more.cuMemcpyDtoH_v2(host.data(), address_in(there), there.size()), "cuMemcpyDtoH_v2");
    });
}

inline void time_registering(Machine& machine, Report& report, std::size_t size_bytes) {
    const CudaContext::Scope scope(machine.context());
    const HostMemory host(machine.context(), size_bytes, false);
    const CudaFunctions& driver = machine.functions();
    const std::string extra = concat(", \"size_bytes\": ", size_bytes);
    Timing registering("cuMemHostRegister_v2", "us", extra);
    Timing unregistering("cuMemHostUnregister", "us", extra);
    for (int repeat = 0; repeat < kCopyRepeats; ++repeat) {
        auto since = Clock::now();
        done(machine, driver.cuMemHostRegister_v2(host.get().data(), size_bytes, kCuHostRegisterPortable),
             "registering");
        registering.add(microseconds_since(since));
        since = Clock::now();
        done(machine, driver.cuMemHostUnregister(host.get().data()), "unregistering");
        unregistering.add(microseconds_since(since));
    }
    registering.write(report);
    unregistering.write(report);
}

/// Memory on the device for all copies; ends with its scope.
class There {
public:
    explicit There(CudaMemory& memory) : memory_(memory), range_(memory.reserve(kThereBytes, nullptr)) {
        memory.commit(range_, HugePages::never);
        memory.fill_zero(range_);
    }
    ~There() { memory_.release(range_); }
    There(const There&) = delete;
    There& operator=(const There&) = delete;
    std::span<std::byte> get() const { return range_; }

private:
    CudaMemory& memory_;
    std::span<std::byte> range_;
};

inline void time_registered(Machine& machine, Report& report) {
    const CudaContext::Scope scope(machine.context());
    const There there(machine.memory());
    const HostMemory registered(machine.context(), kCopiedBytes, true);
    time_pieces(machine, report, registered.get(), there.get(), "registered memory");
    time_both_directions(machine, report, registered.get(), there.get());
    if (!Machine::kIsRehearsal) time_other_memory(machine, report, registered.get(), there.get());
    const HostMemory pageable(machine.context(), kCopiedBytes, false);
    time_copy(report, "memcpy on the host, one thread, pageable to registered", "", kCopiedBytes,
              [&] { std::memcpy(registered.get().data(), pageable.get().data(), kCopiedBytes); });
}

inline void time_pageable(Machine& machine, Report& report) {
    const CudaContext::Scope scope(machine.context());
    const There there(machine.memory());
    const HostMemory pageable(machine.context(), kCopiedBytes, false);
    const HostMemory other(machine.context(), kCopiedBytes, false);
    time_pieces(machine, report, pageable.get(), there.get(), "pageable memory");
    time_copy(report, "memcpy on the host, one thread, pageable to pageable", "", kCopiedBytes,
              [&] { std::memcpy(other.get().data(), pageable.get().data(), kCopiedBytes); });
    report.put("staging_is_registered", CudaStaging(machine.context(), 4 * kMiB).is_registered() ? "true" : "false");
    time_streams(machine, report, "through staging", pageable.get(), there.get());
    const std::span<std::byte> locked = machine.host_memory().reserve(kCopiedBytes, nullptr);
    machine.host_memory().commit(locked, HugePages::never);
    time_streams(machine, report, "locked memory", locked, there.get());
    machine.host_memory().release(locked);
}

inline void run_all(Machine& machine, Report& report) {
    attempt(report, "short calls", [&] { time_short_calls(machine, report); });
    time_memory(machine, report, During::idle);
    attempt(report, "copies of registered memory", [&] { time_registered(machine, report); });
    attempt(report, "copies of pageable memory", [&] { time_pageable(machine, report); });
    attempt(report, "registering 4 MiB", [&] { time_registering(machine, report, 4 * kMiB); });
    attempt(report, "registering much", [&] { time_registering(machine, report, kCopiedBytes); });
    time_memory(machine, report, During::kernel);
}

}  // namespace torch_offload::timings
