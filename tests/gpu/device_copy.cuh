// What programs share that compare kernels with those for processors: arrays on the device, and counting differences.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "base/launch_check.cuh"

namespace torch_offload {

/// A copy of host memory on the device, with room around it that must stay as it is. `offset` breaks the alignment.
template <typename T>
class DeviceCopy {
public:
    DeviceCopy(const std::vector<T>& values, std::size_t offset) : count_(values.size()), offset_(offset) {
        check_cuda(cudaMalloc(&memory_, (count_ + 2 * kMargin) * sizeof(T)), "allocating memory");
        check_cuda(cudaMemset(memory_, kFill, (count_ + 2 * kMargin) * sizeof(T)), "filling memory");
        check_cuda(cudaMemcpy(get(), values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "copying");
    }
    DeviceCopy(const DeviceCopy&) = delete;
    ~DeviceCopy() { cudaFree(memory_); }

    T* get() const { return memory_ == nullptr || count_ == 0 ? nullptr : memory_ + kMargin + offset_; }

    /// False if something beside the array was written.
    bool back(std::vector<T>& values) const {
        std::vector<T> all(count_ + 2 * kMargin);
        check_cuda(cudaMemcpy(all.data(), memory_, all.size() * sizeof(T), cudaMemcpyDeviceToHost), "copying back");
        const std::size_t begin = count_ == 0 ? all.size() : kMargin + offset_;
        if (count_ > 0) std::memcpy(values.data(), all.data() + begin, count_ * sizeof(T));
        const auto* bytes = reinterpret_cast<const unsigned char*>(all.data());
        for (std::size_t i = 0; i < all.size() * sizeof(T); ++i) {
            const bool is_inside = i >= begin * sizeof(T) && i < (begin + count_) * sizeof(T);
            if (!is_inside && bytes[i] != kFill) return false;
        }
        return true;
    }

private:
    static constexpr std::size_t kMargin = 64;
    static constexpr int kFill = 0xAB;
    T* memory_ = nullptr;
    std::size_t count_;
    std::size_t offset_;
};

inline int differences = 0;

inline void expect(bool is_so, const std::string& what) {
    if (is_so) return;
    ++differences;
    std::printf("DIFFERENT: %s\n", what.c_str());
}

}  // namespace torch_offload
