// One parameter with its state in every form that AdamW takes, and numbers that break kernels.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "optim/adamw_kernels.h"
#include "optim/packed_moments.h"
#include "optim/split_master.h"

namespace torch_offload {

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

inline Parameter make_parameter(std::size_t count, Master master, GradientType type, bool is_amsgrad) {
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

inline std::vector<Setting> settings() {
    std::vector<Setting> all;
    all.push_back({adamw_factors({.lr = 1e-2, .weight_decay = 0.1}, 1), {}});
    all.push_back({adamw_factors({.lr = 1e-3, .maximize = true}, 7), {.has_clip = true, .clip = 0.37F}});
    all.push_back({adamw_factors({.lr = 1, .beta1 = 0.3, .beta2 = 0.5}, 3), {.has_scale = true, .scale = 1024.5F}});
    all.push_back({adamw_factors({.lr = 1e-2, .beta1 = 0, .eps = 0}, 100'000),
                   {.has_scale = true, .has_clip = true, .scale = 3.0F, .clip = 1.0F}});
    return all;
}

}  // namespace torch_offload
