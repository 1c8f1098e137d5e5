#include "optim/adamw_kernels.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

#include "optim/packed_moments.h"
#include "optim/split_master.h"
#include "support/adamw_parameter.h"

namespace torch_offload {
namespace {

/// The documented formula, one element at a time; `volatile` keeps the compiler from joining operations.
void reference_step(Parameter& p, std::size_t i, const AdamWFactors& f, const GradientScaling& scaling) {
    const auto rounded = [](float value) {
        volatile float result = value;
        return result;
    };
    const auto canonical = [](float value) { return std::isnan(value) ? std::bit_cast<float>(kCanonicalNan) : value; };
    const bool is_half = p.gradient_type == GradientType::bf16;
    float g = is_half ? std::bit_cast<float>(static_cast<std::uint32_t>(p.half_gradients[i]) << 16) : p.gradients[i];
    if (scaling.has_scale) g = rounded(g / scaling.scale);
    if (scaling.has_clip) g = rounded(g * scaling.clip);
    if (scaling.has_clip && is_half && !std::isnan(g)) {
        const auto bits = std::bit_cast<std::uint32_t>(g);
        const std::uint32_t rest = bits & 0xFFFF;
        const bool is_up = rest > 0x8000 || (rest == 0x8000 && (bits & 0x10000) != 0);
        g = std::bit_cast<float>((bits & 0xFFFF0000) + (is_up ? 0x10000 : 0));
    }
    if (f.is_maximizing) g = -g;
    float master =
        p.master == Master::split ? std::bit_cast<float>(join_master({p.weights[i], p.low[i]})) : p.masters[i];
    float& m = p.exp_avg[i];
    float& v = p.exp_avg_sq[i];
    const float difference = rounded(g - m);
    m = canonical(f.average_weight < 0.5F ? rounded(m + rounded(f.average_weight * difference))
                                          : rounded(g + rounded(rounded(f.average_weight - 1) * difference)));
    v = canonical(rounded(rounded(f.square_keep * v) + rounded(rounded(f.square_weight * g) * g)));
    float square = v;
    if (p.is_amsgrad) {
        float& largest = p.max_exp_avg_sq[i];
        if (std::isnan(v) || largest < v) largest = v;
        square = largest;
    }
    const float denominator = rounded(rounded(std::sqrt(square) / f.square_correction) + f.eps);
    master = canonical(rounded(rounded(master * f.decay) + rounded(rounded(f.negative_step * m) / denominator)));
    const SplitMaster halves = split_master(std::bit_cast<std::uint32_t>(master));
    if (p.master != Master::itself) p.weights[i] = halves.weight;
    if (p.master == Master::split) p.low[i] = halves.low;
    if (p.master != Master::split) p.masters[i] = master;
}

class AdamWKernels : public testing::TestWithParam<InstructionSet> {
protected:
    void SetUp() override {
        if (!is_available(GetParam())) GTEST_SKIP() << "this processor has no such instructions";
    }
};

// Every kernel computes the documented formula, bit for bit, for ordinary numbers, denormals, infinities and
// not-a-numbers, at every length around a vector. Method: an element-wise reference that cannot be contracted.
TEST_P(AdamWKernels, GiveTheBitsOfTheFormula) {
    for (const Setting& setting : settings()) {
        for (const Master master : {Master::split, Master::apart, Master::itself}) {
            for (const GradientType type : {GradientType::bf16, GradientType::f32}) {
                for (const std::size_t count : {1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 65, 255, 256, 257, 1000, 4099}) {
                    Parameter expected = make_parameter(count, master, type, count % 2 != 0);
                    Parameter actual = expected;
                    for (std::size_t i = 0; i < count; ++i) {
                        reference_step(expected, i, setting.factors, setting.scaling);
                    }
                    adamw_update(actual.arrays(), setting.factors, setting.scaling, GetParam());
                    ASSERT_EQ(actual.bytes(), expected.bytes()) << count;
                }
            }
        }
    }
}

// Packed moments are unpacked, updated like wide ones and packed again, with the same bytes from every kernel. Method:
// the element-wise reference between pack_moment and unpack_moment, several steps, lengths around a block, values that
// are not finite included.
TEST_P(AdamWKernels, WorkOnPackedMoments) {
    for (const std::size_t count : {1, 31, 33, 2047, 2048, 2049, 6145}) {
        for (const Setting& setting : settings()) {
            Parameter expected = make_parameter(count, Master::split, GradientType::bf16, false);
            if (count % 2 == 0) {  // one without special values, which would spoil every block
                for (float& value : expected.exp_avg) value = std::isfinite(value) ? value : 0;
                for (float& value : expected.exp_avg_sq) value = std::isfinite(value) ? value : 0;
                for (std::uint16_t& half : expected.half_gradients) half &= 0xBFFF;  // below 2
            }
            expected.pack();
            Parameter actual = expected;
            for (int step = 0; step < 3; ++step) {
                expected.unpack();
                for (std::size_t i = 0; i < count; ++i) reference_step(expected, i, setting.factors, setting.scaling);
                expected.pack();
                adamw_update(actual.arrays(), setting.factors, setting.scaling, GetParam());
                ASSERT_EQ(actual.bytes(), expected.bytes()) << count;
            }
        }
    }
}

// A run may be cut anywhere. Method: one update of the whole against one in pieces of odd lengths.
TEST_P(AdamWKernels, MayBeCutAnywhere) {
    const Setting setting = settings()[1];
    Parameter whole = make_parameter(5000, Master::split, GradientType::bf16, true);
    Parameter pieces = whole;
    adamw_update(whole.arrays(), setting.factors, setting.scaling, GetParam());
    for (std::size_t begin = 0, length = 1; begin < 5000; begin += length, length = length * 2 + 1) {
        adamw_update(pieces.arrays(begin, length), setting.factors, setting.scaling, GetParam());
    }
    EXPECT_EQ(pieces.bytes(), whole.bytes());
}

// With packed moments a run may be cut between blocks. Method: as above, in pieces of whole blocks.
TEST_P(AdamWKernels, MayBeCutBetweenBlocks) {
    const Setting setting = settings()[0];
    Parameter whole = make_parameter(5 * kPackedBlock + 3, Master::split, GradientType::bf16, false);
    whole.pack();
    Parameter pieces = whole;
    adamw_update(whole.arrays(), setting.factors, setting.scaling, GetParam());
    for (const std::size_t begin : {std::size_t{0}, kPackedBlock, 4 * kPackedBlock}) {
        const std::size_t length = begin == 4 * kPackedBlock ? kPackedBlock + 3 : (begin == 0 ? 1 : 3) * kPackedBlock;
        adamw_update(pieces.arrays(begin, length), setting.factors, setting.scaling, GetParam());
    }
    EXPECT_EQ(pieces.bytes(), whole.bytes());
}

// A master kept as a low half and one kept apart stay the same master, and the weight is its rounding, over many
// steps. Method: both forms of one parameter through 200 steps.
TEST_P(AdamWKernels, SplitAndSeparateMastersStayEqual) {
    Parameter split = make_parameter(777, Master::split, GradientType::bf16, false);
    Parameter apart = split;
    apart.master = Master::apart;
    for (int step = 1; step <= 200; ++step) {
        const AdamWFactors factors = adamw_factors({.lr = 1e-2, .weight_decay = 0.1}, step);
        adamw_update(split.arrays(), factors, {}, GetParam());
        adamw_update(apart.arrays(), factors, {}, GetParam());
    }
    EXPECT_EQ(split.weights, apart.weights);
    for (std::size_t i = 0; i < split.low.size(); ++i) {
        ASSERT_EQ(join_master({split.weights[i], split.low[i]}), std::bit_cast<std::uint32_t>(apart.masters[i])) << i;
    }
}

std::string name_of(const testing::TestParamInfo<InstructionSet>& set) {
    constexpr const char* kNames[] = {"portable", "avx2", "avx512"};
    return kNames[static_cast<std::size_t>(set.param)];
}

INSTANTIATE_TEST_SUITE_P(All, AdamWKernels,
                         testing::Values(InstructionSet::portable, InstructionSet::avx2, InstructionSet::avx512),
                         name_of);

// The set used by default is one that this machine has.
TEST(AdamWKernelChoice, BestIsAvailable) { EXPECT_TRUE(is_available(best_instruction_set())); }

}  // namespace
}  // namespace torch_offload
