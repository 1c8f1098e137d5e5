// The coders of ternary matrices: bits per weight against the entropy, and weights per second against a bf16 product.
// Prints one JSON document. Bits count everything: headers, tables, tiles; `extent_bits` also what fills the last
// 4 KiB. Rates are those of every round, in which all kernels take turns: `g_per_s` by the clock, for which
// nothing else should run, `g_per_core_s` by the time that cores worked, to which others on the machine matter less.
// The bf16 matrix is larger than the last cache; threads share the machine's memory.
//   cmake --build build --target codec_benchmark && build/benchmarks/codec_benchmark [--smoke] [--rates] [--speeds]
//   [KERNEL]
// KERNEL: only those whose name has it.
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "codec/encode.h"
#include "codec/intrinsics.h"
#include "codec/product.h"

namespace torch_offload {
namespace {

constexpr std::size_t kColumns = 2048;
constexpr std::size_t kTokens = 8;   // of the bf16 product with several
constexpr std::size_t kClasses = 4;  // of columns, where they are sorted
constexpr std::size_t kTokenCounts[] = {1, 2, 4, 8, 16, 32, 64};

double entropy(double zero) {
    const double other = (1 - zero) / 2;
    return -zero * std::log2(zero) - 2 * other * std::log2(other);
}

/// Zeros with the given probability, as many +1 as -1 on average.
std::vector<std::int8_t> random_ternary(std::size_t count, double zero, std::uint64_t seed) {
    std::vector<std::int8_t> values(count);
    std::mt19937_64 random(seed);
    const auto zero_end = static_cast<std::uint32_t>(zero * 4294967295.0);
    const auto plus_end = static_cast<std::uint32_t>((1 + zero) / 2 * 4294967295.0);
    for (std::size_t i = 0; i < count; ++i) {
        const auto drawn = static_cast<std::uint32_t>(random() >> 32);
        values[i] = static_cast<std::int8_t>(drawn < zero_end ? 0 : (drawn < plus_end ? 1 : -1));
    }
    return values;
}

struct Choice {
    const char* name;
    CoderChoice coder;
};
constexpr Choice kCoders[] = {{"tun12", CoderChoice::tun12},
                              {"rans4", CoderChoice::rans4},
                              {"smallest", CoderChoice::smallest},
                              {"qmoe", CoderChoice::qmoe}};

// ---- bits per weight

void print_rate(std::size_t rows, std::size_t columns, double zero, const Choice& choice, const char* separator) {
    const std::vector<std::int8_t> values = random_ternary(rows * columns, zero, 1);
    const TernaryView matrix{values.data(), rows, columns};
    const ExtentBuffer extent = encode(matrix, {.coder = choice.coder});
    const CodedMatrix coded(extent.bytes());
    std::vector<std::int8_t> back(values.size());
    coded.decode(back.data());
    OFFLOAD_CHECK(back == values, LogicError, choice.name, " does not give back what it coded");
    const auto bits_each = [&](std::size_t bytes) {
        return 8.0 * static_cast<double>(bytes) / static_cast<double>(values.size());
    };
    const double bits = bits_each(coded.header().coded_bytes);
    std::printf(
        "    {\"coder\": \"%s\", \"rows\": %zu, \"columns\": %zu, \"p0\": %.3f, \"entropy\": %.4f, "
        "\"bits\": %.4f, \"of_entropy\": %.4f, \"extent_bits\": %.4f, \"times_below_bf16\": %.4f}%s\n",
        choice.name, rows, columns, zero, entropy(zero), bits, entropy(zero) / bits,
        bits_each(coded.header().extent_bytes), 16 / bits, separator);
}

void print_rates(bool is_smoke) {
    const std::vector<double> all = {0.5, 0.6, 0.7, 0.8, 0.85, 0.885, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97};
    const std::vector<double> zeros = is_smoke ? std::vector{0.885} : all;
    const std::vector<std::size_t> heights =
        is_smoke ? std::vector<std::size_t>{128} : std::vector<std::size_t>{768, 2048, 6144};
    std::printf("  \"rates\": [\n");
    for (const std::size_t rows : heights) {
        for (const double zero : zeros) {
            for (const Choice& choice : kCoders) print_rate(rows, kColumns, zero, choice, ",");
        }
    }
    // QMoE's own shapes, where it says 20.8 to 21.4 times below bf16.
    print_rate(is_smoke ? 64 : 2048, 6144, 0.885, kCoders[3], ",");
    print_rate(is_smoke ? 64 : 6144, 2080, 0.885, kCoders[3], "");
    std::printf("  ]");
}

// ---- weights per second

#if defined(__x86_64__)
/// The baseline: rows of bf16 times tokens of floats, AVX-512, two sums per row and token.
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) void bf16_rows(const std::uint16_t* weights,
                                                                             std::size_t begin, std::size_t end,
                                                                             const TokenPanel& x, float* y) {
    for (std::size_t row = begin; row < end; ++row) {
        __m512 low[kTokens], high[kTokens];
        for (std::size_t t = 0; t < x.tokens(); ++t) low[t] = high[t] = _mm512_setzero_ps();
        const auto widened =
            [&](std::size_t column) __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), always_inline)) {
                const auto* from = reinterpret_cast<const __m256i*>(weights + row * kColumns + column);
                return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from)), 16));
            };
        for (std::size_t column = 0; column < kColumns; column += 32) {
            const __m512 first = widened(column);
            const __m512 second = widened(column + 16);
            for (std::size_t t = 0; t < x.tokens(); ++t) {
                low[t] = _mm512_fmadd_ps(first, _mm512_loadu_ps(x.token(t) + column), low[t]);
                high[t] = _mm512_fmadd_ps(second, _mm512_loadu_ps(x.token(t) + column + 16), high[t]);
            }
        }
        for (std::size_t t = 0; t < x.tokens(); ++t) y[row] = _mm512_reduce_add_ps(_mm512_add_ps(low[t], high[t]));
    }
}

