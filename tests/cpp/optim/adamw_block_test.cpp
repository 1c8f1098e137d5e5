#include "optim/adamw_block.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>

#include "support/adamw_parameter.h"

namespace torch_offload {
namespace {

/// A launch as CUDA would make it: how many blocks there are, and in which order a block's threads happen to run.
struct Launch {
    std::size_t blocks;
    HostTeam team;
};
constexpr Launch kLaunches[] = {{1, {1}}, {3, {253}}, {40, {77}}};

GroupStep step_of(Parameter& parameter, const Setting& setting, bool is_aligned) {
    return {parameter.arrays(), setting.factors, setting.scaling, is_aligned};
}

void run_wide(const GroupStep& step, const Launch& launch) {
    const std::size_t threads = launch.blocks * kTeamLanes;
    for (std::size_t i = 0; i < threads; ++i) {
        update_wide_groups(step, i * launch.team.stride % threads, threads);
    }
}

void run_packed(const GroupStep& step, const Launch& launch) {
    for (std::size_t block = 0; block < launch.blocks; ++block) {
        PackedShared shared;
        update_packed_blocks(launch.team, step, kFirstLevels, kSecondLevels, block, launch.blocks, shared);
    }
}

// The kernel for CUDA gives the bits of the one for processors with fp32 moments, in every form of a parameter,
// whatever the number of blocks and the order of threads. Method: the kernel's own functions in a loop over its
// threads, numbers with denormals, infinities and not-a-numbers among them, lengths around a group and a block.
TEST(AdamWBlock, GivesTheBitsOfThePortableKernel) {
    for (const Setting& setting : settings()) {
        for (const Master master : {Master::split, Master::apart, Master::itself}) {
            for (const GradientType type : {GradientType::bf16, GradientType::f32}) {
                for (const std::size_t count : {1, 7, 8, 9, 255, 2047, 2048, 2049, 9001}) {
                    const Parameter start = make_parameter(count, master, type, count % 2 != 0);
                    Parameter expected = start;
                    adamw_update(expected.arrays(), setting.factors, setting.scaling, InstructionSet::portable);
                    for (const Launch& launch : kLaunches) {
                        Parameter actual = start;
                        run_wide(step_of(actual, setting, count % 3 != 0), launch);
                        ASSERT_EQ(actual.bytes(), expected.bytes()) << count << " in " << launch.blocks;
                    }
                }
            }
        }
    }
}

/// Without what is not finite, which would spoil every block.
void make_tame(Parameter& parameter) {
    for (float& value : parameter.exp_avg) value = std::isfinite(value) ? value : 0;
    for (float& value : parameter.exp_avg_sq) value = std::isfinite(value) ? value : 0;
    for (std::uint16_t& half : parameter.half_gradients) half &= 0xBFFF;  // below 2
}

// The same with 8-bit moments, over several steps, so that what was packed is unpacked. Method: as above; blocks with
// and without values that are not finite, a last block that is not full.
TEST(AdamWBlock, GivesTheBitsOfThePortableKernelForPackedMoments) {
    for (const Setting& setting : settings()) {
        for (const std::size_t count : {1, 31, 33, 2047, 2048, 2049, 6145}) {
            Parameter start =
                make_parameter(count, count % 3 != 0 ? Master::split : Master::apart, GradientType::bf16, false);
            if (count % 2 == 0 || count > 6000) make_tame(start);
            start.pack();
            for (const Launch& launch : kLaunches) {
                Parameter expected = start;
                Parameter actual = start;
                for (int step = 0; step < 3; ++step) {
                    adamw_update(expected.arrays(), setting.factors, setting.scaling, InstructionSet::portable);
                    run_packed(step_of(actual, setting, count % 2 == 0), launch);
                    ASSERT_EQ(actual.bytes(), expected.bytes()) << count << " in " << launch.blocks;
                }
            }
        }
    }
}

}  // namespace
}  // namespace torch_offload
