"""Writes src/core/unicode_printable.cpp: the code points that Python's str.isprintable() accepts.

    python tools/write_unicode_printable.py > src/core/unicode_printable.cpp
"""

import itertools
import unicodedata

printable = (chr(c).isprintable() for c in range(0x110000))
runs = [len(list(run)) for _, run in itertools.groupby(printable)][:-1]

print(f"""// Written by tools/write_unicode_printable.py: Unicode {unicodedata.unidata_version}.
#include <algorithm>
#include <array>
#include <numeric>

#include "core/python_text.h"

namespace accelerate::detail::inline core {{
namespace {{

// The lengths of the runs of code points, from 0 on: not printable and printable in turn.
// clang-format off
constexpr auto kRuns = std::to_array<char32_t>({{""")
line = "   "
for length in runs:
    item = f" {length},"
    if len(line) + len(item) > 100:
        print(line)
        line = "   "
    line += item
print(line)
print("""});
// clang-format on

constexpr auto kEnds = [] {
  auto ends = kRuns;
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  return ends;
}();

}  // namespace

bool is_printable(char32_t c) {
  return (std::ranges::upper_bound(kEnds, c) - kEnds.begin()) % 2 == 1;
}

}  // namespace accelerate::detail::inline core""")
