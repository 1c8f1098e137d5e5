// Bytes that change on the disk are never taken for what was written: a flipped bit, another page's bytes, the same
// page's bytes of an earlier write, a flipped bit of a coded extent.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <random>
#include <string>
#include <vector>

#include "codec/ternary_samples.h"
#include "fault/case_runner.h"
#include "support/pager_fixture.h"
#include "support/seeds.h"
#include "support/sim_engine.h"

namespace torch_offload::test {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::size_t kPages = 6;
constexpr int kChangesOfABatch = 200;

/// Pages on a simulated disk whose bytes a test changes behind the pager's back.
class ChangedDisk {
public:
    explicit ChangedDisk(std::uint64_t seed) : ChangedDisk(std::make_unique<SimEngine>(8, seed)) {}

    /// Sends new bytes of a page to a new place.
    void write(std::size_t index) {
        {
            const PinGuard guard = pager_.pin_pages(segment_, index, 1, Access::overwrite);
            auto* const words = reinterpret_cast<std::uint32_t*>(segment_->page_range(index).data());
            for (std::size_t i = 0; i < kPageElements; ++i) words[i] = word_of(static_cast<std::uint32_t>(writes_), i);
        }
        ++writes_;
        pager_.evict(segment_);
        earlier_[index] = now_[index];
        places_[index] = last_write_;
        now_[index].assign(on_disk(index).begin(), on_disk(index).end());
    }
    /// Nothing of it is in memory then.
    void send_away() { pager_.evict(segment_); }
    std::span<std::byte> on_disk(std::size_t index) {
        return std::span(files_->begin()->second).subspan(places_[index], kPageBytes);
    }
    const Bytes& earlier(std::size_t index) const { return earlier_[index]; }

    /// Whether the page is lost to who reads it; else whether its bytes are as written is told by `is_exact`.
    bool is_refused(std::size_t index, bool& is_exact) {
        try {
            const PinGuard guard = pager_.pin_pages(segment_, index, 1, Access::read);
            is_exact = std::ranges::equal(segment_->page_range(index), now_[index]);
            return false;
        } catch (const CorruptPage&) {
            return true;
        }
    }

private:
    explicit ChangedDisk(std::unique_ptr<SimEngine> engine)
        : files_(engine->files()),
          pager_(options_with(kPages + 2), listened(std::move(engine), last_write_)),
          segment_(pager_.create_segment(kPages * kPageBytes, 4, SegmentKind::parameter)),
          earlier_(kPages),
          now_(kPages),
          places_(kPages) {}

    static std::unique_ptr<IoEngine> listened(std::unique_ptr<SimEngine> engine, std::atomic<std::uint64_t>& place) {
        engine->answer_with([&place](const IoRequest& request) {
            if (request.direction == IoDirection::write) place = request.offset_bytes;
            return SimAnswer{};
        });
        return engine;
    }

    std::shared_ptr<SimFiles> files_;
    std::atomic<std::uint64_t> last_write_{0};
    Pager pager_;
    std::shared_ptr<Segment> segment_;
    std::vector<Bytes> earlier_, now_;
    std::vector<std::uint64_t> places_;
    std::uint64_t writes_ = 1;
};

enum class Change : std::uint8_t { flip, swap, stale };

void change_bytes(ChangedDisk& disk, std::size_t index, Change change, std::mt19937_64& random) {
    const std::span<std::byte> bytes = disk.on_disk(index);
    switch (change) {
        case Change::flip:
            bytes[random() % bytes.size()] ^= std::byte{1} << (random() % 8);
            break;
        case Change::swap:
            std::ranges::copy(disk.on_disk((index + 1 + random() % (kPages - 1)) % kPages), bytes.begin());
            break;
        case Change::stale:
            std::ranges::copy(disk.earlier(index), bytes.begin());
            break;
    }
}

/// Each change in turn, with the other pages read in between.
void change_pages(Report& report, std::uint64_t seed, Change change) {
    std::mt19937_64 random(seed);
    ChangedDisk disk(seed);
    for (std::size_t i = 0; i < 2 * kPages; ++i) disk.write(i % kPages);  // twice, so that each has an earlier write
    for (int i = 0; i < kChangesOfABatch; ++i) {
        const std::size_t index = random() % kPages;
        disk.send_away();
        change_bytes(disk, index, change, random);
        ++report.injected;
        bool is_exact = true;
        if (!disk.is_refused(index, is_exact)) {
            report.fail(Verdict::wrong, concat("change ", i, " of page ", index, " was taken for what was written"));
            return;
        }
        ++report.raised;
        disk.write(index);
        if (disk.is_refused(random() % kPages, is_exact) || !is_exact) {
            report.fail(Verdict::wrong, concat("a page that was not changed is not as written, after change ", i));
            return;
        }
    }
}

void flip_coded_extents(Report& report, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const CoderChoice coder = seed % 2 == 0 ? CoderChoice::rans4 : CoderChoice::tun12;
    const ExtentBuffer whole = encode(random_matrix(70, 90, 0.8, seed).view(), {.coder = coder, .rows_per_tile = 66});
    ExtentBuffer changed(whole.bytes().size());
    std::ranges::copy(whole.bytes(), changed.bytes().begin());
    for (int i = 0; i < kChangesOfABatch; ++i) {
        std::byte& byte = changed.bytes()[random() % changed.bytes().size()];
        const std::byte bit = std::byte{1} << (random() % 8);
        byte ^= bit;
        ++report.injected;
        try {
            const CodedMatrix opened(changed.bytes());
            report.fail(Verdict::wrong, "a coded extent with a flipped bit was opened");
        } catch (const CorruptPage&) {
            ++report.raised;
        }
        byte ^= bit;
    }
}

// Method: batches of changes of each kind, each of which has to be found by who reads the page; a page that is lost is
// written anew, and others are read in between.
TEST(Fault, ChangedBytes) {
    CaseRunner runner(20);
    const std::uint64_t batches = how_many(50, 1250);  // of each kind
    for (std::uint64_t batch = 0; batch < batches; ++batch) {
        const std::uint64_t seed = base_seed() + batch;
        const auto run = [&](const char* kind, Change change) {
            runner.run(concat(kind, ", seed ", seed), [&](Report& report) { change_pages(report, seed, change); });
        };
        run("flipped bits", Change::flip);
        run("other pages' bytes", Change::swap);
        run("earlier bytes", Change::stale);
        runner.run(concat("coded extents, seed ", seed), [&](Report& report) { flip_coded_extents(report, seed); });
    }
    runner.finish(4 * batches, 40'000);
}

}  // namespace
}  // namespace torch_offload::test
