// Seeds for tests that try many cases: other ones for each commit and in each build, and the same when asked for.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <ranges>

#include "support/sanitized.h"

namespace torch_offload::test {

/// How many seeds a test tries; `full` where MATRIX=full asks for all it has.
struct SeedCounts {
    std::uint64_t usual = 0;
    std::uint64_t full = 0;
};

/// The first seed of this program: OFFLOAD_TEST_SEED, a hexadecimal number, which `make` takes from the commit; builds
/// with sanitizers begin elsewhere.
inline std::uint64_t base_seed() {
    const char* const wanted = std::getenv("OFFLOAD_TEST_SEED");
    return (wanted ? std::strtoull(wanted, nullptr, 16) : 0) + (static_cast<std::uint64_t>(kSanitizer) << 40);
}

/// The seeds to try, `count.usual` of them unless OFFLOAD_TEST_SEEDS or MATRIX=full say otherwise. Prints which.
inline auto seeds(const SeedCounts& count) {
    const char* const wanted = std::getenv("OFFLOAD_TEST_SEEDS");
    const char* const matrix = std::getenv("MATRIX");
    const bool is_full = matrix && std::strcmp(matrix, "full") == 0;
    const std::uint64_t tried = wanted ? std::strtoull(wanted, nullptr, 10) : is_full ? count.full : count.usual;
    const std::uint64_t first = base_seed();
    std::cout << tried << " seeds from " << first << '\n';
    return std::views::iota(first, first + tried);
}

}  // namespace torch_offload::test
