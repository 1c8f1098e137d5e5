#include "optim/adamw_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "optim/packed_moments.h"
#include "optim/split_master.h"

namespace torch_offload {
namespace {

enum class Master : std::uint8_t { split, apart, itself };  // low half; fp32 beside bf16; the parameter itself

/// One parameter with its state, in every form a kernel takes.
struct Parameter {
    Master master = Master::split;
    GradientType gradient_type = GradientType::bf16;
    bool is_amsgrad = false;
    std::vector<std::uint16_t> weights;
    std::vector<std::int16_t> low;
    std::vector<float> masters;
    std::vector<std::uint16_t> half_gradients;
    std::vector<float> gradients;
    std::vector<float> exp_avg, exp_avg_sq, max_exp_avg_sq;
    std::vector<std::uint8_t> packed_exp_avg, packed_exp_avg_sq;  // if there, they are used

    AdamWArrays arrays(std::size_t begin = 0, std::size_t count = SIZE_MAX) {
        AdamWArrays result;
        result.count = std::min(count, exp_avg.size() - begin);
        result.weights = master == Master::itself ? nullptr : weights.data() + begin;
        result.low = master == Master::split ? low.data() + begin : nullptr;
        result.masters = master == Master::split ? nullptr : masters.data() + begin;
        result.gradient_type = gradient_type;
        result.gradients = gradient_type == GradientType::bf16 ? static_cast<const void*>(half_gradients.data() + begin)
                                                               : gradients.data() + begin;
        result.exp_avg = exp_avg.data() + begin;
        result.exp_avg_sq = exp_avg_sq.data() + begin;
        result.max_exp_avg_sq = is_amsgrad ? max_exp_avg_sq.data() + begin : nullptr;
        if (!packed_exp_avg.empty()) {
            result.packed_exp_avg = packed_exp_avg.data() + begin;
            result.packed_exp_avg_sq = packed_exp_avg_sq.data() + begin;
            result.exp_avg = result.exp_avg_sq = nullptr;
        }
        return result;
    }
    void pack() {
        packed_exp_avg.resize(packed_size(exp_avg.size()));
        packed_exp_avg_sq.resize(packed_size(exp_avg.size()));
        pack_moment(Moment::first, exp_avg.data(), exp_avg.size(), packed_exp_avg.data());
        pack_moment(Moment::second, exp_avg_sq.data(), exp_avg.size(), packed_exp_avg_sq.data());
    }
    void unpack() {
        unpack_moment(Moment::first, packed_exp_avg.data(), exp_avg.size(), exp_avg.data());
        unpack_moment(Moment::second, packed_exp_avg_sq.data(), exp_avg.size(), exp_avg_sq.data());
    }
    std::string bytes() const {
        std::string all;
        const auto add = [&](const auto& values) {
            all.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0]));
        };
        add(weights), add(low), add(masters), add(packed_exp_avg), add(packed_exp_avg_sq);
        if (packed_exp_avg.empty()) add(exp_avg), add(exp_avg_sq), add(max_exp_avg_sq);
        return all;
    }
};

/// Numbers of usual size, and among them those that break kernels.
class Numbers {
public:
    explicit Numbers(std::uint32_t seed) : random_(seed) {}

    float next(float scale) {
        constexpr float kSpecial[] = {0.0F,
                                      -0.0F,
                                      INFINITY,
                                      -INFINITY,
                                      std::numeric_limits<float>::quiet_NaN(),
                                      std::numeric_limits<float>::denorm_min(),
                                      -1e-40F,
                                      std::numeric_limits<float>::max(),
                                      -std::numeric_limits<float>::max(),
                                      std::numeric_limits<float>::min(),
                                      1.0F};
        if (random_() % 16 == 0) return kSpecial[random_() % std::size(kSpecial)];
        if (random_() % 16 == 0) return std::bit_cast<float>(static_cast<std::uint32_t>(random_()));
        return scale * normal_(random_);
    }

private:
    std::mt19937 random_;
    std::normal_distribution<float> normal_;
};

Parameter make_parameter(std::size_t count, Master master, GradientType type, bool is_amsgrad) {
    Numbers numbers(static_cast<std::uint32_t>(count) + 1);
    Parameter made;
    made.master = master;
    made.gradient_type = type;
    made.is_amsgrad = is_amsgrad;
    for (std::size_t i = 0; i < count; ++i) {
        const auto bits = std::bit_cast<std::uint32_t>(numbers.next(1.0F));
        made.weights.push_back(split_master(bits).weight);
        made.low.push_back(split_master(bits).low);
        made.masters.push_back(std::bit_cast<float>(with_canonical_nan(bits)));
        const float gradient = numbers.next(0.1F);
        made.gradients.push_back(gradient);
        made.half_gradients.push_back(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(gradient) >> 16));
        made.exp_avg.push_back(numbers.next(0.01F));
        made.exp_avg_sq.push_back(std::abs(numbers.next(0.001F)));
        made.max_exp_avg_sq.push_back(std::abs(numbers.next(0.001F)));
    }
    return made;
}

struct Setting {
    AdamWFactors factors;
    GradientScaling scaling;
};

std::vector<Setting> settings() {
    std::vector<Setting> all;
    all.push_back({adamw_factors({.lr = 1e-2, .weight_decay = 0.1}, 1), {}});
    all.push_back({adamw_factors({.lr = 1e-3, .maximize = true}, 7), {.has_clip = true, .clip = 0.37F}});
    all.push_back({adamw_factors({.lr = 1, .beta1 = 0.3, .beta2 = 0.5}, 3), {.has_scale = true, .scale = 1024.5F}});
    all.push_back({adamw_factors({.lr = 1e-2, .beta1 = 0, .eps = 0}, 100'000),
                   {.has_scale = true, .has_clip = true, .scale = 3.0F, .clip = 1.0F}});
    return all;
}

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
