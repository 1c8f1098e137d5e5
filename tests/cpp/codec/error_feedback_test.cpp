#include "codec/error_feedback.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace torch_offload {
namespace {

struct Size {
    std::size_t columns;
    std::size_t rows;
};

/// A matrix, a square matrix of inputs and how to round; `values` are those of a first, crude choice.
struct Problem {
    Size size;
    std::vector<float> exact;
    std::vector<float> square;
    std::vector<float> steps;
    std::vector<float> thresholds;
    std::vector<float> values;

    Problem(Size shape, std::uint32_t seed) : size(shape) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        for (std::size_t i = 0; i < size.columns * size.rows; ++i) exact.push_back(normal(random));
        for (std::size_t i = 0; i < size.columns * size.columns; ++i) square.push_back(0.1F * normal(random));
        for (std::size_t i = 0; i < size.columns; ++i) {
            square[i * size.columns + i] = 1 + std::abs(normal(random));
            for (std::size_t j = 0; j < i; ++j) square[i * size.columns + j] = square[j * size.columns + i];
            steps.push_back(1 + 0.1F * std::abs(normal(random)));
            thresholds.push_back(0.6F + 0.1F * std::abs(normal(random)));
        }
        for (const float value : exact) values.push_back(std::abs(value) > 1 ? std::copysign(1.0F, value) : 0.0F);
    }

    RoundedMatrix view() {
        return {exact.data(), size.columns, size.rows, steps.data(), thresholds.data(), values.data()};
    }
};

float decided(float wanted, float threshold) {
    if (std::abs(wanted) <= threshold) return 0;
    return wanted > 0 ? 1.0F : -1.0F;
}

/// Row by row, one product after the other, as error_feedback.h says.
std::vector<float> rounded_by_formula(const Problem& problem) {
    const auto [columns, rows] = problem.size;
    std::vector<float> rest = problem.exact;
    std::vector<float> values(columns * rows);
    for (std::size_t row = 0; row < rows; ++row) {
        for (std::size_t k = 0; k < columns; ++k) {
            const float wanted = rest[k * rows + row];
            const float value = decided(wanted, problem.thresholds[k]);
            const float kept = value * problem.steps[k];
            const float error = (wanted - kept) / problem.square[k * columns + k];
            for (std::size_t c = k + 1; c < columns; ++c) {
                const float moved = problem.square[k * columns + c] * error;
                rest[c * rows + row] -= moved;
            }
            values[k * rows + row] = value;
        }
    }
    return values;
}

std::vector<float> chosen_by_formula(const Problem& problem) {
    const auto [columns, rows] = problem.size;
    std::vector<float> values = problem.values;
    for (std::size_t row = 0; row < rows; ++row) {
        std::vector<float> slope(columns);
        for (std::size_t k = 0; k < columns; ++k) {
            const float kept = values[k * rows + row] * problem.steps[k];
            const float error = -(problem.exact[k * rows + row] - kept);
            for (std::size_t c = 0; c < columns; ++c) {
                const float part = problem.square[k * columns + c] * error;
                slope[c] -= part;
            }
        }
        for (std::size_t k = 0; k < columns; ++k) {
            float& value = values[k * rows + row];
            const float kept = value * problem.steps[k];
            const float chosen = decided(kept + slope[k] / problem.square[k * columns + k], problem.thresholds[k]);
            const float change = (chosen - value) * problem.steps[k];
            for (std::size_t c = k + 1; c < columns; ++c) {
                const float moved = problem.square[k * columns + c] * change;
                slope[c] -= moved;
            }
            value = chosen;
        }
    }
    return values;
}

class ErrorFeedback : public testing::TestWithParam<Size> {
protected:
    static std::vector<InstructionSet> sets() {
        std::vector<InstructionSet> available;
        for (const auto set : {InstructionSet::portable, InstructionSet::avx2, InstructionSet::avx512}) {
            if (is_available(set)) available.push_back(set);
        }
        return available;
    }
};

TEST_P(ErrorFeedback, RoundsAsTheFormulaDoes) {
    const std::vector<float> expected = rounded_by_formula(Problem(GetParam(), 1));
    for (const InstructionSet set : sets()) {
        Problem problem(GetParam(), 1);
        for (std::size_t row = 0; row < problem.size.rows; row += kRoundedRows) {
            round_rows(problem.view(), problem.square.data(), row, set);
        }
        EXPECT_EQ(problem.values, expected) << "instruction set " << static_cast<int>(set);
    }
}

TEST_P(ErrorFeedback, ChoosesAgainAsTheFormulaDoes) {
    const std::vector<float> expected = chosen_by_formula(Problem(GetParam(), 2));
    for (const InstructionSet set : sets()) {
        Problem problem(GetParam(), 2);
        for (std::size_t row = 0; row < problem.size.rows; row += kRoundedRows) {
            refine(problem.view(), problem.square.data(), row, set);
        }
        EXPECT_EQ(problem.values, expected) << "instruction set " << static_cast<int>(set);
    }
}

INSTANTIATE_TEST_SUITE_P(Sizes, ErrorFeedback,
                         testing::Values(Size{1, 1}, Size{2, 63}, Size{31, 64}, Size{33, 65}, Size{101, 130}));

TEST(ErrorFeedbackOfRows, OthersAreLeftAlone) {
    Problem problem({5, 200}, 3);
    const std::vector<float> before = problem.values;
    round_rows(problem.view(), problem.square.data(), 64);
    for (std::size_t i = 0; i < before.size(); ++i) {
        const std::size_t row = i % 200;
        if (row < 64 || row >= 128) {
            EXPECT_EQ(problem.values[i], before[i]) << "row " << row;
        }
    }
}

}  // namespace
}  // namespace torch_offload
