// Every kernel for CUDA against the kernels for processors, byte by byte, without torch: kernel_program COUNT... checks
// parameters and gradients of these lengths. Small ones are for compute-sanitizer. Exits with 1 and a line per
// difference.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "device_copy.cuh"
#include "optim/cuda_launch.cuh"
#include "support/adamw_parameter.h"

namespace torch_offload {
namespace {

/// One step on the device, the results brought back into `p`.
void step_on_device(Parameter& p, const Setting& setting, std::size_t offset, bool are_numbers_on_device) {
    const bool is_packed = !p.packed_exp_avg.empty();
    const DeviceCopy weights(p.weights, offset);
    const DeviceCopy low(p.low, offset);
    const DeviceCopy masters(p.masters, offset);
    const DeviceCopy half_gradients(p.half_gradients, offset);
    const DeviceCopy gradients(p.gradients, offset);
    const DeviceCopy exp_avg(p.exp_avg, offset), exp_avg_sq(p.exp_avg_sq, offset), largest(p.max_exp_avg_sq, offset);
    const DeviceCopy packed_exp_avg(p.packed_exp_avg, offset), packed_exp_avg_sq(p.packed_exp_avg_sq, offset);
    const DeviceCopy numbers(std::vector{setting.scaling.scale, setting.scaling.clip, 0.0F}, 0);
    AdamWArrays arrays;
    arrays.count = p.exp_avg.size();
    arrays.weights = p.master == Master::itself ? nullptr : weights.get();
    arrays.low = p.master == Master::split ? low.get() : nullptr;
    arrays.masters = p.master == Master::split ? nullptr : masters.get();
    arrays.gradient_type = p.gradient_type;
    arrays.gradients =
        p.gradient_type == GradientType::bf16 ? static_cast<const void*>(half_gradients.get()) : gradients.get();
    arrays.exp_avg = is_packed ? nullptr : exp_avg.get();
    arrays.exp_avg_sq = is_packed ? nullptr : exp_avg_sq.get();
    arrays.max_exp_avg_sq = p.is_amsgrad && !is_packed ? largest.get() : nullptr;
    arrays.packed_exp_avg = is_packed ? packed_exp_avg.get() : nullptr;
    arrays.packed_exp_avg_sq = is_packed ? packed_exp_avg_sq.get() : nullptr;
    DeviceScaling scaling{setting.scaling, nullptr, nullptr, nullptr};
    if (are_numbers_on_device) {
        scaling = {{setting.scaling.has_scale, setting.scaling.has_clip, 7.0F, 7.0F},
                   numbers.get(),
                   numbers.get() + 1,
                   numbers.get() + 2};
    }
    launch_adamw(arrays, setting.factors, scaling, nullptr);
    check_cuda(cudaDeviceSynchronize(), "AdamW");
    const bool is_inside = weights.back(p.weights) & low.back(p.low) & masters.back(p.masters) &
                           exp_avg.back(p.exp_avg) & exp_avg_sq.back(p.exp_avg_sq) & largest.back(p.max_exp_avg_sq) &
                           packed_exp_avg.back(p.packed_exp_avg) & packed_exp_avg_sq.back(p.packed_exp_avg_sq);
    expect(is_inside, "AdamW wrote beside its arrays");
}

void check_adamw(const Parameter& start, const Setting& setting, const std::string& what) {
    Parameter expected = start;
    Parameter actual = start;
    for (int step = 0; step < 2; ++step) {
        adamw_update(expected.arrays(), setting.factors, setting.scaling, InstructionSet::portable);
        step_on_device(actual, setting, step == 0 ? 0 : 3, step == 0);
        expect(actual.bytes() == expected.bytes(), what + ", step " + std::to_string(step));
    }
}

/// Blocks with values that are not finite become not-a-number as a whole: half of the lengths have none.
void make_tame(Parameter& parameter) {
    for (float& value : parameter.exp_avg) value = std::isfinite(value) ? value : 0;
    for (float& value : parameter.exp_avg_sq) value = std::isfinite(value) ? value : 0;
    for (std::uint16_t& half : parameter.half_gradients) half &= 0xBFFF;
}

void check_adamw(std::size_t count) {
    int number = 0;
    for (const Setting& setting : settings()) {
        const std::string what = "AdamW of " + std::to_string(count) + ", setting " + std::to_string(number++);
        for (const Master master : {Master::split, Master::apart, Master::itself}) {
            for (const GradientType type : {GradientType::bf16, GradientType::f32}) {
                check_adamw(make_parameter(count, master, type, count % 2 != 0), setting, what);
            }
        }
        for (const bool is_tame : {true, false}) {
            Parameter packed = make_parameter(count, Master::split, GradientType::bf16, false);
            if (is_tame) make_tame(packed);
            packed.pack();
            check_adamw(packed, setting, what + ", 8-bit moments");
        }
    }
}

std::string bytes_of(const WritebackSum& sum) { return {reinterpret_cast<const char*>(&sum), sizeof(sum)}; }

void check_writeback(std::size_t count, GradientType to_type) {
    const Parameter values = make_parameter(count, Master::split, GradientType::bf16, false);
    const std::size_t to_bytes = count * (to_type == GradientType::bf16 ? 2 : 4);
    std::vector<std::uint8_t> expected(to_bytes);
    std::vector<WritebackSum> sums(writeback_chunks(count));
    WritebackArrays arrays{count, values.half_gradients.data(), GradientType::bf16, expected.data(), to_type};
    write_back_gradients(arrays, sums.data(), InstructionSet::portable);
    const WritebackSum total = total_writeback(sums.data(), sums.size());
    for (const unsigned blocks : {0u, 1u, 3u, 1000u}) {
        const DeviceCopy from(values.half_gradients, blocks % 2);
        const DeviceCopy to(std::vector<std::uint8_t>(to_bytes), 0);
        const DeviceCopy found(std::vector<WritebackSum>(sums.size() + 1), 0);
        arrays = {count, from.get(), GradientType::bf16, to.get(), to_type};
        launch_writeback(arrays, found.get() + 1, found.get(), blocks, nullptr);
        check_cuda(cudaDeviceSynchronize(), "the writeback");
        std::vector<std::uint8_t> actual(to_bytes);
        std::vector<WritebackSum> all(sums.size() + 1);
        const std::string what = "writeback of " + std::to_string(count) + " in " + std::to_string(blocks) + " blocks";
        expect(to.back(actual) & found.back(all), what + " wrote beside its arrays");
        expect(actual == expected, what + ": bytes");
        expect(bytes_of(all[0]) == bytes_of(total), what + ": total");
        for (std::size_t i = 0; i < sums.size(); ++i) expect(bytes_of(all[i + 1]) == bytes_of(sums[i]), what);
    }
}

}  // namespace
}  // namespace torch_offload

int main(int argument_count, char** arguments) try {
    for (int i = 1; i < argument_count; ++i) {
        const std::size_t count = std::strtoull(arguments[i], nullptr, 10);
        torch_offload::check_adamw(count);
        torch_offload::check_writeback(count, torch_offload::GradientType::bf16);
        torch_offload::check_writeback(count, torch_offload::GradientType::f32);
    }
    std::printf("%d lengths, %d differences\n", argument_count - 1, torch_offload::differences);
    return argument_count > 1 && torch_offload::differences == 0 ? 0 : 1;
} catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
}
