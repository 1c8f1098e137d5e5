#include "codec/tun12.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <new>
#include <utility>

#include "base/check.h"

namespace torch_offload {
namespace {

constexpr std::align_val_t kWordAlignment{64};
constexpr std::size_t kCodewordCount = 4096;

}  // namespace

TunstallWords::TunstallWords(const TunstallTree& tree) : word_bytes_(static_cast<std::size_t>(tree.limit) + 1) {
    const std::size_t size_bytes = kCodewordCount * word_bytes_;
    words_.reset(static_cast<std::int8_t*>(operator new[](size_bytes, kWordAlignment)));
    std::fill_n(words_.get(), size_bytes, std::int8_t{0});
    // Children come after their parents: a word is that of the parent and one value more.
    constexpr std::int8_t kValues[] = {0, 1, -1};
    std::vector<std::array<std::int8_t, 64>> spelled(tree.nodes.size());
    for (std::size_t i = 0; i < tree.nodes.size(); ++i) {
        const TunstallTree::Node& node = tree.nodes[i];
        if (node.is_leaf()) {
            std::int8_t* const word = words_.get() + node.codeword * word_bytes_;
            std::memcpy(word, spelled[i].data(), word_bytes_);
            word[word_bytes_ - 1] = static_cast<std::int8_t>(node.length);
            continue;
        }
        for (std::size_t value = 0; value < std::size(kValues); ++value) {
            spelled[node.children[value]] = spelled[i];
            spelled[node.children[value]][node.length] = kValues[value];
        }
    }
    words_[(kRestCodeword + 1) * word_bytes_ - 1] = static_cast<std::int8_t>(kRestLength);
}

void TunstallWords::Free::operator()(std::int8_t* words) const noexcept { operator delete[](words, kWordAlignment); }

void Tun12Reader::read(std::size_t count, const TernaryRows& to) {
    for (std::size_t i = 0; i < count; ++i) {
        OFFLOAD_CHECK(kernel_(columns_, stream_, to.row(i)), CorruptPage, "a TUN12 tile of ", stream_.codeword_count,
                      " codewords ends inside a row");
    }
    rows_left_ -= count;
    OFFLOAD_CHECK(rows_left_ > 0 || stream_.next == stream_.codeword_count, CorruptPage, "a TUN12 tile has ",
                  stream_.codeword_count, " codewords, its rows only ", stream_.next);
}

Tun12Decoder::Tun12Decoder(std::size_t columns, ColumnClasses classes, std::vector<SharedTunstallWords> words)
    : columns_{columns, std::move(classes), {}}, words_(std::move(words)) {
    for (const SharedTunstallWords& one : words_) columns_.words.push_back(one.get());
}

std::unique_ptr<TileReader> Tun12Decoder::open(std::span<const std::byte> bytes, std::size_t rows,
                                               InstructionSet set) const {
    return std::make_unique<Tun12Reader>(open_rows(bytes, rows, set));
}

Tun12Reader Tun12Decoder::open_rows(std::span<const std::byte> bytes, std::size_t rows, InstructionSet set) const {
    OFFLOAD_CHECK(bytes.size() % 3 != 1, CorruptPage, "a TUN12 tile of ", bytes.size(),
                  " bytes is no whole number of 12-bit codewords");
    const Tun12Stream stream{bytes.data(), bytes.size() * 8 / kCodewordBits, 0};
    OFFLOAD_CHECK(stream.codeword_count >= rows, CorruptPage, "a TUN12 tile of ", stream.codeword_count,
                  " codewords cannot have ", rows, " rows");
    Tun12Kernel* kernel = tun12_row_portable;
    if (set == InstructionSet::avx2) kernel = tun12_row_avx2;
    if (set == InstructionSet::avx512) kernel = tun12_row_avx512;
    return {columns_, stream, rows, kernel};
}

}  // namespace torch_offload
