#include "device/cuda_driver.h"

#include <gtest/gtest.h>

#include <array>
#include <thread>

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

// A machine whose GPUs are joined by switches is not ready before its fabric manager runs: the error names it.
TEST(CudaDriver, SystemThatIsNotReadyNamesTheFabricManager) {
    FakeCuda cuda;
    cuda.fail("cuInit", CuResult::system_not_ready);
    const auto message = message_of<InvalidArgument>([] { CudaDriver(FakeCuda::functions()); });
    EXPECT_NE(message.find("start nvidia-fabricmanager"), std::string::npos) << message;
}

// A device that another process has for itself is no lost one, and no defect.
TEST(CudaContext, DeviceOfAnotherProcessIsSaid) {
    FakeCuda cuda;
    const CudaDriver driver(FakeCuda::functions());
    cuda.fail("cuDevicePrimaryCtxRetain", CuResult::device_unavailable);
    const auto message = message_of<InvalidArgument>([&] { CudaContext(driver, 0); });
    EXPECT_NE(message.find("compute mode"), std::string::npos) << message;
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
                                  CuResult::tensor_memory_leak, CuResult::device_unavailable, CuResult::unknown}) {
        FakeGpu gpu;
        gpu.driver.lose_at("cuMemAddressReserve", result);
        EXPECT_THROW(gpu.memory.reserve(1, nullptr), TierIoError);
        EXPECT_TRUE(gpu.context.is_lost());
        const auto message = message_of<TierIoError>([&] { gpu.memory.reserve(1, nullptr); });
        EXPECT_NE(message.find("cuda:0 Fake is lost"), std::string::npos) << message;
        EXPECT_EQ(gpu.driver.call_count("cuMemAddressReserve"), 1u);
    }
}

// Errors that may be one call's lose the device only if the next call says so too. Method: each is said once.
TEST(CudaContext, UnclearErrorIsAskedAboutAgain) {
    for (const CuResult result : {CuResult::device_unavailable, CuResult::unknown}) {
        FakeGpu gpu;
        gpu.driver.fail("cuMemAddressReserve", result);
        EXPECT_THROW(gpu.memory.reserve(1, nullptr), LogicError);
        EXPECT_FALSE(gpu.context.is_lost());
        gpu.memory.release(gpu.memory.reserve(1, nullptr));
    }
}

// Host memory that is not registered for an unclear reason is memory that is not registered. Method: said once, then by
// every call.
TEST(CudaContext, UnclearRefusalOfRegistrationIsOne) {
    FakeGpu gpu;
    std::array<std::byte, 64> memory{};
    gpu.driver.fail("cuMemHostRegister_v2", CuResult::unknown);
    EXPECT_FALSE(gpu.context.register_host(memory));
    EXPECT_FALSE(gpu.context.is_lost());
    gpu.driver.lose_at("cuMemHostRegister_v2", CuResult::unknown);
    EXPECT_THROW(gpu.context.register_host(memory), TierIoError);
}

// What captures into graphs refuse is no loss either, and says what to do. Method: each of their results, once.
TEST(CudaContext, CaptureLosesNothing) {
    for (int result = static_cast<int>(CuResult::capture_unsupported);
         result <= static_cast<int>(CuResult::capture_wrong_thread); ++result) {
        FakeGpu gpu;
        gpu.driver.fail("cuMemAddressReserve", static_cast<CuResult>(result));
        const auto message = message_of<InvalidArgument>([&] { gpu.memory.reserve(1, nullptr); });
        EXPECT_NE(message.find("end the capture"), std::string::npos) << message;
        EXPECT_FALSE(gpu.context.is_lost()) << result;
        gpu.memory.release(gpu.memory.reserve(1, nullptr));
    }
}

// Calls of ours heed nobody's capture, and the thread is as it was afterwards. Method: scopes in scopes, in threads
// that heed all captures and their own.
TEST(CudaContext, ScopeHeedsNoCapture) {
    const FakeGpu gpu;
    for (const CuCaptureMode before : {CuCaptureMode::global, CuCaptureMode::of_thread}) {
        std::thread([&] {
            FakeCuda::set_capture_mode(before);
            {
                const CudaContext::Scope outer(gpu.context);
                EXPECT_EQ(FakeCuda::capture_mode(), CuCaptureMode::relaxed);
                {
                    const CudaContext::Scope inner(gpu.context);
                    EXPECT_EQ(FakeCuda::capture_mode(), CuCaptureMode::relaxed);
                }
                EXPECT_EQ(FakeCuda::capture_mode(), CuCaptureMode::relaxed);
            }
            EXPECT_EQ(FakeCuda::capture_mode(), before);
        }).join();
    }
}

// A scope that cannot be begun leaves nothing behind. Method: its second call fails; then a scope, which the fake would
// find inside another.
TEST(CudaContext, ScopeThatFailsIsLeft) {
    FakeGpu gpu;
    gpu.driver.fail("cuThreadExchangeStreamCaptureMode", CuResult::not_permitted);
    EXPECT_THROW(gpu.memory.reserve(1, nullptr), LogicError);
    EXPECT_EQ(gpu.driver.call_count("cuCtxPushCurrent_v2"), gpu.driver.call_count("cuCtxPopCurrent_v2"));
    EXPECT_EQ(FakeCuda::capture_mode(), CuCaptureMode::global);
    gpu.memory.release(gpu.memory.reserve(1, nullptr));
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
