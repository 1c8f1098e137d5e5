// Words that Python uses for the values of enumerations. Layer bindings.
#pragma once

#include <array>
#include <cstddef>
#include <string>

#include "base/check.h"
#include "storage/io_engine.h"

namespace torch_offload {

template <typename Value>
struct Named {
    const char* name;
    Value value;
};
inline constexpr std::array kEngines = {
    Named<IoEngineKind>{"auto", IoEngineKind::automatic}, Named<IoEngineKind>{"uring_fixed", IoEngineKind::uring_fixed},
    Named<IoEngineKind>{"uring", IoEngineKind::uring}, Named<IoEngineKind>{"threads", IoEngineKind::threads}};

/// Throws: InvalidArgument naming the known words. `what` is the argument's name.
template <typename Value, std::size_t kCount>
Value value_named(const std::array<Named<Value>, kCount>& values, const std::string& name, const char* what) {
    std::string known;
    for (const auto& [candidate, value] : values) {
        if (name == candidate) return value;
        known += known.empty() ? candidate : std::string(", ") + candidate;
    }
    throw InvalidArgument(concat(what, " must be one of ", known, ", got ", name));
}

}  // namespace torch_offload
