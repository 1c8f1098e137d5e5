#include "storage/throttled_engine.h"

#include "conformance/io_engine_contract.h"

namespace torch_offload::test {

struct ThrottledFactory {
    static std::unique_ptr<IoEngine> make(std::size_t capacity) {
        return std::make_unique<ThrottledEngine>(make_io_engine(IoEngineKind::threads, capacity), 100e6);
    }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Throttled, IoEngineContract, ThrottledFactory);

namespace {

// A transfer comes back when the slow disk would have done it, not before. Method: a sector at one byte per second.
TEST(ThrottledEngine, TransferIsKeptUntilItsTime) {
    ScratchDirectory scratch;
    BlockFile file(scratch.path());
    AlignedBuffer memory(kSectorBytes);
    ThrottledEngine engine(make_io_engine(IoEngineKind::threads, 8), 1);
    const Extent extent = file.allocate(kSectorBytes);
    IoRequest request{.direction = IoDirection::write,
                      .file_descriptor = file.file_descriptor(),
                      .offset_bytes = extent.offset_bytes,
                      .buffer = memory.bytes()};
    IoRequest* pointer = &request;
    ASSERT_EQ(engine.submit({&pointer, 1}), 1u);
    std::vector<IoRequest*> finished(1);
    EXPECT_EQ(engine.reap(finished, milliseconds(50)), 0u);
}

TEST(ThrottledEngine, RateOfNothingIsRefused) {
    EXPECT_THROW(ThrottledEngine(make_io_engine(IoEngineKind::threads, 8), 0), InvalidArgument);
}

}  // namespace
}  // namespace torch_offload::test
