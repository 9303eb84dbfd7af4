// accelerate/detail/core/object_stream.h - the bytes under accelerate/detail/comm/object_codec.h:
// tags, lengths, checks.
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "accelerate/api.h"
#include "accelerate/value.h"

namespace accelerate::detail::inline core {

enum class ObjectTag : std::uint8_t {
  kNone = 1,
  kFalse,
  kTrue,
  kInteger,
  kNatural,
  kReal,
  kText,
  kBytes,
  kList,
  kTuple,
  kDict,
  kMap,
  kOptional,
  kVariant,
  kRaw,
  kTensor,
  kLeaf
};

class ObjectReader;
class ObjectWriter;

/// Writes and reads the opaque leaves of a `Value`, with their tag.
class LeafCodec {
 public:
  virtual ~LeafCodec() = default;
  virtual void write(ObjectWriter& out, const ValueLeaf& leaf) const = 0;
  [[nodiscard]] virtual std::shared_ptr<const ValueLeaf> read(ObjectReader& in) const = 0;
};

class ACCELERATE_API ObjectWriter {
 public:
  void boolean(bool x);
  void integer(std::int64_t x);
  void natural(std::uint64_t x);
  void real(double x);
  template <class T>
  void number(T x) {
    if constexpr (std::same_as<T, bool>) {
      boolean(x);
    } else if constexpr (std::floating_point<T>) {
      real(static_cast<double>(x));
    } else if constexpr (std::unsigned_integral<T>) {
      natural(x);
    } else {  // enumerations too
      integer(static_cast<std::int64_t>(x));
    }
  }
  void text(std::string_view x);
  /// A node with `count` items (or the index of an alternative), which the caller writes next.
  void open(ObjectTag tag, std::uint64_t count);
  /// A block of memory, with the name of its type.
  void raw(std::string_view type, const void* data, std::size_t size);
  /// Throws `ArgumentError` for a value nested too deeply, or with a leaf that `leaves` cannot
  /// write.
  void value(const Value& x, const LeafCodec* leaves = nullptr, int depth = 0);

  [[nodiscard]] std::string bytes() && { return std::move(bytes_); }

 private:
  void tag(ObjectTag tag) { bytes_.push_back(static_cast<char>(tag)); }
  void varint(std::uint64_t x);

  std::string bytes_;
};

/// Reads what an `ObjectWriter` wrote. Every function throws `CommError` for anything else.
class ACCELERATE_API ObjectReader {
 public:
  explicit ObjectReader(std::string_view bytes) : rest_(bytes) {}

  [[nodiscard]] bool boolean();
  [[nodiscard]] std::int64_t integer();
  [[nodiscard]] std::uint64_t natural();
  [[nodiscard]] double real();
  template <class T>
  [[nodiscard]] T number() {
    if constexpr (std::same_as<T, bool>) {
      return boolean();
    } else if constexpr (std::floating_point<T>) {
      return static_cast<T>(real());
    } else if constexpr (std::unsigned_integral<T>) {
      return narrow<T>(natural());
    } else if constexpr (std::is_enum_v<T>) {
      return static_cast<T>(integer());
    } else {
      return narrow<T>(integer());
    }
  }
  [[nodiscard]] std::string text();
  /// The tag of the next piece; throws at the end of the data.
  [[nodiscard]] ObjectTag next() const;
  /// The number of items; throws if it is larger than the rest of the data allows.
  [[nodiscard]] std::uint64_t open(ObjectTag tag);
  /// Checks name and size of the type, then fills `data`.
  void raw(std::string_view type, void* data, std::size_t size);
  /// The next `raw` piece, without a copy.
  [[nodiscard]] std::string_view raw(std::string_view type);
  [[nodiscard]] Value value(const LeafCodec* leaves = nullptr, int depth = 0);
  /// Throws unless everything was read.
  void finish() const;

  [[noreturn]] void refuse(const std::string& found) const;
  [[noreturn]] void refuse(const Value& found, const char* wanted) const;

 private:
  template <class T, class N>
  [[nodiscard]] T narrow(N number) const {
    const T result = static_cast<T>(number);
    if (static_cast<N>(result) != number || (result < T{}) != (number < N{})) {
      refuse("a number that does not fit");
    }
    return result;
  }
  [[nodiscard]] ObjectTag tag();
  void expect(ObjectTag wanted);
  [[nodiscard]] std::uint64_t varint();
  [[nodiscard]] std::string_view take(std::uint64_t size);

  std::string_view rest_;
};

}  // namespace accelerate::detail::inline core
