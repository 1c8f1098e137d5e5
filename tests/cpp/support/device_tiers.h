// A device's pager over a host's over a simulated disk, with tiny pages.
#pragma once

#include <memory>

#include "device/memory.h"
#include "device/stream.h"
#include "pager/tier_store.h"
#include "support/pager_fixture.h"
#include "support/sim_engine.h"

namespace torch_offload::test {

struct DeviceTiers {
    /// memory: the device's; nullptr: emulated by the host's. host_device: what the host's pager asks, if any.
    /// host_memory: where its pages lie; nullptr: in the process's.
    DeviceTiers(Device& device, std::size_t device_pages, std::size_t host_pages, Memory* memory = nullptr,
                Device* host_device = nullptr, Memory* host_memory = nullptr)
        : host(options_of_host(host_pages, host_device, host_memory), std::make_unique<SimEngine>(8, 1)),
          top(options_of_device(device_pages, device, memory), std::make_unique<TierStore>(host, device)) {}

    static PagerOptions options_of_host(std::size_t pages, Device* device, Memory* memory) {
        PagerOptions options = options_with(pages);
        options.device = device;
        options.memory = memory;
        return options;
    }
    static PagerOptions options_of_device(std::size_t pages, Device& device, Memory* memory) {
        PagerOptions options = options_with(pages);
        options.tier = Tier::device;
        options.device = &device;
        options.memory = memory;
        return options;
    }

    Pager host;
    Pager top;
};

}  // namespace torch_offload::test
