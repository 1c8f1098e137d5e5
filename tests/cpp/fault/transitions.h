// Every change of a page's state in this program and its children, held against a table of those there are.
#pragma once

#include <string>

namespace torch_offload::test {

void forget_transitions();
/// "zero>loading 12, loading>loaded 12": how often each was seen.
std::string seen_transitions();
/// Those seen that the table does not have.
std::string illegal_transitions();

}  // namespace torch_offload::test
