// Stores of this process, and pagers whose pages go to them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "pager/page_server.h"
#include "pager/remote_store.h"
#include "support/pager_fixture.h"
#include "support/small_training.h"

namespace torch_offload::test {

inline constexpr char kKernels[] = "of a test";

inline PageServerOptions server_options(std::size_t budget_pages) {
    return {{"127.0.0.1", 0}, options_with(budget_pages), {}};
}

inline PageServerOptions updating_options(std::size_t budget_pages) {
    PageServerOptions options = server_options(budget_pages);
    options.run_work = &SmallTraining::run_update;
    options.kernels = kKernels;
    return options;
}

/// A pager whose updates run where the store says.
template <typename Store>
std::unique_ptr<Pager> updating_pager(std::unique_ptr<Store> store, std::size_t budget_pages) {
    PagerOptions options = options_with(budget_pages);
    options.updates_below = store->runs_work();
    return std::make_unique<Pager>(options, std::move(store));
}

/// What a client says of its passes.
enum class Said : std::uint8_t { nothing, begins, ends };

/// A pager whose pages go to a store.
struct StoredPager {
    StoredPager(std::unique_ptr<PageStore> store, std::size_t budget_pages)
        : pager(options_with(budget_pages), std::move(store)) {}
    StoredPager(const NetAddress& address, std::size_t budget_pages)
        : StoredPager(std::make_unique<RemoteStore>(address, kPageBytes, 8, options_with(1).transfer_limits),
                      budget_pages) {}

    void fill_segments(std::uint32_t count, std::size_t pages, std::uint32_t seed) {
        for (std::uint32_t i = 0; i < count; ++i) segments.push_back(filled_segment(pager, pages, seed + i));
    }
    /// Of the first that differs, or the number of segments.
    std::size_t first_wrong(std::uint32_t seed) {
        for (std::uint32_t i = 0; i < segments.size(); ++i) {
            const PinGuard guard = pin(pager, segments[i], Access::read);
            if (!holds(*segments[i], seed + i)) return i;
        }
        return segments.size();
    }
    /// Reads all segments in each pass. Returns their bytes.
    std::size_t run_passes(int passes, Said said) {
        std::size_t size_bytes = 0;
        for (int pass = 0; pass < passes; ++pass) {
            if (said == Said::begins) pager.begin_pass(ProgramId{1});
            for (const auto& segment : segments) {
                pager.touch(segment);
                const PinGuard guard = pin(pager, segment, Access::read);
                size_bytes += segment->size_bytes();
            }
            if (said == Said::ends) pager.end_step();
        }
        return size_bytes;
    }

    Pager pager;
    std::vector<std::shared_ptr<Segment>> segments;
};

}  // namespace torch_offload::test
