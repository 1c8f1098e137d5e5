#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"
#include "codec/rans4.h"
#include "codec/ternary_samples.h"
#include "support/sanitized.h"

namespace torch_offload {
namespace {

/// Gives each of the symbols what is left of kFrequencyTotal, by lot; at least 1 where all can have some.
SymbolFrequencies random_frequencies(std::mt19937_64& random) {
    SymbolFrequencies frequencies;
    frequencies.fill(1);
    std::uint32_t left = kFrequencyTotal - kSymbolCount;
    while (left > 0) {
        const auto more = static_cast<std::uint32_t>(1 + random() % left);
        std::uint16_t& one = frequencies[random() % kSymbolCount];
        one = static_cast<std::uint16_t>(one + more);
        left -= more;
    }
    return frequencies;
}

std::vector<std::byte> encoded(const Rans4Encoder& coder, const Matrix& matrix, InstructionSet set) {
    return coder.encode(matrix.view(), set);
}

void expect_equal_bytes(const Rans4Encoder& coder, const Matrix& matrix, const std::string& what) {
    const std::vector<std::byte> expected = encoded(coder, matrix, InstructionSet::portable);
    for (const InstructionSet set : available_sets()) {
        ASSERT_TRUE(encoded(coder, matrix, set) == expected) << what << ", instruction set " << static_cast<int>(set);
    }
}

// Every instruction set gives the same bytes. Method: 400 random matrices, with frequencies by lot that have nothing to
// do with the values, so that states take all sizes; up to three classes, any width, up to 200 rows.
TEST(Rans4Encode, HasTheSameBytesByEverySet) {
    std::mt19937_64 random(21);
    for (int i = 0; i < repetitions(400); ++i) {
        const std::size_t columns = 1 + random() % 150;
        const std::size_t rows = 1 + random() % (i % 2 ? 70 : 200);
        ColumnClasses classes = {{0}};
        while (classes.size() < 3 && classes.back().first_column + 1 < columns) {
            classes.push_back(
                {classes.back().first_column + 1 + random() % (columns - 1 - classes.back().first_column)});
        }
        std::vector<SymbolFrequencies> frequencies;
        for (std::size_t k = 0; k < classes.size(); ++k) frequencies.push_back(random_frequencies(random));
        const Rans4Encoder coder(columns, classes, frequencies);
        const double zero = std::uniform_real_distribution<>(0, 1)(random);
        expect_equal_bytes(coder, random_matrix(rows, columns, zero, random()),
                           std::to_string(i) + ": " + std::to_string(rows) + " x " + std::to_string(columns));
    }
}

// So do matrices that are hard for it. Method: whole extents of nothing but zeros, of one value, of a single column or
// row, of odds that differ from class to class, at widths around those of quads and vectors; by the odds of their own.
TEST(Rans4Encode, HasTheSameExtentsByEverySet) {
    constexpr std::size_t kWidths[] = {1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 333};
    constexpr std::size_t kHeights[] = {1, 2, 16, 17, 63, 64, 65, 129};
    for (const std::size_t columns : kWidths) {
        for (const std::size_t rows : kHeights) {
            Matrix skewed = random_matrix(rows, columns, 0.3, 5);
            for (std::size_t i = 0; i < skewed.values.size(); ++i) {
                if (i % columns >= columns / 2) skewed.values[i] = i % 97 == 0 ? std::int8_t{1} : std::int8_t{0};
            }
            const Matrix matrices[] = {filled_matrix(rows, columns, 0), filled_matrix(rows, columns, -1),
                                       random_matrix(rows, columns, 0.999, 3), skewed};
            for (const Matrix& matrix : matrices) {
                EncodeOptions options{.coder = CoderChoice::rans4, .set = InstructionSet::portable};
                if (columns > 1) options.classes = {{0}, {(columns + 1) / 2}};
                const ExtentBuffer expected = encode(matrix.view(), options);
                for (const InstructionSet set : available_sets()) {
                    options.set = set;
                    ASSERT_TRUE(std::ranges::equal(encode(matrix.view(), options).bytes(), expected.bytes()))
                        << rows << " x " << columns << ", instruction set " << static_cast<int>(set);
                }
            }
        }
    }
}

// Growing a state divides exactly. Method: each frequency with a row of symbols of it, whose states a decoder takes
// back; a quotient that is off by one anywhere leaves another state.
TEST(Rans4Encode, DividesExactlyByEveryFrequency) {
    for (std::uint32_t frequency = 1; frequency < kFrequencyTotal; frequency += kSanitized ? 97 : 1) {
        SymbolFrequencies frequencies{};
        frequencies[0] = static_cast<std::uint16_t>(kFrequencyTotal - frequency);
        frequencies[1] = static_cast<std::uint16_t>(frequency);
        const Rans4Encoder coder(120, {{0}}, {frequencies});
        Matrix matrix = filled_matrix(64, 120, 0);
        std::mt19937 random(frequency);
        for (std::size_t i = 0; i < matrix.values.size(); i += kQuad) matrix.values[i] = random() % 2 ? 1 : 0;
        expect_equal_bytes(coder, matrix, std::to_string(frequency));
    }
}

// Values that the frequencies do not know are refused. Method: one such quad, in each lane, at each position of a
// vector's.
TEST(Rans4Encode, RefusesWhatHasNoFrequency) {
    SymbolFrequencies frequencies{};
    frequencies[0] = frequencies[1] = kFrequencyTotal / 2;
    const Rans4Encoder coder(21, {{0}}, {frequencies});
    Matrix matrix = filled_matrix(67, 21, 0);
    for (std::size_t i = 0; i < matrix.values.size(); ++i) {
        matrix.values[i] = -1;
        for (const InstructionSet set : available_sets()) {
            ASSERT_THROW(encoded(coder, matrix, set), InvalidArgument) << i << ", " << static_cast<int>(set);
        }
        matrix.values[i] = 0;
    }
}

}  // namespace
}  // namespace torch_offload
