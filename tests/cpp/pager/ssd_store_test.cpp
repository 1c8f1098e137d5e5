// The store by itself: when it puts what to the disk.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "pager/pager.h"
#include "pager/ssd_store.h"
#include "pager/use_predictor.h"
#include "support/aligned_buffer.h"
#include "support/gated_engine.h"
#include "support/pager_fixture.h"
#include "support/scratch_directory.h"

namespace torch_offload::test {
namespace {

constexpr std::size_t kPages = 8;
constexpr std::size_t kTogether = 4;  // reads that arrive together

/// Has the store read the pages of a segment in order, one more each time that it is asked to look ahead. Notes how
/// many reads the disk had been given when each ended.
class ReadsInOrder final : public StoreClient {
public:
    ReadsInOrder(GatedEngine& engine, std::shared_ptr<Segment> segment)
        : engine_(engine), segment_(std::move(segment)) {}

    void end_read(const std::shared_ptr<Segment>&, Page&, const TransferEnd& end) noexcept override {
        EXPECT_EQ(end.status, TransferStatus::ok);
        given_at_end.push_back(engine_.order().size());
        ++ended;
    }
    void end_write(Page&, const TransferEnd& end) noexcept override {
        EXPECT_EQ(end.status, TransferStatus::ok);
        ++ended;
    }
    void note_late(Page&, IoDirection, std::exception_ptr) noexcept override { ADD_FAILURE() << "a disk that answers"; }
    std::vector<Frame> frames_to_unregister() override { return {}; }
    void take_unregistered(const Frame&) noexcept override {}
    bool begin_registration(std::size_t) noexcept override { return false; }
    void end_registration(std::size_t, bool) noexcept override {}
    void look_ahead() noexcept override {
        SsdStore* const asked = store.load();
        if (asked != nullptr && next_page < kPages) asked->read(segment_, segment_->page(next_page++));
    }
    std::shared_ptr<UsePredictor> use_predictor() const override { return nullptr; }

    std::atomic<SsdStore*> store{nullptr};  // nullptr: nothing is read ahead
    std::size_t next_page = kTogether;
    std::vector<std::size_t> given_at_end;
    std::atomic<std::size_t> ended{0};

private:
    GatedEngine& engine_;
    std::shared_ptr<Segment> segment_;
};

// A disk may say of several reads at once that they have come. Each is verified by itself, and before the next is, what
// the memory that it used allows to be read is on its way: else the disk stands still until all are verified.
TEST(SsdStore, ReadsOnWhileItVerifiesWhatArrivedTogether) {
    const ScratchDirectory directory;
    Pager pager(options_with(kPages));
    const auto segment = pager.create_segment(kPages * kPageBytes, 4, SegmentKind::parameter);
    std::vector<AlignedBuffer> memory;
    for (std::size_t i = 0; i < kPages; ++i) segment->page(i).frame = Frame{memory.emplace_back(kPageBytes).bytes()};

    auto owned = std::make_unique<GatedEngine>();
    GatedEngine& engine = *owned;
    const std::string path = directory.path();
    SsdStore store(std::span(&path, 1), std::move(owned), TransferLimits{});
    ReadsInOrder client(engine, segment);
    store.start(client);
    for (std::size_t i = 0; i < kPages; ++i) store.write(segment, segment->page(i));
    ASSERT_TRUE(comes_true([&] { return client.ended == kPages; }));

    engine.shut();
    for (std::size_t i = 0; i < kTogether; ++i) store.read(segment, segment->page(i));
    ASSERT_TRUE(comes_true([&] { return engine.order().size() == kTogether; }));
    client.store = &store;
    engine.open();
    ASSERT_TRUE(comes_true([&] { return client.ended == 2 * kPages; }));
    EXPECT_TRUE(store.stop());
    ASSERT_EQ(client.given_at_end.size(), kPages);
    for (std::size_t i = 0; i < kTogether; ++i) EXPECT_EQ(client.given_at_end[i], kTogether + i) << "read " << i;
    for (std::size_t i = 0; i < kPages; ++i) segment->page(i).frame = {};
}

}  // namespace
}  // namespace torch_offload::test
