#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "codec/qmoe.h"
#include "codec/rans_model.h"
#include "codec/tun12.h"
#include "codec/tunstall_dictionary.h"

namespace torch_offload {
namespace {

constexpr TernaryOdds kOdds[] = {{43690, 10923}, {58000, 3768}, {63570, 983}, {65534, 1},
                                 {1, 65534},     {1, 1},        {60000, 1}};
constexpr WordLimit kLimits[] = {WordLimit::w31, WordLimit::w63};

// Every row can be cut into words in exactly one way. Method: 4095 words, none longer than the limit, none the
// beginning of another, and their shares of all sequences add up to one.
TEST(TunstallTree, IsACompletePrefixFreeCode) {
    for (const TernaryOdds& odds : kOdds) {
        for (const WordLimit limit : kLimits) {
            const TunstallTree tree(odds, limit);
            const TunstallWords words(tree);
            std::vector<std::string> spelled;
            double share = 0;
            for (std::size_t i = 0; i < kLeafCount; ++i) {
                const std::int8_t* const word = words.words() + i * words.word_bytes();
                const auto length = static_cast<std::uint8_t>(word[words.word_bytes() - 1]);
                ASSERT_GE(length, 1);
                ASSERT_LE(length, static_cast<std::size_t>(limit));
                std::string text;
                for (std::size_t k = 0; k < length; ++k) text += static_cast<char>('b' + word[k]);
                spelled.push_back(text);
                share += std::pow(1.0 / 3, length);
            }
            std::ranges::sort(spelled);
            for (std::size_t i = 1; i < spelled.size(); ++i) {
                ASSERT_FALSE(spelled[i].starts_with(spelled[i - 1])) << spelled[i] << " after " << spelled[i - 1];
            }
            EXPECT_NEAR(share, 1, 1e-9);
        }
    }
}

// The words are the best ones for the odds. Method: no leaf that could have been split is more probable than a node
// that was; the mean length is that of the leaves.
TEST(TunstallTree, SplitsWhatIsMostProbable) {
    for (const TernaryOdds& odds : kOdds) {
        const TunstallTree tree(odds, WordLimit::w63);
        std::uint64_t least_split = UINT64_MAX;
        std::uint64_t most_left = 0;
        double mean = 0;
        for (const TunstallTree::Node& node : tree.nodes) {
            if (!node.is_leaf()) least_split = std::min(least_split, node.probability);
            if (node.is_leaf() && node.length < 63) most_left = std::max(most_left, node.probability);
            if (node.is_leaf()) mean += node.length * std::ldexp(static_cast<double>(node.probability), -47);
        }
        EXPECT_LE(most_left, least_split);
        EXPECT_NEAR(tree.mean_length(), mean, 1e-3 * mean);
    }
}

// Longer words are taken where they save more than two in a hundred. Method: on both sides.
TEST(TunstallTree, TakesLongWordsWhereTheyPay) {
    EXPECT_EQ(best_limit({52429, 6553}), WordLimit::w31);  // p(0) = 0.80
    EXPECT_EQ(best_limit({62259, 1638}), WordLimit::w63);  // p(0) = 0.95
}

// Odds can always be coded with. Method: counts of nothing, of one value only, of everything.
TEST(TernaryOddsOf, AreNeverZero) {
    constexpr TernaryCounts kCounts[] = {{0, 0, 0},     {5, 0, 5},         {0, 5, 5},
                                         {0, 0, 5},     {1, 1, 1U << 30},  {(1U << 30) - 1, 1, 1U << 30},
                                         {30, 60, 100}, {1, 99999, 100000}};
    for (const TernaryCounts& counts : kCounts) {
        EXPECT_TRUE(is_valid(odds_of(counts))) << counts.zeros << " and " << counts.pluses << " of " << counts.total;
    }
}

// Odds are coarse, so that alike matrices share tables, and signs that are missing cost nothing. Method: by hand; all
// shares that differ by sampling alone; both signs.
TEST(TernaryOddsOf, AreEqualForAlikeMatrices) {
    EXPECT_EQ(odds_of({30, 60, 100}), (TernaryOdds{20480, 38720}));
    EXPECT_EQ(odds_of({30, 10, 100}), (TernaryOdds{20480, 6336}));
    EXPECT_EQ(odds_of({50, 50, 100}), (TernaryOdds{32768, 32767}));
    EXPECT_EQ(odds_of({50, 0, 100}), (TernaryOdds{32768, 1}));
    const TernaryOdds odds = odds_of({88600, 5700, 100000});
    for (std::uint64_t zeros = 88550; zeros <= 88820; zeros += 10) {
        for (std::uint64_t pluses = 5650; pluses <= 5750; pluses += 10) {
            EXPECT_EQ(odds_of({zeros, pluses, 100000}), odds) << zeros << ", " << pluses;
        }
    }
}

// A code of four values and its bytes are each other's inverse. Method: all 81, and the numbers of their symbols.
TEST(Quads, AreNumberedByTheirValues) {
    std::set<std::uint32_t> codes;
    for (std::uint32_t symbol = 0; symbol < kSymbolCount; ++symbol) {
        const std::uint32_t code = code_of(symbol);
        codes.insert(code);
        EXPECT_EQ(symbol_of(code), symbol);
        EXPECT_EQ(quad_code(quad_bytes(code)), code);
    }
    EXPECT_EQ(codes.size(), kSymbolCount);
    EXPECT_EQ(quad_bytes(code_of(1 + 2 * 3 + 0 * 9 + 1 * 27)), 0x0100FF01U);
}

// Frequencies add up, and whatever occurs has one. Method: nothing, one code, all alike, steep ones, a rare one.
TEST(SymbolFrequenciesOf, AddUpAndMissNothing) {
    for (const int kind : {0, 1, 2, 3, 4}) {
        CodeCounts counts{};
        for (std::uint32_t symbol = 0; symbol < kSymbolCount; ++symbol) {
            std::uint64_t& count = counts[code_of(symbol)];
            if (kind == 1) count = symbol == 7 ? 1000 : 0;
            if (kind == 2) count = 5;
            if (kind == 3) count = std::uint64_t{1} << std::min(symbol, 40U);
            if (kind == 4) count = symbol == 0 ? std::uint64_t{1} << 50 : (symbol == 80 ? 1 : 0);
        }
        const SymbolFrequencies frequencies = frequencies_of(counts);
        EXPECT_TRUE(is_valid(frequencies)) << kind;
        for (std::uint32_t symbol = 0; symbol < kSymbolCount; ++symbol) {
            EXPECT_TRUE(counts[code_of(symbol)] == 0 || frequencies[symbol] > 0) << kind << ": " << symbol;
        }
    }
}

// Rounding leaves nothing to be saved. Method: moving one from any symbol to any other costs bits.
TEST(SymbolFrequenciesOf, AreTheBestOfTheirSum) {
    CodeCounts counts{};
    for (std::uint32_t symbol = 0; symbol < kSymbolCount; ++symbol)
        counts[code_of(symbol)] = 3 + 1000 * symbol * symbol;
    const SymbolFrequencies best = frequencies_of(counts);
    const auto bits = [&](const SymbolFrequencies& frequencies) {
        double sum = 0;
        for (std::uint32_t symbol = 0; symbol < kSymbolCount; ++symbol) {
            sum -= static_cast<double>(counts[code_of(symbol)]) * std::log2(frequencies[symbol] / 4096.0);
        }
        return sum;
    };
    for (std::size_t from = 0; from < kSymbolCount; ++from) {
        for (std::size_t to = 0; to < kSymbolCount; ++to) {
            if (from == to || best[from] == 1) continue;
            SymbolFrequencies moved = best;
            --moved[from];
            ++moved[to];
            EXPECT_GE(bits(moved), bits(best) * (1 - 1e-6)) << from << " to " << to;
        }
    }
}

// Every code that four values have knows its interval, and the intervals lie one behind the other. Method: the slots of
// a decoder, which were found the other way round.
TEST(RansIntervals, AreWhatSlotsSay) {
    SymbolFrequencies frequencies{};
    for (std::uint32_t symbol = 0; symbol < kSymbolCount; ++symbol) {
        frequencies[symbol] = symbol % 5 == 3 ? 0 : static_cast<std::uint16_t>(symbol);
    }
    frequencies[80] = static_cast<std::uint16_t>(frequencies[80] + kFrequencyTotal -
                                                 std::accumulate(frequencies.begin(), frequencies.end(), 0U));
    ASSERT_TRUE(is_valid(frequencies));
    const RansIntervals intervals = intervals_of(frequencies);
    const RansSlots slots = slots_of(frequencies);
    ASSERT_EQ(slots.size(), kFrequencyTotal);
    for (std::uint32_t slot = 0; slot < kFrequencyTotal; ++slot) {
        const std::uint32_t interval = intervals[slots[slot] & 255];
        ASSERT_EQ(interval % kFrequencyTotal, slots[slot] >> 8 & 4095) << slot;
        ASSERT_EQ((interval >> kFrequencyBits) + (slots[slot] >> 20), slot);
    }
    for (std::uint32_t code = 0; code < 256; ++code) {
        const std::uint32_t symbol = symbol_of(code);
        const std::uint32_t frequency = symbol == kSymbolCount ? 0 : frequencies[symbol];
        ASSERT_EQ(intervals[code] % kFrequencyTotal, frequency) << code;
    }
}

double probability_of(const std::int8_t* values, std::size_t count) {
    double product = 1;
    for (std::size_t i = 0; i < count; ++i) product *= values[i] == 0 ? 0.885 : 0.0575;
    return product;
}

// The dictionary has the most probable sequences. Method: no continuation of an entry that is missing is more probable
// than an entry, up to what the order of multiplication changes.
TEST(QmoeDictionary, HasWhatIsMostProbable) {
    const QmoeDictionary& dictionary = QmoeDictionary::shared();
    double least_taken = 1;
    double most_missing = 0;
    for (std::uint32_t entry = 0; entry < QmoeDictionary::kEntryCount; ++entry) {
        const std::size_t pairs = dictionary.pair_count(entry);
        const double probability = probability_of(dictionary.word(entry), 2 * pairs);
        least_taken = std::min(least_taken, probability);
        for (std::size_t pair = 0; pairs < QmoeDictionary::kMaxPairs && pair < QmoeDictionary::kPairKinds; ++pair) {
            const std::int8_t added[] = {static_cast<std::int8_t>(pair % 3), static_cast<std::int8_t>(pair / 3)};
            if (dictionary.continued(entry, pair) != QmoeDictionary::kNoEntry) continue;
            most_missing = std::max(most_missing, probability * probability_of(added, 2));
        }
    }
    EXPECT_LE(most_missing, least_taken * (1 + 1e-12));
}

// The dictionary is QMoE's: 65,536 sequences of at most 14 pairs, with each all that begin it. Method: walked through.
TEST(QmoeDictionary, HasWithEachSequenceItsBeginnings) {
    const QmoeDictionary& dictionary = QmoeDictionary::shared();
    std::size_t found = 0;
    for (std::uint32_t entry = 0; entry <= QmoeDictionary::kEntryCount; ++entry) {
        const std::uint32_t parent = entry == 0 ? QmoeDictionary::kNoEntry : entry - 1;
        for (std::size_t pair = 0; pair < QmoeDictionary::kPairKinds; ++pair) {
            const std::uint32_t child = dictionary.continued(parent, pair);
            if (child == QmoeDictionary::kNoEntry) continue;
            ++found;
            const std::size_t before = entry == 0 ? 0 : dictionary.pair_count(parent);
            ASSERT_EQ(dictionary.pair_count(child), before + 1);
            ASSERT_LE(dictionary.pair_count(child), QmoeDictionary::kMaxPairs);
            const std::int8_t* const start = entry == 0 ? dictionary.word(child) : dictionary.word(parent);
            ASSERT_TRUE(std::equal(start, start + 2 * before, dictionary.word(child)));
        }
    }
    EXPECT_EQ(found, QmoeDictionary::kEntryCount);
}

}  // namespace
}  // namespace torch_offload
