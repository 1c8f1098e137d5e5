#include "fake_gpu/driver.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "support/fake_cuda.h"

namespace torch_offload::test {
namespace {

FakeCuda& driver() {
    // Not destroyed: torch's threads use it until the process has gone.
    static auto* const driver = new FakeCuda({.memory_bytes = 4096 * kMiB});
    return *driver;
}

}  // namespace

CuStream compute_stream() {
    static const CuStream stream = driver().compute_stream();
    return stream;
}

bool is_mapped(std::span<const std::byte> memory) { return driver().is_mapped(memory); }

// What a program asks a library for by name, as indirect functions: they have the right types without a list of their
// arguments.
#define OFFLOAD_EXPORT(symbol, parameters)                       \
    extern "C" decltype(CudaFunctions::symbol) find_##symbol() { \
        driver();                                                \
        return FakeCuda::functions().symbol;                     \
    }                                                            \
    extern "C" CuResult symbol parameters __attribute__((ifunc("find_" #symbol)));
OFFLOAD_CUDA_FUNCTIONS(OFFLOAD_EXPORT)
#undef OFFLOAD_EXPORT

/// How often the program did what the real driver forgives, or punishes later.
extern "C" int fake_gpu_failures() {
    int count = 0;
    const testing::TestResult& result = testing::UnitTest::GetInstance()->ad_hoc_test_result();
    for (int i = 0; i < result.total_part_count(); ++i) count += result.GetTestPartResult(i).failed();
    return count;
}

extern "C" std::size_t fake_gpu_bytes() { return driver().created_bytes(); }
extern "C" std::size_t fake_gpu_peak_bytes() { return driver().peak_created_bytes(); }
extern "C" void fake_gpu_set_capturing(bool is_capturing) { driver().set_capturing(is_capturing); }
/// The next copy is the last: the device is lost.
extern "C" void fake_gpu_fail_copy() { driver().fail_copy(CuResult::illegal_address); }

/// From the end of the process on the driver is gone, as a real one's handler has it.
extern "C" void fake_gpu_end_at_exit() {
    std::atexit([] { driver().lose_at("cuCtxPushCurrent_v2", CuResult::deinitialized); });
}

/// The call after `skip` more of that symbol returns `result` and does nothing; then, too, where the device is lost.
extern "C" void fake_gpu_fail(const char* symbol, int result, std::size_t skip, bool loses_device) {
    if (loses_device) {
        driver().lose_at(symbol, static_cast<CuResult>(result), skip);
    } else {
        driver().fail(symbol, static_cast<CuResult>(result), skip);
    }
}
extern "C" void fake_gpu_forgive() { driver().forgive(); }
extern "C" std::size_t fake_gpu_calls(const char* symbol) { return driver().call_count(symbol); }

}  // namespace torch_offload::test
