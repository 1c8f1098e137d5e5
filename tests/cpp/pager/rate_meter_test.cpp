#include "pager/rate_meter.h"

#include <gtest/gtest.h>

namespace torch_offload::test {
namespace {

using std::chrono::milliseconds;

constexpr double kGuess = 4e9;
constexpr std::size_t kMiB = std::size_t{1} << 20;

// Until something was measured, there is the guess. Method: less than a measurement.
TEST(RateMeter, GuessHoldsUntilAMeasurement) {
    RateMeter meter(kGuess);
    meter.note(kMiB, milliseconds(1));
    EXPECT_EQ(meter.rate(), kGuess);
}

// A link much slower than the guess is known after a quarter of a second. Method: small reads that take long.
TEST(RateMeter, SlowLinkIsKnownSoon) {
    RateMeter meter(kGuess);
    for (int i = 0; i < 25; ++i) meter.note(100'000, milliseconds(10));
    EXPECT_DOUBLE_EQ(meter.rate(), 1e7);
}

// A fast one after 64 MiB. Method: large reads in little time.
TEST(RateMeter, FastLinkIsMeasuredOverManyBytes) {
    RateMeter meter(1);
    for (int i = 0; i < 64; ++i) meter.note(kMiB, std::chrono::microseconds(100));
    EXPECT_DOUBLE_EQ(meter.rate(), 1e4 * static_cast<double>(kMiB));
}

// Later measurements count half. Method: a rate, then a third of it.
TEST(RateMeter, LaterMeasurementsAreAveraged) {
    RateMeter meter(kGuess);
    meter.note(3'000'000, milliseconds(300));
    meter.note(1'000'000, milliseconds(300));
    EXPECT_NEAR(meter.rate(), (1e7 + 1e7 / 3) / 2, 1);
}

}  // namespace
}  // namespace torch_offload::test
