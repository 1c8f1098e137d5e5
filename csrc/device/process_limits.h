// What the system lets the process have of addresses and mappings, for messages. Layer device: includes base only.
#pragma once

#include <string>

namespace torch_offload {

/// What to do where the system has refused memory or a mapping.
std::string memory_remedy();

/// How many addresses the process may have, in bytes.
std::string address_limit();

}  // namespace torch_offload
