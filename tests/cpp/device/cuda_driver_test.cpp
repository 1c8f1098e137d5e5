#include "device/cuda_driver.h"

#include <gtest/gtest.h>

#include "base/check.h"
#include "support/fake_gpu.h"

namespace torch_offload::test {
namespace {

/// What the message of the error says, of that type; empty: none was thrown.
template <typename Error, typename Action>
std::string message_of(Action action) {
    try {
        action();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

// Where there is no driver, asking for one is a typed error that says what to do. Method: a name nobody has.
TEST(CudaDriver, MissingLibraryIsSaid) {
    const auto message = message_of<InvalidArgument>([] { CudaDriver::load("libcuda-that-is-not-there.so.1"); });
    EXPECT_NE(message.find("install an NVIDIA driver"), std::string::npos) << message;
}

// A library without a function that is needed is too old. Method: one that has none of them.
TEST(CudaDriver, MissingFunctionIsNamed) {
    const auto message = message_of<InvalidArgument>([] { CudaDriver::load("libm.so.6"); });
    EXPECT_NE(message.find("no function cuInit: it is too old"), std::string::npos) << message;
}

TEST(CudaDriver, OldDriverIsRefused) {
    const FakeCuda cuda({.version = 11080});
    const auto message = message_of<InvalidArgument>([] { CudaDriver(FakeCuda::functions()); });
    EXPECT_NE(message.find("version 11.8"), std::string::npos) << message;
}

TEST(CudaDriver, DriverThatDoesNotBeginIsSaid) {
    FakeCuda cuda;
    cuda.fail("cuInit", CuResult::no_device);
    EXPECT_NE(message_of<InvalidArgument>([] { CudaDriver(FakeCuda::functions()); }), "");
}

TEST(CudaContext, HasADeviceAndItsName) {
    const FakeCuda cuda;
    const CudaDriver driver(FakeCuda::functions());
    EXPECT_EQ(CudaContext(driver, 0).name(), "cuda:0 Fake");
    const auto message = message_of<InvalidArgument>([&] { CudaContext(driver, 1); });
    EXPECT_NE(message.find("no device cuda:1: there are 1"), std::string::npos) << message;
}

TEST(CudaContext, DeviceThatCannotMapIsRefused) {
    const FakeCuda cuda({.has_virtual_memory = false});
    const CudaDriver driver(FakeCuda::functions());
    EXPECT_THROW(CudaContext(driver, 0), InvalidArgument);
}

// An error that ends the device ends every call after it, without asking the driver again. Method: each of them.
TEST(CudaContext, LostDeviceStaysLost) {
    for (const CuResult result : {CuResult::illegal_address, CuResult::launch_failed, CuResult::ecc_uncorrectable,
                                  CuResult::device_unavailable, CuResult::unknown}) {
        FakeGpu gpu;
        gpu.driver.lose_at("cuMemAddressReserve", result);
        EXPECT_THROW(gpu.memory.reserve(1, nullptr), TierIoError);
        EXPECT_TRUE(gpu.context.is_lost());
        const auto message = message_of<TierIoError>([&] { gpu.memory.reserve(1, nullptr); });
        EXPECT_NE(message.find("cuda:0 Fake is lost"), std::string::npos) << message;
        EXPECT_EQ(gpu.driver.call_count("cuMemAddressReserve"), 1u);
    }
}

// A lack of memory is no loss. Method: the call after it.
TEST(CudaContext, LackOfMemoryPasses) {
    FakeGpu gpu;
    gpu.driver.fail("cuMemAddressReserve", CuResult::out_of_memory);
    EXPECT_THROW(gpu.memory.reserve(1, nullptr), OutOfTierMemory);
    EXPECT_FALSE(gpu.context.is_lost());
    gpu.memory.release(gpu.memory.reserve(1, nullptr));
}

}  // namespace
}  // namespace torch_offload::test
