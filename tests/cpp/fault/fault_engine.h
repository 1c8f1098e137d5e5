// A simulated disk whose Nth call of a kind fails, as the injector says.
#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <deque>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "base/check.h"
#include "fault/injector.h"
#include "storage/fallback_engine.h"
#include "support/sim_engine.h"

namespace torch_offload::test {

/// What a call comes to that fails.
struct FaultAnswer {
    const char* name = "";
    int error = 0;
    std::size_t most_bytes = SIZE_MAX;  // of a transfer without `error`
    bool never = false;                 // the transfer does not end while the fault is armed
};

/// submit() and reap() throw TierIoError, or do nothing if the answer is EAGAIN or EINTR; register_buffer() refuses;
/// unregister_buffer() throws what a lack of memory throws; transfers are answered.
class FaultEngine final : public IoEngine {
public:
    FaultEngine(const FaultAnswer& answer, std::uint64_t seed, std::shared_ptr<SimFiles> files)
        : answer_(answer), disk_(8, seed, {}, std::move(files)) {
        disk_.answer_with([this](const IoRequest& request) {
            const bool fails = !answer_.never && is_due(call_of(request));
            return fails ? SimAnswer{answer_.error, answer_.most_bytes} : SimAnswer{};
        });
    }

    std::size_t submit(std::span<IoRequest* const> requests) override {
        if (is_due(FaultCall::submit)) {
            if (is_passing()) return 0;
            if (injected_faults() % 2 == 0) disk_.submit(requests);  // before or after it took them
            throw TierIoError(concat("submit: ", answer_.name), answer_.error);
        }
        const Spared own;
        std::size_t taken = 0;
        for (IoRequest* request : requests) {
            if (answer_.never && is_due(call_of(*request))) {
                parked_.push_back(request);
            } else if (disk_.submit({&request, 1}) == 0) {
                break;
            }
            ++taken;
        }
        return taken;
    }

    std::size_t reap(std::span<IoRequest*> finished, std::chrono::milliseconds timeout) override {
        if (is_due(FaultCall::reap)) {
            if (is_passing()) return 0;
            throw TierIoError(concat("reap: ", answer_.name), answer_.error);
        }
        const Spared own;
        while (!is_armed() && !parked_.empty() && disk_.submit({&parked_.front(), 1}) == 1) parked_.pop_front();
        return disk_.reap(finished, parked_.empty() ? timeout : std::min(timeout, kParkedWait));
    }

    void wake() noexcept override { disk_.wake(); }
    BufferIndex register_buffer(std::span<std::byte> memory) override {
        return is_due(FaultCall::register_buffer) ? kUnregistered : disk_.register_buffer(memory);
    }
    void unregister_buffer(BufferIndex index) override {
        if (is_due(FaultCall::unregister_buffer)) throw std::bad_alloc();
        disk_.unregister_buffer(index);
    }
    bool quiesce() noexcept override {
        parked_.clear();
        return disk_.quiesce();
    }
    std::size_t capacity() const noexcept override { return disk_.capacity(); }
    std::string name() const override { return "failing on purpose"; }

private:
    static constexpr std::chrono::milliseconds kParkedWait{2};  // until the ages of transfers are looked at again

    static FaultCall call_of(const IoRequest& request) noexcept {
        return request.direction == IoDirection::read ? FaultCall::read : FaultCall::write;
    }
    bool is_passing() const noexcept { return answer_.error == EAGAIN || answer_.error == EINTR; }

    const FaultAnswer answer_;
    SimEngine disk_;
    std::deque<IoRequest*> parked_;
};

/// As engines are made in production: if it breaks, another one over the same disk takes over.
inline std::unique_ptr<IoEngine> failing_engine(const FaultAnswer& answer, std::uint64_t seed) {
    auto files = std::make_shared<SimFiles>();
    auto first = std::make_unique<FaultEngine>(answer, seed, files);
    return std::make_unique<FallbackEngine>(std::move(first), [files, seed](std::size_t capacity) {
        return std::make_unique<SimEngine>(capacity, seed, SimChances{}, files);
    });
}

}  // namespace torch_offload::test
