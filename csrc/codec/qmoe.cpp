#include "codec/qmoe.h"

#include <algorithm>
#include <cstring>
#include <queue>

#include "base/check.h"
#include "codec/little_endian.h"

namespace torch_offload {
namespace {

constexpr double kZeroProbability = 0.885;
constexpr std::int8_t kValues[] = {0, 1, -1};
constexpr std::uint16_t kGrid[] = {0xBF80, 0x3F80};  // bf16 of a row's least and greatest value: -1, 1

/// Could become an entry: one that is there and a pair behind it.
struct Candidate {
    double probability;
    std::uint32_t number;  // in the order of their making; of equals the last made is taken
    std::uint32_t parent;
    std::size_t pair;

    bool operator<(const Candidate& other) const noexcept {
        return probability != other.probability ? probability < other.probability : number < other.number;
    }
};

std::size_t pair_of(const std::int8_t* row, std::size_t column, std::size_t columns) noexcept {
    const auto digit = [](std::int8_t value) { return value < 0 ? std::size_t{2} : static_cast<std::size_t>(value); };
    return digit(row[column]) + (column + 1 < columns ? 3 * digit(row[column + 1]) : 0);
}

/// Reads rows by the offsets in front of the codewords.
class QmoeReader : public TileReader {
public:
    QmoeReader(const QmoeDictionary& dictionary, std::size_t columns, std::span<const std::byte> bytes,
               std::size_t rows) noexcept
        : dictionary_(dictionary), columns_(columns), bytes_(bytes), rows_(rows) {}

    std::size_t rows_at_once() const noexcept override { return 1; }
    void read(std::size_t count, const TernaryRows& to) override {
        for (std::size_t i = 0; i < count; ++i, ++next_row_) read_row(to.row(i));
        OFFLOAD_CHECK(next_row_ < rows_ || next_ == bytes_.size(), CorruptPage, "a QMoE tile of ", bytes_.size(),
                      " bytes has rows of only ", next_);
    }

private:
    void read_row(std::int8_t* row) {
        const auto codeword_end = load_number<std::uint32_t>(bytes_.data() + next_row_ * sizeof(std::uint32_t));
        const std::size_t head_bytes = rows_ * (sizeof(std::uint32_t) + sizeof(kGrid));
        const std::size_t end = head_bytes + codeword_end * sizeof(std::uint16_t);
        if (next_row_ == 0) next_ = head_bytes;
        OFFLOAD_CHECK(end >= next_ && end <= bytes_.size(), CorruptPage, "row ", next_row_,
                      " of a QMoE tile is said to end at byte ", end, " of ", bytes_.size());
        std::size_t column = 0;
        for (; next_ < end && column < columns_; next_ += sizeof(std::uint16_t)) {
            const auto entry = load_number<std::uint16_t>(bytes_.data() + next_);
            std::memcpy(row + column, dictionary_.word(entry), QmoeDictionary::kWordBytes);
            column += 2 * dictionary_.pair_count(entry);
        }
        OFFLOAD_CHECK(next_ == end && column >= columns_ && column <= columns_ + 1, CorruptPage, "row ", next_row_,
                      " of a QMoE tile has codewords of ", column, " values, not ", columns_);
        std::memset(row + columns_, 0, (columns_ + 63) / 64 * 64 - columns_);
    }

    const QmoeDictionary& dictionary_;
    std::size_t columns_;
    std::span<const std::byte> bytes_;
    std::size_t rows_;
    std::size_t next_row_ = 0;
    std::size_t next_ = 0;  // byte
};

}  // namespace

const QmoeDictionary& QmoeDictionary::shared() {
    static const QmoeDictionary dictionary;
    return dictionary;
}

QmoeDictionary::QmoeDictionary()
    : next_((1 + kEntryCount) * kPairKinds, kNoEntry), words_(kEntryCount * kWordBytes), pair_counts_(kEntryCount) {
    const double share[] = {kZeroProbability, (1 - kZeroProbability) / 2, (1 - kZeroProbability) / 2};
    std::priority_queue<Candidate> candidates;
    std::uint32_t made = 0;
    const auto add_candidates = [&](double probability, std::uint32_t parent) {
        for (std::size_t pair = 0; pair < kPairKinds; ++pair) {
            candidates.push({probability * share[pair % 3] * share[pair / 3], made++, parent, pair});
        }
    };
    add_candidates(1, kNoEntry);
    for (std::uint32_t entry = 0; entry < kEntryCount; ++entry) {
        const Candidate best = candidates.top();
        candidates.pop();
        next_[(best.parent + 1) * kPairKinds + best.pair] = entry;
        const std::size_t before = best.parent == kNoEntry ? 0 : pair_counts_[best.parent];
        std::int8_t* const values = words_.data() + entry * kWordBytes;
        if (before > 0) std::copy_n(word(best.parent), 2 * before, values);
        values[2 * before] = kValues[best.pair % 3];
        values[2 * before + 1] = kValues[best.pair / 3];
        pair_counts_[entry] = static_cast<std::uint8_t>(before + 1);
        if (before + 1 < kMaxPairs) add_candidates(best.probability, entry);
    }
}

std::vector<std::byte> QmoeCoder::encode(const TernaryView& tile, InstructionSet) const {
    std::vector<std::byte> bytes;
    std::vector<std::uint16_t> codewords;
    for (std::size_t i = 0; i < tile.rows; ++i) {
        const std::int8_t* row = tile.row(i);
        std::uint32_t entry = QmoeDictionary::kNoEntry;
        for (std::size_t column = 0; column < tile.columns; column += 2) {
            const std::size_t pair = pair_of(row, column, tile.columns);
            const std::uint32_t longer = dictionary_.continued(entry, pair);
            if (longer == QmoeDictionary::kNoEntry) codewords.push_back(static_cast<std::uint16_t>(entry));
            entry = longer == QmoeDictionary::kNoEntry ? dictionary_.continued(longer, pair) : longer;
        }
        codewords.push_back(static_cast<std::uint16_t>(entry));
        append_number(bytes, static_cast<std::uint32_t>(codewords.size()));
    }
    for (std::size_t i = 0; i < tile.rows; ++i) {
        for (const std::uint16_t value : kGrid) append_number(bytes, value);
    }
    for (const std::uint16_t codeword : codewords) append_number(bytes, codeword);
    return bytes;
}

std::unique_ptr<TileReader> QmoeCoder::open(std::span<const std::byte> bytes, std::size_t rows, InstructionSet) const {
    const std::size_t head_bytes = rows * (sizeof(std::uint32_t) + sizeof(kGrid));
    OFFLOAD_CHECK(bytes.size() >= head_bytes + rows * sizeof(std::uint16_t), CorruptPage, "a QMoE tile of ",
                  bytes.size(), " bytes cannot have ", rows, " rows");
    return std::make_unique<QmoeReader>(dictionary_, columns_, bytes, rows);
}

}  // namespace torch_offload