/// One token: sums in registers.
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) void bf16_rows_of_one(const std::uint16_t* weights,
                                                                                    std::size_t begin, std::size_t end,
                                                                                    const float* x, float* y) {
    for (std::size_t row = begin; row < end; ++row) {
        __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        for (std::size_t column = 0; column < kColumns; column += 64) {
            for (std::size_t i = 0; i < 4; ++i) {
                const auto* from = reinterpret_cast<const __m256i*>(weights + row * kColumns + column + 16 * i);
                const __m512 weight =
                    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from)), 16));
                sums[i] = _mm512_fmadd_ps(weight, _mm512_loadu_ps(x + column + 16 * i), sums[i]);
            }
        }
        y[row] = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
    }
}
#endif

#if defined(__x86_64__)
/// Sums of products of registers: what the core can do at most. Takes `count` of them.
__attribute__((target("avx512f"))) void multiply_add(std::size_t count) {
    constexpr std::size_t kChains = 16;
    __m512 sums[kChains];
    for (__m512& sum : sums) sum = _mm512_set1_ps(1);
    const __m512 factor = _mm512_set1_ps(0.5F);
    for (std::size_t i = 0; i < count / (kChains * 16); ++i) {
#pragma GCC unroll 16
        for (__m512& sum : sums) {
            sum = _mm512_fmadd_ps(sum, factor, factor);
            asm volatile("" : "+v"(sum));  // all of them, in registers
        }
    }
}

/// Loads all of it and does nothing else: what memory gives at most.
__attribute__((target("avx512f"))) void load_all(const std::uint16_t* from, std::size_t count) {
    __m512i mixed[4] = {};
    for (std::size_t i = 0; i + 128 <= count; i += 128) {
#pragma GCC unroll 4
        for (std::size_t k = 0; k < 4; ++k) {
            mixed[k] = _mm512_xor_si512(mixed[k], _mm512_loadu_si512(from + i + 32 * k));
            asm volatile("" : "+v"(mixed[k]));
        }
    }
}
#endif

