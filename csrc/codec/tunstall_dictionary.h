// Dictionaries of 12-bit codewords for ternary values of known odds. Layer codec: includes base only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec/ternary.h"

namespace torch_offload {

/// Probabilities in 65536ths. That of -1 is the rest; none of the three is 0.
struct TernaryOdds {
    std::uint16_t zero = 43690;
    std::uint16_t plus = 10923;

    bool operator==(const TernaryOdds&) const = default;
};
bool is_valid(const TernaryOdds& odds) noexcept;
/// Coarse, so that alike matrices have equal odds and share tables: of what is not zero five significant bits, of the
/// rarer sign's part in that four. Words are then hardly longer than by exact odds: by less than one part in a thousand
/// for p(0) of 0.5 to 0.97. None is 0; those of nothing are the defaults.
TernaryOdds odds_of(const TernaryCounts& counts) noexcept;

/// The longest word a codeword may stand for. Decoders copy that many bytes and its length per codeword, so short is
/// fast.
enum class WordLimit : std::uint8_t { w31 = 31, w63 = 63 };

inline constexpr unsigned kCodewordBits = 12;
inline constexpr std::size_t kLeafCount = 4095;
/// Not in the tree: "the rest of this row is zero".
inline constexpr std::uint32_t kRestCodeword = 4095;

/// The parse tree of a code whose codewords have one length and whose words do not: the leaf of highest probability is
/// split into three until there are kLeafCount leaves. No word is a prefix of another, and every row begins with one.
/// Units:   node 0 is the root; a leaf's codeword is its rank among the leaves by node number. Probabilities are
///          integers, so the tree is the same on every machine.
/// Source:  Tunstall, "Synthesis of noiseless compression codes", Georgia Tech, 1967.
struct TunstallTree {
    struct Node {
        std::array<std::uint16_t, 3> children{};  // for 0, +1, -1; all 0: a leaf
        std::uint16_t parent = 0;
        std::uint16_t codeword = 0;  // of a leaf
        std::uint8_t length = 0;     // values from the root to here
        std::uint64_t probability = 0;

        bool is_leaf() const noexcept { return children[0] == 0; }
    };
    std::vector<Node> nodes;
    WordLimit limit;

    TunstallTree(const TernaryOdds& odds, WordLimit word_limit);
    /// Values that a codeword stands for on average, for the odds of the tree.
    double mean_length() const noexcept;
};

/// 31 unless 63 saves more than two parts in a hundred. The same choice on every machine.
WordLimit best_limit(const TernaryOdds& odds);

}  // namespace torch_offload
