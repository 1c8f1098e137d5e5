// A device's pager over a host's over a simulated disk.
#pragma once

#include <memory>

#include "pager/tier_store.h"
#include "support/pager_fixture.h"
#include "support/sim_engine.h"

namespace torch_offload::test {

enum class UpdatesOn { device, host };

struct ThreeTiers {
    ThreeTiers(Device& device, std::size_t device_pages, std::size_t host_pages,
               UpdatesOn updates_on = UpdatesOn::device, ActivityLog* log = nullptr)
        : engine(new SimEngine(8, 1, {})),
          host(with_device(host_pages, device, log), std::unique_ptr<IoEngine>(engine)),
          top(of_device(device_pages, device, updates_on, log), std::make_unique<TierStore>(host, device)) {}

    static PagerOptions with_device(std::size_t budget_pages, Device& device, ActivityLog* log) {
        PagerOptions options = options_with(budget_pages);
        options.device = &device;
        options.activity_log = log;
        return options;
    }
    static PagerOptions of_device(std::size_t budget_pages, Device& device, UpdatesOn updates_on, ActivityLog* log) {
        PagerOptions options = with_device(budget_pages, device, log);
        options.tier = Tier::device;
        options.updates_below = updates_on == UpdatesOn::host;
        return options;
    }

    SimEngine* engine;  // the host pager's
    Pager host;
    Pager top;
};

}  // namespace torch_offload::test
