// What tests choose when a program runs, so that one build serves many of them: the fault, of those that were put into
// its copy of the kernels' headers (0: none), and the phase before a group's first.
#pragma once

#include <cstdint>

namespace planted {
inline int fault = 0;
inline uint32_t last_phase = 0;
}  // namespace planted
