#include "device/stream.h"

#include <chrono>
#include <exception>
#include <thread>

#include "base/check.h"
#include "base/log.h"

namespace torch_offload {
namespace {

constexpr std::chrono::milliseconds kRefusalPause{1};

}  // namespace

void wait_through_refusals(const Event& event) {
    for (bool was_refused = false;; was_refused = true) {
        try {
            event.wait();
            return;
        } catch (const TierIoError&) {
            throw;
        } catch (const std::exception& error) {
            if (!was_refused) OFFLOAD_LOG(warning, "copies cannot be waited for, trying again: ", error.what());
        }
        std::this_thread::sleep_for(kRefusalPause);
    }
}

}  // namespace torch_offload
