#include "device/cuda_device.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>
#include <tuple>
#include <vector>

#include "base/check.h"
#include "support/fake_gpu.h"
#include "support/log_capture.h"

namespace torch_offload::test {
namespace {

using std::chrono::microseconds;

constexpr std::size_t kBufferBytes = 2 * kSectorBytes;  // of the fake's device

/// Memory of a fake device, and host memory that nobody registered.
struct Link {
    explicit Link(const FakeCudaOptions& options = {}, std::size_t size_bytes = 5 * kBufferBytes)
        : gpu(options), there(gpu.memory.reserve(size_bytes, nullptr)), out(there.size()), back(there.size()) {
        gpu.memory.commit(there, HugePages::allowed);
        std::mt19937 random(static_cast<unsigned>(options.seed));
        for (std::byte& byte : out) byte = static_cast<std::byte>(random());
        to_device = gpu.device.make_stream(LinkDirection::to_device);
        to_host = gpu.device.make_stream(LinkDirection::to_host);
    }
    ~Link() {
        to_device.reset();
        to_host.reset();
        gpu.memory.release(there);
    }

    FakeGpu gpu;
    std::span<std::byte> there;
    std::vector<std::byte> out;
    std::vector<std::byte> back;
    std::unique_ptr<Stream> to_device;
    std::unique_ptr<Stream> to_host;
};

// Bytes go there and back, through more buffers than there are, whatever the delays. Method: sizes around a buffer's,
// seeds.
TEST(CudaStream, BytesGoThereAndBack) {
    for (std::uint64_t seed = 0; seed < 8; ++seed) {
        Link link({.longest_delay = microseconds(seed % 3 * 100), .seed = seed}, 11 * kBufferBytes);
        for (const std::size_t size :
             {std::size_t{1}, kBufferBytes - 1, kBufferBytes, kBufferBytes + 1, 11 * kBufferBytes}) {
            link.back.assign(link.back.size(), std::byte{0});
            link.to_device->copy(link.there.first(size), std::span(link.out).first(size));
            link.to_device->record()->wait();
            link.to_host->copy(std::span(link.back).first(size), link.there.first(size));
            link.to_host->record()->wait();
            EXPECT_TRUE(
                std::equal(link.back.begin(), link.back.begin() + static_cast<std::ptrdiff_t>(size), link.out.begin()))
                << size << " bytes, seed " << seed;
        }
    }
}

// The host's bytes may change once copy() to the device has returned. Method: overwritten at once, before a slow copy.
TEST(CudaStream, SourceIsFreeOnceCopyReturns) {
    Link link({.longest_delay = microseconds(500), .seed = 3});
    const std::vector<std::byte> expected = link.out;
    link.to_device->copy(link.there, link.out);
    link.out.assign(link.out.size(), std::byte{0});
    link.to_device->record()->wait();
    EXPECT_TRUE(std::ranges::equal(link.there, expected));
}

// An event passes with the copies before it, and asking it brings the bytes. Method: polls until it has; what arrived.
TEST(CudaStream, EventThatHasPassedHasBroughtTheBytes) {
    Link link({.longest_delay = microseconds(200), .seed = 4});
    EXPECT_TRUE(link.to_host->record()->has_passed()) << "nothing was before it";
    std::ranges::copy(link.out, link.there.begin());
    link.to_host->copy(link.back, link.there);
    const auto event = link.to_host->record();
    while (!event->has_passed()) std::this_thread::yield();
    EXPECT_EQ(link.back, link.out);
}

// Bytes that could not be brought have not arrived, though the GPU is done with them. Method: the first wait fails,
// which is the one of who asks.
TEST(CudaStream, EventWaitsForBytesThatCouldNotBeBrought) {
    Link link;
    std::ranges::copy(link.out, link.there.begin());
    const std::span<std::byte> part = std::span(link.back).first(kBufferBytes);
    link.to_host->copy(part, std::span<const std::byte>(link.there).first(kBufferBytes));
    const auto event = link.to_host->record();
    link.gpu.driver.fail("cuEventSynchronize", CuResult::not_permitted);
    while (link.gpu.driver.call_count("cuEventSynchronize") == 0) EXPECT_FALSE(event->has_passed());
    EXPECT_FALSE(link.gpu.context.is_lost());
    while (!event->has_passed()) std::this_thread::yield();
    EXPECT_TRUE(std::ranges::equal(part, std::span(link.out).first(kBufferBytes)));
}

// Threads that wait for events of one stream all get what they waited for. Method: one event per copy, a thread each.
TEST(CudaStream, ManyMayWait) {
    Link link({.longest_delay = microseconds(200), .seed = 5}, 4 * kBufferBytes);
    std::ranges::copy(link.out, link.there.begin());
    std::vector<std::thread> waiters;
    std::atomic<int> wrong{0};
    for (std::size_t i = 0; i < 4; ++i) {
        const std::span<std::byte> part = std::span(link.back).subspan(i * kBufferBytes, kBufferBytes);
        const std::span<const std::byte> expected = std::span(link.out).subspan(i * kBufferBytes, kBufferBytes);
        link.to_host->copy(part, link.there.subspan(i * kBufferBytes, kBufferBytes));
        waiters.emplace_back([&wrong, part, expected, event = link.to_host->record()] {
            event->wait();
            wrong += !std::ranges::equal(part, expected);
        });
    }
    for (std::thread& waiter : waiters) waiter.join();
    EXPECT_EQ(wrong, 0);
}

// An error in a stream is said by who waits for it, by everything after, and holds nobody up. Method: the second of
// three copies fails.
TEST(CudaStream, ErrorIsSaidByWaitAndAfter) {
    Link link;
    link.gpu.driver.fail_copy(CuResult::illegal_address, 1);
    link.gpu.driver.hold();
    link.to_device->copy(link.there.first(3 * kBufferBytes), std::span(link.out).first(3 * kBufferBytes));
    const auto event = link.to_device->record();
    EXPECT_FALSE(event->has_passed());
    link.gpu.driver.let_go();
    EXPECT_THROW(event->wait(), TierIoError);
    EXPECT_THROW(event->wait(), TierIoError);
    EXPECT_TRUE(event->has_passed()) << "nothing will come";
    EXPECT_TRUE(link.gpu.context.is_lost());
    EXPECT_THROW(link.to_host->copy(link.back, link.there), TierIoError);
    EXPECT_THROW(link.gpu.memory.fill_zero(link.there), TierIoError);
    EXPECT_THROW(link.gpu.device.check_use(), TierIoError);
    EXPECT_EQ(link.gpu.device.fence_use(), nullptr) << "nothing runs";
}

// What a graph would replay over memory that has left is refused before it is captured. Method: the driver says that
// the stream is captured, then no longer.
TEST(CudaDevice, CaptureIsRefused) {
    FakeGpu gpu;
    EXPECT_NO_THROW(gpu.device.check_use());
    gpu.driver.set_capturing(true);
    EXPECT_THROW(gpu.device.check_use(), InvalidArgument);
    gpu.driver.set_capturing(false);
    EXPECT_NO_THROW(gpu.device.check_use());
}

// The default stream cannot be used while a stream that it waits for is captured, and asking about it does not break
// the capture. Method: another library's stream; a kernel's point from before.
TEST(CudaDevice, DefaultStreamIsRefusedInACaptureThatItWaitsFor) {
    FakeGpu gpu;
    CudaDevice device(gpu.context, {.current_stream = [] { return CuStream{}; }});
    EXPECT_NO_THROW(device.check_use());
    const CuStream captured = gpu.driver.blocking_stream();
    gpu.driver.begin_capture(captured);
    EXPECT_THROW(device.check_use(), InvalidArgument);
    EXPECT_NO_THROW(gpu.device.check_use()) << "the other streams can";
    const auto mark = device.fence_use();
    ASSERT_NE(mark, nullptr);
    EXPECT_FALSE(mark->has_passed());
    EXPECT_THROW(mark->wait(), InvalidArgument);
    EXPECT_FALSE(gpu.context.is_lost());
    EXPECT_TRUE(gpu.driver.end_capture(captured));
    EXPECT_NO_THROW(device.check_use());
    mark->wait();
    EXPECT_TRUE(mark->has_passed());
}

// What ends while its own stream is captured stays in use until the capture has ended and the kernels before it have
// run. Method: a kernel that is held, then a capture, then the mark.
TEST(CudaDevice, MarkInACaptureComesAfterIt) {
    FakeGpu gpu;
    std::atomic<bool> has_run{false};
    gpu.driver.hold();
    gpu.driver.launch({}, [&] { has_run = true; });
    gpu.driver.begin_capture(gpu.compute_stream);
    const auto mark = gpu.device.fence_use();
    ASSERT_NE(mark, nullptr);
    EXPECT_FALSE(mark->has_passed());
    EXPECT_THROW(mark->wait(), InvalidArgument);
    EXPECT_TRUE(gpu.driver.end_capture(gpu.compute_stream)) << "asking has broken it";
    EXPECT_FALSE(mark->has_passed()) << "the kernel has not run";
    EXPECT_FALSE(has_run);
    gpu.driver.let_go();
    mark->wait();
    EXPECT_TRUE(has_run);
    EXPECT_TRUE(mark->has_passed());
    EXPECT_FALSE(gpu.context.is_lost());
}

// An event that a capture keeps from being asked has not passed, and loses nothing. Method: each result of captures,
// once when asked and once when waited for.
TEST(CudaDevice, EventThatACaptureRefusesIsNotReady) {
    for (int result = static_cast<int>(CuResult::capture_unsupported);
         result <= static_cast<int>(CuResult::capture_wrong_thread); ++result) {
        FakeGpu gpu;
        const auto mark = gpu.device.fence_use();
        gpu.driver.fail("cuEventQuery", static_cast<CuResult>(result));
        EXPECT_FALSE(mark->has_passed()) << result;
        gpu.driver.fail("cuEventSynchronize", static_cast<CuResult>(result));
        EXPECT_THROW(mark->wait(), InvalidArgument) << result;
        EXPECT_FALSE(gpu.context.is_lost()) << result;
        mark->wait();
        EXPECT_TRUE(mark->has_passed());
    }
}

// Also an error that is neither has not let the event pass: memory that is let go too early would be silently wrong.
TEST(CudaDevice, EventThatCannotBeAskedIsNotReady) {
    FakeGpu gpu;
    const auto mark = gpu.device.fence_use();
    gpu.driver.fail("cuEventQuery", CuResult::invalid_value);
    EXPECT_FALSE(mark->has_passed());
    gpu.driver.fail("cuEventSynchronize", CuResult::invalid_value);
    EXPECT_THROW(mark->wait(), LogicError);
    EXPECT_FALSE(gpu.context.is_lost());
    mark->wait();
}

// An error of a call that queues nothing is that call's, and the stream goes on. Method: each call fails once.
TEST(CudaStream, ErrorOfACallIsThatCalls) {
    for (const char* const symbol : {"cuMemcpyHtoDAsync_v2", "cuEventCreate", "cuEventRecord",
                                     "cuStreamCreateWithPriority", "cuCtxGetStreamPriorityRange"}) {
        Link link;
        link.gpu.driver.fail(symbol, CuResult::not_permitted);
        EXPECT_THROW(link.to_device->copy(link.there, link.out), LogicError) << symbol;
        link.to_device->copy(link.there, link.out);
        link.to_device->record()->wait();
        EXPECT_TRUE(std::ranges::equal(link.there, link.out)) << symbol;
    }
}

// Copies use registered memory that stays where it is; a system that registers none is said once, and costs speed
// only. Method: what is registered, the log, the bytes.
TEST(CudaStream, RegistrationThatIsRefusedIsSaidOnce) {
    for (const bool may_register : {true, false}) {
        const LogCapture log(LogLevel::warning);
        Link link({.may_register = may_register});
        link.to_device->copy(link.there, link.out);
        link.to_device->record()->wait();
        link.to_host->copy(link.back, link.there);
        link.to_host->record()->wait();
        EXPECT_EQ(link.back, link.out);
        EXPECT_EQ(link.gpu.driver.call_count("cuMemHostRegister_v2"), 2u);
        const std::string lines = log.lines();
        EXPECT_EQ(lines.find("cannot be registered") == std::string::npos, may_register) << lines;
        EXPECT_EQ(lines.find("cannot be registered"), lines.rfind("cannot be registered")) << lines;
        EXPECT_EQ(lines.find("free memory, or give it more") == std::string::npos, may_register) << lines;
    }
}

// Events are few. Method: many copies and marks.
TEST(CudaDevice, EventsAreReused) {
    Link link;
    for (int i = 0; i < 100; ++i) {
        link.to_device->copy(link.there, link.out);
        link.gpu.device.fence_use()->wait();
    }
    link.to_device->record()->wait();
    EXPECT_LE(link.gpu.driver.call_count("cuEventCreate"), 8u);
}

// A mark passes with the kernels before it. Method: streams that are held.
TEST(CudaDevice, MarkPassesWithKernels) {
    FakeGpu gpu;
    gpu.driver.hold();
    gpu.driver.launch({}, [] {});
    const auto mark = gpu.device.fence_use();
    EXPECT_FALSE(mark->has_passed());
    gpu.driver.let_go();
    mark->wait();
    EXPECT_TRUE(mark->has_passed());
}

// Where there is no event for a mark, kernels are waited for instead: memory is never let go too early. Method: each
// call fails once.
TEST(CudaDevice, MarkWithoutAnEventWaits) {
    for (const char* const symbol : {"cuEventCreate", "cuEventRecord"}) {
        FakeGpu gpu({.longest_delay = microseconds(2000), .seed = 1});
        std::atomic<bool> has_run{false};
        gpu.driver.fail(symbol, CuResult::out_of_memory);
        gpu.driver.launch({}, [&] { has_run = true; });
        EXPECT_EQ(gpu.device.fence_use(), nullptr);
        EXPECT_TRUE(has_run) << symbol;
    }
}

// Where kernels can neither be marked nor waited for, the mark is made later: nobody takes them for done. Method: both
// calls fail once, under a kernel that is held.
TEST(CudaDevice, MarkThatCannotBeMadeIsMadeLater) {
    FakeGpu gpu;
    std::atomic<bool> has_run{false};
    gpu.driver.hold();
    gpu.driver.launch({}, [&] { has_run = true; });
    gpu.driver.fail("cuEventRecord", CuResult::not_permitted);
    gpu.driver.fail("cuStreamSynchronize", CuResult::not_permitted);
    const auto mark = gpu.device.fence_use();
    ASSERT_NE(mark, nullptr);
    EXPECT_FALSE(mark->has_passed());
    EXPECT_FALSE(gpu.context.is_lost());
    gpu.driver.let_go();
    mark->wait();
    EXPECT_TRUE(has_run);
}

// The same of copies. Method: both calls fail once, behind a copy in each direction.
TEST(CudaStream, CopyThatCannotBeMarkedIsMarkedLater) {
    Link link({.longest_delay = microseconds(500), .seed = 6});
    for (const auto& [stream, to, from] :
         {std::tuple(link.to_device.get(), link.there, std::span<std::byte>(link.out)),
          std::tuple(link.to_host.get(), std::span<std::byte>(link.back), link.there)}) {
        link.gpu.driver.fail("cuEventRecord", CuResult::not_permitted);
        link.gpu.driver.fail("cuStreamSynchronize", CuResult::not_permitted);
        EXPECT_NO_THROW(stream->copy(to, from));
        stream->record()->wait();
        EXPECT_TRUE(std::ranges::equal(to, from));
    }
    EXPECT_FALSE(link.gpu.context.is_lost());
}

// Kernels of another stream run after a mark without anybody waiting, those of the same stream anyway. Method: a kernel
// that is held, one that was ordered after it, in a faster stream.
TEST(CudaDevice, OrderAfterAMarkHoldsUpTheStream) {
    FakeGpu gpu({.longest_delay = microseconds(2000), .seed = 2});
    std::atomic<bool> has_run{false};
    std::atomic<bool> was_in_order{false};
    gpu.driver.hold();
    gpu.driver.launch({}, [&] { has_run = true; });
    const auto mark = gpu.device.fence_use();
    gpu.device.order_after(*mark);
    EXPECT_EQ(gpu.driver.call_count("cuStreamWaitEvent"), 0u);
    gpu.compute_stream = gpu.driver.blocking_stream();
    gpu.device.order_after(*mark);
    gpu.driver.launch_in(gpu.compute_stream, {}, [&] { was_in_order = has_run.load(); });
    EXPECT_FALSE(mark->has_passed());
    gpu.driver.let_go();
    gpu.device.fence_use()->wait();
    EXPECT_TRUE(was_in_order);
}

// A mark that is made later is waited for by the caller. Method: one that cannot be made at first.
TEST(CudaDevice, OrderAfterALateMarkWaits) {
    FakeGpu gpu({.longest_delay = microseconds(2000), .seed = 3});
    std::atomic<bool> has_run{false};
    gpu.driver.launch({}, [&] { has_run = true; });
    gpu.driver.fail("cuEventRecord", CuResult::not_permitted);
    gpu.driver.fail("cuStreamSynchronize", CuResult::not_permitted);
    const auto mark = gpu.device.fence_use();
    ASSERT_NE(mark, nullptr);
    gpu.device.order_after(*mark);
    EXPECT_TRUE(has_run);
}

TEST(CudaDevice, HasItsName) {
    const FakeGpu gpu;
    EXPECT_EQ(gpu.device.name(), "cuda:0 Fake");
}

}  // namespace
}  // namespace torch_offload::test
