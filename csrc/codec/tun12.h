// TUN12: rows of T as 12-bit Tunstall codewords. FORMAT.md has the bytes. Layer codec: includes base only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "codec/column_class.h"
#include "codec/tile_coder.h"
#include "codec/tunstall_dictionary.h"

namespace torch_offload {

/// What a class of columns is coded with.
struct TunstallClass {
    TernaryOdds odds;
    WordLimit limit = WordLimit::w31;

    bool operator==(const TunstallClass&) const = default;
};

/// The words of a dictionary, spelled out: 32 or 64 bytes for each codeword, of which the last one is the length.
class TunstallWords {
public:
    explicit TunstallWords(const TunstallTree& tree);

    /// In place of the length of kRestCodeword; more than four words have together.
    static constexpr std::uint8_t kRestLength = 255;

    std::size_t word_bytes() const noexcept { return word_bytes_; }
    const std::int8_t* words() const noexcept { return words_.get(); }  // [4096, word_bytes()]

private:
    struct Free {
        void operator()(std::int8_t* words) const noexcept;
    };
    std::size_t word_bytes_;
    std::unique_ptr<std::int8_t[], Free> words_;
};

/// What decoding knows of the columns.
struct TunstallColumns {
    std::size_t column_count = 0;
    ColumnClasses classes;
    std::vector<const TunstallWords*> words;  // one per class
};

/// The inner nodes of all classes' trees, numbered so that a zero leads to the next number until it ends the word.
struct Tun12Steps {
    std::vector<std::uint32_t> roots;          // [classes]
    std::vector<std::uint8_t> zeros_left;      // [nodes]: the last of so many zeros ends the word,
    std::vector<std::uint16_t> zero_codeword;  // [nodes]: with this codeword
    // By +1 and -1: the next node in bits 0-15, or, with bit 31, a word that ends, with its codeword in bits 16-27.
    std::vector<std::uint32_t> by_value;  // [nodes, 2]

    void add(const TunstallTree& tree);
};

class Tun12Encoder : public TileEncoder {
public:
    /// `coded` has one entry per class of columns.
    Tun12Encoder(std::size_t columns, ColumnClasses classes, const std::vector<TunstallClass>& coded);

    std::vector<std::byte> encode(const TernaryView& tile, InstructionSet set) const override;

private:
    std::size_t column_count_;
    ColumnClasses classes_;
    Tun12Steps steps_;
};

using SharedTunstallWords = std::shared_ptr<const TunstallWords>;

/// Codewords of one tile and how far they have been read.
struct Tun12Stream {
    const std::byte* bytes = nullptr;
    std::size_t codeword_count = 0;
    std::size_t next = 0;
};

/// Decodes the next row. False: the codewords end before the row does, or it is longer than its columns allow.
/// One kernel per instruction set, one per source file. Pre: the set is available.
using Tun12Kernel = bool(const TunstallColumns&, Tun12Stream&, std::int8_t* row) noexcept;
Tun12Kernel tun12_row_portable;
Tun12Kernel tun12_row_avx2;
Tun12Kernel tun12_row_avx512;

/// Reads rows one by one. Borrows from its decoder.
class Tun12Reader : public TileReader {
public:
    Tun12Reader(const TunstallColumns& columns, Tun12Stream stream, std::size_t rows, Tun12Kernel* kernel) noexcept
        : columns_(columns), stream_(stream), kernel_(kernel), rows_left_(rows) {}

    std::size_t rows_at_once() const noexcept override { return 1; }
    void read(std::size_t count, const TernaryRows& to) override;
    /// The number of the codeword that the next row begins with.
    std::size_t next_codeword() const noexcept { return stream_.next; }

private:
    const TunstallColumns& columns_;
    Tun12Stream stream_;
    Tun12Kernel* kernel_;
    std::size_t rows_left_;
};

class Tun12Decoder : public TileDecoder {
public:
    /// `words` has one entry per class of columns.
    Tun12Decoder(std::size_t columns, ColumnClasses classes, std::vector<SharedTunstallWords> words);

    std::unique_ptr<TileReader> open(std::span<const std::byte> bytes, std::size_t rows,
                                     InstructionSet set) const override;
    /// The same, for those who ask where rows begin.
    Tun12Reader open_rows(std::span<const std::byte> bytes, std::size_t rows, InstructionSet set) const;

private:
    TunstallColumns columns_;
    std::vector<SharedTunstallWords> words_;  // to which columns_ points
};

}  // namespace torch_offload
