// Everything of a GPU over the fake driver.
#pragma once

#include "device/cuda_device.h"
#include "device/cuda_driver.h"
#include "device/cuda_memory.h"
#include "device/locked_memory.h"
#include "support/fake_cuda.h"

namespace torch_offload::test {

struct FakeGpu {
    explicit FakeGpu(const FakeCudaOptions& options = {})
        : driver(options),
          context(CudaDriver(FakeCuda::functions()), 0),
          memory(context),
          host_memory(context),
          device(context, {.buffer_bytes = 2 * kSectorBytes,
                           .current_stream = [this] { return compute_stream; },
                           .host = &host_memory}) {}

    FakeCuda driver;
    CuStream compute_stream = driver.compute_stream();
    CudaContext context;
    CudaMemory memory;
    LockedMemory host_memory;
    CudaDevice device;
};

}  // namespace torch_offload::test
