#include "codec/tunstall_dictionary.h"

#include <algorithm>
#include <bit>
#include <queue>
#include <utility>

namespace torch_offload {
namespace {

constexpr std::uint32_t kOddsTotal = 65536;
constexpr std::uint64_t kCertain = std::uint64_t{1} << 47;

/// A share in 65536ths, to the nearest number that has so many significant bits.
std::uint32_t rounded_share(std::uint64_t count, std::uint64_t total, unsigned significant_bits) noexcept {
    const auto share = static_cast<std::uint32_t>(static_cast<double>(count) / static_cast<double>(total) * kOddsTotal);
    const auto width = static_cast<unsigned>(std::bit_width(share));
    const unsigned dropped = width > significant_bits ? width - significant_bits : 0;
    return (share + (dropped > 0 ? 1U << (dropped - 1) : 0)) >> dropped << dropped;
}

/// The most probable leaf is split first; of equal ones that with the lowest number.
struct SplitLater {
    bool operator()(const std::pair<std::uint64_t, std::uint16_t>& left,
                    const std::pair<std::uint64_t, std::uint16_t>& right) const noexcept {
        return left.first != right.first ? left.first < right.first : left.second > right.second;
    }
};

}  // namespace

bool is_valid(const TernaryOdds& odds) noexcept {
    return odds.zero > 0 && odds.plus > 0 && std::uint32_t{odds.zero} + odds.plus < kOddsTotal;
}

TernaryOdds odds_of(const TernaryCounts& counts) noexcept {
    if (counts.total == 0) return {};
    const std::uint64_t nonzeros = counts.total - counts.zeros;
    const std::uint64_t fewer = std::min(counts.pluses, nonzeros - counts.pluses);
    const std::uint32_t nonzero = std::clamp(rounded_share(nonzeros, counts.total, 5), 2U, kOddsTotal - 1);
    const std::uint32_t share = nonzeros > 0 ? rounded_share(fewer, nonzeros, 4) : kOddsTotal / 2;
    const std::uint32_t rare = std::max(nonzero * share / kOddsTotal, 1U);
    const std::uint32_t plus = fewer == counts.pluses ? rare : nonzero - rare;
    return {static_cast<std::uint16_t>(kOddsTotal - nonzero), static_cast<std::uint16_t>(plus)};
}

TunstallTree::TunstallTree(const TernaryOdds& odds, WordLimit word_limit) : limit(word_limit) {
    const std::uint32_t shares[] = {odds.zero, odds.plus, kOddsTotal - odds.zero - odds.plus};
    std::priority_queue<std::pair<std::uint64_t, std::uint16_t>, std::vector<std::pair<std::uint64_t, std::uint16_t>>,
                        SplitLater>
        leaves;
    nodes.reserve(kLeafCount + kLeafCount / 2);
    nodes.push_back({.probability = kCertain});
    leaves.emplace(kCertain, 0);
    for (std::size_t leaf_count = 1; leaf_count < kLeafCount; leaf_count += 2) {
        const auto split = leaves.top().second;
        leaves.pop();
        for (std::size_t value = 0; value < 3; ++value) {
            const auto child = static_cast<std::uint16_t>(nodes.size());
            const Node& parent = nodes[split];
            const std::uint64_t probability = parent.probability * shares[value] / kOddsTotal;
            const auto length = static_cast<std::uint8_t>(parent.length + 1);
            nodes.push_back({.parent = split, .length = length, .probability = probability});
            nodes[split].children[value] = child;
            if (length < static_cast<std::size_t>(word_limit)) leaves.emplace(probability, child);
        }
    }
    std::uint16_t codeword = 0;
    for (Node& node : nodes) {
        if (node.is_leaf()) node.codeword = codeword++;
    }
}

double TunstallTree::mean_length() const noexcept {
    // A word is as long as it has inner nodes above its end, so the mean is the sum of their probabilities.
    std::uint64_t sum = 0;
    for (const Node& node : nodes) {
        if (!node.is_leaf()) sum += node.probability / 1024;
    }
    return static_cast<double>(sum) / static_cast<double>(kCertain / 1024);
}

WordLimit best_limit(const TernaryOdds& odds) {
    const TunstallTree with_short(odds, WordLimit::w31);
    const bool is_limited = std::ranges::any_of(with_short.nodes, [](const TunstallTree::Node& node) {
        return node.length == static_cast<std::size_t>(WordLimit::w31);
    });
    if (!is_limited) return WordLimit::w31;  // the other tree is the same
    const double long_length = TunstallTree(odds, WordLimit::w63).mean_length();
    return long_length > 1.02 * with_short.mean_length() ? WordLimit::w63 : WordLimit::w31;
}

}  // namespace torch_offload