/// Runs `work(0)` to `work(count - 1)` on as many threads.
void on_threads(std::size_t threads, std::size_t count, const std::function<void(std::size_t)>& work) {
    std::atomic<std::size_t> next{0};
    const auto take_turns = [&] {
        for (std::size_t i = next++; i < count; i = next++) work(i);
    };
    std::vector<std::thread> others;
    for (std::size_t i = 1; i < threads; ++i) others.emplace_back(take_turns);
    take_turns();
    for (std::thread& other : others) other.join();
}

/// Something that goes over all weights once, some number of times per weight.
struct Variant {
    std::string name;
    double operations_per_weight;
    std::function<void()> run;
    std::vector<double> rates = {};       // 10^9 per second of wall time, one per round
    std::vector<double> core_rates = {};  // 10^9 per second of processor time, one per round
};

double process_seconds() {
    timespec now{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

void print_rounds(const char* name, const std::vector<double>& rates) {
    std::printf("\"%s\": [", name);
    for (const double& rate : rates) std::printf("%s%.3f", &rate == &rates.front() ? "" : ", ", rate);
    std::printf("]");
}

void print_variants(const std::vector<Variant>& variants) {
    std::printf("  \"speeds\": [\n");
    for (const Variant& variant : variants) {
        std::printf("    {\"kernel\": \"%s\", ", variant.name.c_str());
        print_rounds("g_per_s", variant.rates);
        std::printf(", ");
        print_rounds("g_per_core_s", variant.core_rates);
        std::printf("}%s\n", &variant == &variants.back() ? "" : ",");
    }
    std::printf("  ]");
}

/// Takes a cycle per addition: what the clock really is, shared cores included.
void add_up(std::size_t count) {
    volatile std::size_t start = 1;
    std::size_t sum = start;
    for (std::size_t i = 0; i < count; ++i) {
        sum += i;
        asm volatile("" : "+r"(sum));  // not to be replaced by a formula
    }
    start = sum;
}

class Speeds {
public:
    Speeds(std::size_t rows, double zero, std::string only)
        : only_(std::move(only)),
          rows_(rows),
          values_(random_ternary(rows * kColumns, zero, 2)),
          tun12_(encode(matrix(), {.coder = CoderChoice::tun12})),
          rans4_(encode(matrix(), {.coder = CoderChoice::rans4})),
          sorted_tun12_(encode_in_classes(CoderChoice::tun12)),
          sorted_rans4_(encode_in_classes(CoderChoice::rans4)),
          weights_(rows * kColumns, 0x3F80),
          several_(kTokens, kColumns),
          sums_(rows) {
        std::mt19937 random(3);
        fill(several_, random);
        for (const std::size_t tokens : kTokenCounts) {
            Panels& made = panels_.emplace_back(tokens, rows);
            for (TokenPanel* panel : {&made.x, &made.g}) fill(*panel, random);
        }
        add("additions, each of which waits for the one before", 1, 1, [this] { add_up(values_.size()); });
        for (const std::size_t threads : {1, 2}) add_variants(threads);
    }

    void measure(std::size_t rounds) {
        for (std::size_t round = 0; round <= rounds; ++round) {  // the first one warms up
            for (Variant& variant : variants_) {
                const auto start = std::chrono::steady_clock::now();
                const double start_process = process_seconds();
                variant.run();
                const double process = process_seconds() - start_process;
                const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
                if (round == 0) continue;
                const double done = static_cast<double>(values_.size()) * variant.operations_per_weight / 1e9;
                variant.rates.push_back(done / took.count());
                variant.core_rates.push_back(done / process);
            }
        }
        print_variants(variants_);
    }

private:
    /// Of one count of tokens: y = T x, z = T^T g. Tokens become planes in every product, as in the operator.
    struct Panels {
        TokenPanel x, y, g, z;
        Panels(std::size_t tokens, std::size_t rows)
            : x(tokens, kColumns), y(tokens, rows), g(tokens, rows), z(tokens, kColumns) {}
    };

    static void fill(TokenPanel& panel, std::mt19937& random) {
        std::normal_distribution<float> normal;
        for (std::size_t t = 0; t < panel.tokens(); ++t) {
            for (std::size_t i = 0; i < panel.width(); ++i) panel.token(t)[i] = normal(random);
        }
    }

    TernaryView matrix() const { return {values_.data(), rows_, kColumns}; }

    /// Sorted, though these columns gain nothing by it: tables and order are what matters here.
    ExtentBuffer encode_in_classes(CoderChoice coder) const {
        SortedColumns sorted = sorted_columns(matrix(), kClasses);
        return encode(matrix(),
                      {.coder = coder, .classes = std::move(sorted.classes), .order = std::move(sorted.order)});
    }

    void add(const std::string& name, std::size_t threads, double operations, std::function<void()> run) {
        if (name.find(only_) == std::string::npos) return;
        variants_.push_back({name + ", " + std::to_string(threads) + " threads", operations, std::move(run)});
    }

    static std::string of_tokens(const std::string& name, std::size_t tokens) {
        return name + ", " + std::to_string(tokens) + (tokens == 1 ? " token" : " tokens");
    }

    /// Of floats, beside those of 16 bits.
    static std::string of_floats(const std::string& name, unsigned planes) {
        return planes == kPlanesOfFloat ? name + " float32" : name;
    }

    void add_products(const std::string& name, const CodedMatrix& coded, std::size_t threads, InstructionSet set,
                      std::size_t most_tokens, unsigned planes = kPlanesOfHalf) {
        if (!is_available(set)) return;
        for (Panels& panels : panels_) {
            const std::size_t tokens = panels.x.tokens();
            if (tokens > most_tokens) continue;
            const auto run = [&coded, threads, set, planes, &panels] {
                const TokenPlanes x(panels.x, planes, set);
                on_threads(threads, coded.tiles().size(),
                           [&](std::size_t i) { multiply_tile(coded, coded.tiles()[i], x, panels.y, set); });
            };
            add(of_tokens(of_floats(name, planes), tokens), threads, static_cast<double>(tokens), run);
        }
    }

    void add_transposed(unsigned planes) {
        for (Panels& panels : panels_) {
            const std::size_t tokens = panels.g.tokens();
            add(of_tokens(of_floats("tun12 transposed", planes), tokens), 1, static_cast<double>(tokens),
                [this, planes, &panels] {
                    multiply_transposed(coded_tun12_, TokenPlanes(panels.g, planes), panels.z);
                });
        }
    }

#if defined(__x86_64__)
    /// What bounds the others: the core's arithmetic, and memory in 10^9 bytes.
    void add_limits(std::size_t threads) {
        add("multiply-adds in registers", threads, 1, [this, threads] {
            on_threads(threads, threads, [&](std::size_t) { multiply_add(values_.size() / threads); });
        });
        add("bytes from memory", threads, sizeof(std::uint16_t), [this, threads] {
            const std::size_t part = weights_.size() / threads;
            on_threads(threads, threads, [&](std::size_t i) { load_all(weights_.data() + i * part, part); });
        });
    }
#endif

    void add_variants(std::size_t threads) {
#if defined(__x86_64__)
        constexpr std::size_t kChunk = 512;
        if (is_available(InstructionSet::avx512)) {
            add_limits(threads);
            add("bf16 avx512, 1 token", threads, 1, [this, threads] {
                on_threads(threads, rows_ / kChunk, [&](std::size_t i) {
                    bf16_rows_of_one(weights_.data(), i * kChunk, (i + 1) * kChunk, several_.token(0), sums_.data());
                });
            });
            add("bf16 avx512, 8 tokens", threads, kTokens, [this, threads] {
                on_threads(threads, rows_ / kChunk, [&](std::size_t i) {
                    bf16_rows(weights_.data(), i * kChunk, (i + 1) * kChunk, several_, sums_.data());
                });
            });
        }
#endif
        add_products("tun12 avx512", coded_tun12_, threads, InstructionSet::avx512, 64);
        add_products("tun12 avx512", coded_tun12_, threads, InstructionSet::avx512, 64, kPlanesOfFloat);
        add_products("tun12 avx2", coded_tun12_, threads, InstructionSet::avx2, 8);
        add_products("rans4 avx512", coded_rans4_, threads, InstructionSet::avx512, 8);
        add_products("rans4 avx2", coded_rans4_, threads, InstructionSet::avx2, 1);
        add_products("tun12 avx512 in 4 classes", coded_sorted_tun12_, threads, InstructionSet::avx512, 8);
        add_products("rans4 avx512 in 4 classes", coded_sorted_rans4_, threads, InstructionSet::avx512, 8);
        add_products("tun12 portable", coded_tun12_, threads, InstructionSet::portable, 1);
        if (threads > 1) return;
        add_transposed(kPlanesOfHalf);
        add_transposed(kPlanesOfFloat);
        add("tun12 encode", 1, 1, [this] { encode(matrix(), {.coder = CoderChoice::tun12}); });
        add("rans4 encode", 1, 1, [this] { encode(matrix(), {.coder = CoderChoice::rans4}); });
        add("smallest encode", 1, 1, [this] { encode(matrix(), {.coder = CoderChoice::smallest}); });
    }

    std::string only_;
    std::size_t rows_;
    std::vector<std::int8_t> values_;
    ExtentBuffer tun12_;
    ExtentBuffer rans4_;
    ExtentBuffer sorted_tun12_;
    ExtentBuffer sorted_rans4_;
    CodedMatrix coded_tun12_{tun12_.bytes()};
    CodedMatrix coded_rans4_{rans4_.bytes()};
    CodedMatrix coded_sorted_tun12_{sorted_tun12_.bytes()};
    CodedMatrix coded_sorted_rans4_{sorted_rans4_.bytes()};
    std::vector<std::uint16_t> weights_;
    TokenPanel several_;
    std::vector<float> sums_;
    std::deque<Panels> panels_;  // which variants point to
    std::vector<Variant> variants_;
};

void run(bool is_smoke, bool has_rates, bool has_speeds, const std::string& only) {
    std::printf("{\n  \"columns\": %zu, \"processors\": %u,\n", kColumns, std::thread::hardware_concurrency());
    if (has_rates) print_rates(is_smoke);
    if (has_rates && has_speeds) std::printf(",\n");
    if (has_speeds) {
        constexpr double kZero = 0.886;
        const std::size_t rows = is_smoke ? 1024 : 65536;
        const std::size_t rounds = is_smoke ? 5 : 9;
        std::printf("  \"speed_rows\": %zu, \"speed_p0\": %.3f, \"rounds\": %zu,\n", rows, kZero, rounds);
        Speeds(rows, kZero, only).measure(rounds);
    }
    std::printf("\n}\n");
}

}  // namespace
}  // namespace torch_offload

int main(int argument_count, char** arguments) {
    const auto is_given = [&](const char* name) {
        return std::any_of(arguments + 1, arguments + argument_count,
                           [&](const char* argument) { return std::strcmp(argument, name) == 0; });
    };
    const bool all = !is_given("--rates") && !is_given("--speeds");
    torch_offload::run(
        is_given("--smoke"), all || is_given("--rates"), all || is_given("--speeds"),
        argument_count > 1 && arguments[argument_count - 1][0] != '-' ? arguments[argument_count - 1] : "");
}
