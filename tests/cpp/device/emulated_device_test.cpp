#include "device/emulated_device.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/check.h"

namespace torch_offload::test {
namespace {

using std::chrono::microseconds;

std::vector<std::byte> filled(std::size_t size_bytes, int value) {
    return std::vector<std::byte>(size_bytes, static_cast<std::byte>(value));
}

// Copies of one stream happen in the order in which they were queued, whatever their delays. Method: a chain over one
// buffer, each link of which reads what the one before wrote; delays from a seed.
TEST(EmulatedDevice, StreamKeepsItsOrder) {
    EmulatedDevice device({.longest_delay = microseconds(300), .seed = 1});
    const auto stream = device.make_stream(LinkDirection::to_device);
    std::vector<std::vector<std::byte>> buffers(50, filled(100, 0));
    buffers.front() = filled(100, 7);
    for (std::size_t i = 1; i < buffers.size(); ++i) stream->copy(buffers[i], buffers[i - 1]);
    stream->record()->wait();
    EXPECT_EQ(buffers.back(), buffers.front());
}

// An event passes with what was queued before it, not with what came later. Method: a slow link, an event between two
// copies.
TEST(EmulatedDevice, EventPassesWithWhatIsBeforeIt) {
    EmulatedDevice device({.bytes_per_second = {1e5, 1e5}});
    const auto stream = device.make_stream(LinkDirection::to_host);
    const auto few = filled(10, 3);
    const auto source = filled(20000, 4);
    std::vector<std::byte> first(10), second(20000);
    stream->copy(first, few);
    const auto between = stream->record();
    stream->copy(second, source);
    const auto behind = stream->record();
    between->wait();
    EXPECT_TRUE(between->has_passed());
    EXPECT_FALSE(behind->has_passed());
    EXPECT_EQ(first, few);
    behind->wait();
    EXPECT_EQ(second, source);
}

// Memory that a copy has not finished with is not idle, at either side, whole or in part; what lies beside it is.
// Method: copies on a slow link between the middles of two buffers, one for each place that is asked about.
TEST(EmulatedDevice, MemoryIsIdleAfterItsCopies) {
    EmulatedDevice device({.bytes_per_second = {1e6, 1e6}});
    const auto stream = device.make_stream(LinkDirection::to_device);
    std::vector<std::byte> to(30000), from(30000);
    for (const std::vector<std::byte>* side : {&to, &from}) {
        const std::span<const std::byte> memory(*side);
        for (const auto overlapping :
             {memory, memory.subspan(9999, 2), memory.subspan(19999, 10), memory.subspan(15000, 1)}) {
            stream->copy(std::span(to).subspan(10000, 10000), std::span(from).subspan(10000, 10000));
            EXPECT_NO_THROW(device.check_idle(memory.first(10000)));
            EXPECT_NO_THROW(device.check_idle(memory.subspan(20000)));
            EXPECT_THROW(device.check_idle(overlapping), LogicError);
            EXPECT_NO_THROW(device.check_idle(overlapping)) << "it waited before it threw";
        }
    }
}

// Streams of one direction share the link, those of the other have their own. Method: how long copies take at least.
TEST(EmulatedDevice, StreamsOfADirectionShareTheLink) {
    EmulatedDevice device({.bytes_per_second = {1e6, 0}});
    const auto a = device.make_stream(LinkDirection::to_device);
    const auto b = device.make_stream(LinkDirection::to_device);
    std::vector<std::byte> one(50000), two(50000);
    const auto source = filled(50000, 1);
    const auto begin = std::chrono::steady_clock::now();
    a->copy(one, source);
    b->copy(two, source);
    a->record()->wait();
    b->record()->wait();
    EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(100));
}

TEST(EmulatedDevice, PoisonIsSeen) {
    EmulatedDevice device;
    std::vector<std::byte> memory(100);
    device.poison(memory);
    EXPECT_EQ(memory, filled(100, 0xFF));
}

}  // namespace
}  // namespace torch_offload::test
