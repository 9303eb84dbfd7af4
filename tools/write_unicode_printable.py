"""Writes src/core/unicode_printable.cpp: the code points that Python's str.isprintable() accepts.

    python tools/write_unicode_printable.py > src/core/unicode_printable.cpp
"""

import sys
import unicodedata

ranges = []
for c in range(0x20, 0x110000):
    if not chr(c).isprintable():
        continue
    if ranges and ranges[-1][1] == c - 1:
        ranges[-1][1] = c
    else:
        ranges.append([c, c])

print(f"""// Written by tools/write_unicode_printable.py: Unicode {unicodedata.unidata_version}.
#include <algorithm>
#include <iterator>

#include "core/python_text.h"

namespace accelerate::detail::inline core {{
namespace {{

struct Range {{
  char32_t first;
  char32_t last;
}};

// clang-format off
constexpr Range kPrintable[] = {{""")
line = "   "
for first, last in ranges:
    item = f" {{0x{first:X}, 0x{last:X}}},"
    if len(line) + len(item) > 100:
        print(line)
        line = "   "
    line += item
print(line)
print("""};
// clang-format on

}  // namespace

bool is_printable(char32_t c) {
  if (c < 0x7F) return c >= 0x20;
  const auto* after = std::ranges::upper_bound(kPrintable, c, {}, &Range::first);
  return after != std::begin(kPrintable) && c <= std::prev(after)->last;
}

}  // namespace accelerate::detail::core""")
sys.stdout.flush()
